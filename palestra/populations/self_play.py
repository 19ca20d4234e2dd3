"""Self-play with a pool: each player trains in slices, against a mixture of earlier members.

A copy is frozen after every slice, and the next slice continues from it. The matchmaker chooses the mixture: `latest`
is plain self-play (with several populations, alternating responses), `history` fictitious self-play (Heinrich et al.,
2015), `pfsp` prefers opponents that still win, `solution` is a meta-solver's mixture. With best responses instead of
slices (`start: fresh` and an exact oracle), `history` is fictitious play.

Slice k + 1 of a player needs slice k of every other player, and nothing more.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from palestra.config import Strict
from palestra.populations.matches import Matches
from palestra.populations.matchmaking import Latest, MatchmakerConfig
from palestra.populations.opponents import Meta, members_of, normal
from palestra.populations.payoffs import Payoffs
from palestra.populations.population import Member, Mix, Player, Population
from palestra.populations.solvers import Nash, SolverConfig
from palestra.populations.tasks import Result, Task
from palestra.populations.win_rates import WinRates
from palestra.types import TEAM, Metrics


class SelfPlayConfig(Strict):
    """Self-play with a pool of earlier members: slices, choice of opponents, and evaluation."""

    type: Literal["self_play"] = "self_play"
    slices: int = Field(40, ge=1)
    """Slices that each player trains."""
    env_steps: int = Field(20_000, ge=1)
    """Env steps of each slice."""
    steps: int = Field(0, ge=0)
    """Training steps of each slice, for language agents; replaces `env_steps` if above 0."""
    matchmaker: MatchmakerConfig = Latest()
    """Computes the mixture of opponents."""
    pool: int = Field(0, ge=0)
    """Opponents are the newest so many members; 0: all."""
    self_play: float = Field(0.0, ge=0, le=1)
    """Probability that a game's opponents are the learner's own current weights; needs `symmetric: true`."""
    start: Literal["last", "fresh"] = "last"
    """A slice continues the `last` one, or starts with `fresh` weights."""
    games: int = Field(0, ge=0)
    """Games of each new copy against each earlier one, for the payoff table; 0: none. Needed by matchmaker
    `solution`."""
    cells: int = Field(16, ge=1)
    """Payoff cells of one task of games."""
    solver: SolverConfig = Nash()
    """Meta-solver for matchmaker `solution`."""
    decay: float = Field(0.99, gt=0, le=1)
    """Factor by which earlier results against an opponent are weighted down with each game; 1: all games count
    alike."""
    assess: int = Field(1, ge=0)
    """NashConv is measured every so many slices; 0: never. Needs a game with exact rules."""
    assessed: Literal["average", "latest"] = "average"
    """NashConv is that of the uniform mixture over all members (`average`), or of the `latest`."""
    stop: float = Field(0.0, ge=0)
    """The run ends once NashConv is at most this; 0: never."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.matchmaker.type == "solution" and not self.games:
            raise ValueError("matchmaker solution reads the payoff table, which games: 0 leaves empty; say games: 200")
        if self.matchmaker.type == "solution" and self.solver.joint:
            raise ValueError(f"matchmaker solution needs a mixture for each player; solver {self.solver.type} has none")
        return self


