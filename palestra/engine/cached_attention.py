"""Attention of the sampler's passes, over keys and values in the KV cache.

Shapes: `S` new tokens of a flat row, `M` tokens with queries, `N` prompts, `R` live rows, `n` sequences of a part, `Q`
queries of each (padded), `P` their keys (padded), `h` key-value heads, `H` query heads, `D` head width.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from palestra.engine import sdpa
from palestra.engine.attention_terms import NO_TERMS, AttentionTerms, KeySpan, attention_by_scores, cap_scores
from palestra.engine.kv_cache import CachePool, CacheSlot

MAX_PADDING_RATIO = 1.5  # maximum ratio of computed to needed query-key pairs of a part of a prefill;
MIN_SPLIT_PAIRS = 2**22  # parts with fewer pairs are always merged, since each part has a fixed cost


class PrefillLayout:
    """Attention layout of a prefill: new prompt tokens are written to their slots and attend to all earlier tokens
    there, including reused ones."""

    def __init__(self, slots: Sequence[CacheSlot], starts_N: np.ndarray) -> None:
        """`slots` are those of the prompts, with the full prompt length; `starts_N` counts the tokens already
        stored."""
        self.slots, self.device = slots, slots[0].pool.kv.device
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

    def _writes(self) -> Iterator[tuple[CachePool, Tensor, Tensor, Tensor]]:
        """Yields, for each pool, the tokens of the flat row that belong there, with their slot indices and
        positions."""
        index_N = np.array([slot.index for slot in self.slots])
        for pool in dict.fromkeys(slot.pool for slot in self.slots):
            mine_N = np.array([slot.pool is pool for slot in self.slots])
            token_M = np.flatnonzero(mine_N[self.group_S])
            index_M, position_M = index_N[self.group_S[token_M]], self.position_S[token_M]
            yield pool, self._tensor(token_M), self._tensor(index_M), self._tensor(position_M)

    def _ask(self, token_M: np.ndarray) -> None:
        """Sets the tokens with queries: `token_M`, rising indices of the flat row."""
        asked_N = np.bincount(self.group_S[token_M], minlength=len(self.slots))
        first_N = np.cumsum(asked_N) - asked_N
        back_M, offset = np.zeros(len(token_M), np.int64), 0
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
            index_n = np.array([self.slots[i].index for i in members])
            fresh = all(asked_N[i] == self.slots[i].length for i in members)  # no reused tokens, all with queries
            self.parts.append(
                PrefillPart(
                    self.slots[members[0]].pool,
                    self._tensor(index_n),
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
        q_HSD, k_HSD, v_HSD = _as_wide_as_cache(self.writes[0][0], q_HSD, k_HSD, v_HSD)
        for pool, token_M, index_M, position_M in self.writes:
            for kept, new_HSD in zip(pool.kv[layer], (k_HSD, v_HSD), strict=True):
                kept[index_M, :, position_M] = new_HSD[:, token_M].transpose(0, 1)
        outs = []
        for part, mask in zip(self.parts, self._masks_of(terms.span), strict=True):
            n, _, queries, keys = mask.shape
            q = q_HSD[:, part.row_nQ].view(q_HSD.shape[0], n, queries, -1).transpose(0, 1)
            k, v = (kept[:, :, :keys][part.index_n] for kept in part.pool.kv[layer])
            if terms.needs_scores:
                out = attention_by_scores(q, k, v, mask, scale, terms)
            else:
                # on a GPU fresh prompts need no mask, and what a padded query attends to is not read
                causal = part.is_fresh and terms.span is None and sdpa.uses_cuda(q)
                out = sdpa.grouped_attention(q, k, v, None if causal else mask, scale, is_causal=causal)
            outs.append(out.transpose(1, 2).flatten(0, 1))
        return _joined(outs)[self.output_index_M][..., :out_width]


class PrefillPart(NamedTuple):
    """Prompts of one pool and of similar shape: their slots, the flat rows of their queries (padded), which keys these
    attend to, and their positions; `is_fresh`: all tokens have queries."""

    pool: CachePool
    index_n: Tensor
    row_nQ: Tensor
    mask_n1QP: Tensor
    position_nQ: np.ndarray
    is_fresh: bool


def _similar(slots: Sequence[CacheSlot], asked_N: np.ndarray) -> Iterator[np.ndarray]:
    """Yields indices of `slots` that have queries, in groups of one pool and of similar shape."""
    pools = {pool: number for number, pool in enumerate(dict.fromkeys(slot.pool for slot in slots))}
    order = sorted(np.flatnonzero(asked_N).tolist(), key=lambda i: (pools[slots[i].pool], int(asked_N[i])))
    part: list[int] = []
    need = keys = 0
    for i in order:
        q, k = int(asked_N[i]), slots[i].length
        padded = q * max(keys, k) * (len(part) + 1)
        if part and (
            slots[i].pool is not slots[part[0]].pool
            or padded > max(MIN_SPLIT_PAIRS, MAX_PADDING_RATIO * (need + q * k))
        ):
            yield np.array(part)
            part, need, keys = [], 0, 0
        part.append(i)
        need, keys = need + q * k, max(keys, k)
    yield np.array(part)


class DecodeLayout:
    """Attention layout of a decoding step: one new token per live row is appended to the row's answer and attends to
    the row's prompt and answer.

    The two are computed separately, all rows of a prompt together, and combined by their softmax sums, as in
    FlashAttention (Dao et al., 2022).
    """

    def __init__(self, prompts: Sequence[CacheSlot], answers: Sequence[CacheSlot]) -> None:
        """`prompts` and `answers` are the two sequences of each row [R]; the new token is the last of the answer."""
        self.prompts, self.answers = PooledAttention(prompts), PooledAttention(answers)
        self.writes = [self._write(pool, answers) for pool in self.answers.pools]
        self._slots = prompts, answers
        self._hidden: dict[KeySpan, tuple[list[Tensor], list[Tensor]]] = {}

    @staticmethod
    def _write(pool: CachePool, answers: Sequence[CacheSlot]) -> tuple[CachePool, Tensor, Tensor]:
        """Returns the rows whose answers are in `pool`, and the flat index of each row's new token per head."""
        _, _, _, h, room, _ = pool.kv.shape
        row_M = np.array([r for r, slot in enumerate(answers) if slot.pool is pool])
        index_M = np.array([slot.index for slot in answers if slot.pool is pool])
        last_M = np.array([slot.length - 1 for slot in answers if slot.pool is pool])
        at_Mh = (index_M[:, None] * h + np.arange(h)) * room + last_M[:, None]
        device = pool.kv.device
        return pool, torch.as_tensor(row_M, device=device), torch.as_tensor(at_Mh.ravel(), device=device)

    def _hide(self, span: KeySpan | None) -> tuple[list[Tensor] | None, list[Tensor] | None]:
        """Returns what to add to the scores of the parts of answers and of prompts in layers with `span`."""
        if span is None:
            return None, None
        if span not in self._hidden:
            prompts, answers = self._slots
            prompt_R, answer_R = (np.array([slot.length for slot in slots]) for slots in (prompts, answers))
            first_R = span.first_key(prompt_R + answer_R - 1)
            self._hidden[span] = self.answers.hide_before(first_R - prompt_R), self.prompts.hide_before(first_R)
        return self._hidden[span]

    def attend(
        self, layer: int, q_HSD: Tensor, k_HSD: Tensor, v_HSD: Tensor, scale: float, terms: AttentionTerms = NO_TERMS
    ) -> Tensor:
        """Writes the new keys and values [h, R, D] of a layer to the cache; returns the attention output [R, H, D]."""
        out_width = v_HSD.shape[-1]
        q_HSD, k_HSD, v_HSD = _as_wide_as_cache(self.writes[0][0], q_HSD, k_HSD, v_HSD)
        (_, rows, width), h = q_HSD.shape, k_HSD.shape[0]
        for pool, row_M, at_Mh in self.writes:
            for kept, new_HSD in zip(pool.kv[layer], (k_HSD, v_HSD), strict=True):
                new_RHD = new_HSD.transpose(0, 1)
                mine = new_RHD if len(self.writes) == 1 else new_RHD.index_select(0, row_M)
                kept.view(-1, width).index_copy_(0, at_Mh, mine.reshape(-1, width))
        q_RHD = (q_HSD.transpose(0, 1) * scale).reshape(rows, -1)
        sums = [
            parts.attend(layer, q_RHD, h, width, terms.softcap, hide)
            for parts, hide in zip((self.answers, self.prompts), self._hide(terms.span), strict=True)
        ]
        most = torch.maximum(sums[0].max_score, sums[1].max_score)
        sinks_H = None if terms.sinks_H is None else terms.sinks_H.float()
        if sinks_H is not None:
            most = torch.maximum(most, sinks_H)
        shares = [(one.max_score - most).exp() for one in sums]
        total = sum(one.total * share for one, share in zip(sums, shares, strict=True))
        if sinks_H is not None:
            total = total + (sinks_H - most).exp()
        out = sums[0].values * (shares[0] / total)[..., None]
        return out.addcmul_(sums[1].values, (shares[1] / total)[..., None]).to(q_HSD.dtype)[..., :out_width]


