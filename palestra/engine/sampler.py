"""Continuous batching: many requests, many adapters, one forward pass per token.

A request is one prompt and the number of answers to sample. Its answers are rows of the batch (live_batch.py), admitted
between two decoding passes when there is room, all at once or some at a time; a row leaves as soon as it ends. This
module decides which rows are admitted and which are in the next pass. The sampled tokens do not depend on these
decisions, up to floating-point rounding.

The KV cache has a budget. A sibling is admitted if there is room for its first tokens. If the live answers outgrow the
budget, or memory runs out, those with the fewest tokens are preempted: they give their memory back, wait at the head of
the queue until others have ended, and go on where they were after their keys and values are computed again. Nothing is
dropped, unless a single answer is too long for the whole budget.

Clients share the rows fairly. The least served client is admitted first (fair_queue.py), and each may have
`FREE_ROWS_FACTOR` times as many rows as are free (dynamic thresholds, Choudhury and Hahne, 1998): a single client gets
`max_rows`, and beyond those some rows always stay free for other clients.

A client with few rows is light: it gets extra passes of its own, and for `LIGHT_CLIENT_WINDOW_S` seconds after it last
had rows, passes of the other clients are cut to 1/`SHORT_PASS_DIVISOR` of the rows, so that it does not wait long for a
running pass.

A client alone has its groups started as a whole, if they have at most `MAX_WHOLE_GROUP_ROWS` rows: with `max_rows` of
one group's size, no two requests ever share a batch, and the answers are the same to the last bit, whenever the
requests arrive.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import torch

from palestra.engine.batch import CachedBatch
from palestra.engine.fair_queue import FairQueue
from palestra.engine.kv_cache import default_cache_bytes
from palestra.engine.kv_pages import CacheFull
from palestra.engine.live_batch import LiveBatch
from palestra.engine.malloc import free_memory
from palestra.engine.models import Engine
from palestra.engine.plain_batch import PlainBatch
from palestra.engine.request import Completion as Completion
from palestra.engine.request import LiveSequence, SamplingOutcome, SequenceGroup, check_prompt, check_top_logprobs
from palestra.engine.request import Request as Request
from palestra.engine.sampling import SamplingConfig as SamplingConfig

PREFILL_TOKENS = 8192  # maximum number of prompt tokens of a pass
PREEMPTED_DIVISOR = 8  # a preemption takes 1/8 of all rows
FREE_ROWS_FACTOR = 8
LIGHT_CLIENT_DIVISOR = 16  # light clients together have at most 1/16 of all rows
LIGHT_PASSES = 4  # extra passes of light clients per common pass
LIGHT_CLIENT_WINDOW_S = 1.0  # seconds
MAX_WHOLE_GROUP_ROWS = 32  # the rows of a group that starts as a whole
SHORT_PASS_DIVISOR = 4  # shortened passes have 1/4 of `max_rows` and 1/8 of `prefill_tokens`


class Sampler:
    """Serves sampling requests on one engine.

    Use `await sample(request)` from any number of coroutines, `sample_all` for a list, or `submit` and `step` from
    another loop. `max_rows` is the maximum number of rows of one client; all clients together have at most an eighth
    more. `prefill_tokens` is the maximum number of prompt tokens of one pass, `keep_tokens` the capacity of the prefix
    store. `cache_bytes` is the budget of the KV cache (None: half of the memory that is free now).
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_rows: int = 512,
        prefill_tokens: int = PREFILL_TOKENS,
        keep_tokens: int = 65536,
        cache_bytes: int | None = None,
    ) -> None:
        self.engine, self.max_rows, self.prefill_tokens = engine, max_rows, prefill_tokens
        if cache_bytes is None:
            cache_bytes = default_cache_bytes(free_memory(str(engine.device)))
        self.batch: LiveBatch = (
            PlainBatch(engine)
            if engine.plain_path
            else CachedBatch(engine, keep_tokens=keep_tokens, cache_bytes=cache_bytes, prefill_tokens=prefill_tokens)
        )
        self.waiting: FairQueue[SequenceGroup] = FairQueue()  # groups with siblings that are not admitted
        self._hurried = False
        self._light_until = 0.0  # light clients count as active until this `time.monotonic()`
        self._holds_back = False  # no admission after a preemption, until an answer has ended
        self._first_row = 0  # index of the first row of the next partial pass
        self._ended: list[tuple[SequenceGroup, SamplingOutcome]] = []
        self._pump: asyncio.Task[None] | None = None

    @property
    def has_requests(self) -> bool:
        """True if a request is waiting or being served."""
        return bool(self.waiting or self.batch.groups)

    async def sample(self, request: Request) -> list[Completion]:
        """Returns the answers to `request`, in sibling order. Raises ValueError if the request is invalid or prompt and
        answer exceed the base's length."""
        future: asyncio.Future[list[Completion]] = asyncio.get_running_loop().create_future()
        group = self.submit(request, partial(_resolve, future))
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

    def step(self) -> bool:
        """Admits requests, samples one token for each live row (for a part of them while a light client is active), and
        calls `on_done` of the requests that ended. Returns False if there was nothing to do."""
        if not self.has_requests:
            return False
        try:
            self._step()
        except Exception as error:  # the cause is unknown: fail all requests, so that none waits for ever
            self._ended += [(group, error) for group in dict.fromkeys([*self.batch.groups, *self.waiting])]
            self.batch.reset()
            self.waiting.clear()
        ended, self._ended = self._ended, []
        self._rest()
        for group, outcome in ended:
            group.on_done(outcome)
        return True

    def _rest(self) -> None:
        if not self.has_requests:
            self.batch.rest()

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
        return SequenceGroup(request, done)

    async def _run(self) -> None:
        while self.has_requests:
            await self._settle()
            self.step()

    async def _settle(self) -> None:
        """Runs all ready coroutines, so that their requests join the next batch."""
        quiet, seen = 0, len(self.waiting)
        while quiet < 6:
            await asyncio.sleep(0)
            quiet, seen = (quiet + 1, seen) if len(self.waiting) == seen else (0, len(self.waiting))

    # -- admission -----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _step(self) -> None:
        batch, more = self._admit()
        if batch:
            self._start(batch)
            self._retire()
        if more and len({group.request.client for group in (*self.batch.groups, *self.waiting)}) == 1:
            return  # start the client's batch as a whole, but let requests that arrive between two passes join
        if self._decode_light() and not self._hurried:
            self._hurried = True  # deliver their answers before the long pass, but not twice in a row
            return
        self._hurried = False
        self._decode(self._partial_rows() if self._shortened and self._costs_by_the_row else self.batch.rows)

    @property
    def _shortened(self) -> bool:
        """True if a light client has rows, or had some within the last `LIGHT_CLIENT_WINDOW_S` seconds."""
        return time.monotonic() < self._light_until

    @property
    def _costs_by_the_row(self) -> bool:
        """True if a pass of fewer rows takes less time. If False, a pass mostly waits for reading the weights."""
        return self.engine.device.type == "cpu"

    def _partial_rows(self) -> list[LiveSequence]:
        """Returns the rows of the next partial pass. They are adjacent in the cache if possible, since attention
        computes all slots between the first and the last of them."""
        rows = sorted(self.batch.rows, key=lambda row: row.cache_position)
        start = self._first_row if self._first_row < len(rows) else 0
        chosen = set(rows[start : start + -(-self.max_rows // SHORT_PASS_DIVISOR)])
        self._first_row = start + len(chosen)
        return [row for row in self.batch.rows if row in chosen]

    def _decode_light(self) -> bool:
        """Runs the extra passes of light clients; returns whether one of their requests ended."""
        before = len(self._ended)
        for _ in range(LIGHT_PASSES):
            self._decode(self._light_rows())
        return len(self._ended) > before

    def _light_rows(self) -> list[LiveSequence]:
        """Returns the rows of light clients. Their own passes delay the others little, but sharing every pass with all
        rows would delay them much."""
        held = Counter(row.group.request.client for row in self.batch.rows)
        if 2 * max(held.values(), default=0) <= len(self.batch.rows):
            return []  # unless one client has most of the rows, short passes only cost throughput
        few, light = len(self.batch.rows) // LIGHT_CLIENT_DIVISOR, set()
        for client, rows in sorted(held.items(), key=lambda item: item[1]):
            few -= rows
            if few < 0:
                break
            light.add(client)
        if light:
            self._light_until = time.monotonic() + LIGHT_CLIENT_WINDOW_S
        return [row for row in self.batch.rows if row.group.request.client in light]

    def _decode(self, rows: Sequence[LiveSequence]) -> None:
        """Runs a pass of `rows`, charges its cost to their clients, and retires finished rows."""

        def compute(groups: list[SequenceGroup]) -> None:
            chosen = set(groups)
            now = [row for row in self._live(rows) if row.group in chosen]
            if not now:
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
            self._holds_back = False

    def _admit(self) -> tuple[list[SequenceGroup], bool]:
        """Raises `num_admitted` of the groups to start now, and returns them; and whether more are waiting only because
        of the size of a pass: `prefill_tokens` of prompts (equal ones count once) and `max_rows`, or a part of both."""
        room, limit = self.max_rows, self.prefill_tokens
        if self._shortened:
            room, limit = -(-room // SHORT_PASS_DIVISOR), -(-limit // (2 * SHORT_PASS_DIVISOR))
        held: Counter[str] = Counter()
        for row in self.batch.rows:
            held[row.group.request.client] += row.group.rows_per_answer
        batch: dict[SequenceGroup, None] = {}
        if self._holds_back and self.batch.rows:
            return [], False
        free = self.batch.free_bytes
        asked: set[tuple[int, bytes]] = set()
        tokens = 0
        while found := self._next(held):
            client, most = found
            group = self.waiting.peek(client)
            new = 0 if group.prompt or group.prompt_key in asked else group.prompt_length
            if batch and (tokens + new > limit or room < group.rows_per_answer):
                return list(batch), True
            count = min(group.num_unadmitted, max(1, min(most, room) // group.rows_per_answer))
            if count < group.num_unadmitted and self._starts_whole(group, held):
                break  # until the rows of others have ended
            if free is not None:
                fits, needed = self.batch.fitting(group, count, free, new_prompt=bool(new))
                if not fits and (batch or self.batch.rows):
                    break  # until answers have ended
                count, free = max(1, fits), free - needed
            room -= count * group.rows_per_answer
            group.admit(count)
            held[client] += count * group.rows_per_answer
            tokens += new
            asked.add(group.prompt_key)
            batch[group] = None
            self.waiting.work_counters.add_work(client, new + count)
            if not group.num_unadmitted:
                self.waiting.pop(client)
        return list(batch), False

    def _starts_whole(self, group: SequenceGroup, held: Counter[str]) -> bool:
        """True if `group` waits until there is room for all of its rows: a small group of the only client."""
        rows = group.num_unadmitted * group.rows_per_answer
        clients = {*held, *(waiting.request.client for waiting in self.waiting)}
        return rows <= min(MAX_WHOLE_GROUP_ROWS, self.max_rows) and len(clients) == 1

    def _next(self, held: Counter[str]) -> tuple[str, int] | None:
        """Returns the least served client that may have more rows than it holds, and how many more."""
        total = held.total()
        for client in self.waiting.next_clients():
            count = row_allowance(held[client], total, self.max_rows)
            if count > 0:
                return client, count
        return None

    # -- memory --------------------------------------------------------------------------------------------------------

    def _start(self, groups: list[SequenceGroup]) -> None:
        """Starts the admitted siblings of `groups`. What the memory has no room for goes back to the queue."""
        try:
            self._run_isolated(self.batch.start, groups)
        except OutOfMemory as error:
            if self.batch.release_idle(keep=groups):
                self._start(groups)
            elif len(groups) > 1:
                self._put_back(groups[len(groups) // 2 :])
                self._start(groups[: len(groups) // 2])
            elif self.batch.rows:
                self._put_back(groups)
            elif groups[0].num_starting > 1:
                self._put_back(groups, groups[0].num_starting // 2)
                self._start(groups)
            else:
                self._drop(groups[0], error.reason)

    def _put_back(self, groups: Sequence[SequenceGroup], count: int | None = None) -> None:
        """Puts groups back at the head of their clients' queues: the last `count` of their siblings that were to start
        (None: all)."""
        for group in reversed(groups):
            group.take_back(group.num_starting if count is None else count)
            if group.num_unadmitted and group not in self.waiting:  # none, if it started before another failed
                self.waiting.push_front(group.request.client, group)
        self._holds_back = True

    def _make_room(self, rows: Sequence[LiveSequence]) -> bool:
        """Makes room in the cache for one more token of each of `rows`, by preempting others or some of them; returns
        whether any of `rows` is left."""
        while live := self._live(rows):
            try:
                self.batch.grow(live)
                return True
            except Exception as error:
                if not is_out_of_memory(error):
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
        for group in dict.fromkeys(row.group for row in preempted):
            if group not in self.waiting:
                self.waiting.push_front(group.request.client, group)
        self._holds_back = True

    # -- failures ------------------------------------------------------------------------------------------------------

    def _run_isolated(self, compute: Callable[[list[SequenceGroup]], None], groups: list[SequenceGroup]) -> None:
        """Runs `compute` for all `groups` together. If it fails, runs it for each group alone, so that only the groups
        that cause the error fail. Raises OutOfMemory if there is not enough memory, which no group is to blame for."""
        try:
            compute(groups)
        except Exception as error:
            if is_out_of_memory(error):
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
    """A pass did not fit into memory, for the reason `reason`."""

    def __init__(self, reason: Exception) -> None:
        super().__init__(str(reason))
        self.reason = reason


def is_out_of_memory(error: Exception) -> bool:
    """Returns whether `error` says that memory ran out: that of the cache's budget, of the GPU or of the machine."""
    if isinstance(error, (CacheFull, MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)  # torch's message on CPU


def row_allowance(held: int, total: int, max_rows: int) -> int:
    """Returns the number of further rows for a client that holds `held` of the `total` live ones; at most 0 if it gets
    none."""
    free = max_rows + -(-max_rows // FREE_ROWS_FACTOR) - total
    return min(max_rows - held, -((held - FREE_ROWS_FACTOR * free) // (FREE_ROWS_FACTOR + 1)))


def _resolve(future: asyncio.Future[list[Completion]], outcome: SamplingOutcome) -> None:
    if future.done():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
