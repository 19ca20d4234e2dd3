"""Attention layers (Vaswani et al., 2017) of several networks of one shape, for sequences of a few seats or entities,
and retention layers as a replacement (Sun et al., 2023).

Shapes: `P` members, `G` sequences, `S` query positions, `K` key positions, `H` units, `D` units of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from palestra.vector.nets.dense import GAIN, Activation, LayerNorm, Linear
from palestra.vector.nets.on_device import all_known, identity
from palestra.vector.nets.retention import StepMemory

AttentionType = Literal["softmax", "retention"]
# What a layer keeps: keys and values of earlier positions, or the state of retention over them; or of earlier steps.
Past = list[Tensor] | StepMemory | None


class Attention(nn.Module):
    """Multi-head attention: queries [P, G, S, H] and the context that they attend to [P, G, K, H]
    -> [P, G, S, H]. Raises ValueError if the heads do not divide the units."""

    def __init__(self, units: int, heads: int, generators: Sequence[torch.Generator]) -> None:
        super().__init__()
        _check_heads(units, heads)
        self.heads = heads
        self.query = Linear(units, units, 1.0, generators)
        self.key_value = Linear(units, 2 * units, 1.0, generators)
        self.out = Linear(units, units, 1.0, generators)

    def forward(self, x: Tensor, context: Tensor, mask: Tensor | None, past: list[Tensor] | None = None) -> Tensor:
        """Returns the attended values [P, G, S, H]. `mask` [P, G, S, K] is true where a query may attend to a position,
        and needs at least one such position for each query; None allows all. `past` holds the keys and values of
        earlier positions; the keys and values of `context` are appended to it."""
        P, G, S, H = x.shape
        queries = rowwise(self.query, x).view(P * G, S, self.heads, -1)
        keys_values = rowwise(self.key_value, context).view(P * G, -1, 2, self.heads, H // self.heads)
        if past is not None:
            past.append(keys_values)
            keys_values = torch.cat(past, 1)
        keys, values = keys_values.unbind(2)
        if mask is not None:
            mask = mask.flatten(0, 1)[:, None]
        attended = scaled_dot_product_attention(
            queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), mask
        )
        return rowwise(self.out, attended.transpose(1, 2).reshape(P, G, S, H))


class Retention(nn.Module):
    """Multi-head retention, which takes the same arguments as `Attention`. Queries weigh values by their products with
    keys, without a softmax; each head's sum is normalised (mean 0, deviation 1) and multiplied by the swish of a gate
    (Sun et al., 2023, eq. 5 and 8). The positions of a sequence are seats of one step, which Sable does not decay
    (Mahjoub et al., 2024); with a `StepMemory` queries also read earlier steps. As in its authors' code, the gate is
    computed from `context`, like the keys. Raises ValueError if the heads do not divide the units, or have a single
    unit each."""

    def __init__(self, units: int, heads: int, generators: Sequence[torch.Generator]) -> None:
        super().__init__()
        _check_heads(units, heads)
        if units == heads:
            raise ValueError(
                "attention_heads: attention_type: retention normalises over the units of each head, and "
                f"{heads} heads have one unit each: set fewer heads"
            )
        self.heads = heads
        self.query = Linear(units, units, 1.0, generators)
        self.key_value = Linear(units, 2 * units, 1.0, generators)
        self.gate = Linear(units, units, 1.0, generators)
        self.out = Linear(units, units, 1.0, generators)

    def forward(self, x: Tensor, context: Tensor, mask: Tensor | None, past: Past = None) -> Tensor:
        """Returns the retained values [P, G, S, H]; `context` has as many positions as `x`. `mask` [P, G, S, K] is true
        where a position counts; None counts all. With a `StepMemory` of N = P*games teams the sequences of a member are
        the T steps of its first game, then of the next; the memory is set to the state after the last step. With a list
        as `past` (empty before the first position, or with the state of earlier steps) it computes the recurrent form:
        `x` and `context` are the next position only, and `past` does not grow with the positions."""
        P, G, S, H = x.shape
        queries = rowwise(self.query, x).view(P * G, S, self.heads, -1).transpose(1, 2)
        keys, values = (
            part.transpose(1, 2)
            for part in rowwise(self.key_value, context).view(P * G, S, 2, self.heads, H // self.heads).unbind(2)
        )
        keys = keys * (H // self.heads) ** -0.5
        if isinstance(past, list):
            retained = queries @ _next_state(keys.mT @ values, mask, past)
        else:
            scores = queries @ keys.mT
            if mask is not None:
                scores = scores * mask.flatten(0, 1)[:, None]
            retained = scores @ values
            if past is not None:
                retained = retained + past.read(queries, keys, values)
        normed = nn.functional.layer_norm(retained, retained.shape[-1:]).transpose(1, 2).reshape(P, G, S, H)
        return rowwise(self.out, nn.functional.silu(rowwise(self.gate, context)) * normed)


def _next_state(kv: Tensor, mask: Tensor | None, past: list[Tensor]) -> Tensor:
    """Returns the state of retention [P*G, heads, D, D] that a position reads: the sum of the key-value products of the
    earlier positions that count, and of its `kv` product. `mask` [P, G, 1, K] has a column for each position so far;
    the last one is always true. `past`, which is updated in place, holds the state before the previous position, and
    the product of the previous position: only the current mask tells whether the previous position counts. Before the
    first position it holds the state of earlier steps, or nothing."""
    if len(past) == 2:
        state, last = past
        if mask is not None:
            last = last * mask[..., -2].reshape(-1, 1, 1, 1)
        state = state + last
    else:
        state = past[0] if past else torch.zeros_like(kv)
    past[:] = [state, kv]
    return state + kv


class BlockShape(NamedTuple):
    """Shape of a block of attention, or of retention, and a feed-forward layer."""

    units: int
    heads: int
    activation: Activation
    kind: AttentionType = "softmax"


def make_attention(shape: BlockShape, generators: Sequence[torch.Generator]) -> Attention | Retention:
    """Returns a layer of attention or of retention. Raises ValueError if the number of heads does not fit."""
    layer = Retention if shape.kind == "retention" else Attention
    return layer(shape.units, shape.heads, generators)


def _check_heads(units: int, heads: int) -> None:
    if units % heads:
        raise ValueError(
            f"attention_heads: {heads} heads do not divide {units} units: make the units of the policies' last hidden "
            "layer a multiple of the heads"
        )


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
    """Self-attention, then a feed-forward layer, each added to its input and normalised: [P, G, S,
    H] -> [P, G, S, H]. With retention `memory` lets it read earlier steps."""

    def __init__(self, shape: BlockShape, generators: Sequence[torch.Generator]) -> None:
        super().__init__()
        self.attention = make_attention(shape, generators)
        self.feed_forward = FeedForward(shape.units, shape.activation, generators)
        self.norms = nn.ModuleList(LayerNorm(shape.units, len(generators)) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor | None, memory: StepMemory | None = None) -> Tensor:
        x = rowwise(self.norms[0], x + self.attention(x, x, mask, memory))
        return rowwise(self.norms[1], x + self.feed_forward(x))


def attention_mask(present: Tensor) -> Tensor | None:
    """Returns a mask [P, G, S, S] of the positions that each may attend to: itself and those
    `present` [P, G, S]. None allows all."""
    if all_known(present):
        return None
    return present[:, :, None] | identity(present.shape[2], present.device).bool()


def rowwise(layer: nn.Module, x: Tensor) -> Tensor:
    """Applies a layer at every position: [P, G, S, in] -> [P, G, S, out]."""
    out: Tensor = layer(x.flatten(1, 2))
    return out.view(*x.shape[:3], -1)
