"""Continuous batching: many requests, many adapters, one forward pass per token.

A request is one prompt and the number of answers wanted. Its answers are rows of the batch (batch.py), admitted when
there is room between two decoding passes, all at once or some at a time; a row leaves as soon as it ends. This module
decides which rows are admitted, and which are in the next pass. What is sampled does not depend on it, up to the
rounding of floats.

Clients share the rows fairly. The least served one is admitted first (fair_queue.py), and each may have `SHARE` times
as many rows as are free (dynamic thresholds, Choudhury and Hahne, 1998): one alone gets `max_rows`, and when others
come, some rows are always free for them, beyond those.

A client of few rows is light: it gets passes of its own, and for `RECENT` seconds after it had rows, passes of the
others are cut to a `PART`th, so that it does not wait long for the one under way.
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
LIGHT = 16  # clients that have a sixteenth of all rows together have
EXTRA = 4  # passes of their own beside each of the others'
RECENT = 1.0  # seconds
PART = 4  # of `max_rows`, and twice that of `prefill_tokens`


class Sampler:
    """Serves requests on one engine: `await sample(request)` from any number of coroutines, `sample_all` at once, or
    `submit` and `advance` from a loop of one's own. `max_rows` are the most rows of one client; all together have an
    eighth more."""

    def __init__(self, engine: Engine, *, max_rows: int = 512, prefill_tokens: int = 8192, keep_tokens: int = 65536):
        self.engine, self.max_rows, self.prefill_tokens = engine, max_rows, prefill_tokens
        self.batch = Batch(engine, keep_tokens)
        self.waiting: FairQueue[Group] = FairQueue()  # those with siblings that are not admitted
        self._hurried = False
        self._light_until = 0.0  # `time.monotonic()` at which light clients count as gone
        self._start = 0  # place of the first row of the next partial pass
        self._ended: list[tuple[Group, Outcome]] = []
        self._pump: asyncio.Task[None] | None = None

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.batch.groups)

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
        """Lets `request` wait for `advance`, which calls `done` with its answers, or with what made it fail (`done`
        must not raise). What it returns is for `cancel`. Raises ValueError when the prompt and answer cannot fit."""
        group = self._group(request, done)
        self.waiting.push(request.client, group)
        return group

    @torch.inference_mode()
    def cancel(self, group: Group) -> None:
        """Takes back what was submitted: its `done` is not called. One that has ended is left alone."""
        if group in self.batch.groups:
            self.batch.drop(group)
        if group in self.waiting:
            self.waiting.remove(group)

    def advance(self) -> bool:
        """Admits what fits, samples one token for each live row (for a part of them while a light client is here), and
        calls `done` of what has ended. False when there was nothing to do."""
        if not self.busy:
            return False
        try:
            self._step()
        except Exception as error:  # whose fault it is cannot be told, and nobody must wait for ever
            self._ended += [(group, error) for group in dict.fromkeys([*self.batch.groups, *self.waiting])]
            self.batch.reset()
            self.waiting.clear()
        ended, self._ended = self._ended, []
        for group, outcome in ended:
            group.done(outcome)
        return True

    def forget(self) -> None:
        """Drops what was kept for later turns and for snapshots of earlier steps."""
        self.batch.forget()

    def rest(self) -> None:
        """Gives back the memory that empty pools of the cache keep for the next requests."""
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
        """Lets every coroutine that can move do so, that its request joins the coming batch."""
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
            return  # its batch starts whole, but a request that comes between two passes need not wait for the last one
        if self._decode_light() and not self._hurried:
            self._hurried = True  # their answers go out before the long pass, but not twice in a row
            return
        self._hurried = False
        self._decode(self._part() if self._shortened and self._costs_by_the_row else self.batch.rows)

    @property
    def _shortened(self) -> bool:
        """True if a light client has rows, or had some a moment ago."""
        return time.monotonic() < self._light_until

    @property
    def _costs_by_the_row(self) -> bool:
        """True if a pass of fewer rows takes less time; where False it mostly waits for the weights."""
        return self.engine.device.type == "cpu"

    def _part(self) -> list[Row]:
        """The rows of the next partial pass. They lie side by side in the cache where they can, as attention computes
        all places between the first and the last of them."""
        rows = sorted(self.batch.rows, key=lambda row: row.place)
        start = self._start if self._start < len(rows) else 0
        chosen = set(rows[start : start + -(-self.max_rows // PART)])
        self._start = start + len(chosen)
        return [row for row in self.batch.rows if row in chosen]

    def _decode_light(self) -> bool:
        """The light clients' own passes; whether one of their requests ended."""
        before = len(self._ended)
        for _ in range(EXTRA):
            self._decode(self._light())
        return len(self._ended) > before

    def _light(self) -> list[Row]:
        """The rows of clients that have few: passes of their own delay the others little, who delay them much where
        every token costs a pass of all rows."""
        held = Counter(row.group.request.client for row in self.batch.rows)
        if 2 * max(held.values(), default=0) <= len(self.batch.rows):
            return []  # without a client that has most of the rows short passes only cost throughput
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
        """A pass of `rows`, with what it cost charged to their clients, and the end of those that end with it."""

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
        """Notes the answers of groups that have ended."""
        self._ended += [(group, group.result()) for group in self.batch.retire()]

    def _admit(self) -> tuple[list[Group], bool]:
        """The groups with siblings to begin now, `admitted` raised; and whether more would fit but for the size of one
        pass: `prefill_tokens` of prompts (equal ones count once) and `max_rows`, or a part of both."""
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
        """The least served client that may have more rows than it holds, and how many more."""
        total = held.total()
        for client in self.waiting.clients():
            count = allowance(held[client], total, self.max_rows)
            if count > 0:
                return client, count
        return None

    def _apart(self, compute: Callable[[list[Group]], None], groups: list[Group]) -> None:
        """`compute` for all `groups` together; where that fails, for each alone, so that only those fail whose own
        computation does."""
        try:
            compute(groups)
        except Exception as error:
            if len(groups) == 1:
                self._drop(groups[0], error)
                return
            for group in groups:
                self._apart(compute, [group])

    def _drop(self, group: Group, error: Exception) -> None:
        """Ends a group with what made it fail."""
        self.batch.drop(group)
        if group in self.waiting:
            self.waiting.remove(group)
        self._ended.append((group, error))


def allowance(held: int, total: int, max_rows: int) -> int:
    """Number of further rows for a client that holds `held` of the `total` live ones; at most 0 where it gets none."""
    free = max_rows + -(-max_rows // SHARE) - total
    return min(max_rows - held, -((held - SHARE * free) // (SHARE + 1)))


def _resolve(future: asyncio.Future[list[Sampled]], outcome: Outcome) -> None:
    if future.done():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
