"""Waiting for answers, with one shared query of the store for all pending polls."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain

from palestra.service.server.state import ServiceContext
from palestra.service.storage.database import OUTAGE_ERRORS

POLL_INTERVAL_S = 0.02  # seconds between two queries without a worker that wakes this front end
WOKEN_INTERVAL_S = 0.5  # with one: for what another front end answers
MAX_IDS_PER_QUERY = 1000  # ids in one query
OUTAGE_PAUSE_S = 1.0  # seconds between two queries while the database does not answer


class AnswerPoller:
    """Wakes polls when their request has an answer. One instance for each front end.

    While any poll is pending, one task waits on the wake-up socket and queries the store for all of them: a thousand
    polls cost one query per wake-up. A new poll asks for one too: its answer may have been written just before.
    """

    def __init__(self, context: ServiceContext) -> None:
        self.context = context
        self._waiting: defaultdict[str, set[asyncio.Event]] = defaultdict(set)
        self._watch: asyncio.Task[None] | None = None
        self._ringing = asyncio.Event()  # set by the worker's wake-up, and by a new poll
        self.is_closed = False

    def close(self) -> None:
        """Ends all polls without an answer; later ones return at once."""
        self.is_closed = True
        for events in self._waiting.values():
            for event in events:
                event.set()

    async def wait(self, ids: Sequence[str], seconds: float) -> bool:
        """Waits up to `seconds` until one of the requests `ids` has an answer, and returns whether one has. Returns
        False at once after `close`."""
        if self.is_closed:
            return False
        answered = asyncio.Event()
        for id in ids:
            self._waiting[id].add(answered)
        self._ringing.set()
        if self._watch is None or self._watch.done():
            self._watch = asyncio.create_task(self._look())
        try:
            async with asyncio.timeout(seconds):
                await answered.wait()
        except TimeoutError:
            return False
        finally:
            for id in ids:
                self._waiting[id].discard(answered)
                if not self._waiting[id]:
                    del self._waiting[id]
        return not self.is_closed

    async def _look(self) -> None:
        while self._waiting:
            self._ringing = asyncio.Event()
            try:
                await self._wake(list(self._waiting))
            except OUTAGE_ERRORS:  # polls keep waiting: clients repeat a poll that ends without an answer
                await asyncio.sleep(OUTAGE_PAUSE_S)
            wakeup = self.context.wakeup
            await wakeup.wait_async(POLL_INTERVAL_S if wakeup.peer_gone else WOKEN_INTERVAL_S, self._ringing)

    async def _wake(self, ids: list[str]) -> None:
        for start in range(0, len(ids), MAX_IDS_PER_QUERY):
            found = await asyncio.to_thread(self.context.store.answered_ids, ids[start : start + MAX_IDS_PER_QUERY])
            for event in list(chain.from_iterable(self._waiting.get(id, ()) for id in found)):
                event.set()
