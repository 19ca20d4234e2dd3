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
from palestra.engine.kv_cache import CacheSlot, KVCache, PrefixStore
from palestra.engine.lora import AdapterStack, MultiAdapterRoute
from palestra.engine.models import Engine
from palestra.engine.request import CachedPrompt, LiveSequence, SequenceGroup
from palestra.engine.sampling import StopStringMatcher, counter_uniform, sample_tokens, top_tokens

INITIAL_ANSWER_CAPACITY = 64  # initial capacity of an answer in tokens; grows with the answer


class LiveBatch:
    """The live groups and rows of one engine, their KV cache, and the stored keys and values of earlier conversations.

    `keep_tokens` is the capacity of the prefix store in tokens. `counts` counts sampled, prefilled and reused tokens.
    """

    def __init__(self, engine: Engine, keep_tokens: int) -> None:
        self.engine = engine
        self.cache = _cache(engine)
        self.prefix_store = PrefixStore(keep_tokens)
        self.end_ids = end_token_ids(engine)
        self.groups: dict[SequenceGroup, None] = {}  # in order of admission
        self.rows: list[LiveSequence] = []  # by adapter
        self.counts = {"sampled_tokens": 0, "prefill_tokens": 0, "reused_tokens": 0}
        self._over: list[LiveSequence] = []  # rows that finished since the last `remove_finished`
        self._stop_strings = StopStringMatcher(engine.tokenizer)
        self._stacks: OrderedDict[tuple[int, ...], AdapterStack] = OrderedDict()

    def reset(self) -> None:
        """Drops all groups, all rows and the cache."""
        self.groups, self.rows, self._over = {}, [], []
        self.cache = _cache(self.engine)

    def clear_cache(self) -> None:
        """Drops the stored prefixes and adapter stacks of earlier snapshots."""
        self.prefix_store.clear()
        self._stacks.clear()

    # -- passes --------------------------------------------------------------------------------------------------------

    def start(self, groups: list[SequenceGroup]) -> None:
        """Computes the missing prompts of `groups` (equal prompts once) and samples the first tokens of their
        admitted siblings, which become live rows."""
        groups = sorted(groups, key=lambda group: group.sort_key)
        self.groups |= dict.fromkeys(groups)
        if new := [group for group in groups if group.prompt is None]:
            self._prefill(new)
        rows = [self._row(group, k) for group in groups for k in range(group.num_started, group.num_admitted)]
        which = [i for i, group in enumerate(groups) for _ in range(group.num_started, group.num_admitted)]
        first_V = [group.first_logits_V for group in groups if group.first_logits_V is not None]
        live = self._draw(rows, torch.stack(first_V)[self.engine.tensor(which)])
        self._place(live)
        for group in groups:
            group.num_started = group.num_admitted
            group.first_logits_V = group.first_logits_V if group.num_unadmitted else None
        self.rows = sorted([*self.rows, *live], key=lambda row: row.group.sort_key)
        self._over += _without(rows, live)
        self.cache.free_empty_pools()

    def _row(self, group: SequenceGroup, k: int) -> LiveSequence:
        stop = group.request.sampling.stop
        return LiveSequence(group, k, tail=StopStringMatcher.empty_tail(stop)) if stop else LiveSequence(group, k)

    def _place(self, rows: Sequence[LiveSequence]) -> None:
        """Allocates cache slots for new rows."""
        self._regroup(rows, more=Counter(_prompt(row) for row in rows))
        slots = self.cache.allocate_answers(
            [min(row.group.request.sampling.max_tokens, INITIAL_ANSWER_CAPACITY) for row in rows]
        )
        for row, slot in zip(rows, slots, strict=True):
            row.slot = slot
            _prompt(row).num_rows += 1

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
        answers = Counter(group.prompt_key for group in groups for _ in range(group.num_admitted))
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
        layout = PrefillLayout(slots, np.array(starts))
        ids = np.concatenate([g.request.prompt_ids[start:] for g, start in zip(groups, starts, strict=True)])
        route = self._route(groups, [g.prompt_length - start for g, start in zip(groups, starts, strict=True)])
        logits_NV = self.engine.logits(self.engine.tensor(ids), layout.positions, layout, route, layout.last_N)
        self.counts["prefill_tokens"] += len(ids)
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
        answers = [_slot(row) for row in rows]
        self.cache.grow([slot for row, slot in zip(rows, answers, strict=True) if slot.length < len(row.token_ids)])
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
        self.cache.free([_slot(row) for row in placed])
        for row in placed:
            _prompt(row).num_rows -= 1
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


def _cache(engine: Engine) -> KVCache:
    config = engine.model.config.get_text_config()
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return KVCache(config.num_hidden_layers, kv_heads, width, engine.device, engine.dtype)


def _without(rows: Sequence[LiveSequence], others: Sequence[LiveSequence]) -> list[LiveSequence]:
    out = set(others)
    return [row for row in rows if row not in out]


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
