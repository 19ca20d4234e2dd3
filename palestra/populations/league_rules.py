"""AlphaStar's rules: which opponents a learner trains against, and when it is frozen (Vinyals et al., 2019, and its
published pseudocode)."""

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
    """A league: the number of learners of each role, and how they train and are frozen."""

    type: Literal["league"] = "league"
    main_agents: int = Field(1, ge=1, le=10_000)
    """Learners that train against the whole history, against main agents, and by self-play."""
    main_exploiters: int = Field(1, ge=0, le=10_000)
    """Learners that train against the current main agents; reset when frozen."""
    league_exploiters: int = Field(2, ge=0, le=10_000)
    """Learners that train against the whole history; sometimes reset when frozen."""
    slices: int = Field(40, ge=1)
    """Slices that each learner trains."""
    env_steps: int = Field(20_000, ge=1)
    """Env steps of each slice."""
    steps: int = Field(0, ge=0)
    """Training steps of each slice, for language agents; replaces `env_steps` if above 0."""
    least: int = Field(2, ge=1)
    """Slices between two frozen copies of a learner, at least."""
    most: int = Field(4, ge=1)
    """Slices after which a learner is frozen in any case."""
    games: int = Field(200, ge=0)
    """Games that a frozen copy plays against each earlier one, for the payoff table and ratings; 0: none."""
    cells: int = Field(16, ge=1)
    """Opponents of one task of games."""
    assess: int = Field(0, ge=0)
    """NashConv is measured for every so many-th copy of a main agent; 0: never. Needs a game with exact rules."""
    strong: float = Field(0.7, gt=0, lt=1)
    """Win rate above which an opponent counts as beaten: required against all judges before a learner is frozen early,
    and for a main agent against the past that it must not forget."""
    weak: float = Field(0.3, gt=0, lt=1)
    """Win rate up to which a main agent plays another main agent's past instead of its current weights. Earlier
    exploiters are played while the win rate against one of them is lower."""
    lost: float = Field(0.1, ge=0, lt=1)
    """Win rate up to which a main exploiter plays a main agent's past instead of its current weights."""
    priority: float = Field(0.5, ge=0, le=1)
    """Share of a main agent's games against the whole history, weighted by priority."""
    verify: float = Field(0.15, ge=0, le=1)
    """Share of a main agent's games against opponents that it should have learned to beat; the rest is self-play."""
    reset: float = Field(0.25, ge=0, le=1)
    """Probability that a league exploiter is reset when it is frozen."""
    decay: float = Field(0.99, gt=0, le=1)
    """Factor by which a pair's earlier results are weighted down with each game; 1: all games count alike."""
    explore: float = Field(0.05, ge=0, lt=1)
    """Share of a learner's games that is spread evenly over its judges, so that all their win rates stay current."""

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
        """Returns the role of each learner."""
        counts = (self.main_agents, self.main_exploiters, self.league_exploiters)
        return [role for role, count in zip(get_args(Role), counts, strict=True) for _ in range(count)]


def without_monotone_suffix(rates: Sequence[float]) -> int:
    """Returns the length of `rates` (oldest opponent first) without the suffix in which they never rise.

    In that suffix the agent does no better against newer opponents than against older ones, so it has forgotten
    nothing: [.9, .6, .65, .6] -> 3, [.9, .8, .7] -> 0.
    """
    return next((i + 1 for i in range(len(rates) - 1, 0, -1) if rates[i - 1] < rates[i]), 0)


def evenly(names: Sequence[str]) -> Mix:
    """Returns the uniform mixture."""
    return {name: 1 / len(names) for name in names}


@dataclass
class Learner:
    """A policy in training.

    `start` is the member from which its next slice begins ("": new weights), `latest` the member that its last slice
    produced ("": none since a reset), `parent` the frozen copy that it continues, `past` its frozen copies, oldest
    first.
    """

    name: str
    role: Role
    start: str = ""
    latest: str = ""
    parent: str = ""
    slices: int = 0
    since: int = 0  # slices since it was last frozen
    past: list[str] = field(default_factory=list)


class Rules:
    """The league's decisions, from the current win rates. The past of a main agent starts with the population's initial
    members."""

    def __init__(self, config: LeagueConfig, learners: Sequence[Learner], population: Population) -> None:
        self.config, self.population = config, population
        self.rates = WinRates(config.decay)
        self.learners = {learner.name: learner for learner in learners}
        self.first = [member.name for member in population]

    def mixture(self, learner: Learner) -> Mix:
        """Returns the mixture of opponents for a learner's next slice: frozen members, and learners with their current
        weights. Its own name stands for self-play."""
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
        """Returns earlier exploiters that beat the learner; else past opponents that it no longer beats; else {}."""
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
        """Returns main agent `main` with its current weights if the learner's win rate against it is above `bar`; else
        its past."""
        met = main is learner or main.latest  # a main agent that has not trained yet has no current weights
        if met and self.rates.rate(learner.name, main.name) > bar:
            return {main.name: 1.0}
        return self._prioritised(learner, self.past(main), "variance")

    def _prioritised(self, learner: Learner, names: Sequence[str], weighting: Weighting) -> Mix:
        return dict(zip(names, pfsp(np.array(self.against(learner, names)), weighting).tolist(), strict=True))

    def against(self, learner: Learner, names: Sequence[str]) -> list[float]:
        """Returns a learner's win rates against these opponents."""
        return [self.rates.rate(learner.name, name) for name in names]

    def of(self, role: Role) -> list[Learner]:
        """Returns the learners with this role."""
        return [learner for learner in self.learners.values() if learner.role == role]

    def past(self, learner: Learner) -> list[str]:
        """Returns the initial members and a main agent's frozen copies, oldest first."""
        return [*self.first, *learner.past]

    def history(self) -> list[str]:
        """Returns all frozen members, oldest first."""
        return [member.name for member in self.population]

    def judges(self, learner: Learner) -> list[str]:
        """Returns the opponents that a learner must beat to be frozen early: the main agents for a main exploiter, else
        the whole history."""
        if learner.role != "main_exploiter":
            return self.history()
        return [main.name for main in self.of("main") if main.latest] or self.first

    def ready(self, learner: Learner) -> bool:
        """True if the learner is to be frozen now."""
        if learner.since < self.config.least:
            return False
        strong = min(self.against(learner, self.judges(learner))) > self.config.strong
        return strong or learner.since >= self.config.most
