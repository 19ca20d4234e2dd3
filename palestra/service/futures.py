"""Waiting for answers: one look at the store for everybody who waits."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence

from palestra.service.context import Context
from palestra.service.database import AWAY

TICK = 0.02  # seconds between two looks when no bell rings
ASKED = 1000  # ids in one query
PAUSE = 1.0  # seconds, while the database does not answer


class Waiter:
    """Wakes those who wait for a request when it has its answer. One for each front end.

    While anybody waits, one task listens to the bell and asks the store for all of them; a thousand polls cost one
    query a tick.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self._waiting: defaultdict[str, set[asyncio.Event]] = defaultdict(set)
        self._watch: asyncio.Task[None] | None = None
        self._closed = False

    def close(self) -> None:
        """From now on nobody waits: all are told that there is no answer yet."""
        self._closed = True
        for events in self._waiting.values():
            for event in events:
                event.set()

    async def wait(self, ids: Sequence[str], seconds: float) -> bool:
        """Whether one of the requests `ids` has its answer, now or within `seconds`. False at once after `close`."""
        if self._closed:
            return False
        answered = asyncio.Event()
        for id in ids:
            self._waiting[id].add(answered)
        if self._watch is None or self._watch.done():
            self._watch = asyncio.create_task(self._look())
        try:
            async with asyncio.timeout(seconds):
                await answered.wait()
        except TimeoutError:
            return False
        finally:
            self._forget(ids, answered)
        return not self._closed

    def _forget(self, ids: Sequence[str], answered: asyncio.Event) -> None:
        for id in ids:
            self._waiting[id].discard(answered)
            if not self._waiting[id]:
                del self._waiting[id]

    async def _look(self) -> None:
        while self._waiting:
            try:
                await self._wake(list(self._waiting))
            except AWAY:  # whoever waits goes on: a poll that ends without an answer is sent again
                await asyncio.sleep(PAUSE)
            await self.context.bell.heard(TICK)

    async def _wake(self, ids: list[str]) -> None:
        for start in range(0, len(ids), ASKED):
            found = await asyncio.to_thread(self.context.store.finished, ids[start : start + ASKED])
            for event in [event for id in found for event in self._waiting.get(id, ())]:
                event.set()
