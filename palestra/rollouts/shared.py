"""Rollouts shared among ranks: each plays its part, and all know all episodes, in their order, before anybody learns.

Which games there are does not depend on who plays them, so a step of many ranks has the episodes of one.
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
    """Processes that do the same program; this one is `rank` of `size`."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def gather(self, thing: Any) -> list[Any]:
        """Every rank's `thing`, in order of rank."""
        ...


@dataclass(frozen=True)
class Table:
    """Who plays together, and what is to be around a rollout: `opened` readies the weights."""

    ranks: Ranks
    opened: Callable[[], AbstractContextManager[Any]]

    def own(self, things: Sequence[Any]) -> Sequence[Any]:
        """This rank's part of what there is to play."""
        return things[self.ranks.rank :: self.ranks.size]

    def exchange(self, own: Sequence[Episode], told: Told) -> list[Episode]:
        """All ranks' episodes in their order; `told` hears of those of others."""
        parts = self.ranks.gather(own)
        size = len(parts)
        episodes = [parts[i % size][i // size] for i in range(sum(map(len, parts)))]
        for i, episode in enumerate(episodes):
            if told and i % size != self.ranks.rank:
                told(episode)
        return episodes


@dataclass
class SharedSource:
    """A source of which each rank plays its part."""

    source: Source
    table: Table

    async def play(
        self, numbers: Sequence[int], branching: Branching, memory: Memory, told: Told = None
    ) -> list[Episode]:
        """The episodes of these numbers, in their order."""
        with self.table.opened():
            own = await self.source.play(self.table.own(numbers), branching, memory, told)
        return self.table.exchange(own, told)

    def observe(self, episodes: Sequence[Episode], memory: Memory) -> Metrics:
        return self.source.observe(episodes, memory)


class SharedArena(Arena):
    """An arena of whose matches each rank plays its part."""

    def __init__(self, arena: Arena, table: Table) -> None:
        super().__init__(arena.make_env, arena.name, limit=arena.limit, max_steps=arena.max_steps)
        self.table = table

    async def play_all(
        self, matches: Sequence[Match], branching: Branching, on_done: Callable[[Episode], None] | None = None
    ) -> list[Episode]:
        """The episodes of `matches`, in their order."""
        with self.table.opened():
            own = await super().play_all(self.table.own(matches), branching, on_done)
        return self.table.exchange(own, on_done)
