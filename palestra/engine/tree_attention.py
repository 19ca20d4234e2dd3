"""Tree attention: tokens shared by several sequences are computed once, in the forward and the backward pass.

`build_forest` builds a forest from many sequences: in sorted order, each sequence adds only the tokens after its
longest common prefix with the one before it. K answers to one prompt cost one prompt and K answers; the turns of a
conversation, or a whole episode tree, cost their distinct tokens. The new tokens of one sequence are a *segment*: its
queries attend to the path of tokens from the root to themselves. The i-th key of a path has position i, so the causal
mask is a comparison of positions.

Shapes: `S` tokens of the flat row, `N` segments of a bucket, `Q` queries and `K` keys of the longest segment in it, `M`
rows with queries, `H` heads, `D` head width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from palestra.engine.sdpa import grouped_attention

QuerySegment = tuple[np.ndarray, np.ndarray]  # positions of the tokens of a segment that have queries, and its path
MAX_PADDING_RATIO = 1.5  # maximum ratio of computed to needed query-key pairs of a bucket


@dataclass
class Forest:
    """Sequences laid out as a forest: `ids_S` int64 token ids, `positions_S` int64 positions; `paths[i]` int64 flat
    indices of the tokens of sequence i, root first."""

    ids_S: np.ndarray
    positions_S: np.ndarray
    paths: list[np.ndarray]
    segments: list[tuple[int, np.ndarray]]  # (position of the first new token, path)


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Returns the length of the longest common prefix of two arrays of token ids."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


def build_forest(sequences: Sequence[np.ndarray]) -> Forest:
    """Returns the forest of `sequences` (token ids, int64 [length], length ≥ 1); sorted neighbours share their common
    prefix."""
    order = sorted(range(len(sequences)), key=lambda i: sequences[i].tolist())
    ids: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    paths: list[np.ndarray] = [np.zeros(0, np.int64)] * len(sequences)
    segments = []
    last_ids, last_path, size = np.zeros(0, np.int64), np.zeros(0, np.int64), 0
    for i in order:
        sequence = sequences[i]
        cut = common_prefix(last_ids, sequence)
        new = len(sequence) - cut
        path = np.concatenate([last_path[:cut], np.arange(size, size + new)])
        if new:
            ids.append(sequence[cut:])
            positions.append(np.arange(cut, len(sequence)))
            segments.append((cut, path))
        paths[i], last_ids, last_path, size = path, sequence, path, size + new
    return Forest(np.concatenate(ids), np.concatenate(positions), paths, segments)


def concat_forests(forests: Sequence[Forest]) -> Forest:
    """Concatenates forests; nothing is shared between them."""
    starts = np.cumsum([0] + [len(forest.ids_S) for forest in forests])
    placed = list(zip(forests, starts, strict=False))
    return Forest(
        ids_S=np.concatenate([forest.ids_S for forest in forests]),
        positions_S=np.concatenate([forest.positions_S for forest in forests]),
        paths=[path + start for forest, start in placed for path in forest.paths],
        segments=[(cut, path + start) for forest, start in placed for cut, path in forest.segments],
    )


@dataclass
class Bucket:
    """Segments of similar shape, padded to one shape (N, Q, K): int64 flat indices of queries `[N*Q]` and keys `[N*K]`,
    and a bool mask [N, 1, Q, K] (None: plain causal attention)."""

    queries: Tensor
    keys: Tensor
    mask_N1QK: Tensor | None
    shape: tuple[int, int, int]


class TreeLayout:
    """Attention layout of a forest. Built once per forest, used by every layer.

    `keep_M` (None: every token) are the flat indices of the tokens with queries, in the order of their rows.
    """

    def __init__(self, forest: Forest, device: torch.device, keep_M: np.ndarray | None = None) -> None:
        self.forest, self.device = forest, device
        size = len(forest.ids_S)
        keep_M = np.arange(size) if keep_M is None else keep_M
        row_S = np.full(size, -1)
        row_S[keep_M] = np.arange(len(keep_M))
        parts = list(_similar(list(_asking(forest, row_S))))
        self.buckets = [_bucket(part, row_S, device) for part in parts]
        # index of each query's output in the padded outputs of all buckets
        back = np.zeros(len(keep_M), np.int64)
        offset = 0
        for part, bucket in zip(parts, self.buckets, strict=True):
            n, q, _ = bucket.shape
            for row, (at, path) in enumerate(part):
                back[row_S[path[at]]] = offset + row * q + np.arange(len(at))
            offset += n * q
        self.output_index_M = torch.as_tensor(back, device=device)

    def narrow(self, keep_M: Tensor) -> TreeLayout:
        """Returns the layout in which only the tokens `keep_M` (flat indices, rising) have queries."""
        return TreeLayout(self.forest, self.device, keep_M.cpu().numpy())

    def attend(self, layer: int, q_HSD: Tensor, k_HSD: Tensor, v_HSD: Tensor, scale: float) -> Tensor:
        """Returns the attention output [M, H, D] of queries [H, M, D] over keys and values [h, S, D]."""
        q, k, v = (t.transpose(0, 1).flatten(1) for t in (q_HSD, k_HSD, v_HSD))  # [S, H*D]: rows to gather
        out = torch.cat([self._bucket(b, q, k, v, q_HSD.shape[0], k_HSD.shape[0], scale) for b in self.buckets])
        return out.index_select(0, self.output_index_M).view(q_HSD.shape[1], q_HSD.shape[0], -1)

    def _bucket(self, b: Bucket, q: Tensor, k: Tensor, v: Tensor, heads: int, kv_heads: int, scale: float) -> Tensor:
        n, nq, nk = b.shape
        q = q.index_select(0, b.queries).view(n, nq, heads, -1).transpose(1, 2)
        k = k.index_select(0, b.keys).view(n, nk, kv_heads, -1).transpose(1, 2)
        v = v.index_select(0, b.keys).view(n, nk, kv_heads, -1).transpose(1, 2)
        out = grouped_attention(q, k, v, b.mask_N1QK, scale, is_causal=b.mask_N1QK is None)
        return out.transpose(1, 2).reshape(n * nq, -1)


def _asking(forest: Forest, row_S: np.ndarray) -> Iterator[QuerySegment]:
    """Yields the segments that contain a token with a row, with the positions of these tokens."""
    for cut, path in forest.segments:
        at = cut + np.flatnonzero(row_S[path[cut:]] >= 0)
        if len(at):
            yield at, path


def _similar(segments: list[QuerySegment]) -> Iterator[list[QuerySegment]]:
    """Yields groups of segments of similar shape, so that padding wastes little."""
    part: list[QuerySegment] = []
    need = queries = keys = 0
    for at, path in sorted(segments, key=lambda s: (len(s[0]), len(s[1]))):
        q, k = len(at), len(path)
        wide, deep = max(queries, q), max(keys, k)
        if part and wide * deep * (len(part) + 1) > MAX_PADDING_RATIO * (need + q * k):
            yield part
            part, need, wide, deep = [], 0, q, k
        part.append((at, path))
        need, queries, keys = need + q * k, wide, deep
    if part:
        yield part


def _bucket(part: list[QuerySegment], row_S: np.ndarray, device: torch.device) -> Bucket:
    n = len(part)
    nq = max(len(at) for at, _ in part)
    nk = max(len(path) for _, path in part)
    queries, keys = np.zeros((n, nq), np.int64), np.zeros((n, nk), np.int64)
    positions = np.zeros((n, nq), np.int64)  # a padded query attends to key 0, so that its softmax is defined
    for row, (at, path) in enumerate(part):
        # pad with the segment's own first token: a mask would not keep out NaN of another segment
        queries[row], keys[row] = row_S[path[at[0]]], path[0]
        queries[row, : len(at)], keys[row, : len(path)] = row_S[path[at]], path
        positions[row, : len(at)] = at
    whole = all(len(at) == len(path) for at, path in part)
    seen = None if whole else torch.as_tensor(np.arange(nk) <= positions[:, :, None], device=device)[:, None]
    return Bucket(
        queries=torch.as_tensor(queries.ravel(), device=device),
        keys=torch.as_tensor(keys.ravel(), device=device),
        mask_N1QK=seen,
        shape=(n, nq, nk),
    )
