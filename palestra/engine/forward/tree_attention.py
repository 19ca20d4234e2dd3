"""Tree attention: tokens shared by several sequences are computed once, in the forward and the backward pass.

`build_forest` builds a forest from many sequences: in sorted order, each sequence adds only the tokens after its
longest common prefix with the one before it. K answers to one prompt cost one prompt and K answers; the turns of a
conversation, or a whole episode tree, cost their distinct tokens. The new tokens of one sequence are a *segment*: its
queries attend to the path of tokens from the root to themselves. The i-th key of a path has position i, so the causal
mask is a comparison of positions. In layers with a window or chunks (attention_terms.py), paths begin at the first key
that one of the queries attends to.

Shapes: `S` tokens of the flat row, `N` segments of a bucket, `Q` queries and `K` keys of the longest segment in it, `M`
rows with queries, `H` heads, `D` head width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from palestra.engine.forward.attention_terms import NO_TERMS, AttentionTerms, KeySpan, attention_by_scores
from palestra.engine.forward.flat_row import groups_to_pad
from palestra.engine.forward.sdpa import grouped_attention


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
    if len(differ):
        return int(differ[0])
    return n


def build_forest(sequences: Sequence[np.ndarray]) -> Forest:
    """Returns the forest of `sequences` (token ids, int64 [length], length ≥ 1); sorted neighbours share their common
    prefix."""
    order = sorted(range(len(sequences)), key=lambda i: sequences[i].tolist())
    ids: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    paths: list[np.ndarray] = [np.zeros(0, np.int64)] * len(sequences)
    segments = []
    last_ids = np.zeros(0, np.int64)
    last_path = np.zeros(0, np.int64)
    size = 0
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
    paths: list[np.ndarray] = []
    segments: list[tuple[int, np.ndarray]] = []
    start = 0
    for forest in forests:
        paths += [path + start for path in forest.paths]
        segments += [(cut, path + start) for cut, path in forest.segments]
        start += len(forest.ids_S)
    ids_S = np.concatenate([forest.ids_S for forest in forests])
    return Forest(ids_S, np.concatenate([forest.positions_S for forest in forests]), paths, segments)


def padded_forest(forest: Forest, size: int) -> Forest:
    """Returns `forest` with tokens 0 at its end, which no path has, up to `size` tokens."""
    if (padding := size - len(forest.ids_S)) <= 0:
        return forest
    places = np.arange(padding)
    return concat_forests([forest, Forest(np.zeros(padding, np.int64), places, [], [(0, places)])])


class QuerySegment(NamedTuple):
    """The queries of a segment: `at`, the index of each in `path`, the flat indices of the keys; and the index in
    `path` of the first key that each attends to (None: all)."""

    at: np.ndarray
    path: np.ndarray
    first: np.ndarray | None = None

    def shape(self) -> tuple[int, int]:
        """Returns the numbers of queries and keys."""
        return len(self.at), len(self.path)

    def within(self, span: KeySpan) -> QuerySegment:
        """Returns the segment without the keys outside `span`."""
        first = span.first_key(self.at)
        cut = int(first[0])  # the least: first keys rise with positions
        first = first - cut
        return QuerySegment(self.at - cut, self.path[cut:], first if first.any() else None)


@dataclass
class Bucket:
    """Segments of similar shape, padded to one shape (N, Q, K): int64 flat indices of queries `[N*Q]` and keys `[N*K]`,
    and a bool mask [N, 1, Q, K] (None: plain causal attention)."""

    queries: Tensor
    keys: Tensor
    mask_N1QK: Tensor | None
    shape: tuple[int, int, int]


class PaddedSegments(NamedTuple):
    """Buckets of segments, and the index of each query's output in the padded outputs of all buckets."""

    buckets: list[Bucket]
    output_index_M: Tensor


