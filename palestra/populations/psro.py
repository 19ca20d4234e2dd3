"""Policy-space response oracles (PSRO; Lanctot et al., 2017) and variants, as a plan of tasks.

An iteration adds to each player a best response to the meta-strategy over the current members. The games of the new
members fill the payoff table, from which the solver computes the next meta-strategy. With joint solvers this is JPSRO
(Marris et al., 2021), for any number of players; with `rectified`, PSRO_rN (Balduzzi et al., 2019); with
several `pipeline_levels`, pipeline PSRO (McAleer et al., 2020): the responses of several iterations train at once in
slices, each against the newest snapshots of those below it. A response is frozen only after a slice against members
that were all frozen.

A task is created as soon as its inputs exist: a new member plays each member that exists at that moment, and later
members play against it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from palestra.config import StrictModel
from palestra.populations.empirical import cells_containing
from palestra.populations.match_tasks import MatchQueue
from palestra.populations.meta_strategy import (
    MetaStrategy,
    equilibrium_gap,
    opponent_names,
    opponent_payload,
    rectified_payload,
)
from palestra.populations.payoffs import PayoffTable
from palestra.populations.population import Member, Player, Population
from palestra.populations.solvers import MetaSolverConfig, Nash
from palestra.populations.tasks import ResultDict, Task
from palestra.types import TEAM, Metrics

CORRELATED_SOLVERS = ("ce", "cce")  # solvers for which responses train against the joint distribution
MIN_RELATIVE_GAIN = (
    1e-7  # relative to the largest payoff: an exact response that gains less is not added (joint solvers)
)


class PSROConfig(StrictModel):
    """Policy-space response oracles: number of iterations, the solver, and how responses are trained and evaluated.

    With a joint solver, exact responses that gain almost nothing or equal another member are left out, and the run ends
    with the iteration that adds none.
    """

    type: Literal["psro"] = "psro"
    iterations: int = Field(20, ge=1)
    """Iterations, each with one response (or more) for each player."""
    meta_solver: MetaSolverConfig = Nash()
    """Meta-solver that computes the meta-strategy from the payoff table."""
    env_steps: int = Field(100_000, ge=1)
    """Env steps of each response, over all its slices."""
    train_steps: int = Field(0, ge=0)
    """Training steps of each slice, for language agents; replaces `env_steps` if above 0."""
    slices: int = Field(1, ge=1)
    """Parts in which a response is trained; with `pipeline_levels` above 1, opponents are updated between them."""
    start: Literal["fresh", "last", "best"] = "fresh"
    """Where a response starts: `fresh` weights, its player's `last` member, or the `best` member against the
    meta-strategy."""
    self_play: float = Field(0.0, ge=0, lt=1)
    """Probability that a game's opponents are the response's own current weights; needs `symmetric: true`."""
    rectified: bool = False
    """PSRO_rN: one response for each member of the meta-strategy, against the opponents that the member beats. Two
    seats only."""
    pipeline_levels: int = Field(1, ge=1)
    """Iterations whose responses train at once (pipeline PSRO)."""
    games_per_cell: int = Field(1000, ge=1)
    """Games of each payoff cell."""
    adaptive_games: int = Field(0, ge=0)
    """Additional games per iteration, played in the cells where the meta-strategy is most uncertain."""
    cells_per_task: int = Field(16, ge=1)
    """Payoff cells of one task of games."""
    nash_conv_every: int = Field(1, ge=0)
    """NashConv is measured every so many iterations; 0: never. Needs a game with exact rules."""
    stop_nash_conv: float = Field(0.0, ge=0)
    """The run ends once NashConv is at most this (0: never); with a joint solver, once the gap to an equilibrium that
    responses find is."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.pipeline_levels > 1 and (self.rectified or self.correlated):
            raise ValueError(
                f"pipeline_levels: {self.pipeline_levels} train responses to mixtures that are not final; with "
                f"rectified: true or meta_solver {self.meta_solver.type} their number follows from the final one, so "
                "pipeline_levels: must be 1"
            )
        if self.rectified and self.correlated:
            raise ValueError(
                f"rectified: true reads a mixture of each player; meta_solver {self.meta_solver.type} has none"
            )
        return self

    @property
    def correlated(self) -> bool:
        """True if responses train against a joint distribution (`ce`, `cce`)."""
        return self.meta_solver.type in CORRELATED_SOLVERS