class SelfPlay:
    """Plan of self-play. `population` holds the initial members; `seats` names the player at each seat."""

    def __init__(self, config: SelfPlayConfig, population: Population, seats: Sequence[Player] = ()) -> None:
        """Raises ValueError if a player has no member, or if `self_play` is above 0 with several players."""
        self.config, self.population = config, population
        self.seats = tuple(seats) or population.players
        if empty := [player for player in population.players if not population.of(player)]:
            raise ValueError(f'player "{empty[0]}" has no member to begin with: add one, for example uniform')
        if config.self_play and len(population.players) > 1:
            raise ValueError(
                "self_play: a policy of one seat cannot sit at another; only a population that plays every seat "
                "(symmetric: true) meets its own current weights"
            )
        self.matches = Matches(population, self.seats, max(config.games, 1), config.cells)
        self.first = {player: len(population.of(player)) for player in population.players}
        self.done = dict.fromkeys(population.players, 0)
        self.busy: set[Player] = set()
        self.rates = WinRates(config.decay)
        self.nash_convs: dict[int, float] = {}
        self.env_steps = 0
        self.over = False
        self._notes: dict[str, Metrics] = {}

    def begin(self) -> list[Task]:
        """Returns the games among the initial members, if `games` is above 0, and the first slices."""
        return [*(self.matches.first() if self.config.games else []), *self._slices()]

    def finished(self, task: Task, result: Result) -> list[Task]:
        """Records a result; returns the games, assessments and slices that it makes possible."""
        self._notes, new = {}, []
        if task.kind == "train":
            new = self._trained(task, result)
        elif task.kind == "play":
            self.matches.finished(task, result)
        else:
            self._assessed(task, result)
        return [*new, *self._slices()]

    def notes(self, task: Task, result: Result) -> dict[str, Metrics]:
        """Metrics of a slice or of NashConv, with counts once all players have trained equally many slices."""
        return self._notes

    def summary(self) -> dict[str, float]:
        """Progress: slices done by all players and in all, members, games, env steps, and the latest NashConv."""
        last = {"nash_conv": self.nash_convs[max(self.nash_convs)]} if self.nash_convs else {}
        return {"iteration": self._round(), "iterations": self.config.slices, **self._counts(), **last}

    @property
    def payoffs(self) -> Payoffs:
        """Payoff table of the frozen members; empty if `games` is 0."""
        return self.matches.game.payoffs

    def _counts(self) -> Metrics:
        return {"members": len(self.population), "games": self.matches.played, "env_steps": self.env_steps}

    def _round(self) -> int:
        """Number of slices that every player has done."""
        return min(self.done.values())

    # ---- results

    def _trained(self, task: Task, result: Result) -> list[Task]:
        player, before = task.order["player"], self._round()
        for member, tally in result["against"].items():
            self.rates.add(player, member, tally["games"], tally["wins"] + tally["draws"] / 2)
        self.busy.remove(player)
        self.done[player] += 1
        self.env_steps += int(result["env_steps"])
        figures = {"iteration": self.done[player], "env_steps": self.env_steps, "return": result["return"]}
        self._notes = {player: figures}
        new = self._keep(task)
        if self._round() > before:
            self._notes |= {TEAM: {"iteration": self._round(), **self._counts()}}
            new += self._assessment(self._round())
        return new

    def _keep(self, task: Task) -> list[Task]:
        """Adds the frozen copy; returns its games."""
        player, name = task.order["player"], task.makes
        info = {"iteration": self.done[player]}
        member = Member(name, player, f"members/{name}", task.order["start"], info)
        if self.config.games:
            return self.matches.join(member)
        self.population.add(member)
        return []

    def _assessment(self, number: int) -> list[Task]:
        every, last = self.config.assess, number == self.config.slices
        if not every or (number % every and not last):
            return []
        names = self._names(number)
        mixes = {player: dict.fromkeys(own, 1 / len(own)) for player, own in names.items()}
        if self.config.assessed == "latest":
            mixes = {player: {own[-1]: 1.0} for player, own in names.items()}
        files = self.matches.files(name for mix in mixes.values() for name in mix)
        return [Task(f"assess/{number}", "assess", {"iteration": number, "strategies": mixes}, files)]

    def _assessed(self, task: Task, result: Result) -> None:
        number, measured = int(task.order["iteration"]), float(result["nash_conv"])
        self.nash_convs[number] = measured
        self.over |= measured <= self.config.stop > 0
        self._notes = {TEAM: {"iteration": number, "nash_conv": measured, "exploitability": result["exploitability"]}}

    # ---- slices

    def _slices(self) -> list[Task]:
        """Returns a slice for every player that can start one."""
        return [] if self.over else [self._slice(player) for player in self.population.players if self._ready(player)]

    def _ready(self, player: Player) -> bool:
        done = self.done[player]
        if player in self.busy or done == self.config.slices or self._round() < done:
            return False
        names = self._pool(done)
        return self.config.matchmaker.type != "solution" or all(
            map(self.matches.game.knows, product(*(names[seat] for seat in self.seats)))
        )

    def _slice(self, player: Player) -> Task:
        number = self.done[player]
        name, own = f"{player}-{number + 1}", self._names(number)[player]
        start = own[-1] if self.config.start == "last" and self.matches.files(own[-1:]) else None
        order: dict[str, Any] = {"player": player, "opponents": self._opponents(player), "start": start}
        order |= {"steps": self.config.steps} if self.config.steps else {"env_steps": self.config.env_steps}
        order["self_play"] = self.config.self_play
        self.busy.add(player)
        files = self.matches.files([*members_of(order), *([start] if start else [])])
        return Task(f"train/{name}", "train", order, files, name)

    def _opponents(self, player: Player) -> dict[Player, Mix]:
        """Returns the mixture of opponents of a player's next slice, by player."""
        names = self._pool(self.done[player])
        others = [other for other in names if other != player] or [player]
        return {
            other: normal(self.config.matchmaker.mix(names[other], self._rates(player, names[other]), solution))
            for other, solution in self._solution(names, others).items()
        }

    def _rates(self, player: Player, names: Sequence[str]) -> dict[str, float]:
        return {name: self.rates.rate(player, name) for name in names}

    def _solution(self, names: dict[Player, list[str]], others: Sequence[Player]) -> dict[Player, Mix]:
        """Returns the meta-strategy of each player if the matchmaker uses it; else empty mixtures."""
        if self.config.matchmaker.type != "solution":
            return {other: {} for other in others}
        seated = [names[player] for player in self.seats]
        strategies = self.config.solver.solve(self.matches.game.tables(seated))
        meta = Meta.independent(self.seats, seated, strategies)
        return {other: meta.mix(other) for other in others}

    def _names(self, number: int) -> dict[Player, list[str]]:
        """Returns the members of each player after `number` slices."""
        return {player: self.population.of(player)[: first + number] for player, first in self.first.items()}

    def _pool(self, number: int) -> dict[Player, list[str]]:
        return {player: names[-self.config.pool :] for player, names in self._names(number).items()}
