"""Whom a learner plays: from its history to a mixture.

A mixture is data. The worker draws from it once per episode; drawn anew at every step it would be another, per-step
random opponent that no member is. A learner that is to play its current self has the task's `self_play` for that.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from palestra.config import Strict
from palestra.populations.population import Mix

Weighting = Literal["squared", "variance", "linear", "capped"]


def latest(names: Sequence[str]) -> Mix:
    """The newest member, always."""
    return {_some(names)[-1]: 1.0}


def delta_uniform(names: Sequence[str], delta: float) -> Mix:
    """Uniform over the newest fraction `delta` of the history (Bansal et al., 2018, sec. 3.2), rounded up: 0 is the
    newest member alone, 1 all. Their delta is the oldest member's place instead: 1 minus ours."""
    newest = _some(names)[-max(1, math.ceil(delta * len(names))) :]
    return dict.fromkeys(newest, 1 / len(newest))


def pfsp(win_rates: np.ndarray, weighting: Weighting = "squared") -> np.ndarray:
    """Prioritised fictitious self-play's probabilities of opponents, given the learner's win rates against them
    (Vinyals et al., 2019, "Matchmaking"); uniform where every weight is 0.

    With p a win rate: `squared` (1 - p)^2 looks for those that win, `variance` p (1 - p) for equals, `linear` is
    1 - p, `capped` min(0.5, 1 - p). Raises ValueError for rates out of [0, 1] and for none.
    """
    p = np.asarray(win_rates, float)
    if not p.size or not ((p >= 0) & (p <= 1)).all():
        raise ValueError(f"PFSP needs win rates from 0 to 1, one for each opponent; these are {p.tolist()}")
    weights = {"squared": (1 - p) ** 2, "variance": p * (1 - p), "linear": 1 - p, "capped": np.minimum(0.5, 1 - p)}
    chosen = weights[weighting]
    return chosen / chosen.sum() if chosen.sum() > 0 else np.full(len(p), 1 / len(p))


def _some(names: Sequence[str]) -> Sequence[str]:
    if not names:
        raise ValueError("there is no member to play yet: a population starts from at least one, for example uniform")
    return names


class Matchmaker(Strict):
    """Makes a learner's mixture of opponents."""

    @abstractmethod
    def mix(self, names: Sequence[str], win_rates: Mapping[str, float], solution: Mix) -> Mix:
        """`names` are the opponents there are, oldest first; `win_rates` the learner's against them (0.5 where it has
        none); `solution` a meta-solver's. Each kind reads what it needs. Raises ValueError where there is nobody."""


class Latest(Matchmaker):
    """The newest member: self-play without a memory."""

    type: Literal["latest"] = "latest"

    def mix(self, names: Sequence[str], win_rates: Mapping[str, float], solution: Mix) -> Mix:
        return latest(names)


class History(Matchmaker):
    """The newest fraction `delta` of the history, each alike: by default all, which is fictitious self-play."""

    type: Literal["history"] = "history"
    delta: float = Field(1.0, ge=0, le=1)

    def mix(self, names: Sequence[str], win_rates: Mapping[str, float], solution: Mix) -> Mix:
        return delta_uniform(names, self.delta)


class PFSP(Matchmaker):
    """Those the learner has most to learn from."""

    type: Literal["pfsp"] = "pfsp"
    weighting: Weighting = "squared"
    unplayed: ClassVar[float] = 0.5

    def mix(self, names: Sequence[str], win_rates: Mapping[str, float], solution: Mix) -> Mix:
        rates = np.array([win_rates.get(name, self.unplayed) for name in _some(names)])
        shares = pfsp(rates, self.weighting)
        return {name: float(share) for name, share in zip(names, shares, strict=True) if share > 0}


class Solution(Matchmaker):
    """The meta-solver's mixture: Nash, where that is the solver."""

    type: Literal["solution"] = "solution"

    def mix(self, names: Sequence[str], win_rates: Mapping[str, float], solution: Mix) -> Mix:
        """Raises ValueError where the solution names nobody, or somebody who is not there."""
        if not solution or set(solution) - set(names):
            raise ValueError(f"the solution {solution} is no mixture of {list(names)}: solve the table first")
        return solution


MatchmakerConfig = Annotated[Latest | History | PFSP | Solution, Field(discriminator="type")]
