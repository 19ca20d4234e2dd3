"""Continuous batching: many requests, many adapters, one forward pass per token.

A request is one prompt and the number of answers to sample. Its answers are rows of the batch (live_batch.py), admitted
between two decoding passes when there is room, all at once or some at a time; a row leaves as soon as it ends. Which
rows are admitted and which are in the next pass is decided in scheduler.py. The sampled tokens do not depend on these
decisions, up to floating-point rounding.

The KV cache has a budget. A sibling is admitted if there is room for its first tokens. If the live answers outgrow the
budget, or memory runs out, those with the fewest tokens are preempted: their memory is freed, they wait at the head of
the queue until others have ended, and continue after their keys and values are computed again. Nothing is dropped,
unless a single answer is too long for the whole budget.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import torch

from palestra.core.accel.malloc import free_memory
from palestra.core.event_loop import settle, until_quiet
from palestra.core.failures import is_out_of_memory
from palestra.core.held_calls import held_calls
from palestra.engine.bases.model import Engine
from palestra.engine.cache.kv_cache import MAX_PREFILL_TOKENS, default_cache_bytes, default_prefill_tokens, token_bytes
from palestra.engine.cache.kv_pages import CacheFull
from palestra.engine.forward.linear import pack_weights
from palestra.engine.lora.adapters import Snapshot
from palestra.engine.sampling.cached_batch import CachedBatch
from palestra.engine.sampling.live_batch import LiveBatch
from palestra.engine.sampling.plain_batch import PlainBatch
from palestra.engine.sampling.request import (
    Completion,
    LiveSequence,
    Request,
    SamplingOutcome,
    SequenceGroup,
    check_choices,
    check_prompt,
    check_top_logprobs,
)
from palestra.engine.sampling.scheduler import Scheduler

PREEMPTED_DIVISOR = 8  # a preemption takes 1/8 of all rows
LIGHT_PASSES = 4  # extra passes of light clients per common pass
RELEASE_EVERY_S = 4.0  # seconds of sampling with a large model after which freed memory goes back to the system


class Sampler:
    """Serves sampling requests on one engine.

    Use `await sample(request)` from any number of coroutines, `sample_all` for a list, or `submit` and `step` from
    another loop. `max_num_seqs` is the maximum number of rows of one client; all clients together have an eighth more
    at most. `cache_bytes` is the budget of the KV cache (None: half of the memory that is free now), `prefill_tokens`
    the maximum number of prompt tokens of one pass (None: a quarter of those that the budget has room for, from 256 to
    8,192), `keep_tokens` the capacity of the prefix store.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_num_seqs: int = 512,
        prefill_tokens: int | None = None,
        keep_tokens: int = 65536,
        cache_bytes: int | None = None,
    ) -> None:
        self.engine = engine
        pack_weights(engine.linear_layers.values())
        if cache_bytes is None:
            cache_bytes = default_cache_bytes(free_memory(str(engine.device)))
        if prefill_tokens is None:
            prefill_tokens = _default_prefill_tokens(engine, cache_bytes)
        self.batch: LiveBatch = PlainBatch(engine)
        if not engine.plain_path:
            self.batch = CachedBatch(
                engine, keep_tokens=keep_tokens, cache_bytes=cache_bytes, prefill_tokens=prefill_tokens
            )
        self.scheduler = Scheduler(self.batch, max_num_seqs=max_num_seqs, prefill_tokens=prefill_tokens)
        self.waiting = self.scheduler.waiting
        self._hurried = False
        self._ended: list[tuple[SequenceGroup, SamplingOutcome]] = []
        self._release_at = 0.0  # `time.monotonic()`
        self._pump: asyncio.Task[None] | None = None

    @property
    def has_requests(self) -> bool:
        """True if a request is waiting or being served."""
        return bool(self.waiting or self.batch.groups)

    async def sample(self, request: Request) -> list[Completion]:
        """Returns the answers to `request`, in sibling order. Raises ValueError if the request is invalid or prompt and
        answer exceed the base's length."""
        future: asyncio.Future[list[Completion]] = asyncio.get_running_loop().create_future()
        group = self.submit(request, partial(settle, future))
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._run())
        try:
            return await future
        except asyncio.CancelledError:
            self.cancel(group)
            raise

    def sample_all(self, requests: list[Request]) -> list[list[Completion]]:
        """Returns the answers to all `requests`, sampled together. Raises the first error after all requests have
        ended."""
        outcomes: list[SamplingOutcome] = [[] for _ in requests]
        groups = [self._group(r, partial(outcomes.__setitem__, i)) for i, r in enumerate(requests)]
        for group in groups:
            self.waiting.push(group.request.client, group)
        while self.step():
            pass
        answers = []
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
            answers.append(outcome)
        return answers

    def submit(self, request: Request, on_done: Callable[[SamplingOutcome], None]) -> SequenceGroup:
        """Queues `request` for `step`, which calls `on_done` with its answers or its error (`on_done` must not raise).
        Returns a handle for `cancel`. Raises ValueError if the request is invalid or prompt and answer exceed the
        base's length."""
        group = self._group(request, on_done)
        self.waiting.push(request.client, group)
        return group

    @torch.inference_mode()
    def cancel(self, group: SequenceGroup) -> None:
        """Cancels a submitted request; its `on_done` is not called. Does nothing if it has ended."""
        if group in self.batch.groups:
            self.batch.cancel(group)
        if group in self.waiting:
            self.waiting.remove(group)

    @torch.inference_mode()
    def replace_adapter(self, old: Snapshot, new: Snapshot, *, recompute: bool) -> int:
        """Replaces the snapshot `old` by `new` in every running and waiting request, from its next token on; returns
        the number of these requests. Tokens that are sampled stay.

        With `recompute` the keys and values of running answers are computed again under `new`, so that a later token
        has exactly the probability that `new` gives it (Fu et al., 2025, sec. 4.1). Without it they stay as they are
        (Piché et al., 2025): later tokens then attend to keys and values of `old`, which are not stored for a later
        turn. If some siblings have not started, all are computed again in both cases, since they share a prompt.
        """
        groups = [g for g in dict.fromkeys([*self.batch.groups, *self.waiting]) if g.request.adapter is old]
        again = {group for group in groups if recompute or group.num_started < group.request.n}
        if rows := [row for row in self.batch.rows if row.group in again]:
            self.batch.preempt(rows)
        if again:
            self.batch.release_idle()
        for group in groups:
            group.replace_adapter(new, keep_kv=group in again)
            for row in (*group.preempted, *(row for row in self.batch.rows if row.group is group)):
                row.note_adapter()
            if group in again and group not in self.waiting:
                self.waiting.push_front(group.request.client, group)
        self.batch.rows.sort(key=lambda row: row.group.sort_key)
        return len(groups)

    def step(self) -> bool:
        """Admits requests, samples one token for each live row (for a part of them while a light client is active), and
        calls `on_done` of the requests that ended. Returns False if there was nothing to do."""
        if not self.has_requests:
            return False
        try:
            self._step()
        except Exception as error:
            self._fail_all(error)
        except BaseException as stop:
            self._fail_all(RuntimeError(f"sampling was ended by {type(stop).__name__}"))
            self._deliver()
            raise
        self._deliver()
        return True

    def _fail_all(self, error: Exception) -> None:
        """Fails all requests with `error`, whose cause is unknown, so that none waits forever."""
        self._ended += [(group, error) for group in dict.fromkeys([*self.batch.groups, *self.waiting])]
        self.batch.reset()
        self.waiting.clear()

    def _deliver(self) -> None:
        """Calls `on_done` of the requests that ended."""
        ended = self._ended
        self._ended = []
        self._rest()
        for group, outcome in ended:
            group.on_done(outcome)

    def _rest(self) -> None:
        if not self.has_requests:
            self.batch.rest()
        elif time.monotonic() < self._release_at:
            return
        self.engine.release_freed_memory()
        self._release_at = time.monotonic() + RELEASE_EVERY_S

    def clear_cache(self) -> None:
        """Drops the stored prefixes and adapter stacks of earlier snapshots."""
        self.batch.clear_cache()

    def release_memory(self) -> None:
        """Frees the memory of empty cache pools, when no requests are expected soon."""
        self.batch.release_memory()

    def _group(self, request: Request, done: Callable[[SamplingOutcome], None]) -> SequenceGroup:
        if request.n < 1:
            raise ValueError("a request needs n of at least 1")
        check_prompt(self.engine, request.prompt_ids, request.sampling.max_tokens)
        check_top_logprobs(self.engine, request.top_logprobs)
        check_choices(self.engine, request.choices, request.sampling.max_tokens)
        return SequenceGroup(request, done)

    async def _run(self) -> None:
        while self.has_requests:
            # All ready coroutines run first, so that their requests join the next batch
            await until_quiet(lambda: len(self.waiting))
            while held_calls().are_held:
                await held_calls().wait()
                await until_quiet(lambda: len(self.waiting))
            self.step()

    # -- passes -----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _step(self) -> None:
        batch, more = self.scheduler.admit()
        if batch:
            self._start(batch)
            self._retire()
        if more and len({group.request.client for group in (*self.batch.groups, *self.waiting)}) == 1:
            return  # start the client's batch as a whole, but let requests that arrive between two passes join
        if self._decode_light() and not self._hurried:
            self._hurried = True  # deliver their answers before the long pass, but not twice in a row
            return
        self._hurried = False
        partial = self.scheduler.is_shortened and self._costs_by_the_row
        self._decode(self.scheduler.partial_rows() if partial else self.batch.rows)

    @property
    def _costs_by_the_row(self) -> bool:
        """True if a pass of fewer rows takes less time. If False, a pass mostly waits for reading the weights."""
        return self.engine.device.type == "cpu"

    def _decode_light(self) -> bool:
        """Runs the extra passes of light clients; returns whether one of their requests ended."""
        before = len(self._ended)
        for _ in range(LIGHT_PASSES):
            self._decode(self.scheduler.light_rows())
        return len(self._ended) > before

    def _decode(self, rows: Sequence[LiveSequence]) -> None:
        """Runs a pass of `rows`, charges its cost to their clients, and retires finished rows."""

        def compute(groups: list[SequenceGroup]) -> None:
            chosen = set(groups)
            if not (now := [row for row in self._live(rows) if row.group in chosen]):
                return  # preempted
            self.batch.decode(now)
            for client, count in Counter(row.group.request.client for row in now).items():
                self.waiting.work_counters.add_work(client, count)

        while self._make_room(rows):
            try:
                self._run_isolated(compute, list(dict.fromkeys(row.group for row in self._live(rows))))
                self._retire()
                return
            except OutOfMemory as error:
                self._retire()
                self._preempt_some(error.reason)

    def _live(self, rows: Sequence[LiveSequence]) -> list[LiveSequence]:
        """Returns those of `rows` that are still live."""
        live = set(self.batch.rows)
        return [row for row in rows if row in live]

    def _retire(self) -> None:
        """Records the answers of finished groups."""
        before = len(self.batch.rows)
        self._ended += [(group, group.completions()) for group in self.batch.remove_finished()]
        if len(self.batch.rows) < before:
            self.scheduler.holds_back = False

    # -- memory --------------------------------------------------------------------------------------------------------

    def _start(self, groups: list[SequenceGroup]) -> None:
        """Starts the admitted siblings of `groups`. What the memory has no room for goes back to the queue."""
        try:
            self._run_isolated(self.batch.start, groups)
        except OutOfMemory as error:
            if self.batch.release_idle(keep=groups):
                self._start(groups)
            elif len(groups) > 1:
                self.scheduler.put_back(groups[len(groups) // 2 :])
                self._start(groups[: len(groups) // 2])
            elif self.batch.rows:
                self.scheduler.put_back(groups)
            elif groups[0].num_starting > 1:
                self.scheduler.put_back(groups, groups[0].num_starting // 2)
                self._start(groups)
            else:
                self._drop(groups[0], error.reason)

    def _make_room(self, rows: Sequence[LiveSequence]) -> bool:
        """Makes room in the cache for one more token of each of `rows`, by preempting others or some of them; returns
        whether any of `rows` is left."""
        while live := self._live(rows):
            try:
                self.batch.grow(live)
                return True
            except Exception as error:
                if not does_not_fit(error):
                    return True  # the pass will fail for the groups that cause it
                self._preempt_some(error)
        return False

    def _preempt_some(self, error: Exception) -> None:
        """Preempts an eighth of the live rows, those with the fewest tokens; drops the last one's request."""
        if self.batch.release_idle():
            return
        rows = sorted(self.batch.rows, key=lambda row: -len(row.token_ids))
        if len(rows) == 1:
            self._drop(rows[0].group, error)
            return
        preempted = rows[len(rows) - -(-len(rows) // PREEMPTED_DIVISOR) :]
        self.batch.preempt(preempted)
        if not isinstance(error, CacheFull):
            self.batch.lower_budget()
        self.scheduler.requeue(list(dict.fromkeys(row.group for row in preempted)))

    # -- failures ------------------------------------------------------------------------------------------------------

    def _run_isolated(self, compute: Callable[[list[SequenceGroup]], None], groups: list[SequenceGroup]) -> None:
        """Runs `compute` for all `groups` together. If it fails, runs it for each group alone, so that only the groups
        that cause the error fail. Raises OutOfMemory if there is not enough memory, which no group is to blame for."""
        try:
            compute(groups)
        except Exception as error:
            if does_not_fit(error):
                raise OutOfMemory(error) from error
            if len(groups) == 1:
                self._drop(groups[0], error)
                return
            for group in groups:
                self._run_isolated(compute, [group])

    def _drop(self, group: SequenceGroup, error: Exception) -> None:
        """Ends a group with an error."""
        self.batch.cancel(group)
        if group in self.waiting:
            self.waiting.remove(group)
        self._ended.append((group, error))


class OutOfMemory(Exception):
    """Raised if a pass did not fit into memory, for the reason `reason`."""

    def __init__(self, reason: Exception) -> None:
        super().__init__(str(reason))
        self.reason = reason


def does_not_fit(error: Exception) -> bool:
    """Returns whether `error` means that the cache's budget, or memory, ran out."""
    return isinstance(error, CacheFull) or is_out_of_memory(error)


def _default_prefill_tokens(engine: Engine, cache_bytes: int) -> int:
    """Returns how many prompt tokens a pass of `engine` has at most, beside a cache of `cache_bytes` bytes."""
    if not (shape := engine.attention):
        return MAX_PREFILL_TOKENS
    size = token_bytes(shape.layers, shape.kv_heads * shape.width, engine.dtype.itemsize)
    return default_prefill_tokens(cache_bytes, size)
