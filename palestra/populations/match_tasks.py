"""The `play` tasks of a population, and the empirical game that their results fill."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from palestra.populations.empirical import EmpiricalGame, cells_containing
from palestra.populations.payoffs import MemberProfile
from palestra.populations.population import Member, Player, Population
from palestra.populations.tasks import ResultDict, Task


class MatchQueue:
    """Creates tasks for the payoffs that are missing, and records their results.

    A cell has `games` games, a task `cells` cells; `seats` names the player at each seat. `num_games` counts games,
    without exact payoffs; `open_tasks` holds the names of pending tasks between frozen members.
    """

    def __init__(self, population: Population, seats: Sequence[Player], games: int, cells: int) -> None:
        self.population, self.games_per_cell, self.cells_per_task = population, games, cells
        self.empirical_game = EmpiricalGame(seats)
        self.num_games = 0
        self.open_tasks: set[str] = set()
        self._sketched: dict[str, Sequence[MemberProfile]] = {}  # by task: the members that its snapshots stand for

    def initial_tasks(self) -> list[Task]:
        """Returns tasks for the games among the population's initial members."""
        for player in self.population.players:
            for name in self.population.names_of(player):
                self.empirical_game.payoffs.add_member(player, name)
        return self._opened(self._tasks("play/first", self.empirical_game.payoffs.cells_below(), self.games_per_cell))

    def add_member(self, member: Member) -> list[Task]:
        """Adds a member to the population; returns tasks for its games against the other members."""
        self.population.add(member)
        self.empirical_game.payoffs.add_member(member.player, member.name)
        cells = cells_containing(
            self.empirical_game.seats, self.empirical_game.payoffs.members, member.player, member.name
        )
        return self._opened(self._tasks(f"play/{member.name}", list(cells), self.games_per_cell))

    def snapshot_tasks(self, player: Player, name: str, training: Mapping[Player, Mapping[str, str]]) -> list[Task]:
        """Returns tasks for the games of the newest snapshot of `name` in which at least one policy in training takes
        part.

        `training` maps, for each player, the name that a policy in training will have to its newest snapshot.
        """
        names = {
            own: [*self.empirical_game.payoffs.members[own], *training.get(own, {})] for own in self.population.players
        }
        newest = {one: snapshot for snapshots in training.values() for one, snapshot in snapshots.items()}
        cells = [
            cell for cell in cells_containing(self.empirical_game.seats, names, player, name) if newest.keys() & {*cell}
        ]
        played = [tuple(newest.get(one, one) for one in cell) for cell in cells]
        tasks = self._tasks(f"sketch/{newest.get(name, name)}", played, self.games_per_cell)
        for i, task in enumerate(tasks):
            self._sketched[task.name] = cells[i * self.cells_per_task : (i + 1) * self.cells_per_task]
        return tasks

    def adaptive_tasks(self, strategies: np.ndarray, games: int, label: str) -> list[Task]:
        """Returns tasks for `games` more games, in the cells where the meta-strategy is most uncertain
        (`PayoffTable.allocate_games`).

        `strategies` is the joint distribution [m_0, ..., m_n-1].
        """
        given = self.empirical_game.payoffs.allocate_games(strategies, games, max(1, games // 10))
        tasks: list[Task] = []
        for count in sorted(set(given.values())):
            cells = [members for members, own in given.items() if own == count]
            tasks += self._tasks(f"play/{label}-{count}", cells, count)
        return self._opened(tasks)

    def record_result(self, task: Task, result: ResultDict) -> None:
        """Records the result of a `play` task."""
        self.open_tasks.discard(task.name)
        cells = result["cells"]
        self.num_games += sum(0 if cell.get("exact") else int(cell["games"]) for cell in cells)
        if sketched := self._sketched.pop(task.name, None):
            for members, cell in zip(sketched, cells, strict=True):
                self.empirical_game.set_snapshot_returns(members, cell["mean"])
        else:
            for cell in cells:
                self.empirical_game.add_games(cell)

    def names_with_files(self, names: Iterable[str]) -> tuple[str, ...]:
        """Returns those of the names that have files, without duplicates."""
        members = self.population.members
        return tuple(name for name in dict.fromkeys(names) if name not in members or members[name].weights)

    def _opened(self, tasks: list[Task]) -> list[Task]:
        self.open_tasks |= {task.name for task in tasks}
        return tasks

    def _tasks(self, name: str, cells: Sequence[MemberProfile], games: int) -> list[Task]:
        parts = [cells[i : i + self.cells_per_task] for i in range(0, len(cells), self.cells_per_task)]
        return [
            Task(
                f"{name}/{number}",
                "play",
                {"cells": [list(cell) for cell in part], "games": games},
                self.names_with_files(one for cell in part for one in cell),
            )
            for number, part in enumerate(parts)
        ]
