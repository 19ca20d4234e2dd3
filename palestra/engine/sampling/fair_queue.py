"""Fair scheduling between clients: the virtual token counter of Sheng et al. (2024).

Each client has a counter of the work done for it; the waiting client with the lowest counter is served first. A client
that returns after a pause starts at the lowest counter of the waiting clients, so a pause earns no credit. No client
starves: while it waits, the counters of the clients being served rise above its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class WorkCounters:
    """Work counters of the clients."""

    def __init__(self) -> None:
        self._work: dict[str, float] = {}
        self._turn: dict[str, int] = {}
        self._waited: set[str] = set()
        self._level = 0.0  # counter of the client that was served last
        self._turns = 0

    def service_order(self, waiting: Iterable[str]) -> list[str]:
        """Returns the waiting clients, lowest counter first; ties go to the client served least recently."""
        now = list(waiting)
        least = min((self._work[client] for client in now if client in self._waited), default=self._level)
        for client in now:
            if client not in self._waited:
                self._work[client] = max(self._work.get(client, 0.0), least)
        self._waited = set(now)
        return sorted(now, key=lambda client: (self._work[client], self._turn.get(client, 0)))

    @property
    def counters(self) -> dict[str, float]:
        """The counter of every client that was ever served."""
        return dict(self._work)

    def add_work(self, client: str, work: float) -> None:
        """Adds `work` (in any one unit) to the counter of a client."""
        self._turns += 1
        self._level = self._work.get(client, self._level)
        self._work[client], self._turn[client] = self._level + work, self._turns


class FairQueue(Generic[T]):
    """A queue of items per client, in order of arrival; `work_counters` decides which client is next."""

    def __init__(self) -> None:
        self.work_counters = WorkCounters()
        self._items: dict[str, deque[T]] = {}  # never holds an empty deque

    def __len__(self) -> int:
        return sum(map(len, self._items.values()))

    def __iter__(self) -> Iterator[T]:
        for items in self._items.values():
            yield from items

    def __contains__(self, item: T) -> bool:
        return any(item in items for items in self._items.values())

    def push(self, client: str, item: T) -> None:
        self._items.setdefault(client, deque()).append(item)

    def push_front(self, client: str, item: T) -> None:
        """Puts an item before all others of the client's queue."""
        self._items.setdefault(client, deque()).appendleft(item)

    def next_clients(self) -> list[str]:
        """Returns the clients with items, in the order of service."""
        return self.work_counters.service_order(self._items)

    def peek(self, client: str) -> T:
        """Returns the client's oldest item without removing it."""
        return self._items[client][0]

    def pop(self, client: str) -> T:
        """Removes and returns the client's oldest item."""
        item = self._items[client].popleft()
        self._forget_empty(client)
        return item

    def remove(self, item: T) -> None:
        """Removes an item from its client's queue."""
        client = next(client for client, items in self._items.items() if item in items)
        self._items[client].remove(item)
        self._forget_empty(client)

    def clear(self) -> None:
        self._items.clear()

    def _forget_empty(self, client: str) -> None:
        if not self._items[client]:
            del self._items[client]
