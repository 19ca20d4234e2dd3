"""Plays games between frozen members for many payoff cells at once: each env of a vectorised env plays the next due
game.

Shapes: `C` cells, `N` seats, `L` line-ups, `F` finished games.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from palestra.oracles.tally import cell
from palestra.policies.frozen import FrozenMember
from palestra.policies.mixture import Mixture, Schedule
from palestra.populations.tasks import Result
from palestra.rollouts.play import derive
from palestra.rollouts.sweep import Sweeper

STEPS = 16  # joint steps of each sweep


def play_cells(
    sweeper: Sweeper,
    cast: Mapping[str, FrozenMember],
    cells: Sequence[Sequence[str]],
    games: int,
    seed: int,
    *,
    turns: bool = False,
) -> list[Result]:
    """Plays `games` games of each cell and returns one result per cell.

    A cell holds names of the cast, one for each seat. With `turns` they rotate over all seats, each as often at every
    seat as `games` allows. All games that start for a cell are played to their end and counted.
    """
    N, numbers = len(sweeper.env.seats), {name: number for number, name in enumerate(cast)}
    rotations = N if turns else 1
    turned = [(names, r) for names in cells for r in range(rotations)]
    lineups = np.array([[numbers[names[(seat + r) % N]] for seat in range(N)] for names, r in turned])
    times = np.array([games // rotations + (r < games % rotations) for _, r in turned])
    mixture = Mixture(sweeper.env, range(N), cast, Schedule(lineups, times), "cells")
    sweeper.restart(derive(seed, "games") % 2**62 + np.arange(sweeper.env.games))
    tags, returns = _played(sweeper, mixture, int(times.sum()), seed)
    by_place = returns[np.arange(len(tags))[:, None], (np.arange(N) - (tags % rotations)[:, None]) % N]
    owners = tags // rotations
    return [cell(by_place[owners == number]) for number in range(len(cells))]


def _played(sweeper: Sweeper, mixture: Mixture, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns line-ups int64 [count] and returns [count, N] of all games."""
    tags: list[np.ndarray] = []
    returns: list[np.ndarray] = []
    chunk, left = 0, count
    while left:
        batch = sweeper.sweep([mixture], STEPS, derive(seed, chunk))
        tag, _ = mixture.played(batch)
        tags.append(tag[tag >= 0])
        returns.append(batch.games["returns"][tag >= 0])
        left -= len(tags[-1])
        chunk += 1
    return np.concatenate(tags), np.concatenate(returns)
