"""Continuous batching: many groups, many adapters, one forward pass per token.

A request is one prompt and the number of answers wanted. Waiting requests are admitted whenever there is room, between
two decoding steps; a group leaves as soon as its last sibling ends. Each row draws from its own counter-based stream
(seed, sibling, position), so what is sampled does not depend on who shares the batch.

Shapes: `G` live groups, `K` siblings, `R` live rows, `T` answer positions, `V` vocabulary, `k` best tokens.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from palestra.engine.cache import Cache, DecodeLayout, PrefillLayout, PrefixStore
from palestra.engine.draw import Sampling as Sampling
from palestra.engine.draw import StopStrings, best, choose, uniform
from palestra.engine.lora import Stack, Stacked
from palestra.engine.models import Engine
from palestra.engine.requests import Group, Outcome, by_owner, check_prompt, check_top
from palestra.engine.requests import Request as Request
from palestra.engine.requests import Sampled as Sampled

ANSWER = 256  # room in the cache for so many tokens of an answer at first: few of those that may be longer are


class Sampler:
    """Serves requests on one engine: `await sample(request)` from any number of coroutines, `sample_all` at once, or
    `submit` and `advance` from a loop of one's own."""

    def __init__(self, engine: Engine, *, max_rows: int = 512, prefill_tokens: int = 8192, keep_tokens: int = 65536):
        config = engine.model.config.get_text_config()
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.engine, self.max_rows, self.prefill_tokens = engine, max_rows, prefill_tokens
        self.cache = Cache(config.num_hidden_layers, kv_heads, width, engine.device, engine.dtype)
        self.store = PrefixStore(keep_tokens)
        self.end_ids = end_token_ids(engine)
        self.groups: list[Group] = []  # the group in slot i is groups[i]
        self.waiting: deque[Group] = deque()
        self._ended: list[tuple[Group, Outcome]] = []
        self._stop_strings = StopStrings(engine.tokenizer)
        self._stacks: OrderedDict[tuple[int, ...], Stack] = OrderedDict()
        self._pump: asyncio.Task[None] | None = None
        self.counts = {"sampled_tokens": 0, "prefill_tokens": 0, "reused_tokens": 0}

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.groups)

    async def sample(self, request: Request) -> list[Sampled]:
        """The answers to `request`, in sibling order. Raises ValueError when the prompt and answer cannot fit."""
        future: asyncio.Future[list[Sampled]] = asyncio.get_running_loop().create_future()
        group = self.submit(request, partial(_resolve, future))
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._run())
        try:
            return await future
        except asyncio.CancelledError:
            self.cancel(group)
            raise

    def sample_all(self, requests: list[Request]) -> list[list[Sampled]]:
        """The answers to all `requests`, sampled together. Raises what made a request fail, once all have ended."""
        outcomes: list[Outcome] = [[] for _ in requests]
        self.waiting.extend([self._group(r, partial(outcomes.__setitem__, i)) for i, r in enumerate(requests)])
        while self.advance():
            pass
        answers = []
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
            answers.append(outcome)
        return answers

    def submit(self, request: Request, done: Callable[[Outcome], None]) -> Group:
        """Lets `request` wait for `advance`, which calls `done` with its answers, or with what made it fail (`done`
        must not raise). What it returns is for `cancel`. Raises ValueError when the prompt and answer cannot fit."""
        group = self._group(request, done)
        self.waiting.append(group)
        return group

    @torch.inference_mode()
    def cancel(self, group: Group) -> None:
        """Takes back what was submitted: its `done` is not called. One that has ended is left alone."""
        if group in self.groups:
            self._close(self.groups.index(group))
        elif group in self.waiting:
            self.waiting.remove(group)

    def advance(self) -> bool:
        """Admits what fits, samples one token for each live row, and calls `done` of what has ended. False when there
        was nothing to do."""
        if not self.busy:
            return False
        try:
            self._step()
        except Exception as error:  # whose fault it is cannot be told, and nobody must wait for ever
            self._ended += [(group, error) for group in [*self.groups, *self.waiting]]
            self.groups.clear()
            self.waiting.clear()
        ended, self._ended = self._ended, []
        for group, outcome in ended:
            group.done(outcome)
        return True

    def forget(self) -> None:
        """Drops what was kept for later turns and for snapshots of earlier steps."""
        self.store.clear()
        self._stacks.clear()

    def _group(self, request: Request, done: Callable[[Outcome], None]) -> Group:
        if request.n < 1:
            raise ValueError("a request needs n of at least 1")
        check_prompt(self.engine, request.prompt_ids, request.sampling.max_tokens)
        check_top(self.engine, request.top_logprobs)
        return Group(request, done)

    async def _run(self) -> None:
        while self.busy:
            await self._settle()
            self.advance()

    async def _settle(self) -> None:
        """Lets every coroutine that can move do so, that its request joins the coming batch."""
        quiet, seen = 0, len(self.waiting)
        while quiet < 6:
            await asyncio.sleep(0)
            quiet, seen = (quiet + 1, seen) if len(self.waiting) == seen else (0, len(self.waiting))

    @torch.inference_mode()
    def _step(self) -> None:
        while self.waiting and (batch := self._admissible()):
            self._apart(self._prefill, batch)
            self._retire()
        if self.groups:
            self._apart(self._decode, list(self.groups))
            self._retire()

    def _apart(self, compute: Callable[[list[Group]], None], groups: list[Group]) -> None:
        """`compute` for all `groups` together; where that fails, for each alone, so that only those fail whose own
        computation does."""
        try:
            compute(groups)
        except Exception as error:
            self.cache.wipe(slice(len(self.groups), None))  # half a prefill
            if len(groups) == 1:
                self._drop(groups[0], error)
                return
            for group in groups:
                self._apart(compute, [group])

    def _drop(self, group: Group, error: Exception) -> None:
        """Ends a group with what made it fail, and leaves nothing of it in the cache: masks do not keep out NaN."""
        if group in self.groups:
            slot = self.groups.index(group)
            self.cache.wipe(slice(slot, slot + 1))
            self._close(slot)
        self._ended.append((group, error))

    def _admissible(self) -> list[Group]:
        """The next waiting groups that fit beside the live rows, at most `prefill_tokens` of prompt at once; of equal
        prompts one counts."""
        rows, tokens = sum(g.request.n for g in self.groups), 0
        batch: list[Group] = []
        asked: set[tuple[int, bytes]] = set()
        while self.waiting:
            group = self.waiting[0]
            new = 0 if group.asked in asked else group.prompt
            crowded = rows + group.request.n > self.max_rows or tokens + new > self.prefill_tokens
            if crowded and (batch or self.groups):
                break
            rows, tokens = rows + group.request.n, tokens + new
            asked.add(group.asked)
            batch.append(self.waiting.popleft())
        return batch

    def _prefill(self, batch: list[Group]) -> None:
        """Computes the prompts and first tokens of `batch`, whose groups are live from then on; equal prompts once."""
        batch = sorted(batch, key=by_owner)
        first = len(self.groups)
        if not first:  # sizes then depend only on what is live, and a resumed run computes in the same shapes
            self.cache.shrink(max(g.request.n for g in batch))
        self.cache.reserve(
            first + len(batch),
            max(g.request.n for g in batch),
            max(g.prompt for g in batch),
            max(min(g.request.sampling.max_tokens, ANSWER) for g in batch),
        )
        alike = _first_alike(batch)
        slots, of_batch = np.unique([alike[g.asked] for g in batch], return_inverse=True)
        alone = [batch[i] for i in slots]  # `of_batch` is where in here each group of the batch has its like
        starts = [self._reuse(first + i, batch[i]) for i in slots]
        lengths = np.array([g.prompt for g in alone])
        layout = PrefillLayout(self.cache, first + slots, np.array(starts), lengths)
        ids = np.concatenate([g.request.prompt_ids[s:] for g, s in zip(alone, starts, strict=True)])
        route = self._route([g.owner for g in alone], [g.prompt - s for g, s in zip(alone, starts, strict=True)], alone)
        logits_NV = self.engine.logits(self.engine.tensor(ids), layout.positions, layout, route, layout.last_N)
        self.cache.repeat(first + slots[of_batch], first + np.arange(len(batch)), int(lengths.max()))
        self.counts["prefill_tokens"] += len(ids)
        self.counts["reused_tokens"] += sum(g.prompt for g in batch) - int(lengths.sum())
        rows = [(i, k) for i, g in enumerate(batch) for k in range(g.request.n)]
        self._draw([(batch[i], k) for i, k in rows], logits_NV[self.engine.tensor([of_batch[i] for i, _ in rows])])
        self.groups += batch

    def _reuse(self, slot: int, group: Group) -> int:
        """Writes the kept keys and values of the prompt's longest known prefix to `slot`; returns its length."""
        kept = self.store.longest(group.owner, group.request.prompt_ids)
        if kept is None:
            return 0
        length = kept.shape[-2]
        self.cache.prefix[:, :, slot, :, :length] = kept
        self.counts["reused_tokens"] += length
        return length

    def _decode(self, groups: list[Group]) -> None:
        """Samples the next token of each live row of `groups`."""
        chosen = set(groups)
        slots = sorted((s for s, g in enumerate(self.groups) if g in chosen), key=self._owner_of)
        rows = [(s, k) for s in slots for k in self._alive(s)]
        slot_R, sibling_R = np.array(rows).T
        prompt_G = np.array([g.prompt for g in self.groups])
        answer_G = np.array([g.t for g in self.groups])
        self.cache.reserve(len(self.groups), 0, 0, int(answer_G.max()))
        layout = DecodeLayout(self.cache, slot_R, sibling_R, prompt_G, answer_G)
        ids = [self.groups[s].tokens_KT[k, self.groups[s].t - 1] for s, k in rows]
        positions = self.engine.tensor(prompt_G[slot_R] + answer_G[slot_R] - 1)
        owners = [self.groups[s] for s, _ in rows]
        route = self._route([g.owner for g in owners], [1] * len(rows), owners)
        logits_RV = self.engine.logits(
            self.engine.tensor(ids), positions, layout, route, self.engine.tensor(range(len(rows)))
        )
        self._draw([(self.groups[s], k) for s, k in rows], logits_RV)

    def _owner_of(self, slot: int) -> tuple[bool, str, int]:
        return by_owner(self.groups[slot])

    def _alive(self, slot: int) -> list[int]:
        return np.flatnonzero(self.groups[slot].alive_K).tolist()

    def _route(self, owners: list[int], tokens: list[int], groups: list[Group]) -> Stacked | None:
        """The route for rows sorted by owner, the bare base last."""
        counts: OrderedDict[int, int] = OrderedDict()
        snapshots = {g.owner: g.request.adapter for g in groups if g.request.adapter}
        for owner, count in zip(owners, tokens, strict=True):
            if owner:
                counts[owner] = counts.get(owner, 0) + count
        if not counts:
            return None
        key = tuple(counts)
        if key not in self._stacks:
            self._stacks[key] = Stack([snapshots[owner] for owner in key], self.engine.linears)
            while len(self._stacks) > 8:
                self._stacks.popitem(last=False)
        self._stacks.move_to_end(key)
        return Stacked(self._stacks[key], list(counts.values()))

    def _draw(self, rows: list[tuple[Group, int]], logits_RV: Tensor) -> None:
        """Samples the next token of each row, a sibling of a group, and notes which rows end with it."""
        settings = [g.request.sampling for g, _ in rows]
        seeds = np.array([g.seed for g, _ in rows], np.uint64)
        siblings = np.array([k for _, k in rows], np.uint64)
        steps = np.array([g.t for g, _ in rows], np.uint64)
        tokens, logps = choose(logits_RV, settings, uniform(seeds, siblings, steps))
        if np.isnan(logps).any():
            raise ValueError(
                "the weights give no probabilities (NaN): they grew without bound. Lower the learning rate."
            )
        self._note_top(rows, logits_RV)
        ends = np.isin(tokens, self.end_ids)
        for (group, k), token, logp, end in zip(rows, tokens.tolist(), logps, ends.tolist(), strict=True):
            group.note(k, token, logp, ends=self._ends(group, k, token, end))
        self.counts["sampled_tokens"] += len(rows)
        for group in {group: None for group, _ in rows}:
            group.t += 1

    def _ends(self, group: Group, k: int, token: int, end: bool) -> bool:
        sampling = group.request.sampling
        if (end and sampling.end) or token in sampling.stop_ids:
            return True
        return bool(sampling.stop) and self._stop_strings.found(sampling.stop, group.tails_K[k], token)

    def _note_top(self, rows: list[tuple[Group, int]], logits_RV: Tensor) -> None:
        """Notes the likeliest tokens of the rows whose requests ask for them."""
        asking = [i for i, (group, _) in enumerate(rows) if group.request.top_logprobs]
        if not asking:
            return
        settings = [rows[i][0].request.sampling for i in asking]
        most = max(rows[i][0].request.top_logprobs for i in asking)
        for i, ids, logps in zip(asking, *best(logits_RV[asking], settings, most), strict=True):
            group, k = rows[i]
            wanted = group.request.top_logprobs
            group.top_ids_KTk[k, group.t], group.top_logps_KTk[k, group.t] = ids[:wanted], logps[:wanted]

    def _retire(self) -> None:
        """Takes out finished groups."""
        for slot in range(len(self.groups) - 1, -1, -1):
            group = self.groups[slot]
            if group.alive_K.any():
                continue
            if group.request.keep:
                self._keep(slot, group)
            self._close(slot)
            self._ended.append((group, group.result()))

    def _close(self, slot: int) -> None:
        """Frees a slot; the last group moves into the gap."""
        group, last = self.groups[slot], self.groups.pop()
        if last is not group:
            self.groups[slot] = last
            self.cache.move(len(self.groups), slot, last.prompt, last.t)

    def _keep(self, slot: int, group: Group) -> None:
        for k, length in enumerate(group.length_K):
            # the last token sampled was never fed, so it has no keys and values
            ids = np.concatenate([group.request.prompt_ids, group.tokens_KT[k, : length - 1]])
            self.store.put(group.owner, ids, self.cache.row(slot, k, group.prompt, int(length) - 1))


def _first_alike(batch: list[Group]) -> dict[tuple[int, bytes], int]:
    """Where in the batch each prompt, under its adapter, is first."""
    return {group.asked: i for i, group in reversed(list(enumerate(batch)))}


def _resolve(future: asyncio.Future[list[Sampled]], outcome: Outcome) -> None:
    if future.done():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


def end_token_ids(engine: Engine) -> np.ndarray:
    """The tokens that end an answer: the tokenizer's and the generation config's."""
    ends = {engine.tokenizer.eos_token_id}
    config = engine.model.generation_config.eos_token_id if engine.model.generation_config else None
    ends |= set(config if isinstance(config, list) else [config])
    return np.array(sorted(e for e in ends if e is not None), np.int64)
