"""Base classes of plans: of all, and of those that count iterations and measure NashConv (PSRO, XDO and self-play)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import chain

from palestra.core.types import TEAM, Metrics
from palestra.parallel.tasks import Result, Task
from palestra.populations.population import Mix, Player, Population
from palestra.populations.tasks import (
    AssessResult,
    AssessTask,
    PlayResult,
    PlayTask,
    SolveResult,
    SolveTask,
    TrainResult,
    TrainTask,
)


class RecordingPlan(ABC):
    """A plan with a method for each kind of result, which returns the tasks that the result makes possible."""

    def __init__(self, population: Population) -> None:
        self.population = population
        self.env_steps = 0
        self._metrics: dict[str, Metrics] = {}  # of the last result

    def on_result(self, task: Task, result: Result) -> Sequence[Task]:
        """Records a result; returns the tasks that it makes possible."""
        self._metrics = {}
        match task, result:
            case TrainTask() as trained, TrainResult() as outcome:
                return self._record_training(trained, outcome)
            case PlayTask() as played, PlayResult() as games:
                return self._record_games(played, games)
            case AssessTask() as assessed, AssessResult() as distance:
                return self._record_assessment(assessed, distance)
            case SolveTask() as solved, SolveResult() as solution:
                return self._record_solution(solved, solution)
        return []

    def task_metrics(self, task: Task, result: Result) -> dict[str, Metrics]:
        """Returns the metrics of the result that was recorded last."""
        return self._metrics

    @abstractmethod
    def _record_training(self, task: TrainTask, result: TrainResult) -> Sequence[Task]: ...

    def _record_games(self, task: PlayTask, result: PlayResult) -> Sequence[Task]:
        return []

    def _record_assessment(self, task: AssessTask, result: AssessResult) -> Sequence[Task]:
        return []

    def _record_solution(self, task: SolveTask, result: SolveResult) -> Sequence[Task]:
        return []


class IterativePlan(RecordingPlan):
    """A plan of `iterations`; the mixtures after every `nash_conv_every` of them (0: never) and after
    the last are assessed.

    `nash_convs` maps iterations to measured NashConv; the plan is done once one is at most
    `stop_nash_conv` (0: never).
    """

    def __init__(self, population: Population, iterations: int, nash_conv_every: int, stop_nash_conv: float) -> None:
        super().__init__(population)
        self.iterations = iterations
        self.nash_conv_every = nash_conv_every
        self.stop_nash_conv = stop_nash_conv
        self.nash_convs: dict[int, float] = {}
        self.is_done = False

    @property
    @abstractmethod
    def iteration(self) -> int:
        """The number of iterations that are done."""

    @abstractmethod
    def _counts(self) -> Metrics:
        """Returns the numbers of members, games and env steps."""

    def summary(self) -> dict[str, float]:
        """Returns progress: iterations done and in all, counts, and the latest NashConv."""
        last = {"nash_conv": self.nash_convs[max(self.nash_convs)]} if self.nash_convs else {}
        return {"iteration": self.iteration, "iterations": self.iterations, **self._counts(), **last}

    def _assessment(self, number: int, strategies: dict[Player, Mix]) -> list[AssessTask]:
        """Returns the task that assesses the mixtures of iteration `number`, if it is due."""
        every = self.nash_conv_every
        if not every or (number % every and number != self.iterations):
            return []
        files = self.population.names_with_files(chain.from_iterable(strategies.values()))
        return [AssessTask(f"assess/{number}", iteration=number, strategies=strategies, members=files)]

    def _record_assessment(self, task: AssessTask, result: AssessResult) -> Sequence[Task]:
        number = task.iteration
        measured = result.nash_conv
        self.nash_convs[number] = measured
        self.is_done |= measured <= self.stop_nash_conv > 0
        self._metrics = {TEAM: {"iteration": number, "nash_conv": measured, "exploitability": result.exploitability}}
        return []


def check_population(population: Population, self_play: float) -> None:
    """Raises ValueError if a player has no member, or if several players have `self_play` above 0."""
    for player in population.players:
        if not population.names_of(player):
            raise ValueError(f'player "{player}" has no initial member: add one, for example uniform')
    if self_play and len(population.players) > 1:
        raise ValueError(
            "self_play: a policy of one seat cannot play another; only a population that plays every seat "
            "(symmetric: true) can play its own current weights"
        )
