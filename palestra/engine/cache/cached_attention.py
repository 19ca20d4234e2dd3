"""Attention of the sampler's passes, over keys and values in the pages of the KV cache.

In a prefill, the prompts of a part are gathered from their pages. In decoding, pages are not copied: each is computed
with the queries of all rows that read it, all pages of a pool in one product; the pages of a row are then combined by
their softmax sums, as in FlashAttention (Dao et al., 2022).

Shapes: `S` new tokens of a flat row, `M` tokens with queries, `N` prompts, `R` live rows, `n` prompts or pages of a
part, `Q` queries of each (padded), `P` their keys (padded), `h` key-value heads, `H` query heads, `D` head width, `X`
places: the queries of all pages, padding included.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from palestra.engine.cache.kv_cache import pages_of
from palestra.engine.cache.kv_pages import PAGE_TOKENS, CacheSlot, PagePool
from palestra.engine.forward import sdpa
from palestra.engine.forward.attention_terms import NO_TERMS, AttentionTerms, KeySpan, attention_by_scores, cap_scores
from palestra.engine.forward.flat_row import groups_to_pad

MIN_SPLIT_PAIRS = 2**22  # parts of a prefill with fewer pairs are always merged, since each part has a fixed cost
MAX_SKIPPED_RATIO = 3  # decoding gathers the pages that it reads if more than 3 times as many lie between them


class PrefillLayout:
    """Attention layout of a prefill: new prompt tokens are written to their slots and attend to all earlier tokens
    there, including reused ones."""

    def __init__(self, slots: Sequence[CacheSlot], starts_N: np.ndarray) -> None:
        """`slots` are those of the prompts, with the full prompt length; `starts_N` counts the tokens already
        stored."""
        self.slots = slots
        self.device = slots[0].pool.kv[0].device
        length_N = np.array([slot.length for slot in slots])
        new_N = length_N - starts_N
        self.group_S = np.repeat(np.arange(len(slots)), new_N)
        first_N = np.cumsum(new_N) - new_N
        self.position_S = np.arange(len(self.group_S)) + (starts_N - first_N)[self.group_S]
        self.positions = self._tensor(self.position_S)
        self.last_N = self._tensor(np.cumsum(new_N) - 1)
        self.writes = list(self._writes())
        self._ask(np.arange(len(self.group_S)))

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.as_tensor(values, device=self.device)

    def _writes(self) -> Iterator[tuple[PagePool, Tensor, Tensor]]:
        """Yields, for each pool, the tokens of the flat row that belong there, and their rows [h * M] in the pool."""
        split = np.flatnonzero(np.diff(self.group_S)) + 1
        rows_N = [slot.rows(places) for slot, places in zip(self.slots, np.split(self.position_S, split), strict=True)]
        for pool in dict.fromkeys(slot.pool for slot in self.slots):
            mine_N = np.array([slot.pool is pool for slot in self.slots])
            token_M = np.flatnonzero(mine_N[self.group_S])
            rows_hM = np.concatenate([rows for rows, mine in zip(rows_N, mine_N, strict=True) if mine], 1)
            yield pool, self._tensor(token_M), self._tensor(rows_hM.ravel())

    def _ask(self, token_M: np.ndarray) -> None:
        """Sets the tokens with queries: `token_M`, rising indices of the flat row."""
        asked_N = np.bincount(self.group_S[token_M], minlength=len(self.slots))
        first_N = np.cumsum(asked_N) - asked_N
        back_M = np.zeros(len(token_M), np.int64)
        offset = 0
        self.parts = []
        for members in _similar(self.slots, asked_N):
            q = int(asked_N[members].max())
            column = np.arange(q)[None]
            real_nQ = column < asked_N[members, None]
            row_nQ = first_N[members, None] + np.minimum(column, asked_N[members, None] - 1)
            back_M[row_nQ[real_nQ]] = offset + np.flatnonzero(real_nQ)
            offset += row_nQ.size
            keys = max(self.slots[i].length for i in members)
            position_nQ = self.position_S[token_M[row_nQ]]
            mask_nQP = np.arange(keys) <= position_nQ[:, :, None]
            rows_nhP = np.stack([_pad_rows(self.slots[i].rows(np.arange(self.slots[i].length)), keys) for i in members])
            fresh = all(asked_N[i] == self.slots[i].length for i in members)  # no reused tokens, all with queries
            self.parts.append(
                PrefillPart(
                    self.slots[members[0]].pool,
                    self._tensor(rows_nhP),
                    self._tensor(row_nQ.ravel()),
                    self._tensor(mask_nQP)[:, None],
                    position_nQ,
                    fresh,
                )
            )
        self.output_index_M = self._tensor(back_M)
        self._masks: dict[KeySpan | None, list[Tensor]] = {None: [part.mask_n1QP for part in self.parts]}

    def _masks_of(self, span: KeySpan | None) -> list[Tensor]:
        """Returns the mask of each part in layers with `span`."""
        if span not in self._masks:
            assert span is not None
            first = [self._tensor(span.first_key(part.position_nQ))[:, None, :, None] for part in self.parts]
            keys = [torch.arange(part.mask_n1QP.shape[-1], device=self.device) for part in self.parts]
            self._masks[span] = [part.mask_n1QP & (k >= f) for part, k, f in zip(self.parts, keys, first, strict=True)]
        return self._masks[span]

    def narrow(self, keep_M: Tensor) -> PrefillLayout:
        """Returns the layout in which only the tokens `keep_M` (flat indices, rising) have queries."""
        narrowed = copy.copy(self)
        narrowed._ask(keep_M.cpu().numpy())
        return narrowed

    def attend(
        self, layer: int, q_HSD: Tensor, k_HSD: Tensor, v_HSD: Tensor, scale: float, terms: AttentionTerms = NO_TERMS
    ) -> Tensor:
        """Writes the new keys and values [h, S, D] of a layer to the cache; returns the attention output [M, H, D]."""
        out_width = v_HSD.shape[-1]
        q_HSD, k_HSD, v_HSD = as_wide_as_cache(self.writes[0][0], q_HSD, k_HSD, v_HSD)
        width = q_HSD.shape[-1]
        for pool, token_M, rows_hM in self.writes:
            for cached, new_HSD in zip(pool.kv[layer], (k_HSD, v_HSD), strict=True):
                cached.view(-1, width).index_copy_(0, rows_hM, new_HSD[:, token_M].reshape(-1, width))
        outs = []
        for part, mask in zip(self.parts, self._masks_of(terms.span), strict=True):
            n, _, queries, _ = mask.shape
            q = q_HSD[:, part.row_nQ].view(q_HSD.shape[0], n, queries, -1).transpose(0, 1)
            k, v = (cached.view(-1, width)[part.rows_nhP] for cached in part.pool.kv[layer])
            if terms.needs_scores:
                out = attention_by_scores(q, k, v, mask, scale, terms)
            else:
                # on a GPU fresh prompts need no mask, and what a padded query attends to is not read
                causal = part.is_fresh and terms.span is None and sdpa.uses_cuda(q)
                out = sdpa.grouped_attention(q, k, v, None if causal else mask, scale, is_causal=causal)
            outs.append(out.transpose(1, 2).flatten(0, 1))
        return _concat_tensors(outs)[self.output_index_M][..., :out_width]


class PrefillPart(NamedTuple):
    """Prompts of one pool and of similar shape: the rows of their keys in the pool (padded), the flat rows of their
    queries (padded), which keys these attend to, and their positions; `is_fresh`: all tokens have queries."""

    pool: PagePool
    rows_nhP: Tensor
    row_nQ: Tensor
    mask_n1QP: Tensor
    position_nQ: np.ndarray
    is_fresh: bool


def _similar(slots: Sequence[CacheSlot], asked_N: np.ndarray) -> Iterator[np.ndarray]:
    """Yields indices of `slots` that have queries, in groups of one pool and of similar shape."""
    for pool in dict.fromkeys(slot.pool for slot in slots):
        own = [i for i in np.flatnonzero(asked_N).tolist() if slots[i].pool is pool]
        own.sort(key=lambda i: int(asked_N[i]))
        yield from map(np.array, groups_to_pad(own, lambda i: (int(asked_N[i]), slots[i].length), MIN_SPLIT_PAIRS))


def _pad_rows(rows_hT: np.ndarray, size: int) -> np.ndarray:
    """Returns `rows_hT` with its first column repeated up to `size` columns."""
    return np.concatenate([rows_hT, np.repeat(rows_hT[:, :1], size - rows_hT.shape[1], 1)], 1)


class PartialSoftmax(NamedTuple):
    """An unnormalised softmax for each place and head: values weighted by exp(score - top) [X, H*D], the sum of these
    weights [X, H] and the maximum score [X, H], at least float32."""

    values: Tensor
    total: Tensor
    max_score: Tensor


class DecodeLayout:
    """Attention layout of a decoding step: one new token per live row is appended to the row's answer and attends to
    the row's prompt and answer."""

    def __init__(self, prompts: Sequence[CacheSlot], answers: Sequence[CacheSlot]) -> None:
        """`prompts` and `answers` are the two sequences of each row [R]; the new token is the last of the answer."""
        self.device = answers[0].pool.kv[0].device
        prompt_R = np.array([slot.length for slot in prompts])
        answer_R = np.array([slot.length for slot in answers])
        self.position_R = prompt_R + answer_R - 1
        self.parts = [*_parts(answers, prompt_R), *_parts(prompts, np.zeros(len(prompts), np.int64))]
        self.pool = answers[0].pool
        self.writes = self._tensor(np.concatenate([slot.rows(np.array([slot.length - 1])) for slot in answers]).ravel())
        row_X = np.concatenate([part.row_nQ.ravel() for part in self.parts])
        real_X = np.flatnonzero(np.concatenate([part.is_real_nQ.ravel() for part in self.parts]))
        self._row_X = self._tensor(row_X)
        # the places of row 0, of row 1, ...
        self._bags = self._tensor(real_X[np.argsort(row_X[real_X], kind="stable")])
        counts_R = np.bincount(row_X[real_X], minlength=len(answers))
        self._bag_starts = self._tensor(np.cumsum(counts_R) - counts_R)
        self._score_masks: dict[KeySpan | None, list[Tensor]] = {None: [part.score_mask() for part in self.parts]}

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.as_tensor(values, device=self.device)

    def _masks_of(self, span: KeySpan | None) -> list[Tensor]:
        """Returns what to add to the scores of each part in layers with `span`."""
        if span not in self._score_masks:
            assert span is not None
            first_R = span.first_key(self.position_R)
            self._score_masks[span] = [part.score_mask(first_R) for part in self.parts]
        return self._score_masks[span]

    def attend(
        self, layer: int, q_HSD: Tensor, k_HSD: Tensor, v_HSD: Tensor, scale: float, terms: AttentionTerms = NO_TERMS
    ) -> Tensor:
        """Writes the new keys and values [h, R, D] of a layer to the cache; returns the attention output [R, H, D]."""
        out_width = v_HSD.shape[-1]
        q_HSD, k_HSD, v_HSD = as_wide_as_cache(self.pool, q_HSD, k_HSD, v_HSD)
        (heads, rows, width), h = q_HSD.shape, k_HSD.shape[0]
        for cached, new_HSD in zip(self.pool.kv[layer], (k_HSD, v_HSD), strict=True):
            cached.view(-1, width).index_copy_(0, self.writes, new_HSD.transpose(0, 1).reshape(-1, width))
        q_RF = (q_HSD.transpose(0, 1) * scale).reshape(rows, -1)
        hides = self._masks_of(terms.span)
        outs = [part.attend(layer, q_RF, h, terms.softcap, hide) for part, hide in zip(self.parts, hides, strict=True)]
        values_XF, total_XH, top_XH = (_concat_tensors(column) for column in zip(*outs, strict=True))
        share_XH = self._shares(total_XH, top_XH, terms.sinks_H)
        values_XF.view(-1, heads, width).mul_(share_XH[..., None])
        return self._by_row(values_XF, "sum").view(rows, heads, width)[..., :out_width]

    def _shares(self, total_XH: Tensor, top_XH: Tensor, sinks_H: Tensor | None) -> Tensor:
        """Returns the factors of the unnormalised values of each place."""
        top_RH = self._by_row(top_XH, "max")
        sinks_H = None if sinks_H is None else sinks_H.to(top_RH)
        if sinks_H is not None:
            top_RH = torch.maximum(top_RH, sinks_H)
        share_XH = (top_XH - top_RH.index_select(0, self._row_X)).exp_()
        total_RH = self._by_row(total_XH * share_XH, "sum")
        if sinks_H is not None:
            total_RH += (sinks_H - top_RH).exp()
        return share_XH.div_(total_RH.index_select(0, self._row_X))

    def _by_row(self, values_XC: Tensor, mode: str) -> Tensor:
        """Returns the sum or the maximum [R, C] over the places of each row."""
        return F.embedding_bag(self._bags, values_XC, self._bag_starts, mode=mode)


