"""Calls whose results are handed back together, so that no later result depends on how long each took.

An env that asks another process (a grader, a sandbox, an env server), or blocks on a thread, answers after a time that
no seed determines. Which answers are there when the sampler begins its next pass would decide which requests share a
batch, hence the last bits of its sums, and now and then a token. So the sampler waits until no held call runs, and all
results are handed back at once, in the order in which the calls began.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar
from weakref import WeakKeyDictionary

from palestra.core.event_loop import settle, until_quiet

T = TypeVar("T")
MAX_WAIT_S = 10.0  # seconds after which calls that still run are held no longer


class HeldCalls:
    """The held calls of one event loop. Their results are handed back when none runs any more, or `max_wait_s` seconds
    after the first of them began: a call that takes longer delays nobody else, and what follows it depends on time."""

    def __init__(self, max_wait_s: float = MAX_WAIT_S) -> None:
        self.max_wait_s = max_wait_s
        self._turns: list[asyncio.Future[None]] = []  # one for each call, in order of their beginning
        self._running: set[asyncio.Future[None]] = set()
        self._num_begun = 0
        self._timer: asyncio.TimerHandle | None = None
        self._handing: asyncio.Task[None] | None = None

    async def hold(self, call: Awaitable[T]) -> T:
        """Returns the result of `call`, or raises its error, when no held call runs any more."""
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        if not self._turns:
            self._timer = loop.call_later(self.max_wait_s, self._hand_back)
        self._turns.append(turn)
        self._running.add(turn)
        self._num_begun += 1
        try:
            return await call
        except BaseException as error:
            if not isinstance(error, Exception):  # a cancellation or an interrupt is raised at once
                settle(turn, None)
            raise
        finally:
            self._end(turn)
            await turn

    @property
    def are_held(self) -> bool:
        """True if a call runs, or its result is not handed back yet."""
        return bool(self._turns)

    async def wait(self) -> None:
        """Returns when all results are handed back."""
        while self._turns:
            await asyncio.wait([self._turns[-1]])

    def _end(self, turn: asyncio.Future[None]) -> None:
        self._running.discard(turn)
        if self._turns and not self._running and (self._handing is None or self._handing.done()):
            self._handing = asyncio.create_task(self._hand_back_when_quiet())

    async def _hand_back_when_quiet(self) -> None:
        """Hands back the results, unless a coroutine that was ready has begun a call that still runs."""
        await until_quiet(lambda: self._num_begun)
        if not self._running:
            self._hand_back()

    def _hand_back(self) -> None:
        """Hands back all results that are there; calls that still run are held no longer."""
        assert self._timer is not None
        self._timer.cancel()
        turns = self._turns
        self._turns = []
        self._running.clear()
        for turn in turns:
            settle(turn, None)


_by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, HeldCalls] = WeakKeyDictionary()


def held_calls() -> HeldCalls:
    """Returns the held calls of the running event loop."""
    return _by_loop.setdefault(asyncio.get_running_loop(), HeldCalls())
