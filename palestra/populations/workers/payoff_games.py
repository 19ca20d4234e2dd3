"""Plays games between frozen members for many payoff cells at once: each env of a vectorised env plays the next due
game.

Shapes: `C` cells, `N` seats, `L` line-ups, `F` finished games.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from palestra.core.seeding import derive_seed
from palestra.populations.payoffs import PayoffCell
from palestra.populations.workers.game_results import check_cells, payoff_cell
from palestra.vector.policies.frozen import FrozenMember
from palestra.vector.policies.mixture import LineupSchedule, Mixture
from palestra.vector.rollouts.rollout import VectorRollout

STEPS_PER_SWEEP = 16  # joint steps of each rollout


def play_cells(
    sweeper: VectorRollout,
    members: Mapping[str, FrozenMember],
    cells: Sequence[Sequence[str]],
    games: int,
    seed: int,
    *,
    rotate_seats: bool = False,
) -> list[PayoffCell]:
    """Plays `games` games of each cell and returns its statistics.

    A cell holds keys of `members`, one for each seat. With `rotate_seats` they rotate over all seats, so that each
    member plays every seat as equally often as `games` allows. All games that start for a cell are played to their end
    and counted. Raises ValueError for a cell without a member for each seat, and RunFailed if a game does not
    end.
    """
    check_cells(cells, len(sweeper.env.seats))
    N, numbers = len(sweeper.env.seats), {name: number for number, name in enumerate(members)}
    rotations = N if rotate_seats else 1
    turned = [(names, r) for names in cells for r in range(rotations)]
    lineups = np.array([[numbers[names[(seat + r) % N]] for seat in range(N)] for names, r in turned])
    times = np.array([games // rotations + (r < games % rotations) for _, r in turned])
    mixture = Mixture(sweeper.env, range(N), members, LineupSchedule(lineups, times), "cells")
    sweeper.restart(derive_seed(seed, "games") % 2**62 + np.arange(sweeper.env.num_envs))
    tags, returns = _played(sweeper, mixture, int(times.sum()), seed)
    by_place = returns[np.arange(len(tags))[:, None], (np.arange(N) - (tags % rotations)[:, None]) % N]
    owners = tags // rotations
    return [payoff_cell(by_place[owners == number]) for number in range(len(cells))]


def _played(sweeper: VectorRollout, mixture: Mixture, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Plays `count` games; returns the line-up's index int64 [count] and the returns [count, N] of each game."""
    tags: list[np.ndarray] = []
    returns: list[np.ndarray] = []
    chunk, left = 0, count
    while left:
        batch = sweeper.collect([mixture], STEPS_PER_SWEEP, derive_seed(seed, chunk))
        sweeper.check_episodes_end()
        tag, _ = mixture.played_members(batch)
        tags.append(tag[tag >= 0])
        returns.append(batch.episode_stats["returns"][tag >= 0])
        left -= len(tags[-1])
        chunk += 1
    return np.concatenate(tags), np.concatenate(returns)