class TreeLayout:
    """Attention layout of a forest. Built once per forest, used by every layer.

    `keep_M` (None: every token) are the flat indices of the tokens with queries, in the order of their rows.
    """

    def __init__(self, forest: Forest, device: torch.device, keep_M: np.ndarray | None = None) -> None:
        self.forest = forest
        self.device = device
        size = len(forest.ids_S)
        if keep_M is None:
            keep_M = np.arange(size)
        self._row_S = np.full(size, -1)
        self._row_S[keep_M] = np.arange(len(keep_M))
        self._num_rows = len(keep_M)
        self._padded: dict[tuple[KeySpan | None, bool], PaddedSegments] = {}

    def narrow(self, keep_M: Tensor) -> TreeLayout:
        """Returns the layout in which only the tokens `keep_M` (flat indices, rising) have queries."""
        return TreeLayout(self.forest, self.device, keep_M.cpu().numpy())

    def attend(
        self, layer: int, q_HSD: Tensor, k_HSD: Tensor, v_HSD: Tensor, scale: float, terms: AttentionTerms = NO_TERMS
    ) -> Tensor:
        """Returns the attention output [M, H, D] of queries [H, M, D] over keys and values [h, S, D]."""
        joins = terms.span is None and not terms.needs_scores
        padded = self._padded.get((terms.span, joins)) or self._pad(terms.span, joins)
        q, k, v = (t.transpose(0, 1).flatten(1) for t in (q_HSD, k_HSD, v_HSD))  # [S, H*D]: rows to gather
        heads = q_HSD.shape[0]
        kv_heads = k_HSD.shape[0]
        out = torch.cat([self._bucket(b, q, k, v, heads, kv_heads, scale, terms) for b in padded.buckets])
        return out.index_select(0, padded.output_index_M).view(q_HSD.shape[1], q_HSD.shape[0], -1)

    def _pad(self, span: KeySpan | None, joins: bool) -> PaddedSegments:
        """Returns the segments, each with its keys in `span`, padded in buckets; kept for the other layers. `joins`:
        the turns of a conversation are one segment, so that their shared keys are there once."""
        new = _join(self.forest.segments) if joins else self.forest.segments
        segments = list(_asking(new, self._row_S, joins))
        if span:
            segments = [segment.within(span) for segment in segments]
        groups = list(groups_to_pad(sorted(segments, key=QuerySegment.shape), QuerySegment.shape))
        buckets = [_bucket(group, self._row_S, self.device) for group in groups]
        back = np.zeros(self._num_rows, np.int64)
        offset = 0
        for group, bucket in zip(groups, buckets, strict=True):
            n, q, _ = bucket.shape
            for row, segment in enumerate(group):
                back[self._row_S[segment.path[segment.at]]] = offset + row * q + np.arange(len(segment.at))
            offset += n * q
        self._padded[span, joins] = PaddedSegments(buckets, torch.as_tensor(back, device=self.device))
        return self._padded[span, joins]

    def _bucket(
        self, b: Bucket, q: Tensor, k: Tensor, v: Tensor, heads: int, kv_heads: int, scale: float, terms: AttentionTerms
    ) -> Tensor:
        n, nq, nk = b.shape
        q = q.index_select(0, b.queries).view(n, nq, heads, -1).transpose(1, 2)
        k = k.index_select(0, b.keys).view(n, nk, kv_heads, -1).transpose(1, 2)
        v = v.index_select(0, b.keys).view(n, nk, kv_heads, -1).transpose(1, 2)
        mask = b.mask_N1QK
        if terms.needs_scores:
            if mask is None:
                mask = torch.ones(nq, nk, dtype=torch.bool, device=q.device).tril()
            out = attention_by_scores(q, k, v, mask, scale, terms)
        else:
            out = grouped_attention(q, k, v, mask, scale, is_causal=mask is None)
        return out.transpose(1, 2).reshape(n * nq, -1)


def _join(segments: Sequence[tuple[int, np.ndarray]]) -> list[tuple[int, np.ndarray]]:
    """Returns the segments, with each that continues the whole path of the one before it joined to that one."""
    joined: list[tuple[int, np.ndarray]] = []
    for cut, path in segments:
        if joined and cut == len(joined[-1][1]) and path[cut - 1] == joined[-1][1][-1]:
            joined[-1] = joined[-1][0], path
        else:
            joined.append((cut, path))
    return joined


def _asking(segments: Sequence[tuple[int, np.ndarray]], row_S: np.ndarray, repeats: bool) -> Iterator[QuerySegment]:
    """Yields the segments that contain a token with a row, with the positions of these tokens.

    With `repeats`, also the tokens before a segment that is longer than its shared prefix have queries, if all have
    rows: causal attention of a path to itself needs no mask, and computes half of the pairs.
    """
    for cut, path in segments:
        asks_all = repeats and 0 < 2 * cut < len(path) and bool((row_S[path] >= 0).all())
        at = np.arange(len(path)) if asks_all else cut + np.flatnonzero(row_S[path[cut:]] >= 0)
        if len(at):
            yield QuerySegment(at, path)


def _bucket(segments: list[QuerySegment], row_S: np.ndarray, device: torch.device) -> Bucket:
    n = len(segments)
    nq = max(len(segment.at) for segment in segments)
    nk = max(len(segment.path) for segment in segments)
    queries = np.zeros((n, nq), np.int64)
    keys = np.zeros((n, nk), np.int64)
    last = np.zeros((n, nq), np.int64)  # a padded query attends to key 0, so that its softmax is defined
    first = np.zeros((n, nq), np.int64)
    for row, (at, path, begin) in enumerate(segments):
        # pad with the segment's own first token: a mask would not keep out NaN of another segment
        queries[row], keys[row] = row_S[path[at[0]]], path[0]
        queries[row, : len(at)], keys[row, : len(path)] = row_S[path[at]], path
        last[row, : len(at)] = at
        if begin is not None:
            first[row, : len(at)] = begin
    is_causal = all(len(at) == len(path) and begin is None for at, path, begin in segments)
    return Bucket(
        queries=torch.as_tensor(queries.ravel(), device=device),
        keys=torch.as_tensor(keys.ravel(), device=device),
        mask_N1QK=None if is_causal else torch.as_tensor(_attention_mask(last, first, nk), device=device)[:, None],
        shape=(n, nq, nk),
    )


def _attention_mask(last_NQ: np.ndarray, first_NQ: np.ndarray, keys: int) -> np.ndarray:
    """Returns which keys each query attends to, bool [N, Q, K]: those from its first to its last."""
    seen_NQK = np.arange(keys) <= last_NQ[:, :, None]
    if not first_NQ.any():
        return seen_NQK
    return seen_NQK & (np.arange(keys) >= first_NQ[:, :, None])
