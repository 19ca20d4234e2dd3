"""Population-based training (Jaderberg et al., 2017) as a plan of training slices.

Each learner trains slice after slice. Between two slices, a learner rated among the worst copies the weights and
settings of one of the best, and perturbs or resamples each setting. Learners do not wait for each other: a learner is
compared with the latest ratings of the others when its slice ends. The settings of each slice are part of its task.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from pydantic import Field, model_validator

from palestra.core.config import StrictModel
from palestra.core.seeding import derive_seed
from palestra.core.types import Metrics
from palestra.parallel.tasks import Task
from palestra.populations.plans.iterative_plan import RecordingPlan
from palestra.populations.plans.matchmaking import WinRates
from palestra.populations.plans.slices import SliceConfig, slice_task
from palestra.populations.population import Member, Mix, Player, Population
from palestra.populations.tasks import Opponents, TrainResult, TrainTask


class SearchSpace(StrictModel):
    """Range of a searched setting."""

    low: float
    """Smallest value."""
    high: float
    """Largest value."""
    log_scale: bool = True
    """Draw log-uniformly (needs `low` above 0); else uniformly."""

    @model_validator(mode="after")
    def _fits(self) -> SearchSpace:
        if self.low > self.high:
            raise ValueError(f"low: {self.low:g} is above high: {self.high:g}; swap them")
        if self.log_scale and self.low <= 0:
            raise ValueError(f"low: {self.low:g} has no logarithm; use a positive one, or log_scale: false")
        return self

    def sample(self, rng: np.random.Generator) -> float:
        """Draws a value from the whole range."""
        if not self.log_scale:
            return float(rng.uniform(self.low, self.high))
        return self.clip(math.exp(rng.uniform(math.log(self.low), math.log(self.high))))

    def clip(self, value: float) -> float:
        return min(max(value, self.low), self.high)


class PBTConfig(SliceConfig):
    """Population-based training: number of learners and slices, the searched settings, and the rules of selection."""

    type: Literal["pbt"] = "pbt"
    num_learners: int = Field(8, ge=2, le=10_000)
    """Policies that train in parallel."""
    slices: int = Field(20, ge=1)
    """Slices that each learner trains."""
    search: dict[str, SearchSpace] = {"lr": SearchSpace(low=1e-4, high=1e-2)}
    """Settings to search, by name (settings of the algorithm or of the policy), and their ranges."""
    rating: Literal["wins", "return"] = "wins"
    """Rating of a learner. `wins`: mean win rate against the other learners (decayed, 0.5 where unknown). `return`:
    mean return at the end of the last slice."""
    select_every: int = Field(2, ge=1)
    """Selection takes place after every so many slices of a learner."""
    truncation: float = Field(0.2, gt=0, le=0.5)
    """Share of the learners that counts as the worst, and as the best."""
    min_rating_gap: float = Field(0.0, ge=0)
    """A learner copies a better one only if their ratings differ by more than this."""
    perturb: tuple[float, float] = (0.8, 1.2)
    """Two factors: each copied setting is multiplied by one of them, drawn at random."""
    resample_probability: float = Field(0.0, ge=0, le=1)
    """Probability that a copied setting is drawn anew from its range instead of perturbed."""
    self_play: float = Field(0.2, ge=0, le=1)
    """Share of a learner's games against its own current weights; its other games are against the other learners'
    latest members. Sides have none: their learners meet those of the other sides."""


@dataclass
class PBTLearner:
    """A policy in training, of `player`.

    `copied_from` names the learner whose weights and settings its next slice has copied ("": it continues its own
    weights); `has_trained` is True once it has trained with its current settings.
    """

    name: str
    player: Player
    settings: dict[str, float]
    latest: str = ""
    slices: int = 0
    score: float = 0.0
    copied_from: str = ""
    has_trained: bool = False


class PBT(RecordingPlan):
    """Plan of population-based training. `population` has one player, whose members play all seats, or several, which
    are the sides of the game: each then has learners of its own, which meet those of the others and copy one another.
    At the end it also holds each learner's last member. Metrics are of a slice: the learner's return, its rating before
    selection, and the settings that it was trained with.

    Raises ValueError if the population has no member, or if `self_play` is set for several players.
    """

    def __init__(self, config: PBTConfig, population: Population, seed: int = 0) -> None:
        if not len(population):
            raise ValueError("population-based training needs an initial member, for example uniform")
        if len(population.players) > 1 and config.self_play not in (0.0, PBTConfig().self_play):
            raise ValueError(
                f"self_play: {config.self_play:g} has no effect between sides, whose learners meet those of the other "
                "sides: leave it out"
            )
        super().__init__(population)
        self.config = config
        self.seed = seed
        self.win_rates = WinRates(config.win_rate_decay)
        self.learners = {learner.name: learner for learner in self._new_learners()}
        self.opponents: dict[str, dict[str, str]] = {}  # by task: from opponent member to the learner that made it

    def _new_learners(self) -> Iterator[PBTLearner]:
        players = self.population.players
        for player in players:
            side = f"{player}_" if len(players) > 1 else ""
            for number in range(self.config.num_learners):
                name = f"{side}learner_{number}"
                yield PBTLearner(name, player, self._sample_settings(self._rng(name, 0)))

    def initial_tasks(self) -> Sequence[Task]:
        return [self._slice(learner) for learner in self.learners.values()]

    def _record_training(self, task: TrainTask, result: TrainResult) -> Sequence[Task]:
        """Records a slice's result, applies selection if it is due, and returns the learner's next slice."""
        learner = self.learners[task.learner]
        self.env_steps += result.env_steps
        for member, name in self.opponents.pop(task.name).items():
            if games := result.opponents.get(member):
                self.win_rates.add(learner.name, name, games.games, games.points)
        learner.slices += 1
        learner.latest = task.output_member
        learner.has_trained = True
        if result.mean_return is not None:  # no game may have ended
            learner.score = result.mean_return
        metrics = {"iteration": learner.slices, "env_steps": self.env_steps, "return": result.return_metric}
        self._metrics = {learner.name: {**metrics, "rating": self.rating(learner), **task.settings}}
        if learner.slices == self.config.slices:
            self._keep(learner)
            return []
        if learner.slices % self.config.select_every == 0:
            self._evolve(learner)
        return [self._slice(learner)]

    def summary(self) -> Metrics:
        """Returns progress: slices done and in all, members, env steps."""
        done = sum(learner.slices for learner in self.learners.values())
        in_all = self.config.slices * len(self.learners)
        return {"iteration": done, "iterations": in_all, "members": len(self.population), "env_steps": self.env_steps}

    def _slice(self, learner: PBTLearner) -> TrainTask:
        opponents, self_play = self._opponents(learner)
        copied_from = learner.copied_from
        learner.copied_from = ""
        task = slice_task(
            self.config,
            self.population,
            f"{learner.name}-{learner.slices + 1}",
            opponents,
            learner=learner.name,
            player=learner.player,
            start=learner.latest,
            self_play=self_play,
            settings=dict(learner.settings),
            copied_from=copied_from,
        )
        names = opponents.names()
        latest = {other.latest: other.name for other in self.learners.values()}
        self.opponents[task.name] = {member: name for member, name in latest.items() if member in names}
        return task

    def _opponents(self, learner: PBTLearner) -> tuple[Opponents, float]:
        """Returns the opponents of a learner's next slice, and the share of its games against its own weights."""
        initial = next(iter(self.population)).name
        mixes: dict[Player, Mix] = {}
        for player in self._players_met(learner):
            others = [other.latest for other in self._rivals(learner) if other.player == player and other.latest]
            names = [name for name in dict.fromkeys(others) if name != learner.latest]
            mixes[player] = {name: 1 / len(names) for name in names}
        if len(self.population.players) > 1:
            return Opponents({player: mix or {initial: 1.0} for player, mix in mixes.items()}), 0.0
        (mix,) = mixes.values()
        if mix and self.config.self_play < 1:
            return Opponents(mixes), self.config.self_play
        # With self_play 1 the opponent never plays, but a task must name one.
        return Opponents({learner.player: {initial: 1.0}}), 1.0

    def _players_met(self, learner: PBTLearner) -> list[Player]:
        """Returns the players whose members a learner meets: the other sides, or the only player."""
        return [player for player in self.population.players if player != learner.player] or [learner.player]

    def _rivals(self, learner: PBTLearner) -> list[PBTLearner]:
        """Returns the other learners that a learner meets."""
        players = self._players_met(learner)
        return [other for other in self.learners.values() if other is not learner and other.player in players]

    # ---- exploit and explore

    def rating(self, learner: PBTLearner) -> float:
        """Returns a learner's current rating: a win rate from 0 to 1 or a mean return, as `PBTConfig.rating` says."""
        if self.config.rating == "return":
            return learner.score
        rates = [self.win_rates.rate(learner.name, other.name) for other in self._rivals(learner)]
        return float(np.mean(rates))

    def _evolve(self, learner: PBTLearner) -> None:
        """Lets `learner`, if it is among the worst of its side, copy one of the best, once all have trained."""
        side = [other for other in self.learners.values() if other.player == learner.player]
        ranked = sorted(side, key=self.rating)  # stable: equals remain in the learners' order
        ends = min(math.ceil(self.config.truncation * len(ranked)), len(ranked) // 2)
        best = [other for other in ranked[-ends:] if other.has_trained]
        if learner not in ranked[:ends] or not best or not all(other.slices for other in ranked):
            return
        rng = self._rng(learner.name, learner.slices)
        chosen = best[int(rng.integers(len(best)))]
        if self.rating(chosen) - self.rating(learner) > self.config.min_rating_gap:
            learner.latest = chosen.latest
            learner.score = chosen.score
            learner.copied_from = chosen.name
            learner.has_trained = False
            learner.settings = {
                name: self._explore_setting(name, value, rng) for name, value in chosen.settings.items()
            }
            self.win_rates.remove(learner.name)

    def _explore_setting(self, name: str, value: float, rng: np.random.Generator) -> float:
        searched = self.config.search[name]
        if rng.random() < self.config.resample_probability:
            return searched.sample(rng)
        return searched.clip(value * self.config.perturb[int(rng.integers(2))])

    def _sample_settings(self, rng: np.random.Generator) -> dict[str, float]:
        return {name: searched.sample(rng) for name, searched in self.config.search.items()}

    def _rng(self, learner: str, slices: int) -> np.random.Generator:
        return np.random.default_rng(derive_seed(self.seed, "pbt", learner, slices))

    def _keep(self, learner: PBTLearner) -> None:
        info = {"learner": learner.name, "settings": dict(learner.settings), "rating": self.rating(learner)}
        name = learner.latest
        self.population.add(Member(name, learner.player, f"members/{name}", None, info))
