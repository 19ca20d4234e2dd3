"""Rollouts split over ranks: each rank plays its part, and all ranks then hold all episodes in order.

Episodes do not depend on the rank that plays them, so a step on many ranks has the same episodes as on one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from palestra.core.types import AlgorithmState, Episode, Metrics
from palestra.parallel.process_group import ProcessGroup
from palestra.text.rollouts.sources import EpisodeCallback, EpisodeSource
from palestra.text.rollouts.tree_rollout import Branching, EpisodeRunner, EpisodeSpec


@dataclass(frozen=True)
class RankSplit:
    """Split of a rollout over `ranks`; `weights_context` is a context that prepares the weights for it."""

    ranks: ProcessGroup
    weights_context: Callable[[], AbstractContextManager[Any]]

    def local_part(self, items: Sequence[Any]) -> Sequence[Any]:
        """Returns this rank's part of `items`."""
        return items[self.ranks.rank :: self.ranks.world_size]

    def gather_episodes(self, own: Sequence[Episode], on_episode: EpisodeCallback) -> list[Episode]:
        """All-gathers the episodes in order; calls `on_episode` for those played by other ranks."""
        parts = self.ranks.all_gather(own)
        size = len(parts)
        episodes = [parts[i % size][i // size] for i in range(sum(map(len, parts)))]
        for i, episode in enumerate(episodes):
            if on_episode and i % size != self.ranks.rank:
                on_episode(episode)
        return episodes


@dataclass
class RankSplitSource:
    """An episode source whose episodes are split over ranks."""

    source: EpisodeSource
    table: RankSplit

    async def play(
        self, numbers: Sequence[int], branching: Branching, state: AlgorithmState, on_episode: EpisodeCallback = None
    ) -> list[Episode]:
        """Returns the episodes of these numbers, in order."""
        with self.table.weights_context():
            own = await self.source.play(self.table.local_part(numbers), branching, state, on_episode)
        return self.table.gather_episodes(own, on_episode)

    def observe(self, episodes: Sequence[Episode], state: AlgorithmState) -> Metrics:
        return self.source.observe(episodes, state)


class RankSplitRunner(EpisodeRunner):
    """An episode runner whose episodes are split over ranks."""

    def __init__(self, runner: EpisodeRunner, table: RankSplit) -> None:
        super().__init__(runner.make_env, runner.name, max_concurrent=runner.max_concurrent, max_steps=runner.max_steps)
        self.table = table

    async def play_all(
        self, specs: Sequence[EpisodeSpec], branching: Branching, on_episode: Callable[[Episode], None] | None = None
    ) -> list[Episode]:
        """Returns the episodes of `specs`, in order."""
        with self.table.weights_context():
            own = await super().play_all(self.table.local_part(specs), branching, on_episode)
        return self.table.gather_episodes(own, on_episode)