class PartialSoftmax(NamedTuple):
    """An unnormalised softmax for each row and head: values weighted by exp(score - top) [R, H, D], the sum of these
    weights [R, H] float32, and the maximum score [R, H] float32."""

    values: Tensor
    total: Tensor
    max_score: Tensor


class PooledAttention:
    """Attention of one query per row to one sequence per row, computed pool by pool."""

    def __init__(self, slots: Sequence[CacheSlot]) -> None:
        """`slots` are the rows' sequences [R]; several rows may share one."""
        rows: dict[CachePool, list[int]] = defaultdict(list)
        for r, slot in enumerate(slots):
            rows[slot.pool].append(r)
        self.pools = list(rows)
        self.parts, places, offset = [], np.zeros(len(slots), np.int64), 0
        self._rows_nQ: list[np.ndarray] = []
        for pool, row_M in rows.items():
            index_M = np.array([slots[r].index for r in row_M])
            first, end = int(index_M.min()), int(index_M.max()) + 1  # skip the rest of the pool
            index_M -= first
            place_M, most = _places(index_M)
            size = end - first
            row_nQ = np.full(size * most, row_M[0], np.int64)  # padding repeats the first row
            row_nQ[index_M * most + place_M] = row_M
            places[row_M] = offset + index_M * most + place_M
            offset += size * most
            length_n = np.array([max(1, slot.length) for slot in pool.slots[first:end]])
            keys = int(length_n[index_M].max())
            hide_nP = np.where(np.arange(keys) < length_n[:, None], 0.0, -np.inf)
            hide = torch.as_tensor(hide_nP, device=pool.kv.device, dtype=pool.kv.dtype)[:, None, None]
            self.parts.append((pool, first, _picked(row_nQ, len(slots), pool.kv.device), hide))
            self._rows_nQ.append(row_nQ.reshape(size, most))
        self.place_R = _picked(places, offset, self.pools[0].kv.device)

    def hide_before(self, first_R: np.ndarray) -> list[Tensor]:
        """Returns, for each part, what to add to the scores [n, 1, Q, 1, P] so that row r sees no key before
        `first_R[r]`. It is finite: a row may see none of these keys, and its share is then 0."""
        found = []
        for (pool, _, _, hide), row_nQ in zip(self.parts, self._rows_nQ, strict=True):
            before = np.arange(hide.shape[-1]) < first_R[row_nQ][:, :, None]
            low = torch.finfo(pool.kv.dtype).min / 2
            added = torch.zeros(before.shape, dtype=pool.kv.dtype, device=pool.kv.device)
            found.append(added.masked_fill_(torch.as_tensor(before, device=pool.kv.device), low)[:, None, :, None])
        return found

    def attend(
        self, layer: int, q_RHD: Tensor, h: int, width: int, softcap: float | None, hidden: list[Tensor] | None
    ) -> PartialSoftmax:
        """Returns the unnormalised attention of the scaled queries `q_RHD` [R, H*D] over one layer."""
        found = [
            self._part(pool.kv[layer, :, first:], _at(q_RHD, row_nQ), hide, h, softcap, hidden[i] if hidden else None)
            for i, (pool, first, row_nQ, hide) in enumerate(self.parts)
        ]
        values, total, top = (_at(_joined(list(column)), self.place_R) for column in zip(*found, strict=True))
        return PartialSoftmax(values.view(len(values), -1, width), total, top)

    @staticmethod
    def _part(
        kv: Tensor, q: Tensor, hide: Tensor, h: int, softcap: float | None, more: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        n, keys, width = hide.shape[0], hide.shape[-1], kv.shape[-1]
        most = len(q) // n
        q = q.view(n, most, h, -1, width).transpose(1, 2).reshape(n, h, -1, width)
        score = q @ kv[0, :n, :, :keys].transpose(-1, -2)
        if softcap is not None:
            score = cap_scores(score, softcap)
        score += hide
        if more is not None:
            score.view(n, h, most, -1, keys).add_(more)
        top = score.amax(-1, keepdim=True)
        weight = score.sub_(top).exp_()
        out = weight @ kv[1, :n, :, :keys], weight.sum(-1, dtype=torch.float32), top.float()
        values, total, top = (x.view(n, h, most, -1).transpose(1, 2).reshape(n * most, -1) for x in out)
        return values, total, top


def _as_wide_as_cache(pool: CachePool, *tensors: Tensor) -> list[Tensor]:
    """Returns `tensors` filled up with zeros to the width of the cache, where values are narrower than keys (MLA)."""
    width = pool.kv.shape[-1]
    return [t if t.shape[-1] == width else F.pad(t, (0, width - t.shape[-1])) for t in tensors]


def _picked(index: np.ndarray, size: int, device: torch.device) -> Tensor | None:
    """Returns `index` as a tensor, or None if it selects all of `size` rows in order."""
    if np.array_equal(index, np.arange(size)):
        return None
    return torch.as_tensor(index, device=device)


def _at(rows: Tensor, index: Tensor | None) -> Tensor:
    return rows if index is None else rows.index_select(0, index)


def _places(index_M: np.ndarray) -> tuple[np.ndarray, int]:
    """Returns the rank of each entry among those of the same value, and the count of the most frequent value."""
    order = np.argsort(index_M, kind="stable")
    _, first, count = np.unique(index_M[order], return_index=True, return_counts=True)
    place_M = np.zeros(len(index_M), np.int64)
    place_M[order] = np.arange(len(index_M)) - np.repeat(first, count)
    return place_M, int(count.max())


def _joined(outs: list[Tensor]) -> Tensor:
    return outs[0] if len(outs) == 1 else torch.cat(outs)
