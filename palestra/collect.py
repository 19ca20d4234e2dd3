"""Episodes of any players in a text env, kept as Parquet: demonstrations, data to look at, data to train on."""

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

AT_ONCE = 256  # episodes played, and then written, together


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
    """Who sat where, and the figures of what was played and `kept`; the episodes worth keeping are then in `out`.

    Instances are those of split "train", unless `env` says otherwise. An episode is kept if it did not fail, has
    `reward` of at least `least`, and is a success where only `successes` are wanted. `told` hears of progress.
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
    if episode.error is not None or (successes and not episode.success):
        return False
    return least is None or reward(episode) >= least


def reward(episode: Episode) -> float:
    """The team's reward over the line that was played, and the mean of the seats' own."""
    own = seat_returns([episode])["returns"]
    return summary([episode])["team_return"] + sum(own.values()) / len(own)
