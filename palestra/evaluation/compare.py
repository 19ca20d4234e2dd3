"""Compares two populations: relative population performance."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from palestra.core.config import load, override
from palestra.evaluation.crossplay import CELLS_PER_TASK, open_workers, play_task
from palestra.evaluation.report.population_data import PopulationRecord, read_record
from palestra.parallel.tasks import run_tasks
from palestra.populations.build.build import ExactOracle, PopulationConfig, players_by_seat
from palestra.populations.build.validation import validate_population
from palestra.populations.normal_form.equilibria import maximin
from palestra.populations.payoffs import MemberProfile, PayoffCell
from palestra.populations.population import Player
from palestra.populations.scheduler import MEMBERS_DIR
from palestra.populations.tasks import PlayTask, played_cells


class Comparison(NamedTuple):
    """Result of a comparison."""

    performance: float
    """Relative population performance (Balduzzi et al., 2019, definition 3), averaged over seats: the first
    population's mean return per game when both play an equilibrium of the game between their members. If a game's
    returns add up to a constant other than 0, by how much it exceeds half of that."""
    stderr: float
    """Standard error of `performance`, for fixed equilibria; 0 if payoffs are exact."""
    returns: dict[Player, np.ndarray]
    """Mean returns of the first population, by the player it takes: float64 [own members, members of the other]."""


class PopulationSide(NamedTuple):
    """One population: members by player, and the weight folders of those that have weights."""

    seats: tuple[Player, ...]
    members: dict[Player, list[str]]
    folders: dict[str, Path]


def compare_populations(
    ours: Path,
    theirs: Path,
    games: int,
    settings: list[str] | None = None,
    on_progress: Callable[[int, int], None] = lambda done, of: None,
) -> Comparison:
    """Plays every member of one run against every member of another, `games` games each (none if payoffs are computed
    exactly), and returns the comparison.

    Neither run is changed. `settings` override the config of the first run, whose workers play. `on_progress` is called
    with (done, total) tasks. Raises ValueError if the runs are of different games, if one has a population for each
    seat and the other does not, or if the game has more than two seats or is not constant-sum.
    """
    configs = [validate_population(load(path / "config.yaml")) for path in (ours, theirs)]
    _alike(configs, (ours, theirs))
    records = [read_record(path, players_by_seat(c)) for path, c in zip((ours, theirs), configs, strict=True)]
    sides = [_side(number, record) for number, record in enumerate(records)]
    seats = sides[0].seats
    if len(seats) != 2:
        raise ValueError(
            f"only populations of two-seat games can be compared; the game of {ours} has {len(seats)} seats"
        )
    config = validate_population(override(load(ours / "config.yaml"), settings or []))
    cells = {player: _cells(sides[0], sides[1], player) for player in dict.fromkeys(seats)}
    folders = sides[0].folders | sides[1].folders
    exact = isinstance(config.oracle, ExactOracle) or config.oracle.payoffs == "exact"
    counts = [games] if exact else [max(2, games // 2), max(2, games - games // 2)]
    tasks = []
    halves: dict[str, int] = {}
    for half, count in enumerate(counts):
        for player, some in cells.items():
            new_tasks = _tasks(some, f"{player}/{half}", count, folders)
            halves |= {task.name: half for task in new_tasks}
            tasks += new_tasks
    earned: list[dict[MemberProfile, PayoffCell]] = [{} for _ in counts]
    with open_workers(config, folders) as backend:
        for number, done in enumerate(run_tasks(backend, tasks), 1):
            earned[halves[done.task.name]] |= dict(played_cells(done.task, done.result))
            on_progress(number, len(tasks))
    returns: dict[Player, np.ndarray] = {}
    estimates = []
    for player, some in cells.items():
        at = seats.index(player)
        shape = (len(sides[0].members[player]), -1)
        played, tables, errors = [], [], []
        for of_half in earned:
            payoffs = [of_half[cell] for cell in some]
            played.append(payoffs)
            tables.append(np.reshape([(cell.mean[at] - cell.mean[1 - at]) / 2 for cell in payoffs], shape))
            errors.append(np.reshape([cell.stderr[at] for cell in payoffs], shape))
        _check_constant_sum(list(chain.from_iterable(played)), ours)
        merged = [one.merge(two) for one, two in zip(played[0], played[-1], strict=True)]
        returns[player] = np.array([cell.mean[at] for cell in merged]).reshape(shape)
        estimates.append(estimate_value(tables, errors))
    values, stderrs = np.array(estimates).T
    return Comparison(float(values.mean()), float(np.sqrt(np.sum(stderrs**2)) / len(estimates)), returns)


def estimate_value(tables: Sequence[np.ndarray], stderrs: Sequence[np.ndarray]) -> tuple[float, float]:
    """Returns an estimate of the value of a zero-sum game and its standard error for fixed equilibria.

    `tables` are two independent estimates of the row player's payoffs [rows, columns], with their standard errors: the
    equilibrium of each is scored on the other. If it were scored on the payoffs that it was chosen by, noise would
    favour the player with more members. A single table is exact.
    """
    solved = [(maximin(table), maximin(-table.T)) for table in tables]
    scored = zip(solved, tables[::-1], stderrs[::-1], strict=True)
    estimates = [(row @ table @ column, row**2 @ stderr**2 @ column**2) for (row, column), table, stderr in scored]
    values, variances = np.array(estimates).T
    return float(values.mean()), float(np.sqrt(variances.sum()) / len(estimates))


def _check_constant_sum(cells: Sequence[PayoffCell], path: Path) -> None:
    totals = np.array([sum(cell.mean) for cell in cells])
    if np.ptp(totals) > 1e-6 * max(1.0, float(np.abs(totals).max())):
        raise ValueError(
            f"only populations of zero-sum games can be compared; in that of {path} both players' returns add up to "
            f"{totals.min():.3g} in one cell and to {totals.max():.3g} in another"
        )


def _alike(configs: list[PopulationConfig], paths: tuple[Path, Path]) -> None:
    """Raises ValueError if the runs differ in env, kind of oracle, action selection, or in whether one population plays
    every seat."""
    first, second = (
        {"env": c.env, "oracle": c.oracle.type, "greedy": getattr(c.oracle, "greedy", None)}
        | {"symmetric": len(set(players_by_seat(c))) == 1}
        for c in configs
    )
    for key, value in first.items():
        if value != second[key]:
            raise ValueError(
                f"{paths[0]} and {paths[1]} cannot be compared: {key} is {value} in one and {second[key]} in the other"
            )


def _side(number: int, record: PopulationRecord) -> PopulationSide:
    """Returns one population. Members with weights get names that begin with `number`, since two runs may use the same
    names; members without weights are identical in both runs."""
    called = {member.name: f"{number}:{member.name}" if member.weights else member.name for member in record.members}
    members = {player: [called[name] for name in names] for player, names in record.payoffs.members.items()}
    weighty = [member.name for member in record.members if member.weights]
    return PopulationSide(
        record.payoffs.seats, members, {called[name]: record.path / MEMBERS_DIR / name for name in weighty}
    )


def _cells(ours: PopulationSide, theirs: PopulationSide, player: Player) -> list[MemberProfile]:
    """Returns the line-ups, by seat, in which the first population is player `player`: every member of the first with
    every member of the second, ordered by member of the first."""
    at = ours.seats.index(player)
    pairs = itertools.product(ours.members[player], theirs.members[ours.seats[1 - at]])
    return [(row, column) if at == 0 else (column, row) for row, column in pairs]


def _tasks(cells: list[MemberProfile], name: str, games: int, folders: dict[str, Path]) -> list[PlayTask]:
    starts = range(0, len(cells), CELLS_PER_TASK)
    return [play_task(f"compare/{name}/{i}", cells[i : i + CELLS_PER_TASK], games, folders) for i in starts]
