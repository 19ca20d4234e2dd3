"""Whom AlphaStar's learners meet, and when they are frozen (Vinyals et al., 2019, and its published pseudocode)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
from pydantic import Field, model_validator

from palestra.config import Strict
from palestra.populations.matchmaking import Weighting, pfsp
from palestra.populations.population import Mix, Population
from palestra.populations.win_rates import WinRates, blend

Role = Literal["main", "main_exploiter", "league_exploiter"]


class LeagueConfig(Strict):
    """A league: how many of each role, and for how long. A learner trains `slices` slices of `env_steps` each (language
    agents: `steps`).

    After `least` slices it is frozen once it wins more than `strong` of its games against each of those who judge it,
    after `most` in any case. A frozen copy plays `games` with each one before it, for tables and ratings, in tasks of
    `cells` opponents; NashConv is measured of every `assess`-th copy of a main agent (0: never; games without exact
    rules).
    """

    type: Literal["league"] = "league"
    main_agents: int = Field(1, ge=1, le=10_000)
    main_exploiters: int = Field(1, ge=0, le=10_000)
    league_exploiters: int = Field(2, ge=0, le=10_000)
    slices: int = Field(40, ge=1)
    env_steps: int = Field(20_000, ge=1)
    steps: int = Field(0, ge=0)
    least: int = Field(2, ge=1)
    most: int = Field(4, ge=1)
    games: int = Field(200, ge=0)
    cells: int = Field(16, ge=1)
    assess: int = Field(0, ge=0)
    strong: float = Field(0.7, gt=0, lt=1)  # beaten: a checkpoint's bar, and what a main agent is to keep up
    weak: float = Field(0.3, gt=0, lt=1)  # a main agent turns to the past of those who beat it so often
    lost: float = Field(0.1, ge=0, lt=1)  # so does a main exploiter
    priority: float = Field(0.5, ge=0, le=1)  # of a main agent's games: by priority, against the whole history
    verify: float = Field(0.15, ge=0, le=1)  # ... against those it should have learned to beat; the rest is self-play
    reset: float = Field(0.25, ge=0, le=1)  # how likely a league exploiter begins anew when it is frozen
    decay: float = Field(0.99, gt=0, le=1)  # of what is known about a pair, with each of its games
    explore: float = Field(0.05, ge=0, lt=1)

    @model_validator(mode="after")
    def _fits(self) -> LeagueConfig:
        if self.least > self.most:
            raise ValueError(
                f"least: {self.least} slices between checkpoints are more than most: {self.most}; swap them"
            )
        if self.priority + self.verify > 1:
            raise ValueError(
                f"priority {self.priority:g} and verify {self.verify:g} are shares of one whole; lower one"
            )
        return self

    def roles(self) -> list[Role]:
        """The role of each learner."""
        counts = (self.main_agents, self.main_exploiters, self.league_exploiters)
        return [role for role, count in zip(get_args(Role), counts, strict=True) for _ in range(count)]


def without_monotone_suffix(rates: Sequence[float]) -> int:
    """How many of the first win rates are left without the end over which they never rise (oldest opponent first).

    An agent that does no better against its newer selves than against older ones has forgotten nothing there:
    [.9, .6, .65, .6] -> 3, [.9, .8, .7] -> 0.
    """
    return next((i + 1 for i in range(len(rates) - 1, 0, -1) if rates[i - 1] < rates[i]), 0)


def evenly(names: Sequence[str]) -> Mix:
    return {name: 1 / len(names) for name in names}


@dataclass
class Learner:
    """One who trains. `start` is where its next slice begins ("": anew), `latest` what its last one made ("": none
    since it began), `parent` the copy that it goes on from, `past` its frozen copies, oldest first."""

    name: str
    role: Role
    start: str = ""
    latest: str = ""
    parent: str = ""
    slices: int = 0
    since: int = 0  # the last checkpoint
    past: list[str] = field(default_factory=list)


class Rules:
    """What learners are to do, at the win rates known. A main agent's past begins with the members that there are when
    the rules are made."""

    def __init__(self, config: LeagueConfig, learners: Sequence[Learner], population: Population) -> None:
        self.config, self.population = config, population
        self.rates = WinRates(config.decay)
        self.learners = {learner.name: learner for learner in learners}
        self.first = [member.name for member in population]

    def mixture(self, learner: Learner) -> Mix:
        """Whom a learner meets now: frozen members and learners (their current weights; its own name is self-play)."""
        rules = {"main": self._main, "main_exploiter": self._main_exploiter, "league_exploiter": self._league_exploiter}
        explore = self.config.explore
        return blend((1 - explore, rules[learner.role](learner)), (explore, evenly(self.judges(learner))))

    def _main(self, learner: Learner) -> Mix:
        config, mains = self.config, self.of("main")
        parts = [(config.priority, self._prioritised(learner, self.history(), "squared"))]
        for other in mains:
            now = self._current(learner, other, config.weak)
            parts.append((config.verify / len(mains), self._verification(learner, other) or now))
            parts.append(((1 - config.priority - config.verify) / len(mains), now))
        return blend(*parts)

    def _verification(self, learner: Learner, other: Learner) -> Mix:
        """Exploiters of old that beat the learner, else whom it has forgotten to beat; {} where there is no such."""
        exploiters = [name for rival in self.of("main_exploiter") for name in rival.past]
        if min(self.against(learner, exploiters), default=1.0) < self.config.weak:
            return self._prioritised(learner, exploiters, "squared")
        past = self.past(other)
        rates = self.against(learner, past)
        kept = without_monotone_suffix(rates)
        if min(rates[:kept], default=1.0) < self.config.strong:
            return self._prioritised(learner, past[:kept], "squared")
        return {}

    def _main_exploiter(self, learner: Learner) -> Mix:
        mains = self.of("main")
        return blend(*((1 / len(mains), self._current(learner, main, self.config.lost)) for main in mains))

    def _league_exploiter(self, learner: Learner) -> Mix:
        return self._prioritised(learner, self.history(), "capped")

    def _current(self, learner: Learner, main: Learner, bar: float) -> Mix:
        """A main agent as it is now, where the learner wins more than `bar` against it; else its past."""
        met = main is learner or main.latest  # who has not trained yet is its past
        if met and self.rates.rate(learner.name, main.name) > bar:
            return {main.name: 1.0}
        return self._prioritised(learner, self.past(main), "variance")

    def _prioritised(self, learner: Learner, names: Sequence[str], weighting: Weighting) -> Mix:
        return dict(zip(names, pfsp(np.array(self.against(learner, names)), weighting).tolist(), strict=True))

    def against(self, learner: Learner, names: Sequence[str]) -> list[float]:
        """A learner's win rates against these."""
        return [self.rates.rate(learner.name, name) for name in names]

    def of(self, role: Role) -> list[Learner]:
        return [learner for learner in self.learners.values() if learner.role == role]

    def past(self, learner: Learner) -> list[str]:
        """A main agent's frozen copies, and those whom all began with."""
        return [*self.first, *learner.past]

    def history(self) -> list[str]:
        """All frozen members, oldest first."""
        return [member.name for member in self.population]

    def judges(self, learner: Learner) -> list[str]:
        """Whom a learner must beat to be frozen: main exploiters the main agents, the others everybody in history."""
        if learner.role != "main_exploiter":
            return self.history()
        return [main.name for main in self.of("main") if main.latest] or self.first

    def ready(self, learner: Learner) -> bool:
        """Whether a learner is to be frozen now."""
        if learner.since < self.config.least:
            return False
        strong = min(self.against(learner, self.judges(learner))) > self.config.strong
        return strong or learner.since >= self.config.most
