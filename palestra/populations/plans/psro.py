"""Policy-space response oracles (PSRO; Lanctot et al., 2017) and variants, as a plan of tasks.

An iteration adds to each player a best response to the meta-strategy over the current members. The games of the new
members fill the payoff table, from which the solver computes the next meta-strategy. With joint solvers this is JPSRO
(Marris et al., 2021), for any number of players; with `rectified`, PSRO_rN (Balduzzi et al., 2019); with
several `pipeline_levels`, pipeline PSRO (McAleer et al., 2020): the responses of several iterations train at once in
slices, each against the newest snapshots of the responses of earlier iterations. A response is frozen only after a
slice in which all opponents were frozen.

A task is created as soon as its inputs exist: a new member plays each member that exists at that moment, and later
members play against it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence

import numpy as np

from palestra.core.types import TEAM, Metrics
from palestra.parallel.tasks import Result, Task
from palestra.populations.normal_form.equilibria import fits_memory
from palestra.populations.plans.empirical_game import EmpiricalGame, cells_containing
from palestra.populations.plans.iterative_plan import IterativePlan
from palestra.populations.plans.meta_strategy import MetaStrategy, beaten_opponents, equilibrium_gap, meta_opponents
from palestra.populations.plans.psro_config import PSROConfig, check_psro
from palestra.populations.plans.psro_responses import (
    Response,
    gain_error,
    most_recommended,
    response_gain,
    warn_full,
)
from palestra.populations.population import Player, Population
from palestra.populations.tasks import Opponents, PlayResult, PlayTask, TrainResult, TrainTask


class PSRO(IterativePlan):
    """Plan of PSRO. `population` holds the initial members, at least one for each player.

    `seats` names the player at each seat. A population that plays every seat is named at each, and the game is assumed
    to be symmetric. `meta_strategies` are the meta-strategies by iteration; number 0 is over the initial members.

    Metrics are of a slice, or NashConv; after an iteration's last games, counts, and each player's mixture as
    `mix/MEMBER`. `gap` is the gain of the newest responses over the previous meta-strategy, summed over players: its
    NashConv if responses are exact, a lower bound if they are learned.
    """

    def __init__(self, config: PSROConfig, population: Population, seats: Sequence[Player] = ()) -> None:
        """Raises ValueError if the config does not fit the seats, or a player has no member."""
        super().__init__(population, config.iterations, config.nash_conv_every, config.stop_nash_conv)
        self.config = config
        self.seats = tuple(seats) or population.players
        check_psro(config, population, self.seats)
        self.game = EmpiricalGame(population, self.seats, config.games_per_cell, config.cells_per_task)
        self.payoffs = self.game.payoffs
        self.meta_strategies: list[MetaStrategy] = []
        self.responses: list[Response] = []
        self.in_training: dict[str, Response] = {}  # by name of the task of its current slice
        self._digests: dict[Player, set[str]] = {player: set() for player in population.players}
        self._answered: dict[Player, set[str | None]] = {player: set() for player in population.players}
        self._refined = -1  # last iteration for which adaptive games were created

    def initial_tasks(self) -> Sequence[Task]:
        """Returns tasks for the games among the initial members."""
        return self.game.initial_tasks()

    def on_result(self, task: Task, result: Result) -> list[Task]:
        """Records a result; returns the games, assessments and slices that it makes possible."""
        new = [*super().on_result(task, result)]
        if not self.is_done and self._iteration_is_complete():
            new += self._end_iteration()
        return [*new, *self._slices()]

    @property
    def iteration(self) -> int:
        return len(self.meta_strategies) - 1

    def _counts(self) -> Metrics:
        return {"members": len(self.population), "games": self.game.num_games, "env_steps": self.env_steps}

    # ---- results

    def _record_games(self, task: PlayTask, result: PlayResult) -> Sequence[Task]:
        self.game.record_result(task, result)
        return []

    def _record_training(self, task: TrainTask, result: TrainResult) -> Sequence[Task]:
        if self.is_done:
            return []
        response = self.in_training.pop(task.name)
        response.latest = task.output_member
        response.slices += 1
        self.env_steps += result.env_steps
        metrics = {"iteration": response.iteration, "slice": response.slices, "env_steps": self.env_steps}
        self._metrics = {response.player: {**metrics, "return": result.return_metric}}
        games = self._add_response(response, result) if response.is_frozen else []
        if self.config.pipeline_levels > 1:
            games += self.game.snapshot_tasks(response.player, response.name, self._snapshots())
        return games

    def _add_response(self, response: Response, result: TrainResult) -> list[PlayTask]:
        """Adds a finished response to its player; returns the tasks of its games.

        Responses to a joint distribution are added once all responses of their player in the iteration are done, and
        only those that have a gain and are new, so that the order of completion does not matter.
        """
        if not self.config.is_correlated:
            return self.game.add_member(response.to_member())
        response.gain = self._gain(response, result)
        response.digest = result.policy_digest or response.name
        siblings = [
            each for each in self.responses if (each.iteration, each.player) == (response.iteration, response.player)
        ]
        games: list[PlayTask] = []
        for each in siblings if all(each.is_frozen for each in siblings) else ():
            if each.gain > 0 and each.digest not in self._digests[each.player]:
                self._digests[each.player].add(each.digest)
                games += self.game.add_member(each.to_member())
        return games

    def _gain(self, response: Response, result: TrainResult) -> float:
        """Returns the gain of a response to a joint distribution, minus its standard error if it is learned; infinity
        if the gain is not known, or if the response is learned and is the player's only one."""
        is_exact = result.policy_digest is not None
        if result.mean_return is None or not (is_exact or response.recommended):
            return math.inf
        meta = self.meta_strategies[response.iteration - 1]
        gain = response_gain(response, result.mean_return, meta, self.game.payoff_tensors(meta.names))
        if is_exact:
            return gain
        then = tuple(slice(len(members)) for members in meta.names)  # without members that have joined since
        error = gain_error(response, result, meta, [table[then] for table in self.payoffs.stderr()])
        return math.inf if error is None else gain - error

    def _snapshots(self) -> dict[Player, dict[str, str]]:
        """Returns, by player, the newest snapshot of each response in training that has one."""
        snapshots: dict[Player, dict[str, str]] = {player: {} for player in self.population.players}
        for response in self.responses:
            if response.latest and not response.is_frozen:
                snapshots[response.player][response.name] = response.latest
        return snapshots

    # ---- iterations

    def _iteration_is_complete(self) -> bool:
        """True if all games and responses for the next meta-strategy are done."""
        number = len(self.meta_strategies)
        responses = [response for response in self.responses if response.iteration == number]
        are_trained = number == 0 or (bool(responses) and all(response.is_frozen for response in responses))
        return are_trained and not self.game.open_tasks

    def _end_iteration(self) -> Sequence[Task]:
        """Ends an iteration. Returns the tasks of its adaptive games if these are not yet played; else solves for the
        meta-strategy and returns the task of its assessment."""
        names = [self.payoffs.members[player] for player in self.seats]
        tables = self.game.payoff_tensors(names)
        meta = self._solve(names, tables)
        number = len(self.meta_strategies)
        if self.config.adaptive_games and self._refined < number:
            self._refined = number
            if more := self.game.adaptive_tasks(meta.joint, self.config.adaptive_games, f"more-{number}"):
                return more
        self._note_iteration(meta, tables)
        self.meta_strategies.append(meta)
        self.is_done |= number == self.config.iterations
        if not self.is_done and not self._max_responses(meta):
            self.is_done = True
            warn_full(self.config.meta_solver.type, meta, self._metrics[TEAM])
        if not self.is_done:
            self.responses += self._responses(meta, tables)
        return [] if self.config.is_correlated else self._assessment(number, meta.all_marginals())

    def _solve(self, names: Sequence[Sequence[str]], tables: Sequence[np.ndarray]) -> MetaStrategy:
        solver = self.config.meta_solver
        if self.config.is_correlated:
            return MetaStrategy(self.seats, tuple(map(tuple, names)), solver.solve_joint(tables), is_correlated=True)
        return MetaStrategy.independent(self.seats, names, solver.solve(tables))

    def _note_iteration(self, meta: MetaStrategy, tables: Sequence[np.ndarray]) -> None:
        number = len(self.meta_strategies)
        metrics: Metrics = {"iteration": number, **self._counts()}
        if self.meta_strategies:
            metrics["gap"] = equilibrium_gap(
                self.meta_strategies[-1].pad_to(meta.names), tables, self.config.meta_solver.type != "ce"
            )
            if self.config.is_correlated:
                self._end_if_answered(meta, metrics["gap"])
        self._metrics |= {TEAM: metrics}
        for player, mix in meta.all_marginals().items():
            value = float((meta.joint * tables[self.seats.index(player)]).sum())
            shares = {f"mix/{name}": p for name, p in mix.items()}
            self._metrics[player] = {"iteration": number, "value": value} | shares

    def _end_if_answered(self, meta: MetaStrategy, gap: float) -> None:
        """With joint solvers, ends the run once every recommended member has a response, if the responses gained at
        most `stop_nash_conv` or added no member."""
        before = self.meta_strategies[-1]
        players = self.population.players
        if gap <= self.config.stop_nash_conv > 0:
            self.is_done |= not any(self._unanswered_members(before, player) for player in players)
        if meta.names == before.names:
            self.is_done |= not any(self._unanswered_members(meta, player) for player in players)
        else:
            self._answered = {player: set() for player in players}

    # ---- responses

    def _unanswered_members(self, meta: MetaStrategy, player: Player) -> list[str | None]:
        """Returns the members for which a response is still to be trained; [None] for one response for all members."""
        several = self.config.rectified or self.config.meta_solver.type == "ce"
        members = list(meta.marginal(player)) if several else [None]
        return [one for one in members if one not in self._answered[player]]

    def _max_responses(self, meta: MetaStrategy) -> int:
        """Returns the largest number of responses of each player in an iteration: `max_responses` with `ce`, 1 with
        `cce`, fewer if the solver's table has no room for these, and no limit with other solvers."""
        solver = self.config.meta_solver.type
        if solver != "ce" and solver != "cce":
            return sys.maxsize
        count = self.config.max_responses if solver == "ce" else 1
        while count and not fits_memory(solver, [members + count for members in meta.joint.shape]):
            count -= 1
        return count

    def _responses(self, meta: MetaStrategy, tables: Sequence[np.ndarray]) -> Iterable[Response]:
        """Yields the responses that can start now: in the first iteration those of all pipeline levels, then one more
        level per iteration."""
        done = len(self.meta_strategies) - 1
        levels = self.config.pipeline_levels
        room = self._max_responses(meta)
        for number in range(done + levels if done else 1, min(done + levels, self.config.iterations) + 1):
            for player in self.population.players:
                several = most_recommended(self._unanswered_members(meta, player), meta, player, room)
                if self.config.is_correlated:
                    self._answered[player].update(several)
                for index, member in enumerate(several, start=1):
                    name = f"{player}-{number}" + (f".{index}" if len(several) > 1 else "")
                    start = self._start_member(meta, tables, player, member)
                    yield Response(name, player, number, member, start)

    def _start_member(
        self, meta: MetaStrategy, tables: Sequence[np.ndarray], player: Player, recommended: str | None
    ) -> str | None:
        """Returns the member from whose weights a response starts; None for new weights."""
        if self.config.rectified:
            start = recommended
        elif self.config.start == "fresh":
            return None
        else:
            last = meta.names[meta.seats.index(player)][-1]
            start = last if self.config.start == "last" else meta.best_member(tables, player)
        return start if self.population.names_with_files([start]) else None

    def _slices(self) -> list[TrainTask]:
        """Returns a slice for every response that is not in training."""
        if self.is_done:
            return []
        busy = {response.name for response in self.in_training.values()}
        idle = [response for response in self.responses if not response.is_frozen and response.name not in busy]
        return [self._slice(response) for response in idle]

    def _slice(self, response: Response) -> TrainTask:
        config = self.config
        below = response.iteration - 1
        settled = below < len(self.meta_strategies)
        last = settled and response.slices + 1 >= config.slices
        name = response.name if last else f"{response.name}~{response.slices + 1}"
        opponents = self._opponents(response, self.meta_strategies[below] if settled else self._provisional_meta(below))
        start = response.latest or response.start
        task = TrainTask(
            f"train/{name}",
            player=response.player,
            opponents=opponents,
            start=start,
            self_play=config.self_play,
            env_steps=None if config.train_steps else math.ceil(config.env_steps / config.slices),
            train_steps=config.train_steps or None,
            members=self.population.names_with_files([*opponents.names(), start]),
            output_member=name,
        )
        self.in_training[task.name] = response
        return task

    def _opponents(self, response: Response, meta: MetaStrategy) -> Opponents:
        """Returns a response's opponents; policies in training by the names of their newest snapshots."""
        if self.config.rectified and response.recommended:
            payoffs = self.game.payoff_tensors(meta.names)
            return beaten_opponents(meta, payoffs, response.player, response.recommended)
        opponents = meta_opponents(meta, response.player, response.recommended)
        if self.config.pipeline_levels == 1:
            return opponents
        newest = self._snapshots()
        return Opponents(
            {
                player: {newest[player].get(name, name): p for name, p in mix.items()}
                for player, mix in opponents.mixes.items()
            }
        )

    def _provisional_meta(self, number: int) -> MetaStrategy:
        """Returns the meta-strategy over the iterations up to `number`, some of whose responses are still in training.

        Of these responses it includes those that have payoffs against all others.
        """
        names = {
            player: list(self.meta_strategies[-1].names[self.seats.index(player)]) for player in self.population.players
        }
        for response in self.responses:
            if len(self.meta_strategies) <= response.iteration <= number:
                names[response.player].append(response.name)
                if not all(
                    map(self.game.has_payoffs, cells_containing(self.seats, names, response.player, response.name))
                ):
                    names[response.player].pop()
        names_by_seat = [names[player] for player in self.seats]
        return self._solve(names_by_seat, self.game.payoff_tensors(names_by_seat))
