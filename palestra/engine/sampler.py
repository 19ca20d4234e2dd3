"""Continuous batching: many requests, many adapters, one forward pass per token.

A request is one prompt and the number of answers to sample. Its answers are rows of the batch (batch.py), admitted
between two decoding passes when there is room, all at once or some at a time; a row leaves as soon as it ends. This
module decides which rows are admitted and which are in the next pass. The sampled tokens do not depend on these
decisions, up to floating-point rounding.

Clients share the rows fairly. The least served client is admitted first (fair_queue.py), and each may have `SHARE`
times as many rows as are free (dynamic thresholds, Choudhury and Hahne, 1998): a single client gets `max_rows`, and
beyond those some rows always stay free for other clients.

A client with few rows is light: it gets extra passes of its own, and for `RECENT` seconds after it last had rows,
passes of the other clients are cut to 1/`PART` of the rows, so that it does not wait long for a running pass.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import torch

from palestra.engine.batch import Batch
from palestra.engine.draw import Sampling as Sampling
from palestra.engine.fair_queue import FairQueue
from palestra.engine.models import Engine
from palestra.engine.requests import Group, Outcome, Row, check_prompt, check_top
from palestra.engine.requests import Request as Request
from palestra.engine.requests import Sampled as Sampled

SHARE = 8
LIGHT = 16  # light clients together have at most 1/16 of all rows
EXTRA = 4  # extra passes of light clients per common pass
RECENT = 1.0  # seconds
PART = 4  # shortened passes have 1/4 of `max_rows` and 1/8 of `prefill_tokens`


class Sampler:
    """Serves sampling requests on one engine.

    Use `await sample(request)` from any number of coroutines, `sample_all` for a list, or `submit` and `advance` from
    another loop. `max_rows` is the maximum number of rows of one client; all clients together have at most an eighth
    more. `prefill_tokens` is the maximum number of prompt tokens of one pass, `keep_tokens` the capacity of the prefix
    store.
    """

    def __init__(self, engine: Engine, *, max_rows: int = 512, prefill_tokens: int = 8192, keep_tokens: int = 65536):
        self.engine, self.max_rows, self.prefill_tokens = engine, max_rows, prefill_tokens
        self.batch = Batch(engine, keep_tokens)
        self.waiting: FairQueue[Group] = FairQueue()  # groups with siblings that are not admitted
        self._hurried = False
        self._light_until = 0.0  # light clients count as active until this `time.monotonic()`
        self._start = 0  # index of the first row of the next partial pass
        self._ended: list[tuple[Group, Outcome]] = []
        self._pump: asyncio.Task[None] | None = None

    @property
    def busy(self) -> bool:
        """True if a request is waiting or being served."""
        return bool(self.waiting or self.batch.groups)

    async def sample(self, request: Request) -> list[Sampled]:
        """Returns the answers to `request`, in sibling order. Raises ValueError if the request is invalid or prompt and
        answer exceed the base's length."""
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
        """Returns the answers to all `requests`, sampled together. Raises the first error after all requests have
        ended."""
        outcomes: list[Outcome] = [[] for _ in requests]
        groups = [self._group(r, partial(outcomes.__setitem__, i)) for i, r in enumerate(requests)]
        for group in groups:
            self.waiting.push(group.request.client, group)
        while self.advance():
            pass
        answers = []
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
            answers.append(outcome)
        return answers

    def submit(self, request: Request, done: Callable[[Outcome], None]) -> Group:
        """Queues `request` for `advance`, which calls `done` with its answers or its error (`done` must not raise).
        Returns a handle for `cancel`. Raises ValueError if the request is invalid or prompt and answer exceed the
        base's length."""
        group = self._group(request, done)
        self.waiting.push(request.client, group)
        return group

    @torch.inference_mode()
    def cancel(self, group: Group) -> None:
        """Cancels a submitted request; its `done` is not called. Does nothing if it has ended."""
        if group in self.batch.groups:
            self.batch.drop(group)
        if group in self.waiting:
            self.waiting.remove(group)

    def advance(self) -> bool:
        """Admits requests, samples one token for each live row (for a part of them while a light client is active), and
        calls `done` of the requests that ended. Returns False if there was nothing to do."""
        if not self.busy:
            return False
        try:
            self._step()
        except Exception as error:  # the cause is unknown: fail all requests, so that none waits for ever
            self._ended += [(group, error) for group in dict.fromkeys([*self.batch.groups, *self.waiting])]
            self.batch.reset()
            self.waiting.clear()
        ended, self._ended = self._ended, []
        for group, outcome in ended:
            group.done(outcome)
        return True

    def forget(self) -> None:
        """Drops the stored prefixes and adapter stacks of earlier snapshots."""
        self.batch.forget()

    def rest(self) -> None:
        """Frees the memory of empty cache pools, when no requests are expected soon."""
        self.batch.cache.trim()

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
            self._apart(self.batch.begin, batch)
            self._retire()
        if more and len({group.request.client for group in (*self.batch.groups, *self.waiting)}) == 1:
            return  # start the client's batch as a whole, but let requests that arrive between two passes join
        if self._decode_light() and not self._hurried:
            self._hurried = True  # deliver their answers before the long pass, but not twice in a row
            return
        self._hurried = False
        self._decode(self._part() if self._shortened and self._costs_by_the_row else self.batch.rows)

    @property
    def _shortened(self) -> bool:
        """True if a light client has rows, or had some within the last `RECENT` seconds."""
        return time.monotonic() < self._light_until

    @property
    def _costs_by_the_row(self) -> bool:
        """True if a pass of fewer rows takes less time. If False, a pass mostly waits for reading the weights."""
        return self.engine.device.type == "cpu"

    def _part(self) -> list[Row]:
        """Returns the rows of the next partial pass. They are adjacent in the cache if possible, since attention
        computes all slots between the first and the last of them."""
        rows = sorted(self.batch.rows, key=lambda row: row.place)
        start = self._start if self._start < len(rows) else 0
        chosen = set(rows[start : start + -(-self.max_rows // PART)])
        self._start = start + len(chosen)
        return [row for row in self.batch.rows if row in chosen]

    def _decode_light(self) -> bool:
        """Runs the extra passes of light clients; returns whether one of their requests ended."""
        before = len(self._ended)
        for _ in range(EXTRA):
            self._decode(self._light())
        return len(self._ended) > before

    def _light(self) -> list[Row]:
        """Returns the rows of light clients. Their own passes delay the others little, but sharing every pass with all
        rows would delay them much."""
        held = Counter(row.group.request.client for row in self.batch.rows)
        if 2 * max(held.values(), default=0) <= len(self.batch.rows):
            return []  # unless one client has most of the rows, short passes only cost throughput
        few, light = len(self.batch.rows) // LIGHT, set()
        for client, rows in sorted(held.items(), key=lambda item: item[1]):
            few -= rows
            if few < 0:
                break
            light.add(client)
        if light:
            self._light_until = time.monotonic() + RECENT
        return [row for row in self.batch.rows if row.group.request.client in light]

    def _decode(self, rows: Sequence[Row]) -> None:
        """Runs a pass of `rows`, charges its cost to their clients, and retires finished rows."""

        def compute(groups: list[Group]) -> None:
            chosen = set(groups)
            now = [row for row in rows if row.group in chosen]
            self.batch.decode(now)
            for client, count in Counter(row.group.request.client for row in now).items():
                self.waiting.shares.charge(client, count)

        if rows:
            self._apart(compute, list(dict.fromkeys(row.group for row in rows)))
            self._retire()

    def _retire(self) -> None:
        """Records the answers of finished groups."""
        self._ended += [(group, group.result()) for group in self.batch.retire()]

    def _admit(self) -> tuple[list[Group], bool]:
        """Raises `admitted` of the groups to start now, and returns them; and whether more are waiting only because of
        the size of a pass: `prefill_tokens` of prompts (equal ones count once) and `max_rows`, or a part of both."""
        room, limit = self.max_rows, self.prefill_tokens
        if self._shortened:
            room, limit = -(-room // PART), -(-limit // (2 * PART))
        held: Counter[str] = Counter()
        for row in self.batch.rows:
            held[row.group.request.client] += row.group.weight
        batch: dict[Group, None] = {}
        asked: set[tuple[int, bytes]] = set()
        tokens = 0
        while found := self._next(held):
            client, most = found
            group = self.waiting.first(client)
            new = 0 if group.prompt or group.asked in asked else group.size
            if batch and (tokens + new > limit or room < group.weight):
                return list(batch), True
            count = min(group.left, max(1, min(most, room) // group.weight))
            room -= count * group.weight
            group.admitted += count
            held[client] += count * group.weight
            tokens += new
            asked.add(group.asked)
            batch[group] = None
            self.waiting.shares.charge(client, new + count)
            if not group.left:
                self.waiting.pop(client)
        return list(batch), False

    def _next(self, held: Counter[str]) -> tuple[str, int] | None:
        """Returns the least served client that may have more rows than it holds, and how many more."""
        total = held.total()
        for client in self.waiting.clients():
            count = allowance(held[client], total, self.max_rows)
            if count > 0:
                return client, count
        return None

    def _apart(self, compute: Callable[[list[Group]], None], groups: list[Group]) -> None:
        """Runs `compute` for all `groups` together. If it fails, runs it for each group alone, so that only the groups
        that cause the error fail."""
        try:
            compute(groups)
        except Exception as error:
            if len(groups) == 1:
                self._drop(groups[0], error)
                return
            for group in groups:
                self._apart(compute, [group])

    def _drop(self, group: Group, error: Exception) -> None:
        """Ends a group with an error."""
        self.batch.drop(group)
        if group in self.waiting:
            self.waiting.remove(group)
        self._ended.append((group, error))


def allowance(held: int, total: int, max_rows: int) -> int:
    """Returns the number of further rows for a client that holds `held` of the `total` live ones; at most 0 if it gets
    none."""
    free = max_rows + -(-max_rows // SHARE) - total
    return min(max_rows - held, -((held - SHARE * free) // (SHARE + 1)))


def _resolve(future: asyncio.Future[list[Sampled]], outcome: Outcome) -> None:
    if future.done():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
