"""Policy-space response oracles (Lanctot et al., 2017) and its kin, as a plan of tasks.

An iteration adds to each player a best response to the meta-strategy over the members there are; their games fill the
payoff table; the solver makes the next meta-strategy of it. With joint solvers this is JPSRO (Marris et al., 2021), for
any number of players; `rectified`, PSRO_rN (Balduzzi et al., 2019); with several `levels`, pipeline PSRO (McAleer et
al., 2020): the responses of several iterations train at once in slices, and each meets the newest snapshots of those
below it. A response is frozen only after a slice against members that were all frozen.

A task is handed out as soon as its inputs exist: a member plays each of the others that there is at that moment, and
whoever comes later plays it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from palestra.config import Strict
from palestra.populations.empirical import cells_with
from palestra.populations.matches import Matches
from palestra.populations.opponents import Meta, gap, members_of, opponents, rectified
from palestra.populations.payoffs import Payoffs
from palestra.populations.population import Member, Player, Population
from palestra.populations.solvers import Nash, SolverConfig
from palestra.populations.tasks import Result, Task
from palestra.types import TEAM, Metrics

CORRELATED = ("ce", "cce")  # solvers whose joint distribution is what responses answer
SETTLED = 1e-7  # of the largest payoff: an exact response that gains no more over a joint distribution adds nothing


class PSROConfig(Strict):
    """How many `iterations`, and what each consists of.

    A response trains `env_steps` (language agents: `steps`), in `slices`; with probability `self_play` its opponents in
    a game are its own current weights. It starts `fresh`, from its player's `last` member, or from the `best` against
    the meta-strategy. A payoff cell is of `games` games; `adaptive` more per iteration go where the meta-strategy needs
    them. A task has `cells` payoff cells. NashConv is measured every `assess` iterations (0: never; games without exact
    rules), and the run ends at `stop` of it (of a joint solver: of the gap to an equilibrium that responses found).
    With a joint solver, exact responses that gain next to nothing or equal another member are left out, and the run
    ends with the iteration that adds none."""

    type: Literal["psro"] = "psro"
    iterations: int = Field(20, ge=1)
    solver: SolverConfig = Nash()
    env_steps: int = Field(100_000, ge=1)
    steps: int = Field(0, ge=0)
    slices: int = Field(1, ge=1)
    start: Literal["fresh", "last", "best"] = "fresh"
    self_play: float = Field(0.0, ge=0, lt=1)
    rectified: bool = False
    levels: int = Field(1, ge=1)
    games: int = Field(1000, ge=1)
    adaptive: int = Field(0, ge=0)
    cells: int = Field(16, ge=1)
    assess: int = Field(1, ge=0)
    stop: float = Field(0.0, ge=0)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.levels > 1 and (self.rectified or self.correlated):
            raise ValueError(
                f"levels: {self.levels} train responses to mixtures that are not final; with rectified: true or solver "
                f"{self.solver.type} their number follows from the final one, so levels: must be 1"
            )
        if self.rectified and self.correlated:
            raise ValueError(f"rectified: true reads a mixture of each player; solver {self.solver.type} has none")
        return self

    @property
    def correlated(self) -> bool:
        return self.solver.type in CORRELATED


@dataclass
class Response:
    """A policy on its way into the population: of iteration `number`, for `player`; `name` is the member's to be.

    `told` is the member that it deviates from or goes on from, where an iteration has a response for each of several.
    `latest` is its newest snapshot; `gain` and `digest` say of an exact one what it gains and which policy it is.
    """

    name: str
    player: Player
    number: int
    told: str | None = None
    start: str | None = None
    slices: int = 0
    latest: str = ""
    busy: bool = False
    gain: float = math.inf
    digest: str = ""

    @property
    def frozen(self) -> bool:
        return self.latest == self.name


class PSRO:
    """The plan. `population` holds the members that play first, at least one for each player; `seats` names the player
    at each seat: a population that plays every seat is named at each, and the game taken to be symmetric.

    `metas` are the meta-strategies by iteration, of which 0 is that over the first members; `nash_convs` what was
    measured of them.
    """

    def __init__(self, config: PSROConfig, population: Population, seats: Sequence[Player] = ()) -> None:
        """Raises ValueError where the options do not fit the seats, and for a player without a member."""
        self.config, self.population = config, population
        self.seats = tuple(seats) or population.players
        _check(config, population, self.seats)
        self.matches = Matches(population, self.seats, config.games, config.cells)
        self.metas: list[Meta] = []
        self.responses: list[Response] = []
        self.nash_convs: dict[int, float] = {}
        self.env_steps = 0
        self.over = False
        self._digests: dict[Player, set[str]] = {player: set() for player in population.players}
        self._refined = -1  # the last iteration that had its adaptive games
        self._notes: dict[str, Metrics] = {}

    def begin(self) -> list[Task]:
        return self.matches.first()

    def finished(self, task: Task, result: Result) -> list[Task]:
        self._notes = {}
        new: list[Task] = []
        if task.kind == "assess":
            self._assessed(task, result)
        elif task.kind == "play":
            self.matches.finished(task, result)
        elif not self.over:
            new = self._trained(task, result)
        if not self.over and self._due():
            new += self._conclude()
        return [*new, *self._slices()]

    def notes(self, task: Task, result: Result) -> dict[str, Metrics]:
        """A line of a slice or of NashConv; after an iteration's last games, what there is, and each player's mixture
        as `mix/MEMBER`. `gap` is what the newest responses gained over the meta-strategy before, summed over players:
        its NashConv where they are exact, a lower bound where they are learned."""
        return self._notes

    def summary(self) -> dict[str, float]:
        """Where the run stands."""
        last = {"nash_conv": self.nash_convs[max(self.nash_convs)]} if self.nash_convs else {}
        return {"iteration": len(self.metas) - 1, "iterations": self.config.iterations, **self._counts(), **last}

    @property
    def payoffs(self) -> Payoffs:
        """The payoff table of frozen members."""
        return self.matches.game.payoffs

    def _counts(self) -> Metrics:
        return {"members": len(self.population), "games": self.matches.played, "env_steps": self.env_steps}

    # ---- what was done

    def _trained(self, task: Task, result: Result) -> list[Task]:
        response = next(response for response in self.responses if response.name == task.order["response"])
        response.busy, response.latest = False, task.makes
        response.slices += 1
        self.env_steps += int(result["env_steps"])
        figures = {"iteration": response.number, "slice": response.slices, "env_steps": self.env_steps}
        self._notes = {response.player: {**figures, "return": result["return"]}}
        games = self._joined(response, result) if response.frozen else []
        if self.config.levels > 1:
            games += self.matches.sketch(response.player, response.name, self._training())
        return games

    def _joined(self, response: Response, result: Result) -> list[Task]:
        """The games of a response that is done. Exact ones to a joint distribution join when the last of their player's
        is done, those alone that gain something and are not there yet, so that it does not matter who is done first."""
        if not (self.config.correlated and result.get("exact")):
            return self.matches.join(self._frozen(response))
        response.gain, response.digest = self._gain(response, result["return"]), result["digest"]
        own = [each for each in self.responses if (each.number, each.player) == (response.number, response.player)]
        games: list[Task] = []
        for each in own if all(each.frozen for each in own) else ():
            if each.gain > 0 and each.digest not in self._digests[each.player]:
                self._digests[each.player].add(each.digest)
                games += self.matches.join(self._frozen(each))
        return games

    def _gain(self, response: Response, value: float) -> float:
        """The gain of a response that earns `value` over its player's value, weighed by its probability; 0 where that
        is next to nothing."""
        meta, seat = self.metas[response.number - 1], self.seats.index(response.player)
        table, joint = self.matches.game.tables(meta.names)[seat], meta.joint
        if response.told:
            place = [meta.names[seat].index(response.told)]
            table, joint = table.take(place, axis=seat), joint.take(place, axis=seat)
        gain = float(joint.sum() * value - (joint * table).sum())
        return gain if gain > SETTLED * max(float(np.abs(table).max()), abs(value)) else 0.0

    def _frozen(self, response: Response) -> Member:
        info: dict[str, Any] = {"iteration": response.number, "slices": response.slices}
        info |= {"told": response.told} if response.told else {}
        return Member(response.name, response.player, f"members/{response.name}", response.start, info)

    def _training(self) -> dict[Player, dict[str, str]]:
        """The newest snapshot of each response in training that has one."""
        found: dict[Player, dict[str, str]] = {player: {} for player in self.population.players}
        for response in self.responses:
            if response.latest and not response.frozen:
                found[response.player][response.name] = response.latest
        return found

    def _assessed(self, task: Task, result: Result) -> None:
        number, measured = int(task.order["iteration"]), float(result["nash_conv"])
        self.nash_convs[number] = measured
        self.over |= measured <= self.config.stop > 0
        self._notes = {TEAM: {"iteration": number, "nash_conv": measured, "exploitability": result["exploitability"]}}

    # ---- iterations

    def _due(self) -> bool:
        """Whether all that the next meta-strategy needs is known."""
        number = len(self.metas)
        responses = [response for response in self.responses if response.number == number]
        made = number == 0 or (bool(responses) and all(response.frozen for response in responses))
        return made and not self.matches.open

    def _conclude(self) -> list[Task]:
        """Ends an iteration: its adaptive games first, then its meta-strategy, and what follows from it."""
        names = [self.payoffs.members[player] for player in self.seats]
        tables = self.matches.game.tables(names)
        meta = self._solve(names, tables)
        number = len(self.metas)
        if self.config.adaptive and self._refined < number:
            self._refined = number
            if more := self.matches.more(meta.joint, self.config.adaptive, f"more-{number}"):
                return more
        self._note_iteration(meta, tables)
        self.metas.append(meta)
        self.over |= number == self.config.iterations
        if not self.over:
            self.responses += self._responses(meta, tables)
        return self._assessment(meta, number)

    def _solve(self, names: Sequence[Sequence[str]], tables: Sequence[np.ndarray]) -> Meta:
        solver = self.config.solver
        if self.config.correlated:
            return Meta(self.seats, tuple(map(tuple, names)), solver.solve_joint(tables), correlated=True)
        return Meta.independent(self.seats, names, solver.solve(tables))

    def _note_iteration(self, meta: Meta, tables: Sequence[np.ndarray]) -> None:
        number = len(self.metas)
        figures: Metrics = {"iteration": number, **self._counts()}
        if self.metas:
            figures["gap"] = gap(self.metas[-1].widened(meta.names), tables, self.config.solver.type != "ce")
            self.over |= self.config.correlated and figures["gap"] <= self.config.stop > 0
            self.over |= self.config.correlated and meta.names == self.metas[-1].names
        self._notes |= {TEAM: figures}
        for player, mix in meta.mixes().items():
            value = float((meta.joint * tables[self.seats.index(player)]).sum())
            self._notes[player] = {"iteration": number, "value": value} | {f"mix/{name}": p for name, p in mix.items()}

    def _assessment(self, meta: Meta, number: int) -> list[Task]:
        every, last = self.config.assess, number == self.config.iterations
        if not every or self.config.correlated or (number % every and not last):
            return []
        mixes = meta.mixes()
        files = self.matches.files(name for mix in mixes.values() for name in mix)
        return [Task(f"assess/{number}", "assess", {"iteration": number, "strategies": mixes}, files)]

    # ---- responses

    def _responses(self, meta: Meta, tables: Sequence[np.ndarray]) -> Iterable[Response]:
        """The responses that may begin now: all levels' at first, then one more on top."""
        done, levels = len(self.metas) - 1, self.config.levels
        for number in range(done + levels if done else 1, min(done + levels, self.config.iterations) + 1):
            for player in self.population.players:
                several = self._told(meta, player)
                for part, told in enumerate(several, start=1):
                    name = f"{player}-{number}" + (f".{part}" if len(several) > 1 else "")
                    yield Response(name, player, number, told, self._start(meta, tables, player, told))

    def _told(self, meta: Meta, player: Player) -> Sequence[str | None]:
        """The members for each of which there is a response of its own; [None] where one is for all."""
        return list(meta.mix(player)) if self.config.rectified or self.config.solver.type == "ce" else [None]

    def _start(self, meta: Meta, tables: Sequence[np.ndarray], player: Player, told: str | None) -> str | None:
        """The member whose weights a response goes on from."""
        if self.config.rectified:
            start = told
        elif self.config.start == "fresh":
            return None
        else:
            last = meta.names[self.seats.index(player)][-1]
            start = last if self.config.start == "last" else meta.best(tables, player)
        return start if start and self.matches.files([start]) else None

    def _slices(self) -> list[Task]:
        """A slice for every response that is not in one."""
        if self.over:
            return []
        idle = [response for response in self.responses if not response.frozen and not response.busy]
        return [self._slice(response) for response in idle]

    def _slice(self, response: Response) -> Task:
        config, below = self.config, response.number - 1
        settled = below < len(self.metas)
        last = settled and response.slices + 1 >= config.slices
        makes = response.name if last else f"{response.name}~{response.slices + 1}"
        start = response.latest or response.start
        order: dict[str, Any] = {
            "response": response.name,
            "player": response.player,
            **self._met(response, self.metas[below] if settled else self._meanwhile(below)),
            "start": start,
            "self_play": config.self_play,
        }
        order |= {"steps": config.steps} if config.steps else {"env_steps": math.ceil(config.env_steps / config.slices)}
        response.busy = True
        files = self.matches.files([*members_of(order), *([start] if start else [])])
        return Task(f"train/{makes}", "train", order, files, makes)

    def _met(self, response: Response, meta: Meta) -> dict[str, Any]:
        """Whom a response trains against, by the names of files: snapshots, of those who train."""
        if self.config.rectified and response.told:
            return rectified(meta, self.matches.game.tables(meta.names), response.player, response.told)
        order = opponents(meta, response.player, response.told)
        for player, newest in self._training().items() if self.config.levels > 1 else ():
            if mix := order["opponents"].get(player):
                order["opponents"][player] = {newest.get(name, name): p for name, p in mix.items()}
        return order

    def _meanwhile(self, number: int) -> Meta:
        """The meta-strategy over iterations up to `number`, some of whose responses still train: of these count the
        ones whose games with all others are known."""
        game = self.matches.game
        names = {player: list(self.metas[-1].names[self.seats.index(player)]) for player in self.population.players}
        for response in self.responses:
            if len(self.metas) <= response.number <= number:
                names[response.player].append(response.name)
                if not all(map(game.knows, cells_with(self.seats, names, response.player, response.name))):
                    names[response.player].pop()
        seated = [names[player] for player in self.seats]
        return self._solve(seated, game.tables(seated))


def _check(config: PSROConfig, population: Population, seats: Sequence[Player]) -> None:
    for player in population.players:
        if not population.of(player):
            raise ValueError(f'player "{player}" has no member to begin with: add one, for example uniform')
    if config.self_play and len(population.players) > 1:
        raise ValueError(
            "self_play: a policy of one seat cannot sit at another; only a population that plays every seat "
            "(symmetric: true) meets its own current weights"
        )
    if config.rectified and len(seats) != 2:
        raise ValueError(f"rectified: true is for games of two seats; this one has {len(seats)}")
    if config.solver.type == "nash" and len(seats) != 2:
        raise ValueError(f"solver nash is for two seats; this game has {len(seats)}: take prd, alpha_rank, ce or cce")
    if config.correlated and len(population.players) < len(seats):
        raise ValueError(
            f"solver {config.solver.type} says who plays with whom, so every seat needs a population: say symmetric: "
            "false, or take another solver"
        )
