"""Attention features beyond plain causal attention: windows, chunks, soft caps and sinks.

Models hand these to their attention function, each in its own way. The layouts (tree_attention.py, cached_attention.py)
get them in one form, with every call.

Shapes: `n` sequences, `Q` queries and `K` keys of each, `H` query heads, `h` key-value heads, `D` head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

Positions = TypeVar("Positions", np.ndarray, Tensor)


@dataclass(frozen=True)
class KeySpan:
    """The keys that a query attends to where these are not all earlier ones: the last `size`, its own included (a
    sliding window), or with `chunked` those in its own chunk of `size` positions."""

    size: int
    chunked: bool = False

    def first_key(self, positions: Positions) -> Positions:
        """Returns the position of the first key that a query at each of `positions` (int) attends to."""
        if self.chunked:
            return positions // self.size * self.size
        return (positions - self.size + 1).clip(0)


class AttentionTerms(NamedTuple):
    """Terms of one attention call: the keys that are seen, the cap c of scores s, which become c tanh(s / c) (Gemma 2),
    and a score for each head [H] that joins the softmax without a value (an attention sink, GPT-OSS)."""

    span: KeySpan | None = None
    softcap: float | None = None
    sinks_H: Tensor | None = None

    @property
    def needs_scores(self) -> bool:
        """True if fused attention kernels do not compute these terms."""
        return self.softcap is not None or self.sinks_H is not None


NO_TERMS = AttentionTerms()


def attention_by_scores(
    q_nHQD: Tensor, k_nhKD: Tensor, v_nhKD: Tensor, seen: Tensor, scale: float, terms: AttentionTerms
) -> Tensor:
    """Returns the attention output [n, H, Q, D] with the cap and the sinks of `terms`, by computing all scores. `seen`
    is bool, broadcast to [n, H, Q, K]."""
    (n, heads, queries, _), (kv_heads, keys) = q_nHQD.shape, k_nhKD.shape[1:3]
    rows = q_nHQD.reshape(n, kv_heads, -1, q_nHQD.shape[-1])
    score = (rows @ k_nhKD.transpose(-1, -2)).view(n, heads, queries, keys) * scale
    if terms.softcap is not None:
        score = cap_scores(score, terms.softcap)
    score = score.masked_fill(~seen, -torch.inf)
    if terms.sinks_H is not None:
        score = torch.cat([score, terms.sinks_H.to(score.dtype).view(1, heads, 1, 1).expand(n, -1, queries, 1)], -1)
    weight = torch.softmax(score, -1, dtype=torch.float32).to(v_nhKD.dtype)[..., :keys]
    return (weight.reshape(n, kv_heads, -1, keys) @ v_nhKD).view(n, heads, queries, -1)


def cap_scores(score: Tensor, cap: float) -> Tensor:
    """Returns attention scores capped smoothly to ±`cap`."""
    return torch.tanh(score / cap) * cap
