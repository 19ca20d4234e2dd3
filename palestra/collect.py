"""Collects episodes of any policies in a text env as Parquet, for demonstrations, inspection or training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from palestra.episodes import SCHEMA, to_table
from palestra.evaluate import Table, set_table
from palestra.files import replaced
from palestra.rollouts.failures import check_any
from palestra.rollouts.figures import seat_returns, summary
from palestra.rollouts.play import Branching, Match, derive
from palestra.types import Episode, Seat

AT_ONCE = 256  # episodes per batch: played together, then written


async def collect_episodes(
    path: Path,
    out: Path,
    env: dict[str, Any],
    seats: dict[Seat, str],
    *,
    episodes: int,
    least: float | None,
    successes: bool,
    sampling: dict[str, Any],
    step: int | None,
    seed: int,
    here: bool = False,
    told: Callable[[int, int], None] = lambda played, kept: None,
) -> tuple[dict[Seat, str], dict[str, Any]]:
    """Plays `episodes` episodes and writes those worth keeping to `out`; returns the policy at each seat and the
    metrics of all played episodes with their count `kept`.

    Instances are those of split "train" unless `env` names another. An episode is kept if it did not fail, its `reward`
    is at least `least` (None: any), and, with `successes`, it is a success. `told` is called with (played, kept) after
    each batch. Raises ValueError if the path, env or seats are invalid (see `set_table`), RunFailed if all episodes
    failed.
    """
    table = set_table(path, env, seats, split="train", sampling=sampling, step=step, here=here)
    team, kept, all_played = table.team, 0, list[Episode]()
    with replaced(out) as whole, pq.ParquetWriter(whole, SCHEMA) as writer:
        for start in range(0, episodes, AT_ONCE):
            numbers = range(start, min(start + AT_ONCE, episodes))
            played = await table.arena.play_all([_match(table, team, seed, i) for i in numbers], Branching())
            good = [episode for episode in played if worth_keeping(episode, least, successes)]
            writer.write_table(to_table(0, good, first=kept))
            kept, all_played = kept + len(good), [*all_played, *played]
            told(len(all_played), kept)
        check_any(all_played, "collect")
    names = {seat: policy.name for seat, policy in team.items()}
    return names, {**summary(all_played), **seat_returns(all_played), "kept": kept}


def _match(table: Table, team: dict[Seat, Any], seed: int, i: int) -> Match:
    return Match((seed % 2**31 << 32) + i, team, derive(seed, "collect", i))


def worth_keeping(episode: Episode, least: float | None, successes: bool) -> bool:
    """Returns True if the episode did not fail and meets `least` and `successes`."""
    if episode.error is not None or (successes and not episode.success):
        return False
    return least is None or reward(episode) >= least


def reward(episode: Episode) -> float:
    """Returns the team reward of the played trajectory plus the mean of the seats' own rewards."""
    own = seat_returns([episode])["returns"]
    return summary([episode])["team_return"] + sum(own.values()) / len(own)
