"""The `play` tasks of a population, and the empirical game that they fill."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from palestra.populations.empirical import EmpiricalGame, cells_with
from palestra.populations.payoffs import Members
from palestra.populations.population import Member, Player, Population
from palestra.populations.tasks import Result, Task


class Matches:
    """Who has yet to play whom. A cell is of `games` games, a task of `cells` cells; `seats` names the player at each
    seat. `played` counts games, without payoffs that were worked out; `open` are tasks of frozen members."""

    def __init__(self, population: Population, seats: Sequence[Player], games: int, cells: int) -> None:
        self.population, self.games, self.cells = population, games, cells
        self.game = EmpiricalGame(seats)
        self.played = 0
        self.open: set[str] = set()
        self._sketched: dict[str, Sequence[Members]] = {}  # by task of snapshots: whom they stand for

    def first(self) -> list[Task]:
        """Games of the members that the population has."""
        for player in self.population.players:
            for name in self.population.of(player):
                self.game.payoffs.add_member(player, name)
        return self._opened(self._tasks("play/first", self.game.payoffs.lacking(), self.games))

    def join(self, member: Member) -> list[Task]:
        """Adds a member to the population; its games against each other member."""
        self.population.add(member)
        self.game.payoffs.add_member(member.player, member.name)
        cells = cells_with(self.game.seats, self.game.payoffs.members, member.player, member.name)
        return self._opened(self._tasks(f"play/{member.name}", list(cells), self.games))

    def sketch(self, player: Player, name: str, training: Mapping[Player, Mapping[str, str]]) -> list[Task]:
        """Games of the newest snapshot of `name`, all those in which somebody takes part who still trains; `training`
        gives their newest snapshots, by player and the name that each is to have."""
        names = {own: [*self.game.payoffs.members[own], *training.get(own, {})] for own in self.population.players}
        newest = {one: snapshot for snapshots in training.values() for one, snapshot in snapshots.items()}
        cells = [cell for cell in cells_with(self.game.seats, names, player, name) if newest.keys() & {*cell}]
        played = [tuple(newest.get(one, one) for one in cell) for cell in cells]
        tasks = self._tasks(f"sketch/{newest.get(name, name)}", played, self.games)
        for i, task in enumerate(tasks):
            self._sketched[task.name] = cells[i * self.cells : (i + 1) * self.cells]
        return tasks

    def more(self, strategies: np.ndarray, games: int, label: str) -> list[Task]:
        """`games` more games, where a meta-strategy is least certain."""
        given = self.game.payoffs.where_next(strategies, games, max(1, games // 10))
        tasks: list[Task] = []
        for count in sorted(set(given.values())):
            cells = [members for members, own in given.items() if own == count]
            tasks += self._tasks(f"play/{label}-{count}", cells, count)
        return self._opened(tasks)

    def finished(self, task: Task, result: Result) -> None:
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
        """Those among the names that have files, each once."""
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
