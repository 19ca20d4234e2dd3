"""Self-play with a pool: each player learns in slices, against a mixture of the members there were before the slice.

A copy is frozen after every slice, and the next goes on from it. Whom it meets is the matchmaker's choice: `latest`
is plain self-play (in games of several populations, alternating responses), `history` fictitious self-play (Heinrich et
al., 2015), `pfsp` looks for opponents that still win, `solution` for a meta-solver's mixture. With best responses in
place of slices (`start: fresh`, an exact oracle), `history` is fictitious play.

Slice k + 1 of a player needs slice k of every other, and no more: nobody waits for all.
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
    """How many `slices` each player trains, and of how many `env_steps` (language agents: `steps`) each.

    Opponents are drawn from the newest `pool` members (0: all) by the `matchmaker`; with probability `self_play` they
    are the learner's own current weights. A slice goes on from the `last` one or starts `fresh`. With `games` each copy
    plays those before it, for the payoff table, which the matchmaker `solution` has the `solver` read. Every `assess`
    slices NashConv is measured (0: never; games without exact rules), of the `average` over all members or of the
    `latest`; the run ends at `stop` of it."""

    type: Literal["self_play"] = "self_play"
    slices: int = Field(40, ge=1)
    env_steps: int = Field(20_000, ge=1)
    steps: int = Field(0, ge=0)
    matchmaker: MatchmakerConfig = Latest()
    pool: int = Field(0, ge=0)
    self_play: float = Field(0.0, ge=0, le=1)
    start: Literal["last", "fresh"] = "last"
    games: int = Field(0, ge=0)
    cells: int = Field(16, ge=1)
    solver: SolverConfig = Nash()
    decay: float = Field(0.99, gt=0, le=1)  # of what is known of an opponent, with each game against it
    assess: int = Field(1, ge=0)
    assessed: Literal["average", "latest"] = "average"
    stop: float = Field(0.0, ge=0)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.matchmaker.type == "solution" and not self.games:
            raise ValueError("matchmaker solution reads the payoff table, which games: 0 leaves empty; say games: 200")
        if self.matchmaker.type == "solution" and self.solver.joint:
            raise ValueError(f"matchmaker solution needs a mixture for each player; solver {self.solver.type} has none")
        return self


class SelfPlay:
    """The plan. `population` holds the members that play first; `seats` names the player at each seat."""

    def __init__(self, config: SelfPlayConfig, population: Population, seats: Sequence[Player] = ()) -> None:
        """Raises ValueError for a player without a member, and for self-play of players of different seats."""
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
        return [*(self.matches.first() if self.config.games else []), *self._slices()]

    def finished(self, task: Task, result: Result) -> list[Task]:
        self._notes, new = {}, []
        if task.kind == "train":
            new = self._trained(task, result)
        elif task.kind == "play":
            self.matches.finished(task, result)
        else:
            self._assessed(task, result)
        return [*new, *self._slices()]

    def notes(self, task: Task, result: Result) -> dict[str, Metrics]:
        """A line of a slice or of NashConv, and what there is once all players have trained alike."""
        return self._notes

    def summary(self) -> dict[str, float]:
        """Where the run stands."""
        last = {"nash_conv": self.nash_convs[max(self.nash_convs)]} if self.nash_convs else {}
        return {"iteration": self._round(), "iterations": self.config.slices, **self._counts(), **last}

    @property
    def payoffs(self) -> Payoffs:
        """The payoff table of the copies; empty without `games`."""
        return self.matches.game.payoffs

    def _counts(self) -> Metrics:
        return {"members": len(self.population), "games": self.matches.played, "env_steps": self.env_steps}

    def _round(self) -> int:
        """How many slices every player has done."""
        return min(self.done.values())

    # ---- what was done

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
        """The frozen copy; its games."""
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
        """A slice for every player who may begin one."""
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
        """Whom a player's next slice meets."""
        names = self._pool(self.done[player])
        others = [other for other in names if other != player] or [player]
        return {
            other: normal(self.config.matchmaker.mix(names[other], self._rates(player, names[other]), solution))
            for other, solution in self._solution(names, others).items()
        }

    def _rates(self, player: Player, names: Sequence[str]) -> dict[str, float]:
        return {name: self.rates.rate(player, name) for name in names}

    def _solution(self, names: dict[Player, list[str]], others: Sequence[Player]) -> dict[Player, Mix]:
        """The meta-strategy of each, where the matchmaker reads it."""
        if self.config.matchmaker.type != "solution":
            return {other: {} for other in others}
        seated = [names[player] for player in self.seats]
        strategies = self.config.solver.solve(self.matches.game.tables(seated))
        meta = Meta.independent(self.seats, seated, strategies)
        return {other: meta.mix(other) for other in others}

    def _names(self, number: int) -> dict[Player, list[str]]:
        """The members of each player after `number` slices."""
        return {player: self.population.of(player)[: first + number] for player, first in self.first.items()}

    def _pool(self, number: int) -> dict[Player, list[str]]:
        return {player: names[-self.config.pool :] for player, names in self._names(number).items()}
