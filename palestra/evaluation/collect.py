"""Collects episodes of any policies in a text env as Parquet, for demonstrations, inspection or training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from palestra.core.failures import check_not_all_failed
from palestra.core.files import replacing_file
from palestra.core.seeding import derive_seed
from palestra.core.types import Episode, Seat
from palestra.evaluation.text import TextEvalSetup
from palestra.runs.episodes import SCHEMA, to_table
from palestra.text.rollouts.metrics import episode_metrics, episode_return, seat_returns
from palestra.text.rollouts.tree_rollout import Branching, EpisodeSpec

BATCH_EPISODES = 256  # episodes per batch: played together, then written


@dataclass(frozen=True)
class EpisodeFilter:
    """Which episodes are kept: those of at least `min_return` (None: any), and with `successes` only those that are a
    success, of any seat if they have their own. Failed episodes never are."""

    min_return: float | None = None
    successes: bool = False

    def passes(self, episode: Episode) -> bool:
        """Returns True if the episode has a trajectory that was not lost, and meets the filter."""
        if episode.error is not None or not episode.leaves():
            return False
        if self.successes and not (episode.success or any(episode.seat_success.values())):
            return False
        return self.min_return is None or episode_return(episode) >= self.min_return


async def collect_episodes(
    setup: TextEvalSetup,
    out: Path,
    *,
    episodes: int,
    seed: int,
    keep: EpisodeFilter,
    on_progress: Callable[[int, int], None] = lambda played, num_kept: None,
) -> tuple[dict[Seat, str], dict[str, Any]]:
    """Plays `episodes` episodes of the setup's split and writes those that `keep` passes to `out`; returns the policy
    at each seat and the metrics of all played episodes with their count `kept`.

    `on_progress` is called with (played, kept) after each batch. Raises RunFailed if all episodes failed.
    """
    team = setup.policies
    num_kept = 0
    all_played = list[Episode]()
    with replacing_file(out) as file, pq.ParquetWriter(file, SCHEMA) as writer:
        for start in range(0, episodes, BATCH_EPISODES):
            numbers = range(start, min(start + BATCH_EPISODES, episodes))
            first = seed % 2**31 << 32
            specs = [EpisodeSpec(first + i, team, derive_seed(seed, "collect", i)) for i in numbers]
            played = await setup.runner.play_all(specs, Branching())
            good = [episode for episode in played if keep.passes(episode)]
            writer.write_table(to_table(0, good, first=num_kept))
            num_kept = num_kept + len(good)
            all_played = [*all_played, *played]
            on_progress(len(all_played), num_kept)
        check_not_all_failed(all_played, "collect")
    names = {seat: policy.name for seat, policy in team.items()}
    return names, {**episode_metrics(all_played), **seat_returns(all_played), "kept": num_kept}
