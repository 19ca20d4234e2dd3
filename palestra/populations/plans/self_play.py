"""Self-play with a pool: each player trains in slices, against a mixture of earlier members.

A copy is frozen after every slice, and the next slice may continue from it. The matchmaker chooses the mixture:
`latest` is plain self-play (with several populations, alternating responses), `history` fictitious self-play (Heinrich
et al., 2015), `pfsp` prefers opponents that still win, `solution` is a meta-solver's mixture. With `history` slices
start with new weights by default: from an exact oracle, or learned for long enough, they are best responses, and the
average of fictitious play approaches an equilibrium in two-player zero-sum games.

Slice k + 1 of a player starts once slice k of every other player is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Literal, Self

from pydantic import Field, model_validator

from palestra.core.types import TEAM, Metrics
from palestra.parallel.tasks import Result, Task
from palestra.populations.plans.empirical_game import EmpiricalGame
from palestra.populations.plans.iterative_plan import IterativePlan, check_population
from palestra.populations.plans.matchmaking import LatestMatchmaker, MatchmakerConfig, WinRates
from palestra.populations.plans.meta_strategy import MetaStrategy, drop_negligible
from palestra.populations.plans.slices import SliceConfig, slice_task
from palestra.populations.plans.solvers import MetaSolverConfig, Nash
from palestra.populations.population import Member, Mix, Player, Population
from palestra.populations.tasks import Opponents, PlayResult, PlayTask, TrainResult, TrainTask


class SelfPlayConfig(SliceConfig):
    """Self-play with a pool of earlier members: slices, choice of opponents, and evaluation."""

    type: Literal["self_play"] = "self_play"
    slices: int = Field(40, ge=1)
    """Slices that each player trains."""
    matchmaker: MatchmakerConfig = LatestMatchmaker()
    """Computes the mixture of opponents."""
    pool_size: int = Field(0, ge=0)
    """Number of newest members that can be opponents; 0: all."""
    self_play: float = Field(0.0, ge=0, le=1)
    """Probability that a game's opponents are the learner's own current weights; needs `symmetric: true`."""
    start: Literal["last", "fresh"] | None = None
    """A slice continues the `last` one, or starts with `fresh` weights. With `fresh` it is a best response, and the
    average under matchmaker `history` is that of fictitious play. With `last`, a policy that has become nearly
    deterministic hardly explores, and the average may stay far from an equilibrium. Default: `fresh` with matchmaker
    `history`, else `last`."""
    games_per_cell: int = Field(0, ge=0)
    """Games of each new copy against each earlier one, for the payoff table; 0: none. Needed by matchmaker
    `solution`."""
    cells_per_task: int = Field(16, ge=1)
    """Payoff cells per task of games."""
    meta_solver: MetaSolverConfig = Nash()
    """Meta-solver for matchmaker `solution`."""
    nash_conv_every: int = Field(1, ge=0)
    """Measure NashConv every n slices; 0: never. Needs a game with exact rules."""
    nash_conv_of: Literal["average", "latest"] = "average"
    """Policy whose NashConv is measured: the uniform mixture over all members (`average`), or the `latest` member."""
    stop_nash_conv: float = Field(0.0, ge=0)
    """The run ends once NashConv is at most this; 0: never."""

    @property
    def continues(self) -> bool:
        """True if a slice starts with the weights of the last one."""
        return (self.start or ("fresh" if self.matchmaker.type == "history" else "last")) == "last"

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.matchmaker.type == "solution" and not self.games_per_cell:
            raise ValueError(
                "matchmaker solution reads the payoff table, which games_per_cell: 0 leaves empty: set games_per_cell, "
                "for example to 200"
            )
        if self.matchmaker.type == "solution" and self.meta_solver.is_joint:
            raise ValueError(
                f"matchmaker solution needs a mixture for each player, which meta_solver {self.meta_solver.type} does "
                "not give: use another meta_solver"
            )
        return self


class SelfPlay(IterativePlan):
    """Plan of self-play. `population` holds the initial members; `seats` names the player at each seat. An iteration is
    a slice of every player.

    Metrics are of a slice, or NashConv; with counts once all players have trained the same number of slices.
    """

    def __init__(self, config: SelfPlayConfig, population: Population, seats: Sequence[Player] = ()) -> None:
        """Raises ValueError if a player has no member, or if `self_play` is above 0 with several players."""
        super().__init__(population, config.slices, config.nash_conv_every, config.stop_nash_conv)
        self.config = config
        self.seats = tuple(seats) or population.players
        check_population(population, config.self_play)
        self.game = EmpiricalGame(population, self.seats, max(config.games_per_cell, 1), config.cells_per_task)
        self.payoffs = self.game.payoffs  # of frozen members; empty if `games_per_cell` is 0
        self.num_initial = {player: len(population.names_of(player)) for player in population.players}
        self.slices_done = dict.fromkeys(population.players, 0)
        self.in_training: set[Player] = set()
        self.win_rates = WinRates(config.win_rate_decay)

    def initial_tasks(self) -> Sequence[Task]:
        """Returns the games among the initial members, if `games_per_cell` is above 0, and the first slices."""
        return [*(self.game.initial_tasks() if self.config.games_per_cell else []), *self._slices()]

    def on_result(self, task: Task, result: Result) -> list[Task]:
        """Records a result; returns the games, assessments and slices that it makes possible."""
        return [*super().on_result(task, result), *self._slices()]

    def _counts(self) -> Metrics:
        return {"members": len(self.population), "games": self.game.num_games, "env_steps": self.env_steps}

    @property
    def iteration(self) -> int:
        """The number of slices that every player has done."""
        return min(self.slices_done.values())

    # ---- results

    def _record_games(self, task: PlayTask, result: PlayResult) -> Sequence[Task]:
        self.game.record_result(task, result)
        return []

    def _record_training(self, task: TrainTask, result: TrainResult) -> Sequence[Task]:
        player = task.player
        before = self.iteration
        for member, games in result.opponents.items():
            self.win_rates.add(player, member, games.games, games.points)
        self.in_training.remove(player)
        self.slices_done[player] += 1
        self.env_steps += result.env_steps
        metrics = {"iteration": self.slices_done[player], "env_steps": self.env_steps, "return": result.return_metric}
        self._metrics = {player: metrics}
        new: list[Task] = [*self._keep(task)]
        if self.iteration > before:
            self._metrics |= {TEAM: {"iteration": self.iteration, **self._counts()}}
            new += self._assessment(self.iteration, self._mixtures())
        return new

    def _keep(self, task: TrainTask) -> list[PlayTask]:
        """Adds the frozen copy to the population; returns the tasks of its games."""
        player = task.player
        name = task.output_member
        info = {"iteration": self.slices_done[player]}
        member = Member(name, player, f"members/{name}", task.start, info)
        if self.config.games_per_cell:
            return self.game.add_member(member)
        self.population.add(member)
        return []

    def _mixtures(self) -> dict[Player, Mix]:
        """Returns the mixtures whose NashConv is measured."""
        names = self._names(self.iteration)
        if self.config.nash_conv_of == "latest":
            return {player: {members[-1]: 1.0} for player, members in names.items()}
        return {player: dict.fromkeys(members, 1 / len(members)) for player, members in names.items()}

    # ---- slices

    def _slices(self) -> list[TrainTask]:
        """Returns a slice for every player that can start one."""
        return (
            [] if self.is_done else [self._slice(player) for player in self.population.players if self._ready(player)]
        )

    def _ready(self, player: Player) -> bool:
        done = self.slices_done[player]
        if player in self.in_training or done == self.config.slices or self.iteration < done:
            return False
        names = self._pool(done)
        return self.config.matchmaker.type != "solution" or all(
            map(self.game.has_payoffs, product(*(names[seat] for seat in self.seats)))
        )

    def _slice(self, player: Player) -> TrainTask:
        number = self.slices_done[player]
        name = f"{player}-{number + 1}"
        members = self._names(number)[player]
        start = members[-1] if self.config.continues and self.population.names_with_files(members[-1:]) else None
        opponents = self._opponents(player)
        self.in_training.add(player)
        return slice_task(
            self.config, self.population, name, opponents, player=player, start=start, self_play=self.config.self_play
        )

    def _opponents(self, player: Player) -> Opponents:
        """Returns the mixture of opponents of a player's next slice, by player."""
        names = self._pool(self.slices_done[player])
        others = [other for other in names if other != player] or [player]
        mixes = {}
        for other, solution in self._solution(names, others).items():
            rates = {name: self.win_rates.rate(player, name) for name in names[other]}
            mixes[other] = self.config.matchmaker.mix(names[other], rates, solution)
        return Opponents({other: drop_negligible(mix) for other, mix in mixes.items()})

    def _solution(self, names: dict[Player, list[str]], others: Sequence[Player]) -> dict[Player, Mix]:
        """Returns the meta-strategy of each player if the matchmaker uses it; else empty mixtures."""
        if self.config.matchmaker.type != "solution":
            return {other: {} for other in others}
        names_by_seat = [names[player] for player in self.seats]
        strategies = self.config.meta_solver.solve(self.game.payoff_tensors(names_by_seat))
        meta = MetaStrategy.independent(self.seats, names_by_seat, strategies)
        return {other: meta.marginal(other) for other in others}

    def _names(self, number: int) -> dict[Player, list[str]]:
        """Returns the members of each player after `number` slices."""
        return {
            player: self.population.names_of(player)[: first + number] for player, first in self.num_initial.items()
        }

    def _pool(self, number: int) -> dict[Player, list[str]]:
        return {player: names[-self.config.pool_size :] for player, names in self._names(number).items()}