class PagesOfPool:
    """A part of a decoding step: pages of one pool, with the rows that read them, `row_nQ` [n, Q]. If fewer than `Q`
    rows read a page, its list is padded with others: `is_real_nQ` is false there."""

    def __init__(self, slots: Sequence[CacheSlot], row_M: np.ndarray, first_M: np.ndarray) -> None:
        """`slots` are sequences of one pool; `row_M` is the row that reads each, `first_M` the position of its first
        token. Several rows may read the same sequence."""
        self.pool: PagePool = slots[0].pool
        count_M = np.array([pages_of(slot.length) for slot in slots])
        read = chain.from_iterable(slot.pages[:count] for slot, count in zip(slots, count_M.tolist(), strict=True))
        page_Y = np.fromiter(read, np.int64, count_M.sum())  # Y: a page read by a row
        before_Y = (np.arange(len(page_Y)) - np.repeat(np.cumsum(count_M) - count_M, count_M)) * PAGE_TOKENS
        row_Y = np.repeat(row_M, count_M)
        number_Y = self._select(page_Y)
        place_Y, most = _places(number_Y)
        self.row_nQ = np.full((self.num_pages, most), row_M[0])
        self.row_nQ[number_Y, place_Y] = row_Y
        self.is_real_nQ = np.zeros(self.row_nQ.shape, bool)
        self.is_real_nQ[number_Y, place_Y] = True
        self.filled_n = np.ones(self.num_pages, np.int64)  # pages that no row reads need a key, too: -inf gives NaN
        self.filled_n[number_Y] = np.minimum(PAGE_TOKENS, np.repeat([s.length for s in slots], count_M) - before_Y)
        self.first_n = np.zeros(self.num_pages, np.int64)
        self.first_n[number_Y] = np.repeat(first_M, count_M) + before_Y
        device = self.pool.kv[0].device
        self._rows = torch.as_tensor(self.row_nQ.ravel(), device=device)

    def _select(self, page_Y: np.ndarray) -> np.ndarray:
        """Sets which pages of the pool to compute: those between the first and the last that a row reads, or if these
        are too many, a copy of those read. Returns the number of each of `page_Y` among them."""
        self._first = int(page_Y.min())
        self._gathered = None
        self.num_pages = int(page_Y.max()) + 1 - self._first
        distinct = np.unique(page_Y)
        if self.num_pages <= MAX_SKIPPED_RATIO * len(distinct):
            return page_Y - self._first
        self.num_pages = len(distinct)
        self._gathered = torch.as_tensor(distinct, device=self.pool.kv[0].device)
        return np.searchsorted(distinct, page_Y)

    def score_mask(self, first_R: np.ndarray | None = None) -> Tensor:
        """Returns what to add to the scores [n, 1, Q or 1, 1, P], so that no row sees keys that are not there, nor any
        before its position `first_R` [R]. What it adds for those is finite: a row may see none of a page's keys, and
        the page's share is then 0."""
        device = self.pool.kv[0].device
        dtype = self.pool.kv[0].dtype
        key_P = np.arange(self.filled_n.max())
        hide_n1P = np.where(key_P < self.filled_n[:, None], 0.0, -np.inf)[:, None]
        if first_R is not None:
            before_nQP = self.first_n[:, None, None] + key_P < first_R[self.row_nQ][:, :, None]
            hide_n1P = np.where(before_nQP, torch.finfo(dtype).min / 2, 0.0) + hide_n1P
        return torch.as_tensor(hide_n1P, device=device, dtype=dtype)[:, None, :, None]

    def attend(self, layer: int, q_RF: Tensor, h: int, softcap: float | None, hide: Tensor) -> PartialSoftmax:
        """Returns the unnormalised attention of the scaled queries `q_RF` [R, H*D] over one layer's pages."""
        (n, most), (keys, width) = self.row_nQ.shape, (hide.shape[-1], self.pool.kv[layer].shape[-1])
        k_nhPD, v_nhPD = self._pages(layer, keys)
        q = q_RF.index_select(0, self._rows).view(n, most, h, -1, width).transpose(1, 2).reshape(n, h, -1, width)
        score = q @ k_nhPD.transpose(-1, -2)
        if softcap is not None:
            score = cap_scores(score, softcap)
        score.view(n, h, most, -1, keys).add_(hide)
        top = score.amax(-1, keepdim=True)
        weight = score.sub_(top).exp_()
        wide = torch.promote_types(score.dtype, torch.float32)
        out = weight @ v_nhPD, weight.sum(-1, dtype=wide), top.to(wide)
        return PartialSoftmax(*(x.view(n, h, most, -1).transpose(1, 2).reshape(n * most, -1) for x in out))

    def _pages(self, layer: int, keys: int) -> Tensor:
        """Returns the first `keys` keys and values [2, n, h, keys, D] of the pages."""
        kv = self.pool.kv[layer]
        if self._gathered is not None:
            return kv.index_select(1, self._gathered)[..., :keys, :]
        return kv[:, self._first : self._first + self.num_pages, :, :keys]


