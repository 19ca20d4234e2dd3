"""Tasks of a population's training, their results, and the protocols of plan, worker and backend.

A plan creates the tasks; a backend has workers that run them; the scheduler submits tasks and logs their results in the
order in which the plan gets them. A plan depends only on this sequence of results, so a killed run is resumed by
passing the finished tasks to a new plan. A task's randomness is determined by its name.

Tasks and results consist of text, numbers, None, mappings, tuples and further dataclasses, so that `task_json.py` can
write them as JSON and read them back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol

from pydantic import ConfigDict

from palestra.core.types import Metrics
from palestra.parallel.tasks import Result, Task
from palestra.populations.payoffs import MemberProfile, PayoffCell
from palestra.populations.population import Mix, Player

# ---- results


@dataclass(frozen=True)
class OpponentResult:
    """A learner's games against one opponent: their number, mean return, mean squared return, games won and drawn."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    games: int
    mean_return: float
    mean_squared_return: float
    wins: int | float
    draws: int | float

    @property
    def points(self) -> float:
        """Games won, a draw counting half."""
        return self.wins + self.draws / 2


@dataclass(frozen=True, kw_only=True)
class TrainResult(Result):
    """Result of training a policy. Returns are over the games of the last part of the training.

    TrainResult(env_steps=4096, mean_return=0.1, opponents={"uniform": OpponentResult(512, 0.1, 2.0, 270, 0)})
    """

    env_steps: int
    mean_return: float | None
    """The policy's return, averaged over its games; None if no game ended. For an exact response, its value."""
    opponents: dict[str, OpponentResult] = field(default_factory=dict)
    """By name of the opponent."""
    metrics: dict[str, float | None] = field(default_factory=dict)
    policy_digest: str | None = None
    """SHA-256 of the policy of an exact response; None if the response is learned."""

    @property
    def return_metric(self) -> float:
        """`mean_return` as a metric; NaN if no game ended, which is written to metrics.jsonl as null."""
        return math.nan if self.mean_return is None else self.mean_return


@dataclass(frozen=True)
class PlayResult(Result):
    """Result of a `PlayTask`: one payoff cell for each of its cells, in the same order."""

    payoffs: tuple[PayoffCell, ...]

    @property
    def num_games(self) -> int:
        """Games played; exact payoffs have none."""
        return sum(cell.games for cell in self.payoffs if not cell.exact)


@dataclass(frozen=True, kw_only=True)
class AssessResult(Result):
    """NashConv of the behaviour policy of mixtures, exploitability (NashConv divided by the number of seats), and
    expected returns by seat."""

    nash_conv: float
    exploitability: float
    values: tuple[float, ...]


@dataclass(frozen=True)
class SolveResult(Result):
    """Size of a solved restricted game: its allowed actions, counted over all information states."""

    num_allowed_actions: int


# ---- tasks


@dataclass(frozen=True)
class Lineup:
    """Opponents that play together: a member for each other player, and the probability of a game against them."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    members: dict[Player, str]
    probability: float


@dataclass(frozen=True)
class Opponents:
    """Distribution of a learner's opponents: either `mixes`, from which each player's member is drawn independently, or
    `joint`, line-ups of one member for each other player."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    mixes: dict[Player, Mix] = field(default_factory=dict)
    joint: tuple[Lineup, ...] = ()

    def names(self) -> list[str]:
        """Returns the names of all opponents, without duplicates."""
        named = [lineup.members.values() for lineup in self.joint] or self.mixes.values()
        return list(dict.fromkeys(chain.from_iterable(named)))


@dataclass(frozen=True, kw_only=True)
class TrainTask(Task):
    """Trains a policy of `player` against a distribution of opponents, drawn once per game.

    TrainTask("train/player_0-3", player="player_0", opponents=Opponents({"player_1": {"player_1-2": 1.0}}),
              members=("player_1-2",), output_member="player_0-3")
    """

    kind = "train"
    result_type = TrainResult

    player: Player
    opponents: Opponents
    start: str | None = None
    """The member from whose weights the policy starts; None: new weights."""
    self_play: float = 0.0
    """Probability that a game's opponents are the policy's own current weights."""
    env_steps: int | None = None
    """Env steps, for networks; None: as in the oracle's config."""
    train_steps: int | None = None
    """Training steps, for language agents; None: as in the oracle's config."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the algorithm or the policy that replace those of the oracle's config."""
    learner: str = ""
    """In a league or population-based training, the learner whose slice this is."""
    copied_from: str = ""
    """In population-based training, the learner whose weights and settings this one has just copied."""


@dataclass(frozen=True, kw_only=True)
class PlayTask(Task):
    """Plays games between members, `games_per_cell` for each of `cells`."""

    kind = "play"
    result_type = PlayResult

    cells: tuple[MemberProfile, ...]
    games_per_cell: int


@dataclass(frozen=True, kw_only=True)
class AssessTask(Task):
    """Measures the NashConv of `strategies`, one mixture for each player, after iteration `iteration`."""

    kind = "assess"
    result_type = AssessResult

    iteration: int
    strategies: dict[Player, Mix]


@dataclass(frozen=True, kw_only=True)
class SolveTask(Task):
    """Solves the game restricted to the actions that each player's `responses` prefer, by CFR+."""

    kind = "solve"
    result_type = SolveResult

    iteration: int
    responses: dict[Player, tuple[str, ...]]
    cfr_iterations: int


def played_cells(task: Task, result: Result) -> list[tuple[MemberProfile, PayoffCell]]:
    """Returns the members and the payoffs of each cell of a finished `PlayTask`; [] for another task."""
    if not isinstance(task, PlayTask) or not isinstance(result, PlayResult):
        return []
    return list(zip(task.cells, result.payoffs, strict=True))


# ---- plan, worker and backend


class Plan(Protocol):
    """Creates the tasks of a run. It must be a deterministic function of the sequence of finished tasks."""

    def initial_tasks(self) -> Sequence[Task]:
        """Returns the tasks that need no results of other tasks."""
        ...

    def on_result(self, task: Task, result: Result) -> Sequence[Task]:
        """Records the result of `task`, of type `task.result_type`; returns the tasks that it makes possible."""
        ...

    def task_metrics(self, task: Task, result: Result) -> Mapping[str, Metrics]:
        """Returns metrics by policy, player, or TEAM, for metrics.jsonl; called after `on_result`."""
        ...
