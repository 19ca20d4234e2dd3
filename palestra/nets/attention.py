"""Attention layers of several networks of one shape (Vaswani et al., 2017), for sequences of a few seats or entities.

Shapes: `P` members, `G` sequences, `S` positions that ask, `K` positions that are asked, `H` units.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from palestra.nets.dense import GAIN, Activation, LayerNorm, Linear


class Attention(nn.Module):
    """Multi-head attention: queries [P, G, S, H] and what they attend to [P, G, K, H] -> [P, G, S, H]. Raises
    ValueError if the heads do not divide the units."""

    def __init__(self, units: int, heads: int, generators: Sequence[torch.Generator]) -> None:
        super().__init__()
        if units % heads:
            raise ValueError(
                f"attention_heads: {heads} heads do not divide {units} units: make the last of policies' hidden layers "
                "a multiple of the heads"
            )
        self.heads = heads
        self.query = Linear(units, units, 1.0, generators)
        self.key_value = Linear(units, 2 * units, 1.0, generators)
        self.out = Linear(units, units, 1.0, generators)

    def forward(self, x: Tensor, context: Tensor, mask: Tensor | None, past: list[Tensor] | None = None) -> Tensor:
        """Returns the attended values. `mask` [P, G, S, K] is true where a position may be attended to, one at least
        for each query; None allows all. `past` holds keys and values of earlier positions, to which those of `context`
        are appended."""
        P, G, S, H = x.shape
        queries = rowwise(self.query, x).view(P * G, S, self.heads, -1)
        keys_values = rowwise(self.key_value, context).view(P * G, -1, 2, self.heads, H // self.heads)
        if past is not None:
            past.append(keys_values)
            keys_values = torch.cat(past, 1)
        keys, values = keys_values.unbind(2)
        allowed = None if mask is None else mask.flatten(0, 1)[:, None]
        attended = scaled_dot_product_attention(
            queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), allowed
        )
        return rowwise(self.out, attended.transpose(1, 2).reshape(P, G, S, H))


class FeedForward(nn.Module):
    """Two layers with an activation function between them: [P, G, S, H] -> [P, G, S, H]."""

    def __init__(self, units: int, activation: Activation, generators: Sequence[torch.Generator]) -> None:
        super().__init__()
        self.inner = Linear(units, units, GAIN[activation], generators)
        self.outer = Linear(units, units, 1.0, generators)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.outer(self.inner(x.flatten(1, 2), self.activation))
        return out.view(x.shape)


class SelfAttentionBlock(nn.Module):
    """Self-attention, then a feed-forward layer, each added to its input and normalised: [P, G, S, H] -> [P, G, S,
    H]."""

    def __init__(self, units: int, heads: int, activation: Activation, generators: Sequence[torch.Generator]) -> None:
        super().__init__()
        self.attention = Attention(units, heads, generators)
        self.feed_forward = FeedForward(units, activation, generators)
        self.norms = nn.ModuleList(LayerNorm(units, len(generators)) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = rowwise(self.norms[0], x + self.attention(x, x, mask))
        return rowwise(self.norms[1], x + self.feed_forward(x))


def rowwise(layer: nn.Module, x: Tensor) -> Tensor:
    """Applies a layer at every position: [P, G, S, in] -> [P, G, S, out]."""
    out: Tensor = layer(x.flatten(1, 2))
    return out.view(*x.shape[:3], -1)