def _parts(slots: Sequence[CacheSlot], first_R: np.ndarray) -> list[PagesOfPool]:
    """Returns the parts of the sequences `slots` [R], whose first tokens have the positions `first_R`."""
    rows: dict[PagePool, list[int]] = defaultdict(list)
    for r, slot in enumerate(slots):
        rows[slot.pool].append(r)
    return [PagesOfPool([slots[r] for r in row_M], np.array(row_M), first_R[row_M]) for row_M in rows.values()]


def as_wide_as_cache(pool: PagePool, *tensors: Tensor) -> list[Tensor]:
    """Returns `tensors` filled up with zeros to the width of the cache, where values are narrower than keys (MLA)."""
    width = pool.kv[0].shape[-1]
    return [t if t.shape[-1] == width else F.pad(t, (0, width - t.shape[-1])) for t in tensors]


def _places(number_Y: np.ndarray) -> tuple[np.ndarray, int]:
    """Returns the rank of each entry among those of the same value, and the count of the most frequent value."""
    order = np.argsort(number_Y, kind="stable")
    _, first, count = np.unique(number_Y[order], return_index=True, return_counts=True)
    place_Y = np.zeros(len(number_Y), np.int64)
    place_Y[order] = np.arange(len(number_Y)) - np.repeat(first, count)
    return place_Y, int(count.max())


def _concat_tensors(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
