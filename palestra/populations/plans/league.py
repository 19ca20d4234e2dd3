"""The league of AlphaStar (Vinyals et al., 2019, and its published pseudocode) as a plan of training slices.

Main agents train against the whole league, main exploiters against the main agents, league exploiters against the
league's history. Each learner trains slice after slice from its last weights and does not wait for the others. A
slice's opponents are drawn from a fixed distribution: that of the published rules at the win rates known when the slice
starts. A frozen copy is the member that the slice produced: no weights are copied.

There are three differences from the published rules. A copy is frozen before a reset, not after it. A reset also clears
the learner's win rates, which belong to other weights. A share of the games (`explore_share`) is spread evenly over the
opponents that decide whether the learner is frozen: otherwise an opponent that is always beaten has weight 0, and its
win rate is never measured again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import numpy as np

from palestra.core.seeding import derive_seed
from palestra.core.types import TEAM, Metrics
from palestra.parallel.tasks import Task
from palestra.populations.payoffs import MemberProfile
from palestra.populations.plans.empirical_game import play_tasks
from palestra.populations.plans.iterative_plan import RecordingPlan
from palestra.populations.plans.league_rules import LeagueConfig, LeagueLearner, LeagueLogic, OpponentWeights
from palestra.populations.plans.slices import slice_task
from palestra.populations.population import Member, Mix, Player, Population
from palestra.populations.tasks import AssessResult, AssessTask, Opponents, PlayResult, PlayTask, TrainResult, TrainTask

__all__ = ["League", "LeagueConfig"]


class League(RecordingPlan):
    """Plan of a league. `population` has one player, whose members play all `seats` (default: two), or two, which are
    the sides of the game: each then has learners of every role.

    Its initial members are the first of the league's history and of every main agent's past. All learners start from
    the first of them that has weights, and are reset to it. Metrics are of a slice: the learner's mean and lowest win
    rate against the opponents that decide whether it is frozen; or of an assessment: NashConv. Raises ValueError if the
    population has more players or no member.
    """

    def __init__(
        self, config: LeagueConfig, population: Population, seats: Sequence[Player] = (), seed: int = 0
    ) -> None:
        if len(population.players) > 2 or not len(population):
            raise ValueError(
                "a league needs one player, whose members play every seat, or two sides, and an initial member to play "
                f"against; this population has players {', '.join(population.players)} and {len(population)} members"
            )
        super().__init__(population)
        self.config = config
        self.seed = seed
        self.seats = tuple(seats) or population.players * (3 - len(population.players))
        self.initial_member = {player: self._first_with_weights(player) for player in population.players}
        self.logic = LeagueLogic(config, list(self._learners()), population)
        self.learners = self.logic.learners
        self.win_rates = self.logic.win_rates
        self.games = 0
        self._counts: dict[str, Metrics] = {}  # by assessment: env steps and games when it was created
        self.opponents: dict[
            str, dict[str, list[str]]
        ] = {}  # by task and opponent member: the names whose win rates it counts for

    def _first_with_weights(self, player: Player) -> str:
        """Returns the name of a player's first member that has weights; "" if there is none."""
        return next((one.name for one in self.population if one.weights and one.player in ("", player)), "")

    def _learners(self) -> Iterable[LeagueLearner]:
        roles = self.config.roles()
        for player, start in self.initial_member.items():
            side = "" if len(self.initial_member) == 1 else f"{player}_"
            for number, role in enumerate(roles):
                name = f"{side}{role}_{number - roles.index(role)}"
                yield LeagueLearner(name, role, player, start=start, parent=start)

    def initial_tasks(self) -> Sequence[Task]:
        return [self._slice(learner) for learner in self.learners.values()]

    def summary(self) -> Metrics:
        """Returns progress: slices done and in all, members, games, env steps."""
        done = sum(learner.slices for learner in self.learners.values())
        counts = {"members": len(self.population), "games": self.games, "env_steps": self.env_steps}
        return {"iteration": done, "iterations": self.config.slices * len(self.learners), **counts}

    def _record_games(self, task: PlayTask, result: PlayResult) -> Sequence[Task]:
        self.games += result.num_games
        return []

    def _record_assessment(self, task: AssessTask, result: AssessResult) -> Sequence[Task]:
        metrics = {"nash_conv": result.nash_conv, "exploitability": result.exploitability}
        self._metrics = {TEAM: {"iteration": task.iteration, **self._counts[task.name], **metrics}}
        return []

    def _record_training(self, task: TrainTask, result: TrainResult) -> Sequence[Task]:
        """Records a slice; returns the learner's next one, and the games of a newly frozen copy."""
        learner = self.learners[task.learner]
        self.env_steps += result.env_steps
        self._note(learner, task, result)
        over = learner.slices == self.config.slices
        played = self._freeze(learner) if over or self.logic.should_freeze(learner) else []
        return played if over else [*played, self._slice(learner)]

    def _slice(self, learner: LeagueLearner) -> TrainTask:
        weights = self.logic.opponent_weights(learner)
        self_play = weights.current.pop(learner.name, 0.0)
        latest = {name: self.learners[name].latest for name in weights.current}
        members = self._draw_opponents(learner, weights, latest)
        opponents = Opponents({self.logic.rival_of[learner.player]: members})
        task = slice_task(
            self.config,
            self.population,
            f"{learner.name}-{learner.slices + 1}",
            opponents,
            learner=learner.name,
            player=learner.player,
            start=learner.start,
            self_play=self_play,
        )
        numbers = self.logic.met_by(learner).number_of
        names = {m: [m] if m in numbers and weights.frozen[numbers[m]] else [] for m in members}
        for name, member in latest.items():
            if member in names:
                names[member].append(name)
        self.opponents[task.name] = names
        return task

    def _draw_opponents(self, learner: LeagueLearner, weights: OpponentWeights, latest: Mapping[str, str]) -> Mix:
        """Returns the distribution of a slice's opponents, in which a learner is its member in `latest`. It has
        `opponents_per_slice` draws from `weights`, or if that is 0 all of `weights`."""
        history = self.logic.met_by(learner).names
        shares = np.append(weights.frozen, list(weights.current.values()))
        if not shares.any():  # nothing but self-play
            return {history[0]: 1.0}
        shares /= shares.sum()
        if draws := self.config.opponents_per_slice:
            rng = np.random.default_rng(derive_seed(self.seed, "opponents", learner.name, learner.slices))
            shares = rng.multinomial(draws, shares) / draws
        mix: Mix = {}
        others = list(latest.values())
        for number in np.flatnonzero(shares):
            name = history[number] if number < len(history) else others[number - len(history)]
            mix[name] = mix.get(name, 0.0) + float(shares[number])
        return mix

    def _note(self, learner: LeagueLearner, task: TrainTask, result: TrainResult) -> None:
        for member, names in self.opponents.pop(task.name).items():
            if (games := result.opponents.get(member)) is None:
                continue
            for name in names:
                self.win_rates.add(learner.name, name, games.games, games.points)
        learner.slices += 1
        learner.slices_since_freeze += 1
        learner.start = learner.latest = task.output_member
        rates = self.logic.judge_rates(learner)
        metrics = {"iteration": learner.slices, "env_steps": self.env_steps, "return": result.return_metric}
        self._metrics = {
            learner.name: {**metrics, "win_rate": float(rates.mean()), "worst_win_rate": float(rates.min())}
        }

    def _freeze(self, learner: LeagueLearner) -> list[Task]:
        """Adds the last slice's member to the history; returns its games and its assessment."""
        before = self._rated_opponents(learner)
        name = learner.latest
        info = {"learner": learner.name, "role": learner.role, "slices": learner.slices}
        self.population.add(Member(name, learner.player, f"members/{name}", learner.parent or None, info))
        learner.frozen_copies.append(name)
        learner.slices_since_freeze = 0
        learner.parent = name
        if self._begins_anew(learner):
            learner.start = learner.parent = self.initial_member[learner.player]
            learner.latest = ""
            self.win_rates.remove(learner.name)
        self._metrics[TEAM] = self.summary()
        return [*(self._play(learner, name, before) if self.config.games_per_cell else []), *self._assessment(learner)]

    def _rated_opponents(self, learner: LeagueLearner) -> list[str]:
        """Returns the earlier members that a new copy of the learner plays, oldest first."""
        history = list(self.logic.met_by(learner).names)
        wanted = self.config.rated_opponents
        if not wanted or wanted >= len(history):
            return history
        rng = np.random.default_rng(derive_seed(self.seed, "rated", learner.name, learner.slices))
        return [history[number] for number in sorted(rng.choice(len(history), wanted, replace=False))]

    def _assessment(self, learner: LeagueLearner) -> list[AssessTask]:
        every = self.config.nash_conv_every
        copies = len(learner.frozen_copies)
        if learner.role != "main" or not every or copies % every:
            return []
        newest = learner.frozen_copies[-1]
        strategies = {learner.player: {newest: 1.0}}
        for other in self.learners.values():
            if other.role == "main" and other.player != learner.player and other.frozen_copies:
                strategies[other.player] = {other.frozen_copies[-1]: 1.0}
        if len(strategies) < len(self.population.players):
            return []
        self._counts[f"assess/{newest}"] = {"env_steps": self.env_steps, "games": self.games}
        names = list(chain.from_iterable(strategies.values()))
        return [
            AssessTask(
                f"assess/{newest}",
                iteration=copies,
                strategies=strategies,
                members=self.population.names_with_files(names),
            )
        ]

    def _play(self, learner: LeagueLearner, name: str, others: Sequence[str]) -> list[PlayTask]:
        """Returns the games of a learner's new copy `name` against members that it meets."""
        cells = [self._cell(learner, name, other) for other in others]
        games = self.config.games_per_cell
        return play_tasks(
            self.population, f"play/{name}", cells, games=games, cells_per_task=self.config.cells_per_task
        )

    def _cell(self, learner: LeagueLearner, name: str, other: str) -> MemberProfile:
        """Returns the members at the seats: `name` at the learner's side, or at the first seat, `other` elsewhere."""
        if len(self.population.players) == 1:
            return (name, *[other] * (len(self.seats) - 1))
        return tuple(name if player == learner.player else other for player in self.seats)

    def _begins_anew(self, learner: LeagueLearner) -> bool:
        if learner.role == "league_exploiter":
            drawn = np.random.default_rng(derive_seed(self.seed, "reset", learner.name, learner.slices)).random()
            return bool(drawn < self.config.reset_probability)
        return learner.role == "main_exploiter"
