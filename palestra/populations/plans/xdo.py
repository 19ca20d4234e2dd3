"""Extensive-form double oracle (XDO; McAleer et al., 2021) as a plan of tasks, for two-player zero-sum games with
rules.

PSRO mixes whole policies, and may need as many as there are combinations of actions. XDO mixes actions at each
information state: each player's best response to the last solution adds the actions that it prefers to the allowed
ones, and the game restricted to the allowed actions is solved by CFR+. With networks as responses this is NXDO. A
solution is a member whose policy is a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Literal

from pydantic import Field

from palestra.core.config import StrictModel
from palestra.core.types import TEAM, Metrics
from palestra.parallel.tasks import Task
from palestra.populations.plans.iterative_plan import IterativePlan
from palestra.populations.population import Member, Player, Population
from palestra.populations.tasks import Opponents, SolveResult, SolveTask, TrainResult, TrainTask


class XDOConfig(StrictModel):
    """Extensive-form double oracle: iterations, responses, and the solution of the restricted game."""

    type: Literal["xdo"] = "xdo"
    iterations: int = Field(10, ge=1)
    """Iterations, each with one response for each player."""
    env_steps: int = Field(100_000, ge=1)
    """Env steps of each response."""
    cfr_iterations: int = Field(1000, ge=1)
    """Iterations of CFR+ on the restricted game."""
    nash_conv_every: int = Field(1, ge=0)
    """Measure NashConv every n iterations; 0: never."""
    stop_nash_conv: float = Field(0.0, ge=0)
    """The run ends once NashConv is at most this; 0: never."""


class XDO(IterativePlan):
    """Plan of XDO. `population` holds the initial member; its two players have one seat each.

    Metrics are of a response or a solution, or NashConv. `allowed` counts actions over all information states.
    """

    def __init__(self, config: XDOConfig, population: Population, seats: Sequence[Player] = ()) -> None:
        """Raises ValueError unless there are two players with one seat each and an initial member."""
        super().__init__(population, config.iterations, config.nash_conv_every, config.stop_nash_conv)
        self.config = config
        self.players = population.players
        if len(self.players) != 2 or (seats and tuple(seats) != self.players):
            raise ValueError(
                f"xdo needs two players with one population each; this game has {', '.join(seats or self.players)}: "
                "use psro"
            )
        if not population.members:
            raise ValueError("xdo needs an initial member: add one, for example uniform")
        self.solution = next(iter(population)).name
        self.responses: dict[Player, list[str]] = {player: [] for player in self.players}
        self.num_solutions = 0
        self.num_allowed = 0

    def initial_tasks(self) -> Sequence[Task]:
        return self._responses()

    @property
    def iteration(self) -> int:
        return self.num_solutions

    def _counts(self) -> Metrics:
        return {"members": len(self.population), "games": 0, "env_steps": self.env_steps, "allowed": self.num_allowed}

    # ---- results

    def _record_training(self, task: TrainTask, result: TrainResult) -> Sequence[Task]:
        if self.is_done:  # the task was running when NashConv fell to `stop_nash_conv`
            return []
        player = task.player
        number = self.iteration + 1
        self.responses[player].append(task.output_member)
        self.population.add(
            Member(task.output_member, player, f"members/{task.output_member}", None, {"iteration": number})
        )
        self.env_steps += result.env_steps
        self._metrics = {player: {"iteration": number, "env_steps": self.env_steps, "return": result.return_metric}}
        return [self._solve(number)] if all(len(names) == number for names in self.responses.values()) else []

    def _record_solution(self, task: SolveTask, result: SolveResult) -> Sequence[Task]:
        if self.is_done:
            return []
        self.num_solutions += 1
        self.solution = task.output_member
        self.num_allowed = result.num_allowed_actions
        self.population.add(
            Member(task.output_member, "", f"members/{task.output_member}", None, {"iteration": self.iteration})
        )
        mixed: Metrics = {"iteration": self.iteration, f"mix/{task.output_member}": 1.0}
        self._metrics = {TEAM: {"iteration": self.iteration, **self._counts()}, **dict.fromkeys(self.players, mixed)}
        self.is_done |= self.iteration == self.config.iterations
        strategies = {player: {self.solution: 1.0} for player in self.players}
        responses = [] if self.is_done else self._responses()
        return [*self._assessment(self.iteration, strategies), *responses]

    # ---- tasks

    def _responses(self) -> list[TrainTask]:
        """Returns both players' responses to the last solution."""
        first, second = self.players
        return [self._response(first, second), self._response(second, first)]

    def _response(self, player: Player, other: Player) -> TrainTask:
        name = f"{player}-{self.iteration + 1}"
        return TrainTask(
            f"train/{name}",
            player=player,
            opponents=Opponents({other: {self.solution: 1.0}}),
            env_steps=self.config.env_steps,
            members=self.population.names_with_files([self.solution]),
            output_member=name,
        )

    def _solve(self, number: int) -> SolveTask:
        return SolveTask(
            f"solve/{number}",
            iteration=number,
            responses={player: tuple(names) for player, names in self.responses.items()},
            cfr_iterations=self.config.cfr_iterations,
            members=tuple(chain.from_iterable(self.responses.values())),
            output_member=f"solution-{number}",
        )
