"""The live batch of models on packed rows: prompts and answers in the KV cache, and the passes that compute them.

Shapes: `R` rows, `N` prompts of a prefill, `V` vocabulary.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from palestra.core.accel.malloc import free_memory
from palestra.engine.bases.model import Engine
from palestra.engine.cache.cached_attention import PrefillLayout
from palestra.engine.cache.kv_cache import KVCache
from palestra.engine.cache.kv_pages import CacheFull, CacheMemory, CacheSlot
from palestra.engine.cache.prefix_store import PrefixStore, StoredPart
from palestra.engine.cuda.decode_graphs import DecodeGraphs, DecodeStep
from palestra.engine.lora.routes import AdapterStack, MultiAdapterRoute
from palestra.engine.sampling.live_batch import LiveBatch, without
from palestra.engine.sampling.request import CachedPrompt, LiveSequence, SequenceGroup

KEPT_CACHE_BYTES = 2**26  # empty pools of a batch at rest may keep 64 MiB
KEPT_FREE_DIVISOR = 4  # where decoding steps are recorded, empty pools may keep a quarter of the free memory
ADMITTED_TOKENS = 64  # an answer is admitted if there is room for its first 64 tokens


class CachedBatch(LiveBatch):
    """A live batch with the KV cache of its prompts and answers, and the stored keys and values of earlier
    conversations.

    `keep_tokens` is the capacity of the prefix store in tokens, `cache_bytes` the budget of the cache and the store,
    `prefill_tokens` the maximum number of prompt tokens of a pass. `graphs` records the decoding steps (None: new ones
    on CUDA, none on other devices).
    """

    def __init__(
        self,
        engine: Engine,
        *,
        keep_tokens: int,
        cache_bytes: int | None,
        prefill_tokens: int,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        super().__init__(engine)
        self.cache_bytes = cache_bytes
        self.prefill_tokens = prefill_tokens
        self.memory = CacheMemory(cache_bytes)
        self.prefix_store = PrefixStore(keep_tokens, self.memory)
        self.graphs = DecodeGraphs(self.engine) if graphs is None and engine.device.type == "cuda" else graphs
        self.gathers_prompts = self.graphs is not None
        self.cache = self._new_cache()
        self._stacks: OrderedDict[tuple[int, ...], AdapterStack] = OrderedDict()

    def reset(self) -> None:
        super().reset()
        self.memory.release(self.cache.bytes)
        self.cache = self._new_cache()

    def _new_cache(self) -> KVCache:
        shape = self.engine.attention
        assert shape is not None
        return KVCache(
            shape.layers,
            shape.kv_heads,
            shape.width,
            self.engine.device,
            self.engine.dtype,
            memory=self.memory,
            store=self.prefix_store,
            one_pool=self.graphs is not None,
        )

    def clear_cache(self) -> None:
        self.prefix_store.clear()
        self._stacks.clear()

    def release_memory(self) -> None:
        self.cache.free_empty_pools()

    # -- passes --------------------------------------------------------------------------------------------------------

    def start(self, groups: list[SequenceGroup]) -> None:
        groups = sorted(groups, key=lambda group: group.sort_key)
        self.groups |= dict.fromkeys(groups)
        if new := [group for group in groups if group.prompt is None]:
            self._prefill(new)
        for group in groups:
            if group.resumed:
                self._resume(group)
        if any(group.num_started < group.num_admitted for group in groups):
            self._start_new([group for group in groups if group.num_started < group.num_admitted])
        for group in groups:
            if group.num_started == group.request.n:
                group.first_logits_V = None
        self.cache.free_empty_pools()

    def _start_new(self, groups: list[SequenceGroup]) -> None:
        rows = self._new_rows(groups)
        which = np.repeat(np.arange(len(groups)), [group.num_admitted - group.num_started for group in groups])
        first_V = [group.first_logits_V for group in groups if group.first_logits_V is not None]
        live = self._draw(rows, torch.stack(first_V)[self.engine.tensor(which)])
        self._place(live)
        for group in groups:
            group.num_started = group.num_admitted
        self._add(live)
        self._over += without(rows, live)

    def _add(self, rows: Sequence[LiveSequence]) -> None:
        """Makes `rows` live. Rows are sorted by adapter at any time, even if starting the next group fails."""
        self.rows = sorted([*self.rows, *rows], key=lambda row: row.group.sort_key)

    def _place(self, rows: Sequence[LiveSequence]) -> None:
        """Allocates cache slots for new or resumed rows."""
        self._regroup(rows, more=Counter(_prompt(row) for row in rows))
        slots = self.cache.allocate_answers([len(row.token_ids) for row in rows])
        for row, slot in zip(rows, slots, strict=True):
            row.slot = slot
            _prompt(row).num_rows += 1

    def _unplace(self, rows: Sequence[LiveSequence]) -> None:
        """Frees the cache slots of rows."""
        self.cache.free([_slot(row) for row in rows])
        for row in rows:
            row.slot = None
            _prompt(row).num_rows -= 1

    def _resume(self, group: SequenceGroup) -> None:
        """Makes the resumed answers of a group live again: recomputes the keys and values of their tokens."""
        rows = group.resumed
        self._place(rows)
        try:
            self._recompute([row for row in rows if len(row.token_ids) > 1])
        except Exception:
            self._unplace(rows)
            raise
        self._add(rows)
        group.resumed = []

    def _recompute(self, rows: list[LiveSequence]) -> None:
        """Fills the slots of rows of one prompt, as if it ended with their tokens. Raises CacheFull if there is no room
        for one of these longer prompts."""
        if not rows:
            return
        group = rows[0].group
        prompt = _prompt(rows[0]).slot
        try:
            lengths = [prompt.length + len(row.token_ids) - 1 for row in rows]
            copies = self.cache.allocate_prompts(lengths, [1] * len(rows))
        except CacheFull:
            if len(rows) == 1:
                raise
            self._recompute(rows[: len(rows) // 2])
            self._recompute(rows[len(rows) // 2 :])
            return
        try:
            for slot in copies:
                self.cache.write(slot, 0, self.cache.read(prompt))
            ids = [np.array(row.token_ids[:-1], np.int64) for row in rows]
            self._fill(copies, [prompt.length] * len(rows), ids, [group] * len(rows))
            for row, slot in zip(rows, copies, strict=True):
                row_slot = _slot(row)
                row_slot.length = len(row.token_ids) - 1
                self.cache.write(row_slot, 0, self.cache.read(slot, prompt.length))
        finally:
            self.cache.free(copies)

    def grow(self, rows: Sequence[LiveSequence]) -> None:
        self.cache.grow([_slot(row) for row in rows if _slot(row).length < len(row.token_ids)])

    def fitting(self, group: SequenceGroup, count: int, free: int, *, new_prompt: bool) -> tuple[int, int]:
        first = min(group.request.sampling.max_tokens, ADMITTED_TOKENS)
        resumed = [max(len(row.token_ids), first) for row in group.preempted[:count]]
        lengths = [*resumed, *[first] * (count - len(resumed))]
        prompt_bytes = self.cache.bytes_of(group.prompt_length) if new_prompt else 0
        if resumed:  # recomputed one at a time, in a copy
            prompt_bytes += self.cache.bytes_of(group.prompt_length + max(resumed))
        room_n = prompt_bytes + np.cumsum([self.cache.bytes_of(length) for length in lengths])
        fits = int(np.searchsorted(room_n, free, side="right"))
        return fits, int(room_n[fits - 1]) if fits else prompt_bytes

    def preempt(self, rows: Sequence[LiveSequence]) -> None:
        self._unplace(rows)
        self.rows = without(self.rows, rows)
        self._note_preempted(rows)
        self._regroup(rows)

    @property
    def free_bytes(self) -> int | None:
        return self.cache.free_bytes

    def lower_budget(self) -> None:
        self.memory.limit = self.memory.used

    def rest(self) -> None:
        self.memory.limit = self.cache_bytes
        if self.cache.bytes > self._kept_bytes():
            self.cache.free_empty_pools()

    def _kept_bytes(self) -> int:
        """Returns how many bytes of empty pools a batch at rest keeps. Where steps are recorded, moving the pool costs
        recording them again."""
        if self.graphs is None:
            return KEPT_CACHE_BYTES
        return max(KEPT_CACHE_BYTES, free_memory(str(self.engine.device)) // KEPT_FREE_DIVISOR)

    def release_idle(self, keep: Sequence[SequenceGroup] = ()) -> bool:
        live = {row.group for row in self.rows} | set(keep)
        idle = [group for group in self.groups if group not in live]
        for group in idle:
            self._release(group)
            group.prompt = group.first_logits_V = None
        return bool(idle)

    def _regroup(self, rows: Sequence[LiveSequence], more: Mapping[CachedPrompt, int] | None = None) -> None:
        """Moves the prompts of `rows` to the pools for their new number of answers; `more` counts answers about to
        be added."""
        prompts = list(dict.fromkeys(prompt for prompt in map(_prompt, rows) if prompt.num_groups))
        counts = [prompt.num_rows + (more or {}).get(prompt, 0) for prompt in prompts]
        self.cache.regroup([prompt.slot for prompt in prompts], counts)

    def _prefill(self, groups: list[SequenceGroup]) -> None:
        """Computes the prompts of `groups`, which are sorted by adapter. Groups with equal prompts share one."""
        first = {group.prompt_key: group for group in reversed(groups)}
        alone = [group for group in groups if first[group.prompt_key] is group]
        answers = Counter[Any]()
        for group in groups:
            answers[group.prompt_key] += group.num_starting
        slots = self.cache.allocate_prompts([g.prompt_length for g in alone], [answers[g.prompt_key] for g in alone])
        try:
            starts = [self._reuse(slot, group) for slot, group in zip(slots, alone, strict=True)]
            ids = [g.request.prompt_ids[start:] for g, start in zip(alone, starts, strict=True)]
            logits_NV = self._fill(slots, starts, ids, alone)
        except Exception:
            self.cache.zero(slots)
            self.cache.free(slots)
            raise
        prompts = {
            g.prompt_key: (CachedPrompt(slot), logits_V)
            for g, slot, logits_V in zip(alone, slots, logits_NV, strict=True)
        }
        for group in groups:
            group.prompt, group.first_logits_V = prompts[group.prompt_key]
            group.prompt.num_groups += 1
        self.counts["reused_tokens"] += sum(g.prompt_length for g in groups) - sum(g.prompt_length for g in alone)

    def _fill(
        self,
        slots: Sequence[CacheSlot],
        starts: Sequence[int],
        ids: Sequence[np.ndarray],
        groups: Sequence[SequenceGroup],
    ) -> Tensor:
        """Writes the keys and values of the tokens `ids` of each slot, which are its last ones and start at position
        `starts`, under the adapters of `groups`; returns the logits [N, V] after them. Tokens of one long prompt are
        computed some at a time."""
        if len(slots) > 1 and sum(map(len, ids)) > self.prefill_tokens:
            each = zip(slots, starts, ids, groups, strict=True)
            return torch.cat([self._fill([slot], [start], [tokens], [group]) for slot, start, tokens, group in each])
        lengths = [slot.length for slot in slots]
        done = 0
        while len(slots) == 1 and len(ids[0]) - done > self.prefill_tokens:
            slots[0].length = starts[0] + done + self.prefill_tokens
            self._fill_once(slots, [starts[0] + done], [ids[0][done : done + self.prefill_tokens]], groups)
            done += self.prefill_tokens
        for slot, length in zip(slots, lengths, strict=True):
            slot.length = length
        return self._fill_once(slots, [start + done for start in starts], [tokens[done:] for tokens in ids], groups)

    def _fill_once(
        self,
        slots: Sequence[CacheSlot],
        starts: Sequence[int],
        ids: Sequence[np.ndarray],
        groups: Sequence[SequenceGroup],
    ) -> Tensor:
        layout = PrefillLayout(slots, np.array(starts))
        flat = np.concatenate(ids)
        route = self._route(groups, [len(tokens) for tokens in ids])
        logits_NV = self.engine.logits(self.engine.tensor(flat), layout.positions, layout, route, layout.last_N)
        self.counts["prefill_tokens"] += len(flat)
        return logits_NV

    def _reuse(self, slot: CacheSlot, group: SequenceGroup) -> int:
        """Copies the stored keys and values of the longest known prefix of the prompt to `slot`; returns the prefix
        length."""
        length = 0
        for part in self.prefix_store.longest_prefix(group.snapshot_id, group.request.prompt_ids):
            self.cache.write(slot, length, part.kv_L2hTD)
            length += part.num_tokens
        self.counts["reused_tokens"] += length
        return length

    def decode(self, rows: Sequence[LiveSequence]) -> None:
        self.grow(rows)
        answers = [_slot(row) for row in rows]
        for row, slot in zip(rows, answers, strict=True):
            slot.length = len(row.token_ids)
        route = self._route([row.group for row in rows], [1] * len(rows))
        step = DecodeStep([_prompt(row).slot for row in rows], answers, [row.token_ids[-1] for row in rows], route)
        logits_RV = self.graphs.logits(step) if self.graphs else step.logits(self.engine)
        self._over += without(rows, self._draw(rows, logits_RV))

    def _route(self, groups: Sequence[SequenceGroup], tokens: Sequence[int]) -> MultiAdapterRoute | None:
        """Returns the route for `tokens` rows of each of `groups`, which are sorted by adapter, the bare base
        last."""
        counts: OrderedDict[int, int] = OrderedDict()
        snapshots = {g.snapshot_id: g.request.adapter for g in groups if g.request.adapter}
        for group, count in zip(groups, tokens, strict=True):
            if group.snapshot_id:
                counts[group.snapshot_id] = counts.get(group.snapshot_id, 0) + count
        if not counts:
            return None
        key = tuple(counts)
        if key not in self._stacks:
            self._stacks[key] = AdapterStack([snapshots[owner] for owner in key], self.engine.linear_layers)
            while len(self._stacks) > 8:
                self._stacks.popitem(last=False)
        self._stacks.move_to_end(key)
        return MultiAdapterRoute(self._stacks[key], list(counts.values()))

    # -- ends ----------------------------------------------------------------------------------------------------------

    def remove_finished(self) -> list[SequenceGroup]:
        rows = self._over
        self._over = []
        if not rows:
            return []
        for row in rows:
            if row.group.request.keep_kv:
                self._keep(row)
        self._leave(rows)
        over = list(dict.fromkeys(row.group for row in rows if row.group.is_done))
        for group in over:
            self._release(group)
        self._regroup(rows)
        return over

    def _leave(self, rows: Sequence[LiveSequence]) -> None:
        """Removes rows from the batch and the cache. A row that ended with its first token has no slot."""
        placed = [row for row in rows if row.slot]
        self._unplace(placed)
        self.rows = without(self.rows, placed)

    def _release(self, group: SequenceGroup) -> None:
        """Removes a group without rows, and its prompt if no other group uses it."""
        self.groups.pop(group, None)
        if group.prompt is None:
            return
        group.prompt.num_groups -= 1
        if not group.prompt.num_groups:
            self.cache.free([group.prompt.slot])

    def cancel(self, group: SequenceGroup) -> None:
        # masks do not keep out NaN: the slots are zeroed
        rows = [row for row in self.rows if row.group is group]
        self.cache.zero([_slot(row) for row in rows])
        if group.prompt and group.prompt.num_groups == 1:
            self.cache.zero([group.prompt.slot])
        self._over = [row for row in self._over if row.group is not group]
        self._leave(rows)
        self._release(group)
        self._regroup(rows)

    def _keep(self, row: LiveSequence) -> None:
        """Stores the keys and values of a row, except those that are stored already: the prompt's by a sibling, or
        those of an earlier turn."""
        owner = row.group.snapshot_id
        prompt = row.group.request.prompt_ids
        # the last sampled token was never an input, so it has no keys and values
        ids = np.concatenate([prompt, np.array(row.token_ids[:-1], np.int32)])
        parts = self.prefix_store.longest_prefix(owner, ids)
        known = sum(part.num_tokens for part in parts)
        if known < len(prompt):
            parts = [*parts, StoredPart(self.cache.read(_prompt(row).slot, known))]
            self.prefix_store.put(owner, prompt, parts)
        if row.slot:
            answer_kv = self.cache.read(row.slot, max(0, known - len(prompt)))
            self.prefix_store.put(owner, ids, [*parts, StoredPart(answer_kv)])


def _prompt(row: LiveSequence) -> CachedPrompt:
    assert row.group.prompt is not None
    return row.group.prompt


def _slot(row: LiveSequence) -> CacheSlot:
    assert row.slot is not None
    return row.slot
