"""Rollouts split over ranks: each rank plays its part, and all ranks then hold all episodes in order.

Episodes do not depend on the rank that plays them, so a step on many ranks has the same episodes as on one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from palestra.rollouts.play import Arena, Branching, Match
from palestra.rollouts.sources import Source, Told
from palestra.types import Episode, Memory, Metrics


class Ranks(Protocol):
    """Process group; this process is `rank` of `size`."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def gather(self, thing: Any) -> list[Any]:
        """Returns every rank's `thing`, in order of rank (all-gather of objects)."""
        ...


@dataclass(frozen=True)
class Table:
    """How a rollout is split over `ranks`; `opened` is a context that prepares the weights for it."""

    ranks: Ranks
    opened: Callable[[], AbstractContextManager[Any]]

    def own(self, things: Sequence[Any]) -> Sequence[Any]:
        """Returns this rank's part of `things`."""
        return things[self.ranks.rank :: self.ranks.size]

    def exchange(self, own: Sequence[Episode], told: Told) -> list[Episode]:
        """All-gathers the episodes in order; calls `told` for those played by other ranks."""
        parts = self.ranks.gather(own)
        size = len(parts)
        episodes = [parts[i % size][i // size] for i in range(sum(map(len, parts)))]
        for i, episode in enumerate(episodes):
            if told and i % size != self.ranks.rank:
                told(episode)
        return episodes


@dataclass
class SharedSource:
    """An episode source of which each rank plays its part."""

    source: Source
    table: Table

    async def play(
        self, numbers: Sequence[int], branching: Branching, memory: Memory, told: Told = None
    ) -> list[Episode]:
        """Returns the episodes of these numbers, in order."""
        with self.table.opened():
            own = await self.source.play(self.table.own(numbers), branching, memory, told)
        return self.table.exchange(own, told)

    def observe(self, episodes: Sequence[Episode], memory: Memory) -> Metrics:
        return self.source.observe(episodes, memory)


class SharedArena(Arena):
    """An episode runner of whose episodes each rank plays its part."""

    def __init__(self, arena: Arena, table: Table) -> None:
        super().__init__(arena.make_env, arena.name, limit=arena.limit, max_steps=arena.max_steps)
        self.table = table

    async def play_all(
        self, matches: Sequence[Match], branching: Branching, on_done: Callable[[Episode], None] | None = None
    ) -> list[Episode]:
        """Returns the episodes of `matches`, in order."""
        with self.table.opened():
            own = await super().play_all(self.table.own(matches), branching, on_done)
        return self.table.exchange(own, on_done)
