"""Fair shares of several clients: the virtual token counter of Sheng et al. (2024).

Each client has a counter of the work that was done for it, and the client with the least counter is served first. One
that comes back after a pause begins at the least counter of those that wait, so that a pause earns no credit. None
starves: while one waits, the counters of those that are served rise above its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Shares:
    """The counters. `charge` adds the work done for a client, in any unit."""

    def __init__(self) -> None:
        self._work: dict[str, float] = {}
        self._turn: dict[str, int] = {}
        self._waited: set[str] = set()
        self._level = 0.0  # the counter of the client that was served last
        self._turns = 0

    def order(self, waiting: Iterable[str]) -> list[str]:
        """The clients that wait now, the least served first; of equals, the one whose last turn was longest ago."""
        now = list(waiting)
        least = min((self._work[client] for client in now if client in self._waited), default=self._level)
        for client in now:
            if client not in self._waited:
                self._work[client] = max(self._work.get(client, 0.0), least)
        self._waited = set(now)
        return sorted(now, key=lambda client: (self._work[client], self._turn.get(client, 0)))

    def charge(self, client: str, work: float) -> None:
        self._turns += 1
        self._level = self._work.get(client, self._level)
        self._work[client], self._turn[client] = self._level + work, self._turns


class FairQueue(Generic[T]):
    """Items that wait, in order of arrival for each client; `shares` say whose turn it is."""

    def __init__(self) -> None:
        self.shares = Shares()
        self._items: dict[str, deque[T]] = {}  # no deque is empty

    def __len__(self) -> int:
        return sum(map(len, self._items.values()))

    def __iter__(self) -> Iterator[T]:
        for items in self._items.values():
            yield from items

    def __contains__(self, item: T) -> bool:
        return any(item in items for items in self._items.values())

    def push(self, client: str, item: T) -> None:
        self._items.setdefault(client, deque()).append(item)

    def clients(self) -> list[str]:
        """Those with items, in the order of their turns."""
        return self.shares.order(self._items)

    def first(self, client: str) -> T:
        return self._items[client][0]

    def pop(self, client: str) -> T:
        item = self._items[client].popleft()
        self._forget_empty(client)
        return item

    def remove(self, item: T) -> None:
        """Takes out an item, wherever it is."""
        client = next(client for client, items in self._items.items() if item in items)
        self._items[client].remove(item)
        self._forget_empty(client)

    def clear(self) -> None:
        self._items.clear()

    def _forget_empty(self, client: str) -> None:
        if not self._items[client]:
            del self._items[client]
