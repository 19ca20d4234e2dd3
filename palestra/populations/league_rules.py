"""AlphaStar's rules: which opponents a learner trains against, and when it is frozen (Vinyals et al., 2019, and its
published pseudocode)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
from pydantic import Field, model_validator

from palestra.populations.matchmaking import PFSPWeighting, WinRates, combine_mixes, pfsp
from palestra.populations.population import Mix, Population
from palestra.populations.slices import SliceConfig

Role = Literal["main", "main_exploiter", "league_exploiter"]


class LeagueConfig(SliceConfig):
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
    min_slices: int = Field(2, ge=1)
    """Slices between two frozen copies of a learner, at least."""
    max_slices: int = Field(4, ge=1)
    """Slices after which a learner is frozen in any case."""
    games_per_cell: int = Field(200, ge=0)
    """Games that a frozen copy plays against each earlier one, for the payoff table and ratings; 0: none."""
    rated_opponents: int = Field(0, ge=0)
    """Earlier copies that a frozen copy plays, drawn at random; 0: all, whose number grows with the square of the
    league's. A hundred or more rate a league of thousands."""
    opponents_per_slice: int = Field(0, ge=0)
    """Draws from the distribution of a slice's opponents, which are then its opponents in place of the whole
    distribution; 0: the whole, a line for each member of the league in each task. A slice draws an opponent per game:
    with as many draws as games, nothing changes in distribution."""
    cells_per_task: int = Field(16, ge=1)
    """Opponents of one task of games."""
    nash_conv_every: int = Field(0, ge=0)
    """NashConv is measured for every so many-th copy of a main agent; 0: never. Needs a game with exact rules."""
    strong_win_rate: float = Field(0.7, gt=0, lt=1)
    """Win rate above which an opponent counts as beaten: required against all judges before a learner is frozen early,
    and for a main agent against the past that it must not forget."""
    weak_win_rate: float = Field(0.3, gt=0, lt=1)
    """Win rate up to which a main agent plays another main agent's past instead of its current weights. Earlier
    exploiters are played while the win rate against one of them is lower."""
    lost_win_rate: float = Field(0.1, ge=0, lt=1)
    """Win rate up to which a main exploiter plays a main agent's past instead of its current weights."""
    pfsp_share: float = Field(0.5, ge=0, le=1)
    """Share of a main agent's games against the whole history, weighted by priority."""
    verification_share: float = Field(0.15, ge=0, le=1)
    """Share of a main agent's games against opponents that it should have learned to beat; the rest is self-play."""
    reset_probability: float = Field(0.25, ge=0, le=1)
    """Probability that a league exploiter is reset when it is frozen."""
    explore_share: float = Field(0.05, ge=0, lt=1)
    """Share of a learner's games that is spread evenly over its judges, so that all their win rates stay current."""

    @model_validator(mode="after")
    def _fits(self) -> LeagueConfig:
        if self.min_slices > self.max_slices:
            raise ValueError(
                f"min_slices: {self.min_slices} slices between checkpoints are more than max_slices: "
                f"{self.max_slices}; swap them"
            )
        if self.pfsp_share + self.verification_share > 1:
            raise ValueError(
                f"pfsp_share {self.pfsp_share:g} and verification_share {self.verification_share:g} are shares of one "
                "whole; lower one"
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


def uniform_mix(names: Sequence[str]) -> Mix:
    """Returns the uniform mixture."""
    return {name: 1 / len(names) for name in names}


@dataclass
class LeagueLearner:
    """A policy in training.

    `start` is the member from which its next slice begins ("": new weights), `latest` the member that its last slice
    produced ("": none since a reset), `parent` the frozen copy that it continues, `frozen_copies` its frozen copies,
    oldest first.
    """

    name: str
    role: Role
    start: str = ""
    latest: str = ""
    parent: str = ""
    slices: int = 0
    slices_since_freeze: int = 0  # slices since it was last frozen
    frozen_copies: list[str] = field(default_factory=list)


class LeagueLogic:
    """The league's decisions, from the current win rates. The past of a main agent starts with the population's initial
    members."""

    def __init__(self, config: LeagueConfig, learners: Sequence[LeagueLearner], population: Population) -> None:
        self.config, self.population = config, population
        self.win_rates = WinRates(config.win_rate_decay)
        self.learners = {learner.name: learner for learner in learners}
        self.initial_members = [member.name for member in population]

    def mixture(self, learner: LeagueLearner) -> Mix:
        """Returns the mixture of opponents for a learner's next slice: frozen members, and learners with their current
        weights. Its own name stands for self-play."""
        rules = {"main": self._main, "main_exploiter": self._main_exploiter, "league_exploiter": self._league_exploiter}
        explore = self.config.explore_share
        return combine_mixes((1 - explore, rules[learner.role](learner)), (explore, uniform_mix(self.judges(learner))))

    def _main(self, learner: LeagueLearner) -> Mix:
        config, mains = self.config, self.learners_of("main")
        parts = [(config.pfsp_share, self._prioritised(learner, self.history(), "squared"))]
        for other in mains:
            now = self._current(learner, other, config.weak_win_rate)
            parts.append((config.verification_share / len(mains), self._verification(learner, other) or now))
            parts.append(((1 - config.pfsp_share - config.verification_share) / len(mains), now))
        return combine_mixes(*parts)

    def _verification(self, learner: LeagueLearner, other: LeagueLearner) -> Mix:
        """Returns earlier exploiters that beat the learner; else past opponents that it no longer beats; else {}."""
        exploiters = [name for rival in self.learners_of("main_exploiter") for name in rival.frozen_copies]
        if min(self.win_rates_against(learner, exploiters), default=1.0) < self.config.weak_win_rate:
            return self._prioritised(learner, exploiters, "squared")
        past = self.past(other)
        rates = self.win_rates_against(learner, past)
        kept = without_monotone_suffix(rates)
        if min(rates[:kept], default=1.0) < self.config.strong_win_rate:
            return self._prioritised(learner, past[:kept], "squared")
        return {}

    def _main_exploiter(self, learner: LeagueLearner) -> Mix:
        mains = self.learners_of("main")
        return combine_mixes(
            *((1 / len(mains), self._current(learner, main, self.config.lost_win_rate)) for main in mains)
        )

    def _league_exploiter(self, learner: LeagueLearner) -> Mix:
        return self._prioritised(learner, self.history(), "capped")

    def _current(self, learner: LeagueLearner, main: LeagueLearner, bar: float) -> Mix:
        """Returns main agent `main` with its current weights if the learner's win rate against it is above `bar`; else
        its past."""
        met = main is learner or main.latest  # a main agent that has not trained yet has no current weights
        if met and self.win_rates.rate(learner.name, main.name) > bar:
            return {main.name: 1.0}
        return self._prioritised(learner, self.past(main), "variance")

    def _prioritised(self, learner: LeagueLearner, names: Sequence[str], weighting: PFSPWeighting) -> Mix:
        return dict(zip(names, pfsp(np.array(self.win_rates_against(learner, names)), weighting).tolist(), strict=True))

    def win_rates_against(self, learner: LeagueLearner, names: Sequence[str]) -> list[float]:
        """Returns a learner's win rates against these opponents."""
        return [self.win_rates.rate(learner.name, name) for name in names]

    def learners_of(self, role: Role) -> list[LeagueLearner]:
        """Returns the learners with this role."""
        return [learner for learner in self.learners.values() if learner.role == role]

    def past(self, learner: LeagueLearner) -> list[str]:
        """Returns the initial members and a main agent's frozen copies, oldest first."""
        return [*self.initial_members, *learner.frozen_copies]

    def history(self) -> list[str]:
        """Returns all frozen members, oldest first."""
        return [member.name for member in self.population]

    def judges(self, learner: LeagueLearner) -> list[str]:
        """Returns the opponents that a learner must beat to be frozen early: the main agents for a main exploiter, else
        the whole history."""
        if learner.role != "main_exploiter":
            return self.history()
        return [main.name for main in self.learners_of("main") if main.latest] or self.initial_members

    def should_freeze(self, learner: LeagueLearner) -> bool:
        """True if the learner should be frozen now."""
        if learner.slices_since_freeze < self.config.min_slices:
            return False
        strong = min(self.win_rates_against(learner, self.judges(learner))) > self.config.strong_win_rate
        return strong or learner.slices_since_freeze >= self.config.max_slices
