"""Dynamic sampling (DAPO, Yu et al., 2025, sec. 3.2): another instance is played in place of an episode that gives no
gradient, because all siblings of every group have the same reward.

The instance that replaces an episode depends only on the episode's number and the attempt, so a step plays the same
instances whether its episodes are played together or one at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from palestra.core.types import AlgorithmState, Episode
from palestra.text.rollouts.metrics import REDRAWS_KEY
from palestra.text.rollouts.sources import ATTEMPT_STRIDE, EpisodeCallback, EpisodeSource
from palestra.text.rollouts.tree_rollout import Branching


class Refills(Protocol):
    """The part of an algorithm that decides which episodes are played again."""

    @property
    def branching(self) -> Branching: ...
    @property
    def max_redraws(self) -> int: ...
    def has_signal(self, episode: Episode) -> bool: ...


class RefilledEpisodes(NamedTuple):
    """The episodes of a step: those it trains on (`kept`), and those that were played and replaced, in order of play.

    Curricula observe both: only the replaced episodes show that an instance was replaced because it is solved.
    """

    kept: list[Episode]
    replaced: list[Episode]


async def play_refilled(
    source: EpisodeSource,
    algorithm: Refills,
    numbers: Sequence[int],
    state: AlgorithmState,
    on_episode: EpisodeCallback = None,
) -> RefilledEpisodes:
    """Plays the episodes of these numbers and keeps one for each, in order. An episode without signal is replaced by
    one on another instance, at most `max_redraws` times; the last one is kept in any case. The count is in
    `REDRAWS_KEY` of the first node's info.

    Calls `on_episode` with every episode played. Raises ValueError for a number of `ATTEMPT_STRIDE` or more if
    episodes may be replaced.
    """
    episodes = await source.play(numbers, algorithm.branching, state, on_episode)
    replaced = list[Episode]()
    if algorithm.max_redraws and max(numbers, default=0) >= ATTEMPT_STRIDE:
        raise ValueError(f"flat_groups: refill is for runs of fewer than {ATTEMPT_STRIDE} episodes")
    for attempt in range(1, algorithm.max_redraws + 1):
        flat = [i for i, episode in enumerate(episodes) if not algorithm.has_signal(episode)]
        if not flat:
            break
        replaced += [episodes[i] for i in flat]
        again = [numbers[i] + attempt * ATTEMPT_STRIDE for i in flat]
        for i, episode in zip(flat, await source.play(again, algorithm.branching, state, on_episode), strict=True):
            episodes[i] = episode
            if episode.nodes:
                episode.nodes[0].info = episode.nodes[0].info | {REDRAWS_KEY: attempt}
    return RefilledEpisodes(episodes, replaced)
