"""AlphaStar's rules: which opponents a learner trains against, and when it is frozen (Vinyals et al., 2019, and its
published pseudocode)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Literal, get_args

import numpy as np
from pydantic import Field, model_validator

from palestra.populations.plans.matchmaking import UNPLAYED_WIN_RATE, PFSPWeighting, WinRates, pfsp
from palestra.populations.plans.slices import SliceConfig
from palestra.populations.population import Mix, Player, Population

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
    """Smallest number of slices between two frozen copies of a learner."""
    max_slices: int = Field(4, ge=1)
    """Slices after which a learner is frozen in any case."""
    games_per_cell: int = Field(200, ge=0)
    """Games that a frozen copy plays against each earlier one, for the payoff table and ratings; 0: none."""
    rated_opponents: int = Field(0, ge=0)
    """Number of earlier copies that a frozen copy plays, drawn at random. 0: all; the number of games then grows with
    the square of the league's size. A hundred suffice to rate a league of thousands."""
    opponents_per_slice: int = Field(0, ge=0)
    """Number of opponents of a slice, drawn from the distribution of its opponents. 0: the whole distribution, which
    makes each task list every member of the league. A slice draws an opponent per game, so as many draws as games are
    equivalent in distribution."""
    cells_per_task: int = Field(16, ge=1)
    """Opponents per task of games."""
    nash_conv_every: int = Field(0, ge=0)
    """Measure NashConv for every n-th copy of a main agent; 0: never. Needs a game with exact rules."""
    strong_win_rate: float = Field(0.7, gt=0, lt=1)
    """Win rate above which an opponent counts as beaten. A learner is frozen early once it beats all its judges; a main
    agent plays past opponents that it no longer beats."""
    weak_win_rate: float = Field(0.3, gt=0, lt=1)
    """Up to this win rate against another main agent, a main agent plays that agent's past instead of its current
    weights. It plays earlier exploiters while its win rate against one of them is lower than this."""
    lost_win_rate: float = Field(0.1, ge=0, lt=1)
    """Up to this win rate against a main agent, a main exploiter plays the agent's past instead of its current
    weights."""
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
            raise ValueError(f"min_slices: {self.min_slices} is larger than max_slices: {self.max_slices}; swap them")
        if self.pfsp_share + self.verification_share > 1:
            raise ValueError(
                f"pfsp_share {self.pfsp_share:g} and verification_share {self.verification_share:g} add up to more "
                "than 1; lower one"
            )
        return self

    def roles(self) -> list[Role]:
        counts = (self.main_agents, self.main_exploiters, self.league_exploiters)
        return [role for role, count in zip(get_args(Role), counts, strict=True) for _ in range(count)]


def without_monotone_suffix(rates: Sequence[float]) -> int:
    """Returns the length of `rates` (oldest opponent first) without the suffix in which they never rise.

    In that suffix the agent's win rate is never higher against a newer opponent than against an older one, so it has
    forgotten none of them: [.9, .6, .65, .6] -> 3, [.9, .8, .7] -> 0.
    """
    return next((i + 1 for i in range(len(rates) - 1, 0, -1) if rates[i - 1] < rates[i]), 0)


@dataclass
class LeagueLearner:
    """A policy in training, of `player`.

    `start` is the member from whose weights its next slice starts ("": new weights), `latest` the member that its last
    slice produced ("": none since a reset), `parent` the frozen copy that it continues, `frozen_copies` its frozen
    copies, oldest first.
    """

    name: str
    role: Role
    player: Player
    start: str = ""
    latest: str = ""
    parent: str = ""
    slices: int = 0
    slices_since_freeze: int = 0  # slices since it was last frozen
    frozen_copies: list[str] = field(default_factory=list)


@dataclass
class OpponentWeights:
    """Weights of opponents: of the members of the history, `frozen` float64 [history], oldest first, and of learners at
    their current network weights, by name."""

    frozen: np.ndarray
    current: Mix = field(default_factory=dict)

    def add(self, weight: float, other: OpponentWeights) -> None:
        """Adds `weight` times another mixture."""
        self.frozen += weight * other.frozen
        for name, share in other.current.items() if weight else ():
            self.current[name] = self.current.get(name, 0.0) + weight * share