@dataclass
class Response:
    """A policy in training: the response of iteration `iteration` for `player`; `name` is that of the future member.

    `recommended` is the member that it deviates from or continues, if an iteration has one response for each of several
    members. `latest` is its newest snapshot; `gain` and `digest`, of an exact response, are its gain and a hash of its
    policy.
    """

    name: str
    player: Player
    iteration: int
    recommended: str | None = None
    start: str | None = None
    slices: int = 0
    latest: str = ""
    in_training: bool = False
    gain: float = math.inf
    digest: str = ""

    @property
    def is_frozen(self) -> bool:
        """True once its last slice is done."""
        return self.latest == self.name


class PSRO:
    """Plan of PSRO. `population` holds the initial members, at least one for each player.

    `seats` names the player at each seat. A population that plays every seat is named at each, and the game is taken to
    be symmetric. `meta_strategies` are the meta-strategies by iteration, number 0 over the initial members;
    `nash_convs` maps iterations to measured NashConv.
    """

    def __init__(self, config: PSROConfig, population: Population, seats: Sequence[Player] = ()) -> None:
        """Raises ValueError if the config does not fit the seats, or a player has no member."""
        self.config, self.population = config, population
        self.seats = tuple(seats) or population.players
        _check(config, population, self.seats)
        self.matches = MatchQueue(population, self.seats, config.games_per_cell, config.cells_per_task)
        self.meta_strategies: list[MetaStrategy] = []
        self.responses: list[Response] = []
        self.nash_convs: dict[int, float] = {}
        self.env_steps = 0
        self.is_done = False
        self._digests: dict[Player, set[str]] = {player: set() for player in population.players}
        self._refined = -1  # last iteration for which adaptive games were created
        self._notes: dict[str, Metrics] = {}

    def initial_tasks(self) -> list[Task]:
        """Returns tasks for the games among the initial members."""
        return self.matches.initial_tasks()

    def on_result(self, task: Task, result: ResultDict) -> list[Task]:
        """Records a result; returns the games, assessments and slices that it makes possible."""
        self._notes = {}
        new: list[Task] = []
        if task.kind == "assess":
            self._assessed(task, result)
        elif task.kind == "play":
            self.matches.record_result(task, result)
        elif not self.is_done:
            new = self._trained(task, result)
        if not self.is_done and self._due():
            new += self._conclude()
        return [*new, *self._slices()]

    def task_metrics(self, task: Task, result: ResultDict) -> dict[str, Metrics]:
        """Metrics of a slice or of NashConv; after an iteration's last games, counts, and each player's mixture as
        `mix/MEMBER`.

        `gap` is the gain of the newest responses over the previous meta-strategy, summed over players: its NashConv if
        responses are exact, a lower bound if they are learned.
        """
        return self._notes

    def summary(self) -> dict[str, float]:
        """Progress: iterations done and in all, members, games, env steps, and the latest NashConv."""
        last = {"nash_conv": self.nash_convs[max(self.nash_convs)]} if self.nash_convs else {}
        return {
            "iteration": len(self.meta_strategies) - 1,
            "iterations": self.config.iterations,
            **self._counts(),
            **last,
        }

    @property
    def payoffs(self) -> PayoffTable:
        """Payoff table of the frozen members."""
        return self.matches.empirical_game.payoffs

    def _counts(self) -> Metrics:
        return {"members": len(self.population), "games": self.matches.num_games, "env_steps": self.env_steps}

    # ---- results

    def _trained(self, task: Task, result: ResultDict) -> list[Task]:
        response = next(response for response in self.responses if response.name == task.payload["response"])
        response.in_training, response.latest = False, task.output_member
        response.slices += 1
        self.env_steps += int(result["env_steps"])
        metrics = {"iteration": response.iteration, "slice": response.slices, "env_steps": self.env_steps}
        self._notes = {response.player: {**metrics, "return": result["return"]}}
        games = self._joined(response, result) if response.is_frozen else []
        if self.config.pipeline_levels > 1:
            games += self.matches.snapshot_tasks(response.player, response.name, self._training())
        return games

    def _joined(self, response: Response, result: ResultDict) -> list[Task]:
        """Returns the games of a finished response.

        Exact responses to a joint distribution are added when the last of their player's is done, and only those that
        gain something and are new, so that the order of completion does not matter.
        """
        if not (self.config.correlated and result.get("exact")):
            return self.matches.add_member(self._frozen(response))
        response.gain, response.digest = self._gain(response, result["return"]), result["digest"]
        own = [
            each for each in self.responses if (each.iteration, each.player) == (response.iteration, response.player)
        ]
        games: list[Task] = []
        for each in own if all(each.is_frozen for each in own) else ():
            if each.gain > 0 and each.digest not in self._digests[each.player]:
                self._digests[each.player].add(each.digest)
                games += self.matches.add_member(self._frozen(each))
        return games

    def _gain(self, response: Response, value: float) -> float:
        """Returns by how much a response that earns `value` exceeds its player's value, times the probability of its
        recommendation; 0 if negligible."""
        meta, seat = self.meta_strategies[response.iteration - 1], self.seats.index(response.player)
        table, joint = self.matches.empirical_game.payoff_tensors(meta.names)[seat], meta.joint
        if response.recommended:
            place = [meta.names[seat].index(response.recommended)]
            table, joint = table.take(place, axis=seat), joint.take(place, axis=seat)
        gain = float(joint.sum() * value - (joint * table).sum())
        return gain if gain > MIN_RELATIVE_GAIN * max(float(np.abs(table).max()), abs(value)) else 0.0

    def _frozen(self, response: Response) -> Member:
        info: dict[str, Any] = {"iteration": response.iteration, "slices": response.slices}
        info |= {"told": response.recommended} if response.recommended else {}
        return Member(response.name, response.player, f"members/{response.name}", response.start, info)

    def _training(self) -> dict[Player, dict[str, str]]:
        """Returns, by player, the newest snapshot of each response in training that has one."""
        found: dict[Player, dict[str, str]] = {player: {} for player in self.population.players}
        for response in self.responses:
            if response.latest and not response.is_frozen:
                found[response.player][response.name] = response.latest
        return found

    def _assessed(self, task: Task, result: ResultDict) -> None:
        number, measured = int(task.payload["iteration"]), float(result["nash_conv"])
        self.nash_convs[number] = measured
        self.is_done |= measured <= self.config.stop_nash_conv > 0
        self._notes = {TEAM: {"iteration": number, "nash_conv": measured, "exploitability": result["exploitability"]}}

    # ---- iterations

    def _due(self) -> bool:
        """True if all games and responses for the next meta-strategy are done."""
        number = len(self.meta_strategies)
        responses = [response for response in self.responses if response.iteration == number]
        made = number == 0 or (bool(responses) and all(response.is_frozen for response in responses))
        return made and not self.matches.open_tasks

    def _conclude(self) -> list[Task]:
        """Ends an iteration: requests its adaptive games first; then solves for the meta-strategy and returns its
        assessment."""
        names = [self.payoffs.members[player] for player in self.seats]
        tables = self.matches.empirical_game.payoff_tensors(names)
        meta = self._solve(names, tables)
        number = len(self.meta_strategies)
        if self.config.adaptive_games and self._refined < number:
            self._refined = number
            if more := self.matches.adaptive_tasks(meta.joint, self.config.adaptive_games, f"more-{number}"):
                return more
        self._note_iteration(meta, tables)
        self.meta_strategies.append(meta)
        self.is_done |= number == self.config.iterations
        if not self.is_done:
            self.responses += self._responses(meta, tables)
        return self._assessment(meta, number)

    def _solve(self, names: Sequence[Sequence[str]], tables: Sequence[np.ndarray]) -> MetaStrategy:
        solver = self.config.meta_solver
        if self.config.correlated:
            return MetaStrategy(self.seats, tuple(map(tuple, names)), solver.solve_joint(tables), correlated=True)
        return MetaStrategy.independent(self.seats, names, solver.solve(tables))

    def _note_iteration(self, meta: MetaStrategy, tables: Sequence[np.ndarray]) -> None:
        number = len(self.meta_strategies)
        metrics: Metrics = {"iteration": number, **self._counts()}
        if self.meta_strategies:
            metrics["gap"] = equilibrium_gap(
                self.meta_strategies[-1].pad_to(meta.names), tables, self.config.meta_solver.type != "ce"
            )
            self.is_done |= self.config.correlated and metrics["gap"] <= self.config.stop_nash_conv > 0
            self.is_done |= self.config.correlated and meta.names == self.meta_strategies[-1].names
        self._notes |= {TEAM: metrics}
        for player, mix in meta.all_marginals().items():
            value = float((meta.joint * tables[self.seats.index(player)]).sum())
            self._notes[player] = {"iteration": number, "value": value} | {f"mix/{name}": p for name, p in mix.items()}

    def _assessment(self, meta: MetaStrategy, number: int) -> list[Task]:
        every, last = self.config.nash_conv_every, number == self.config.iterations
        if not every or self.config.correlated or (number % every and not last):
            return []
        mixes = meta.all_marginals()
        files = self.matches.names_with_files(name for mix in mixes.values() for name in mix)
        return [Task(f"assess/{number}", "assess", {"iteration": number, "strategies": mixes}, files)]

    # ---- responses

    def _responses(self, meta: MetaStrategy, tables: Sequence[np.ndarray]) -> Iterable[Response]:
        """Yields the responses that can start now: those of all levels at first, then one more level for each
        iteration."""
        done, levels = len(self.meta_strategies) - 1, self.config.pipeline_levels
        for number in range(done + levels if done else 1, min(done + levels, self.config.iterations) + 1):
            for player in self.population.players:
                several = self._told(meta, player)
                for part, told in enumerate(several, start=1):
                    name = f"{player}-{number}" + (f".{part}" if len(several) > 1 else "")
                    yield Response(name, player, number, told, self._start(meta, tables, player, told))

    def _told(self, meta: MetaStrategy, player: Player) -> Sequence[str | None]:
        """Returns the members that have a response of their own; [None] if one response covers all."""
        return list(meta.marginal(player)) if self.config.rectified or self.config.meta_solver.type == "ce" else [None]

    def _start(self, meta: MetaStrategy, tables: Sequence[np.ndarray], player: Player, told: str | None) -> str | None:
        """Returns the member from whose weights a response starts; None for new weights."""
        if self.config.rectified:
            start = told
        elif self.config.start == "fresh":
            return None
        else:
            last = meta.names[self.seats.index(player)][-1]
            start = last if self.config.start == "last" else meta.best_member(tables, player)
        return start if start and self.matches.names_with_files([start]) else None

    def _slices(self) -> list[Task]:
        """Returns a slice for every response that is not in training."""
        if self.is_done:
            return []
        idle = [response for response in self.responses if not response.is_frozen and not response.in_training]
        return [self._slice(response) for response in idle]

    def _slice(self, response: Response) -> Task:
        config, below = self.config, response.iteration - 1
        settled = below < len(self.meta_strategies)
        last = settled and response.slices + 1 >= config.slices
        makes = response.name if last else f"{response.name}~{response.slices + 1}"
        start = response.latest or response.start
        order: dict[str, Any] = {
            "response": response.name,
            "player": response.player,
            **self._met(response, self.meta_strategies[below] if settled else self._meanwhile(below)),
            "start": start,
            "self_play": config.self_play,
        }
        order |= (
            {"steps": config.train_steps}
            if config.train_steps
            else {"env_steps": math.ceil(config.env_steps / config.slices)}
        )
        response.in_training = True
        files = self.matches.names_with_files([*opponent_names(order), *([start] if start else [])])
        return Task(f"train/{makes}", "train", order, files, makes)

    def _met(self, response: Response, meta: MetaStrategy) -> dict[str, Any]:
        """Returns the opponents of a response by file name: for policies in training, their newest snapshots."""
        if self.config.rectified and response.recommended:
            return rectified_payload(
                meta, self.matches.empirical_game.payoff_tensors(meta.names), response.player, response.recommended
            )
        order = opponent_payload(meta, response.player, response.recommended)
        for player, newest in self._training().items() if self.config.pipeline_levels > 1 else ():
            if mix := order["opponents"].get(player):
                order["opponents"][player] = {newest.get(name, name): p for name, p in mix.items()}
        return order

    def _meanwhile(self, number: int) -> MetaStrategy:
        """Returns the meta-strategy over iterations up to `iteration`, some of whose responses still train.

        Of those, it includes the ones that have payoffs against all others.
        """
        game = self.matches.empirical_game
        names = {
            player: list(self.meta_strategies[-1].names[self.seats.index(player)]) for player in self.population.players
        }
        for response in self.responses:
            if len(self.meta_strategies) <= response.iteration <= number:
                names[response.player].append(response.name)
                if not all(map(game.has_payoffs, cells_containing(self.seats, names, response.player, response.name))):
                    names[response.player].pop()
        seated = [names[player] for player in self.seats]
        return self._solve(seated, game.payoff_tensors(seated))


def _check(config: PSROConfig, population: Population, seats: Sequence[Player]) -> None:
    for player in population.players:
        if not population.names_of(player):
            raise ValueError(f'player "{player}" has no member to begin with: add one, for example uniform')
    if config.self_play and len(population.players) > 1:
        raise ValueError(
            "self_play: a policy of one seat cannot sit at another; only a population that plays every seat "
            "(symmetric: true) meets its own current weights"
        )
    if config.rectified and len(seats) != 2:
        raise ValueError(f"rectified: true is for games of two seats; this one has {len(seats)}")
    if config.meta_solver.type == "nash" and len(seats) != 2:
        raise ValueError(
            f"meta_solver nash is for two seats; this game has {len(seats)}: take prd, alpha_rank, ce or cce"
        )
    if config.correlated and len(population.players) < len(seats):
        raise ValueError(
            f"meta_solver {config.meta_solver.type} says who plays with whom, so every seat needs a population: say "
            "symmetric: false, or take another meta_solver"
        )
