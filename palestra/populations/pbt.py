"""Population-based training (Jaderberg et al., 2017) as a plan of slices: weights and settings evolve while they train.

Each learner trains slice after slice. Between two, one who is rated among the worst takes the weights and the settings
of one of the best, and changes each setting a little (or draws it anew). Nobody waits: a learner is compared with what
is known of the others when its slice ends. The settings that each slice was trained with stand in its order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from pydantic import Field, model_validator

from palestra.config import Strict
from palestra.populations.population import Member, Mix, Population
from palestra.populations.tasks import Result, Task
from palestra.populations.win_rates import WinRates
from palestra.rollouts.play import derive
from palestra.types import Metrics


class Searched(Strict):
    """A setting that is searched for between `low` and `high`; with `log`, in even ratios."""

    low: float
    high: float
    log: bool = True

    @model_validator(mode="after")
    def _fits(self) -> Searched:
        if self.low > self.high:
            raise ValueError(f"low: {self.low:g} is above high: {self.high:g}; swap them")
        if self.log and self.low <= 0:
            raise ValueError(f"low: {self.low:g} has no logarithm; use a positive one, or log: false")
        return self

    def draw(self, rng: np.random.Generator) -> float:
        """A value from the whole range."""
        if not self.log:
            return float(rng.uniform(self.low, self.high))
        return self.inside(math.exp(rng.uniform(math.log(self.low), math.log(self.high))))

    def inside(self, value: float) -> float:
        """The nearest value of the range."""
        return min(max(value, self.low), self.high)


class PBTConfig(Strict):
    """Population-based training. Each of `learners` trains `slices` slices of `env_steps` (language agents: `steps`).

    After every `every` slices, one of the worst `share` of the learners takes over from one of the best, where that is
    rated higher by more than `gap`. `rated: wins` is the mean win rate against the other learners (decayed, 0.5 where
    unknown), `return` the mean return at the end of the last slice. `self_play` of a learner's games are against
    itself, the others against the other learners as they last were.
    """

    type: Literal["pbt"] = "pbt"
    learners: int = Field(8, ge=2, le=10_000)
    slices: int = Field(20, ge=1)
    env_steps: int = Field(20_000, ge=1)
    steps: int = Field(0, ge=0)
    search: dict[str, Searched] = {"lr": Searched(low=1e-4, high=1e-2)}
    rated: Literal["wins", "return"] = "wins"
    every: int = Field(2, ge=1)
    share: float = Field(0.2, gt=0, le=0.5)
    gap: float = Field(0.0, ge=0)
    perturb: tuple[float, float] = (0.8, 1.2)
    resample: float = Field(0.0, ge=0, le=1)
    self_play: float = Field(0.2, ge=0, le=1)
    decay: float = Field(0.99, gt=0, le=1)


@dataclass
class Learner:
    """One who trains. `copied` is whom its next slice takes over from, "" where it goes on; `tried`, whether it has
    trained with its settings."""

    name: str
    settings: dict[str, float]
    latest: str = ""
    slices: int = 0
    score: float = 0.0
    copied: str = ""
    tried: bool = False


class PBT:
    """The plan. `population` plays all seats; in the end it holds each learner's last member too.

    Raises ValueError for a population of several players, and for one without a member.
    """

    def __init__(self, config: PBTConfig, population: Population, seed: int = 0) -> None:
        if len(population.players) != 1 or not len(population):
            raise ValueError(
                "population-based training is of one player whose members sit at every seat, and begins with a member, "
                f"for example uniform; this one has players {', '.join(population.players)}, {len(population)} members"
            )
        self.config, self.population, self.seed = config, population, seed
        self.rates = WinRates(config.decay)
        names = [f"learner_{number}" for number in range(config.learners)]
        self.learners = {name: Learner(name, self._drawn(self._rng(name, 0))) for name in names}
        self.env_steps = 0
        self.opponents: dict[str, dict[str, str]] = {}  # by task: which learner a member was

    def begin(self) -> list[Task]:
        return [self._slice(learner) for learner in self.learners.values()]

    def finished(self, task: Task, result: Result) -> list[Task]:
        learner = self.learners[task.order["learner"]]
        self.env_steps += int(result["env_steps"])
        self._note(learner, task, result)
        if learner.slices == self.config.slices:
            self._keep(learner)
            return []
        if learner.slices % self.config.every == 0:
            self._evolve(learner)
        return [self._slice(learner)]

    def notes(self, task: Task, result: Result) -> dict[str, Metrics]:
        """What a slice came to: the learner's return, its rating, and the settings it was trained with."""
        learner = self.learners[task.order["learner"]]
        figures = {"iteration": learner.slices, "env_steps": self.env_steps, "return": result["return"]}
        return {learner.name: {**figures, "rating": self.rating(learner), **task.order["settings"]}}

    def summary(self) -> Metrics:
        """Where the run stands."""
        done = sum(learner.slices for learner in self.learners.values())
        whole = self.config.slices * len(self.learners)
        return {"iteration": done, "iterations": whole, "members": len(self.population), "env_steps": self.env_steps}

    def _slice(self, learner: Learner) -> Task:
        player = self.population.players[0]
        mix, self_play = self._mixture(learner)
        makes = f"{learner.name}-{learner.slices + 1}"
        self.opponents[f"train/{makes}"] = {
            other.latest: other.name for other in self.learners.values() if other.latest in mix
        }
        order = {
            "learner": learner.name,
            "player": player,
            "opponents": {player: mix},
            "self_play": self_play,
            "start": learner.latest or None,
            **({"steps": self.config.steps} if self.config.steps else {"env_steps": self.config.env_steps}),
            "settings": dict(learner.settings),
            "copied": learner.copied,
        }
        start = [learner.latest] if learner.latest else []
        learner.copied = ""
        known = self.population.members
        files = [name for name in dict.fromkeys([*mix, *start]) if name not in known or known[name].weights]
        return Task(f"train/{makes}", "train", order, tuple(files), makes)

    def _mixture(self, learner: Learner) -> tuple[Mix, float]:
        others = [other.latest for other in self.learners.values() if other is not learner and other.latest]
        others = [name for name in dict.fromkeys(others) if name != learner.latest]
        if not others or self.config.self_play == 1:
            return {next(iter(self.population)).name: 1.0}, 1.0  # an order names opponents, though none of them plays
        return {name: 1 / len(others) for name in others}, self.config.self_play

    def _note(self, learner: Learner, task: Task, result: Result) -> None:
        for member, name in self.opponents.pop(task.name).items():
            if tally := result["against"].get(member):
                self.rates.add(learner.name, name, tally["games"], tally["wins"] + tally["draws"] / 2)
        learner.slices += 1
        learner.latest, learner.tried = task.makes, True
        if result["return"] is not None:  # no game may have ended
            learner.score = float(result["return"])

    # exploit and explore

    def rating(self, learner: Learner) -> float:
        """How good a learner is held to be now."""
        if self.config.rated == "return":
            return learner.score
        others = [other.name for other in self.learners.values() if other is not learner]
        return float(np.mean([self.rates.rate(learner.name, other) for other in others]))

    def _evolve(self, learner: Learner) -> None:
        """Truncation selection, once everybody has trained: one of the worst takes over from one of the best."""
        ranked = sorted(self.learners.values(), key=self.rating)  # stable: equals stay in the order of their numbers
        ends = min(math.ceil(self.config.share * len(ranked)), len(ranked) // 2)
        best = [other for other in ranked[-ends:] if other.tried]
        if learner not in ranked[:ends] or not best or not all(other.slices for other in ranked):
            return
        rng = self._rng(learner.name, learner.slices)
        chosen = best[int(rng.integers(len(best)))]
        if self.rating(chosen) - self.rating(learner) > self.config.gap:
            self._take_over(learner, chosen, rng)

    def _take_over(self, learner: Learner, best: Learner, rng: np.random.Generator) -> None:
        learner.latest, learner.score, learner.copied, learner.tried = best.latest, best.score, best.name, False
        learner.settings = {name: self._explored(name, value, rng) for name, value in best.settings.items()}
        self.rates.forget(learner.name)

    def _explored(self, name: str, value: float, rng: np.random.Generator) -> float:
        searched = self.config.search[name]
        if rng.random() < self.config.resample:
            return searched.draw(rng)
        return searched.inside(value * self.config.perturb[int(rng.integers(2))])

    def _drawn(self, rng: np.random.Generator) -> dict[str, float]:
        return {name: searched.draw(rng) for name, searched in self.config.search.items()}

    def _rng(self, learner: str, slices: int) -> np.random.Generator:
        return np.random.default_rng(derive(self.seed, "pbt", learner, slices))

    def _keep(self, learner: Learner) -> None:
        info = {"learner": learner.name, "settings": dict(learner.settings), "rating": self.rating(learner)}
        name = learner.latest
        self.population.add(Member(name, self.population.players[0], f"members/{name}", None, info))
