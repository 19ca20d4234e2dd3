"""The `play` tasks of a population, and the empirical game that their results fill."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from palestra.populations.empirical import EmpiricalGame, cells_with
from palestra.populations.payoffs import Members
from palestra.populations.population import Member, Player, Population
from palestra.populations.tasks import Result, Task


class Matches:
    """Creates tasks for the payoffs that are missing, and records their results.

    A cell has `games` games, a task `cells` cells; `seats` names the player at each seat. `played` counts games,
    without exact payoffs; `open` holds the names of pending tasks between frozen members.
    """

    def __init__(self, population: Population, seats: Sequence[Player], games: int, cells: int) -> None:
        self.population, self.games, self.cells = population, games, cells
        self.game = EmpiricalGame(seats)
        self.played = 0
        self.open: set[str] = set()
        self._sketched: dict[str, Sequence[Members]] = {}  # by task: the members that its snapshots stand for

    def first(self) -> list[Task]:
        """Returns tasks for the games among the population's initial members."""
        for player in self.population.players:
            for name in self.population.of(player):
                self.game.payoffs.add_member(player, name)
        return self._opened(self._tasks("play/first", self.game.payoffs.lacking(), self.games))

    def join(self, member: Member) -> list[Task]:
        """Adds a member to the population; returns tasks for its games against the other members."""
        self.population.add(member)
        self.game.payoffs.add_member(member.player, member.name)
        cells = cells_with(self.game.seats, self.game.payoffs.members, member.player, member.name)
        return self._opened(self._tasks(f"play/{member.name}", list(cells), self.games))

    def sketch(self, player: Player, name: str, training: Mapping[Player, Mapping[str, str]]) -> list[Task]:
        """Returns tasks for the games of the newest snapshot of `name` in which at least one policy in training takes
        part.

        `training` maps, for each player, the name that a policy in training will have to its newest snapshot.
        """
        names = {own: [*self.game.payoffs.members[own], *training.get(own, {})] for own in self.population.players}
        newest = {one: snapshot for snapshots in training.values() for one, snapshot in snapshots.items()}
        cells = [cell for cell in cells_with(self.game.seats, names, player, name) if newest.keys() & {*cell}]
        played = [tuple(newest.get(one, one) for one in cell) for cell in cells]
        tasks = self._tasks(f"sketch/{newest.get(name, name)}", played, self.games)
        for i, task in enumerate(tasks):
            self._sketched[task.name] = cells[i * self.cells : (i + 1) * self.cells]
        return tasks

    def more(self, strategies: np.ndarray, games: int, label: str) -> list[Task]:
        """Returns tasks for `games` more games, in the cells where the meta-strategy is most uncertain
        (`Payoffs.where_next`).

        `strategies` is the joint distribution [m_0, ..., m_n-1].
        """
        given = self.game.payoffs.where_next(strategies, games, max(1, games // 10))
        tasks: list[Task] = []
        for count in sorted(set(given.values())):
            cells = [members for members, own in given.items() if own == count]
            tasks += self._tasks(f"play/{label}-{count}", cells, count)
        return self._opened(tasks)

    def finished(self, task: Task, result: Result) -> None:
        """Records the result of a `play` task."""
        self.open.discard(task.name)
        cells = result["cells"]
        self.played += sum(0 if cell.get("exact") else int(cell["games"]) for cell in cells)
        if sketched := self._sketched.pop(task.name, None):
            for members, cell in zip(sketched, cells, strict=True):
                self.game.sketch(members, cell["mean"])
        else:
            for cell in cells:
                self.game.record(cell)

    def files(self, names: Iterable[str]) -> tuple[str, ...]:
        """Returns those of the names that have files, without duplicates."""
        members = self.population.members
        return tuple(name for name in dict.fromkeys(names) if name not in members or members[name].weights)

    def _opened(self, tasks: list[Task]) -> list[Task]:
        self.open |= {task.name for task in tasks}
        return tasks

    def _tasks(self, name: str, cells: Sequence[Members], games: int) -> list[Task]:
        parts = [cells[i : i + self.cells] for i in range(0, len(cells), self.cells)]
        return [
            Task(
                f"{name}/{number}",
                "play",
                {"cells": [list(cell) for cell in part], "games": games},
                self.files(one for cell in part for one in cell),
            )
            for number, part in enumerate(parts)
        ]
