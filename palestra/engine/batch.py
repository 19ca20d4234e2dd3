"""The live batch of the sampler: prompts and answers in the KV cache, and the forward passes that compute them.

A row is one answer being sampled: answer `k` of a group. `start` computes prompts and samples the first token of
new rows, `decode` samples the next token of live rows, `remove_finished` removes finished rows. Rows need not be in
step: each has its own position and its own counter-based random stream (seed, sibling, position), so its tokens do not
depend on the other rows of a pass, except for floating-point rounding, which depends on the shapes of a pass.

Shapes: `R` rows, `N` prompts of a prefill, `V` vocabulary, `k` best tokens.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from palestra.engine.cached_attention import DecodeLayout, PrefillLayout
from palestra.engine.kv_cache import CacheFull, CacheMemory, CacheSlot, KVCache, PrefixStore
from palestra.engine.lora import AdapterStack, MultiAdapterRoute
from palestra.engine.models import Engine
from palestra.engine.request import CachedPrompt, LiveSequence, SequenceGroup
from palestra.engine.sampling import StopStringMatcher, counter_uniform, sample_tokens, top_tokens

KEPT_CACHE_BYTES = 2**26  # empty pools of a batch at rest may keep 64 MiB
INITIAL_ANSWER_CAPACITY = 64  # initial capacity of an answer in tokens; grows with the answer


class LiveBatch:
    """The live groups and rows of one engine, their KV cache, and the stored keys and values of earlier conversations.

    `keep_tokens` is the capacity of the prefix store in tokens, `cache_bytes` the budget of the cache and the store,
    `prefill_tokens` the maximum number of prompt tokens of a pass. `counts` counts sampled, prefilled and reused
    tokens, and preempted answers.
    """

    def __init__(self, engine: Engine, *, keep_tokens: int, cache_bytes: int | None, prefill_tokens: int) -> None:
        self.engine, self.cache_bytes, self.prefill_tokens = engine, cache_bytes, prefill_tokens
        self.memory = CacheMemory(cache_bytes)
        self.prefix_store = PrefixStore(keep_tokens, self.memory)
        self.cache = self._new_cache()
        self.end_ids = end_token_ids(engine)
        self.groups: dict[SequenceGroup, None] = {}  # in order of admission
        self.rows: list[LiveSequence] = []  # by adapter
        self.counts = {"sampled_tokens": 0, "prefill_tokens": 0, "reused_tokens": 0, "preempted_answers": 0}
        self._over: list[LiveSequence] = []  # rows that finished since the last `remove_finished`
        self._stop_strings = StopStringMatcher(engine.tokenizer)
        self._stacks: OrderedDict[tuple[int, ...], AdapterStack] = OrderedDict()

    def reset(self) -> None:
        """Drops all groups, all rows and the cache."""
        self.groups, self.rows, self._over = {}, [], []
        self.memory.release(self.cache.bytes)
        self.cache = self._new_cache()

    def _new_cache(self) -> KVCache:
        config = self.engine.model.config.get_text_config()
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        return KVCache(
            config.num_hidden_layers,
            kv_heads,
            width,
            self.engine.device,
            self.engine.dtype,
            memory=self.memory,
            store=self.prefix_store,
        )

    def clear_cache(self) -> None:
        """Drops the stored prefixes and adapter stacks of earlier snapshots."""
        self.prefix_store.clear()
        self._stacks.clear()

    # -- passes --------------------------------------------------------------------------------------------------------

    def start(self, groups: list[SequenceGroup]) -> None:
        """Computes the missing prompts of `groups` (equal prompts once), recomputes their resumed answers, and samples
        the first tokens of their admitted siblings, which become live rows."""
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
            group.first_logits_V = group.first_logits_V if group.num_started < group.request.n else None
        self.rows.sort(key=lambda row: row.group.sort_key)
        self.cache.free_empty_pools()

    def _start_new(self, groups: list[SequenceGroup]) -> None:
        rows = [self._row(group, k) for group in groups for k in range(group.num_started, group.num_admitted)]
        which = [i for i, group in enumerate(groups) for _ in range(group.num_started, group.num_admitted)]
        first_V = [group.first_logits_V for group in groups if group.first_logits_V is not None]
        live = self._draw(rows, torch.stack(first_V)[self.engine.tensor(which)])
        self._place(live)
        for group in groups:
            group.num_started = group.num_admitted
        self.rows += live
        self._over += _without(rows, live)

    def _row(self, group: SequenceGroup, k: int) -> LiveSequence:
        stop = group.request.sampling.stop
        return LiveSequence(group, k, tail=StopStringMatcher.empty_tail(stop)) if stop else LiveSequence(group, k)

    def _place(self, rows: Sequence[LiveSequence]) -> None:
        """Allocates cache slots for new or resumed rows."""
        self._regroup(rows, more=Counter(_prompt(row) for row in rows))
        slots = self.cache.allocate_answers([_first_capacity(row) for row in rows])
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
        self.rows += rows
        group.resumed = []

    def _recompute(self, rows: list[LiveSequence]) -> None:
        """Fills the slots of rows of one prompt, as if it ended with their tokens. Raises CacheFull if there is no room
        for one of these longer prompts."""
        if not rows:
            return
        group, prompt = rows[0].group, _prompt(rows[0]).slot
        try:
            whole = self.cache.allocate_prompts(
                [prompt.length + len(row.token_ids) - 1 for row in rows], [1] * len(rows)
            )
        except CacheFull:
            if len(rows) == 1:
                raise
            self._recompute(rows[: len(rows) // 2])
            self._recompute(rows[len(rows) // 2 :])
            return
        try:
            for slot in whole:
                slot.pool.kv[:, :, slot.index, :, : prompt.length] = prompt.kv_L2hTD
            ids = [np.array(row.token_ids[:-1], np.int64) for row in rows]
            self._fill(whole, [prompt.length] * len(rows), ids, [group] * len(rows))
            for row, slot in zip(rows, whole, strict=True):
                own = _slot(row)
                own.length = len(row.token_ids) - 1
                own.kv_L2hTD[:] = slot.kv_L2hTD[..., prompt.length :, :]
        finally:
            self.cache.free(whole)

    def grow(self, rows: Sequence[LiveSequence]) -> None:
        """Makes room for the last token of each of `rows` in the cache. Raises CacheFull if there is no room for all of
        them; some may have grown."""
        self.cache.grow([_slot(row) for row in rows if _slot(row).length < len(row.token_ids)])

    def fitting(self, group: SequenceGroup, count: int, free: int, *, new_prompt: bool) -> tuple[int, int]:
        """Returns how many of `count` more siblings of `group` there is room for at their start in `free` bytes, and
        the bytes that they take, with their prompt if it is new."""
        resumed = [max(len(row.token_ids), _first_capacity(row)) for row in group.preempted[:count]]
        first = min(group.request.sampling.max_tokens, INITIAL_ANSWER_CAPACITY)
        lengths = [*resumed, *[first] * (count - len(resumed))]
        own = self.cache.bytes_of(group.prompt_length) if new_prompt else 0
        if resumed:  # recomputed one at a time, in a copy
            own += self.cache.bytes_of(group.prompt_length + max(resumed))
        room_n = own + np.cumsum([self.cache.bytes_of(length) for length in lengths])
        fits = int(np.searchsorted(room_n, free, side="right"))
        return fits, int(room_n[fits - 1]) if fits else own

    def preempt(self, rows: Sequence[LiveSequence]) -> None:
        """Takes the cache slots of live rows away; their groups keep their tokens as `preempted`."""
        self._unplace(rows)
        self.rows = _without(self.rows, rows)
        for row in rows:
            row.group.preempted = sorted([*row.group.preempted, row], key=lambda row: row.sibling)
        self.counts["preempted_answers"] += len(rows)
        self._regroup(rows)

    @property
    def free_bytes(self) -> int | None:
        """Bytes of the cache for more answers; None without a budget."""
        return self.cache.free_bytes

    def lower_budget(self) -> None:
        """Sets the budget to what is in use: the machine has less memory than the budget says."""
        self.memory.limit = self.memory.used

    def rest(self) -> None:
        """Called when there are no more requests: restores the budget, and frees much unused memory, since training
        may need it."""
        self.memory.limit = self.cache_bytes
        if self.cache.bytes > KEPT_CACHE_BYTES:
            self.cache.free_empty_pools()

    def release_idle(self, keep: Sequence[SequenceGroup] = ()) -> bool:
        """Frees the prompts of groups without live rows, except those in `keep`: they will be computed again. Returns
        whether there were any."""
        live = {row.group for row in self.rows} | set(keep)
        idle = [group for group in self.groups if group not in live]
        for group in idle:
            self._release(group)
            group.prompt = group.first_logits_V = None
        return bool(idle)

    def _regroup(self, rows: Sequence[LiveSequence], more: Mapping[CachedPrompt, int] | None = None) -> None:
        """Moves the prompts of `rows` to the pools for their new number of answers; `more` counts answers about to
        be added."""
        prompts = [prompt for prompt in dict.fromkeys(_prompt(row) for row in rows) if prompt.num_groups]
        counts = [prompt.num_rows + (more or {}).get(prompt, 0) for prompt in prompts]
        self.cache.regroup([prompt.slot for prompt in prompts], counts)

    def _prefill(self, groups: list[SequenceGroup]) -> None:
        """Computes the prompts of `groups`, which are sorted by adapter. Groups with equal prompts share one."""
        first = {group.prompt_key: group for group in reversed(groups)}
        alone = [group for group in groups if first[group.prompt_key] is group]
        answers = Counter(group.prompt_key for group in groups for _ in range(group.num_starting))
        slots = self.cache.allocate_prompts([g.prompt_length for g in alone], [answers[g.prompt_key] for g in alone])
        try:
            logits_NV = self._prefill_into(slots, alone)
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

    def _prefill_into(self, slots: list[CacheSlot], groups: list[SequenceGroup]) -> Tensor:
        """Writes the keys and values of the prompts of `groups` to `slots`; returns the logits [N, V] after each
        prompt."""
        starts = [self._reuse(slot, group) for slot, group in zip(slots, groups, strict=True)]
        ids = [g.request.prompt_ids[start:] for g, start in zip(groups, starts, strict=True)]
        return self._fill(slots, starts, ids, groups)

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
            return torch.cat([self._fill([slot], [start], [own], [group]) for slot, start, own, group in each])
        whole = [slot.length for slot in slots]
        done = 0
        while len(slots) == 1 and len(ids[0]) - done > self.prefill_tokens:
            slots[0].length = starts[0] + done + self.prefill_tokens
            self._fill_once(slots, [starts[0] + done], [ids[0][done : done + self.prefill_tokens]], groups)
            done += self.prefill_tokens
        for slot, length in zip(slots, whole, strict=True):
            slot.length = length
        return self._fill_once(slots, [start + done for start in starts], [own[done:] for own in ids], groups)

    def _fill_once(
        self,
        slots: Sequence[CacheSlot],
        starts: Sequence[int],
        ids: Sequence[np.ndarray],
        groups: Sequence[SequenceGroup],
    ) -> Tensor:
        layout, flat = PrefillLayout(slots, np.array(starts)), np.concatenate(ids)
        route = self._route(groups, [len(own) for own in ids])
        logits_NV = self.engine.logits(self.engine.tensor(flat), layout.positions, layout, route, layout.last_N)
        self.counts["prefill_tokens"] += len(flat)
        return logits_NV

    def _reuse(self, slot: CacheSlot, group: SequenceGroup) -> int:
        """Copies the stored keys and values of the longest known prefix of the prompt to `slot`; returns the prefix
        length."""
        kept = self.prefix_store.longest_prefix(group.snapshot_id, group.request.prompt_ids)
        if kept is None:
            return 0
        length = kept.shape[-2]
        slot.kv_L2hTD[..., :length, :] = kept
        self.counts["reused_tokens"] += length
        return length

    def decode(self, rows: Sequence[LiveSequence]) -> None:
        """Samples the next token of each of `rows`, which must be live and in batch order."""
        self.grow(rows)
        answers = [_slot(row) for row in rows]
        for row, slot in zip(rows, answers, strict=True):
            slot.length = len(row.token_ids)
        layout = DecodeLayout([_prompt(row).slot for row in rows], answers)
        ids = self.engine.tensor([row.token_ids[-1] for row in rows])
        positions = self.engine.tensor([row.group.prompt_length + len(row.token_ids) - 1 for row in rows])
        route = self._route([row.group for row in rows], [1] * len(rows))
        logits_RV = self.engine.logits(ids, positions, layout, route, self.engine.tensor(range(len(rows))))
        self._over += _without(rows, self._draw(rows, logits_RV))

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

    # -- tokens --------------------------------------------------------------------------------------------------------

    def _draw(self, rows: Sequence[LiveSequence], logits_RV: Tensor) -> list[LiveSequence]:
        """Samples the next token of each row, or of none if this fails; returns the rows that are not finished."""
        settings = [row.group.request.sampling for row in rows]
        seeds = np.array([row.group.seed for row in rows], np.uint64)
        siblings = np.array([row.sibling for row in rows], np.uint64)
        steps = np.array([len(row.token_ids) for row in rows], np.uint64)
        tokens_R, logps_R = sample_tokens(logits_RV, settings, counter_uniform(seeds, siblings, steps))
        if np.isnan(logps_R).any():
            raise ValueError(
                "the weights give no probabilities (NaN): they grew without bound. Lower the learning rate."
            )
        top = self._top(rows, logits_RV)
        is_end = np.isin(tokens_R, self.end_ids).tolist()
        tokens = tokens_R.tolist()
        drawn = [self._stops(row, token, end) for row, token, end in zip(rows, tokens, is_end, strict=True)]
        self.counts["sampled_tokens"] += len(rows)
        live = []
        for row, token, logp, (stops, tail) in zip(rows, tokens, logps_R.tolist(), drawn, strict=True):
            row.token_ids.append(token)
            row.logprobs.append(logp)
            row.tail = tail
            if row in top:
                row.top_tokens.append(top[row])
            if stops or row.is_full:
                row.group.finished[row.sibling] = row.to_completion("stop" if stops else "length")
            else:
                live.append(row)
        return live

    def _stops(self, row: LiveSequence, token: int, end: bool) -> tuple[bool, deque[int]]:
        """Returns whether `token` ends the answer, and the row's tail including that token."""
        sampling = row.group.request.sampling
        if (end and sampling.stop_at_eos) or token in sampling.stop_token_ids:
            return True, row.tail
        if not sampling.stop:
            return False, row.tail
        tail = row.tail.copy()
        return self._stop_strings.append_and_match(sampling.stop, tail, token), tail

    def _top(
        self, rows: Sequence[LiveSequence], logits_RV: Tensor
    ) -> dict[LiveSequence, tuple[np.ndarray, np.ndarray]]:
        """Returns the most likely tokens and their log-probabilities, for the rows whose requests ask for them."""
        asking = [i for i, row in enumerate(rows) if row.group.request.top_logprobs]
        if not asking:
            return {}
        settings = [rows[i].group.request.sampling for i in asking]
        wanted = [rows[i].group.request.top_logprobs for i in asking]
        found = zip(asking, wanted, *top_tokens(logits_RV[asking], settings, max(wanted)), strict=True)
        return {rows[i]: (ids[:k].astype(np.int32), logps[:k].copy()) for i, k, ids, logps in found}

    # -- ends ----------------------------------------------------------------------------------------------------------

    def remove_finished(self) -> list[SequenceGroup]:
        """Removes finished rows. Returns the groups of which all rows are finished; these are removed too."""
        rows, self._over = self._over, []
        if not rows:
            return []
        for row in rows:
            if row.group.request.keep_kv:
                self._keep(row)
        self._leave(rows)
        over = [group for group in dict.fromkeys(row.group for row in rows) if group.is_done]
        for group in over:
            self._release(group)
        self._regroup(rows)
        return over

    def _leave(self, rows: Sequence[LiveSequence]) -> None:
        """Removes rows from the batch and the cache. A row that ended with its first token has no slot."""
        placed = [row for row in rows if row.slot]
        self._unplace(placed)
        self.rows = _without(self.rows, placed)

    def _release(self, group: SequenceGroup) -> None:
        """Removes a group without rows, and its prompt if no other group uses it."""
        self.groups.pop(group, None)
        if group.prompt is None:
            return
        group.prompt.num_groups -= 1
        if not group.prompt.num_groups:
            self.cache.free([group.prompt.slot])

    def cancel(self, group: SequenceGroup) -> None:
        """Cancels a group and zeroes its cache slots: masks do not keep out NaN."""
        rows = [row for row in self.rows if row.group is group]
        self.cache.zero([_slot(row) for row in rows])
        if group.prompt and group.prompt.num_groups == 1:
            self.cache.zero([group.prompt.slot])
        self._over = [row for row in self._over if row.group is not group]
        self._leave(rows)
        self._release(group)
        self._regroup(rows)

    def _keep(self, row: LiveSequence) -> None:
        # the last sampled token was never an input, so it has no keys and values
        ids = np.concatenate([row.group.request.prompt_ids, np.array(row.token_ids[:-1], np.int32)])
        parts = [slot.kv_L2hTD for slot in (_prompt(row).slot, row.slot) if slot]
        self.prefix_store.put(row.group.snapshot_id, ids, torch.cat(parts, -2))


def _without(rows: Sequence[LiveSequence], others: Sequence[LiveSequence]) -> list[LiveSequence]:
    out = set(others)
    return [row for row in rows if row not in out]


def _first_capacity(row: LiveSequence) -> int:
    """Returns the tokens for which a row gets room when it starts or goes on."""
    return max(len(row.token_ids), min(row.group.request.sampling.max_tokens, INITIAL_ANSWER_CAPACITY))


def _prompt(row: LiveSequence) -> CachedPrompt:
    assert row.group.prompt is not None
    return row.group.prompt


def _slot(row: LiveSequence) -> CacheSlot:
    assert row.slot is not None
    return row.slot


def end_token_ids(engine: Engine) -> np.ndarray:
    """Returns the tokens that end an answer, int64, sorted: those of the tokenizer and of the generation config."""
    ends = {engine.tokenizer.eos_token_id}
    config = engine.model.generation_config.eos_token_id if engine.model.generation_config else None
    ends |= set(config if isinstance(config, list) else [config])
    return np.array(sorted(e for e in ends if e is not None), np.int64)