@dataclass
class History:
    """The frozen members of a player, oldest first, and the number of each."""

    names: list[str] = field(default_factory=list)
    number_of: dict[str, int] = field(default_factory=dict)

    def numbers(self, names: Iterable[str]) -> np.ndarray:
        """Returns the numbers of members, int64."""
        return np.array([self.number_of[name] for name in names], np.int64)

    def add(self, name: str) -> None:
        self.number_of[name] = len(self.names)
        self.names.append(name)

    def __len__(self) -> int:
        return len(self.names)


class LeagueLogic:
    """The league's decisions, from the current win rates. The past of a main agent starts with the population's initial
    members.

    With one player, whose members play every seat, its learners meet each other. With two, the sides of a game, each
    side's learners meet those of the other: main agents of one side train against those of the other and against the
    exploiters that target them. There is no self-play then.

    Decisions are computed on arrays over the history of the players that a learner meets, since a league of thousands
    of members makes some after every slice.
    """

    def __init__(self, config: LeagueConfig, learners: Sequence[LeagueLearner], population: Population) -> None:
        self.config = config
        self.population = population
        self.win_rates = WinRates(config.win_rate_decay)
        self.learners = {learner.name: learner for learner in learners}
        self.rival_of = dict(zip(population.players, reversed(population.players), strict=True))
        self._histories = {player: History() for player in population.players}
        self._num_seen = 0
        self.initial_members = {player: list(self.history(player).names) for player in population.players}

    def opponent_weights(self, learner: LeagueLearner) -> OpponentWeights:
        """Returns the weights of the opponents of a learner's next slice. Its own name stands for self-play."""
        rules = {"main": self._main, "main_exploiter": self._main_exploiter, "league_exploiter": self._league_exploiter}
        rates = self.history_rates(learner)
        explore = self.config.explore_share
        weights = OpponentWeights(np.zeros(len(rates)))
        weights.add(1 - explore, rules[learner.role](learner, rates))
        if learner.role != "main_exploiter":
            weights.frozen += explore / len(rates)
        else:
            weights.add(explore, self._uniform(learner, self.judges(learner)))
        return weights

    def _main(self, learner: LeagueLearner, rates: np.ndarray) -> OpponentWeights:
        config = self.config
        mains = self.rivals(learner, "main")
        weights = OpponentWeights(config.pfsp_share * pfsp(rates, "squared"))
        copies = [rival.frozen_copies for rival in self.rivals(learner, "main_exploiter")]
        exploiters = self.met_by(learner).numbers(chain.from_iterable(copies))
        for other in mains:
            now = self._current(learner, other, config.weak_win_rate, rates)
            verified = self._verification(other, exploiters, rates) or now
            weights.add(config.verification_share / len(mains), verified)
            weights.add((1 - config.pfsp_share - config.verification_share) / len(mains), now)
        return weights

    def _verification(self, other: LeagueLearner, exploiters: np.ndarray, rates: np.ndarray) -> OpponentWeights | None:
        """Returns earlier exploiters that beat the learner; if there are none, past opponents that it no longer beats;
        if there are none, None. `rates` are the learner's win rates against the history."""
        if len(exploiters) and rates[exploiters].min() < self.config.weak_win_rate:
            return self._pfsp_weights(exploiters, rates, "squared")
        past = self._histories[other.player].numbers(self.past(other))
        past = past[: without_monotone_suffix(rates[past].tolist())]
        if len(past) and rates[past].min() < self.config.strong_win_rate:
            return self._pfsp_weights(past, rates, "squared")
        return None

    def _main_exploiter(self, learner: LeagueLearner, rates: np.ndarray) -> OpponentWeights:
        mains = self.rivals(learner, "main")
        weights = OpponentWeights(np.zeros(len(rates)))
        for main in mains:
            weights.add(1 / len(mains), self._current(learner, main, self.config.lost_win_rate, rates))
        return weights

    def _league_exploiter(self, learner: LeagueLearner, rates: np.ndarray) -> OpponentWeights:
        return OpponentWeights(pfsp(rates, "capped"))

    def _current(self, learner: LeagueLearner, main: LeagueLearner, bar: float, rates: np.ndarray) -> OpponentWeights:
        """Returns `main` at its current weights if the learner's win rate against it is above `bar`, else its past."""
        has_weights = main is learner or main.latest  # a main agent that has not trained yet has no current weights
        if has_weights and self.win_rates.rate(learner.name, main.name) > bar:
            return OpponentWeights(np.zeros(len(rates)), {main.name: 1.0})
        past = self._histories[main.player].numbers(self.past(main))
        return self._pfsp_weights(past, rates, "variance")

    def _pfsp_weights(self, numbers: np.ndarray, rates: np.ndarray, weighting: PFSPWeighting) -> OpponentWeights:
        weights = OpponentWeights(np.zeros(len(rates)))
        weights.frozen[numbers] = pfsp(rates[numbers], weighting)
        return weights

    def _uniform(self, learner: LeagueLearner, names: Sequence[str]) -> OpponentWeights:
        """Returns the uniform mixture of learners, or of frozen members, that a learner meets."""
        history = self.met_by(learner)
        weights = OpponentWeights(np.zeros(len(history)))
        for name in names:
            if name in self.learners:
                weights.current[name] = 1 / len(names)
            else:
                weights.frozen[history.number_of[name]] = 1 / len(names)
        return weights

    def history_rates(self, learner: LeagueLearner) -> np.ndarray:
        """Returns a learner's win rates against all frozen members that it meets, float64 [history]."""
        history = self.met_by(learner)
        rates = np.full(len(history), UNPLAYED_WIN_RATE)
        for name, rate in self.win_rates.rates_of(learner.name).items():
            if (number := history.number_of.get(name)) is not None:
                rates[number] = rate
        return rates

    def judge_rates(self, learner: LeagueLearner) -> np.ndarray:
        """Returns a learner's win rates against its judges, float64 [judges]."""
        if learner.role != "main_exploiter":
            return self.history_rates(learner)
        return np.array([self.win_rates.rate(learner.name, name) for name in self.judges(learner)])

    def rivals(self, learner: LeagueLearner, role: Role) -> list[LeagueLearner]:
        """Returns the learners of a role that a learner meets; with one player also itself."""
        rival = self.rival_of[learner.player]
        return [other for other in self.learners.values() if (other.player, other.role) == (rival, role)]

    def past(self, learner: LeagueLearner) -> list[str]:
        """Returns the initial members and a main agent's frozen copies, oldest first."""
        return [*self.initial_members[learner.player], *learner.frozen_copies]

    def met_by(self, learner: LeagueLearner) -> History:
        """Returns the frozen members that a learner meets."""
        return self.history(self.rival_of[learner.player])

    def history(self, player: Player) -> History:
        """Returns all frozen members of a player. The histories grow with the population."""
        for member in islice(self.population.members.values(), self._num_seen, None):
            for owner, history in self._histories.items():
                if member.player in ("", owner):
                    history.add(member.name)
        self._num_seen = len(self.population)
        return self._histories[player]

    def judges(self, learner: LeagueLearner) -> list[str]:
        """Returns the opponents to beat before an early freeze: of a main exploiter main agents, else all history."""
        if learner.role != "main_exploiter":
            return self.met_by(learner).names
        mains = [main.name for main in self.rivals(learner, "main") if main.latest]
        return mains or self.initial_members[self.rival_of[learner.player]]

    def should_freeze(self, learner: LeagueLearner) -> bool:
        if learner.slices_since_freeze < self.config.min_slices:
            return False
        strong = bool(self.judge_rates(learner).min() > self.config.strong_win_rate)
        return strong or learner.slices_since_freeze >= self.config.max_slices
