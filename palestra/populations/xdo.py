"""Extensive-form double oracle (XDO; McAleer et al., 2021) as a plan of tasks, for two-player zero-sum games with
rules.

PSRO mixes whole policies, and may need as many as there are combinations of actions. XDO mixes actions at each
information state: each player's best response to the last solution allows the actions that it prefers, and the game
restricted to all allowed actions is solved by CFR+. With networks as responses this is NXDO. A solution is a member
whose policy is a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from palestra.config import Strict
from palestra.populations.population import Member, Player, Population
from palestra.populations.tasks import Result, Task
from palestra.types import TEAM, Metrics


class XDOConfig(Strict):
    """Extensive-form double oracle: iterations, responses, and the solution of the restricted game."""

    type: Literal["xdo"] = "xdo"
    iterations: int = Field(10, ge=1)
    """Iterations, each with one response for each player."""
    env_steps: int = Field(100_000, ge=1)
    """Env steps of each response."""
    rounds: int = Field(1000, ge=1)
    """Iterations of CFR+ on the restricted game."""
    assess: int = Field(1, ge=0)
    """NashConv is measured every so many iterations; 0: never."""
    stop: float = Field(0.0, ge=0)
    """The run ends once NashConv is at most this; 0: never."""


class XDO:
    """Plan of XDO. `population` holds the initial member; its two players have one seat each."""

    def __init__(self, config: XDOConfig, population: Population, seats: Sequence[Player] = ()) -> None:
        """Raises ValueError unless there are two players with one seat each and an initial member."""
        self.config, self.population = config, population
        self.players = population.players
        if len(self.players) != 2 or (seats and tuple(seats) != self.players):
            raise ValueError(
                f"xdo is for two players with a population each, and here are {', '.join(seats or self.players)}: use "
                "psro"
            )
        if not population.members:
            raise ValueError("xdo has no member to begin with: add one, for example uniform")
        self.solution = next(iter(population)).name
        self.responses: dict[Player, list[str]] = {player: [] for player in self.players}
        self.number, self.env_steps, self.allowed = 0, 0, 0
        self.nash_convs: dict[int, float] = {}
        self.over = False
        self._notes: dict[str, Metrics] = {}

    def begin(self) -> list[Task]:
        """Returns both players' first responses."""
        return self._responses()

    def finished(self, task: Task, result: Result) -> list[Task]:
        """Records a result; returns the next responses, the solve task or the assessment."""
        self._notes = {}
        if task.kind == "assess":
            self._assessed(task, result)
            return []
        if self.over:
            return []  # tasks that were running when NashConv fell to `stop`
        return self._trained(task, result) if task.kind == "train" else self._solved(task, result)

    def notes(self, task: Task, result: Result) -> dict[str, Metrics]:
        """Metrics of a response, of a solution or of NashConv. `allowed` counts actions over all information states."""
        return self._notes

    def summary(self) -> dict[str, float]:
        """Progress: iterations done and in all, members, env steps, allowed actions, and the latest NashConv."""
        last = {"nash_conv": self.nash_convs[max(self.nash_convs)]} if self.nash_convs else {}
        return {"iteration": self.number, "iterations": self.config.iterations, **self._counts(), **last}

    def _counts(self) -> Metrics:
        return {"members": len(self.population), "games": 0, "env_steps": self.env_steps, "allowed": self.allowed}

    # ---- results

    def _trained(self, task: Task, result: Result) -> list[Task]:
        player, number = task.order["player"], self.number + 1
        self.responses[player].append(task.makes)
        self.population.add(Member(task.makes, player, f"members/{task.makes}", None, {"iteration": number}))
        self.env_steps += int(result["env_steps"])
        self._notes = {player: {"iteration": number, "env_steps": self.env_steps, "return": result["return"]}}
        return [self._solve(number)] if all(len(own) == number for own in self.responses.values()) else []

    def _solved(self, task: Task, result: Result) -> list[Task]:
        self.number, self.solution, self.allowed = self.number + 1, task.makes, int(result["allowed"])
        self.population.add(Member(task.makes, "", f"members/{task.makes}", None, {"iteration": self.number}))
        mixed: Metrics = {"iteration": self.number, f"mix/{task.makes}": 1.0}
        self._notes = {TEAM: {"iteration": self.number, **self._counts()}, **dict.fromkeys(self.players, mixed)}
        self.over |= self.number == self.config.iterations
        return [*self._assessment(), *([] if self.over else self._responses())]

    def _assessed(self, task: Task, result: Result) -> None:
        number, measured = int(task.order["iteration"]), float(result["nash_conv"])
        self.nash_convs[number] = measured
        self.over |= measured <= self.config.stop > 0
        self._notes = {TEAM: {"iteration": number, "nash_conv": measured, "exploitability": result["exploitability"]}}

    # ---- tasks

    def _responses(self) -> list[Task]:
        """Returns both players' responses to the last solution."""
        first, second = self.players
        return [self._response(first, second), self._response(second, first)]

    def _response(self, player: Player, other: Player) -> Task:
        makes = f"{player}-{self.number + 1}"
        order = {"player": player, "opponents": {other: {self.solution: 1.0}}, "env_steps": self.config.env_steps}
        return Task(f"train/{makes}", "train", order, self._files([self.solution]), makes)

    def _solve(self, number: int) -> Task:
        makes = f"solution-{number}"
        responses = {player: list(own) for player, own in self.responses.items()}
        order = {"iteration": number, "responses": responses, "rounds": self.config.rounds}
        files = tuple(name for own in self.responses.values() for name in own)
        return Task(f"solve/{number}", "solve", order, files, makes)

    def _assessment(self) -> list[Task]:
        every, last = self.config.assess, self.number == self.config.iterations
        if not every or (self.number % every and not last):
            return []
        strategies = {player: {self.solution: 1.0} for player in self.players}
        order = {"iteration": self.number, "strategies": strategies}
        return [Task(f"assess/{self.number}", "assess", order, self._files([self.solution]))]

    def _files(self, names: Sequence[str]) -> tuple[str, ...]:
        """Returns those of the members that have files."""
        return tuple(name for name in names if self.population.members[name].weights)
