"""Compares two populations: relative population performance."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from palestra.config import load, override
from palestra.launch.population import PopulationConfig, build_population, players_by_seat
from palestra.launch.population_config import validate_population
from palestra.populations.normal_form.equilibria import game_value
from palestra.populations.payoffs import MemberProfile
from palestra.populations.population import Player
from palestra.populations.scheduler import MEMBERS_DIR
from palestra.populations.tasks import PlayTask, played_cells, run_tasks
from palestra.report.population_data import PopulationRecord, read_record

CELLS_PER_TASK = 16  # payoff cells per task


class Comparison(NamedTuple):
    """Result of a comparison."""

    performance: float
    """Relative population performance (Balduzzi et al., 2019, definition 3), averaged over seats: the first
    population's mean return per game when both play an equilibrium of the game between their members."""
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
    with (done, total) tasks. Raises ValueError if the runs are of different games, or the game has more than two seats.
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
    setup = build_population(validate_population(override(load(ours / "config.yaml"), settings or [])))
    cells = {own: _cells(sides[0], sides[1], own) for own in dict.fromkeys(seats)}
    folders = sides[0].folders | sides[1].folders
    tasks = [task for own, some in cells.items() for task in _tasks(some, own, games, folders)]
    earned: dict[MemberProfile, tuple[float, ...]] = {}
    backend = setup.open_backend(setup.make_worker)
    try:
        for name, folder in folders.items():
            backend.add_member(name, folder)
        for number, done in enumerate(run_tasks(backend, tasks), 1):
            earned |= {members: cell.mean for members, cell in played_cells(done.task, done.result)}
            on_progress(number, len(tasks))
    finally:
        backend.close()
    returns = {}
    for own, some in cells.items():
        flat = np.array([earned[cell][seats.index(own)] for cell in some])
        returns[own] = flat.reshape(len(sides[0].members[own]), -1)
    return Comparison(float(np.mean([game_value(table) for table in returns.values()])), returns)


def _alike(configs: list[PopulationConfig], paths: tuple[Path, Path]) -> None:
    """Raises ValueError if the runs differ in env, kind of oracle or action selection."""
    first, second = (
        {"env": c.env, "oracle": c.oracle.type, "greedy": getattr(c.oracle, "greedy", None)} for c in configs
    )
    for key, held in first.items():
        if held != second[key]:
            raise ValueError(
                f"{paths[0]} and {paths[1]} cannot be compared: {key} is {held} in one and {second[key]} in the other"
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


def _cells(ours: PopulationSide, theirs: PopulationSide, own: Player) -> list[MemberProfile]:
    """Returns the line-ups, by seat, in which the first population is player `own`: every member of the first with
    every member of the second, ordered by member of the first."""
    at = ours.seats.index(own)
    pairs = itertools.product(ours.members[own], theirs.members[ours.seats[1 - at]])
    return [(row, column) if at == 0 else (column, row) for row, column in pairs]


def _tasks(cells: list[MemberProfile], own: Player, games: int, folders: dict[str, Path]) -> list[PlayTask]:
    tasks = []
    for i in range(0, len(cells), CELLS_PER_TASK):
        some = cells[i : i + CELLS_PER_TASK]
        files = tuple(dict.fromkeys(name for cell in some for name in cell if name in folders))
        tasks.append(PlayTask(f"compare/{own}/{i}", cells=tuple(some), games_per_cell=games, members=files))
    return tasks
