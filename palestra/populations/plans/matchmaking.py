"""Matchmakers, which compute the mixture of opponents that a learner trains against from its history and win rates.

A worker draws a member from the mixture once per episode: drawing at every step would create an opponent that no member
is. The share of games against the learner's current weights is the task's `self_play`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from palestra.core.config import StrictModel
from palestra.populations.population import Mix

PFSPWeighting = Literal["squared", "variance", "linear", "capped"]


UNPLAYED_WIN_RATE = 0.5  # assumed for a pair without games


class WinRates:
    """Win rates from game counts that decay by the factor `decay` with each game of a pair (AlphaStar's pseudocode uses
    0.99, about the last 100 games)."""

    def __init__(self, decay: float = 0.99) -> None:
        self.decay = decay
        self._counts: dict[str, dict[str, tuple[float, float]]] = {}  # decayed: games, and wins + draws / 2

    def rate(self, home: str, away: str) -> float:
        """Returns the share of the pair's games that `home` won, a draw counting half; 0.5 if there were none."""
        return _rate(*self._counts.get(home, {}).get(away, (0.0, 0.0)))

    def rates_of(self, home: str) -> dict[str, float]:
        """Returns `rate` of `home` against each opponent that it has played, by name."""
        return {away: _rate(*counts) for away, counts in self._counts.get(home, {}).items()}

    def add(self, home: str, away: str, games: int, points: float) -> None:
        """Adds `games` games with `points` of `home` (a draw counts half), as if these were spread evenly."""
        if not games:
            return
        weight = self.decay**games
        fresh = float(games) if self.decay == 1 else (1 - weight) / (1 - self.decay)
        for ours, theirs, share in ((home, away, points / games), (away, home, 1 - points / games)):
            counts = self._counts.setdefault(ours, {})
            old = counts.get(theirs, (0.0, 0.0))
            counts[theirs] = (old[0] * weight + fresh, old[1] * weight + share * fresh)

    def remove(self, name: str) -> None:
        for other in self._counts.pop(name, {}):
            self._counts.get(other, {}).pop(name, None)


def _rate(games: float, wins: float) -> float:
    return min(wins / games, 1.0) if games else UNPLAYED_WIN_RATE  # rounding may exceed 1


def pfsp(win_rates: np.ndarray, weighting: PFSPWeighting = "squared") -> np.ndarray:
    """Returns opponent probabilities of prioritised fictitious self-play, float64 [opponents], from the learner's win
    rates [opponents] (Vinyals et al., 2019, "Matchmaking"); uniform if all weights are 0.

    Weights, with p the win rate: `squared` (1 - p)^2 prefers opponents that beat the learner, `variance` p (1 - p)
    those of equal strength; `linear` is 1 - p, `capped` min(0.5, 1 - p). Raises ValueError if there are no rates or a
    rate is outside [0, 1].
    """
    p = np.asarray(win_rates, float)
    if not p.size or not ((p >= 0) & (p <= 1)).all():
        raise ValueError(f"PFSP needs win rates from 0 to 1, one for each opponent; these are {p.tolist()}")
    weights = {"squared": (1 - p) ** 2, "variance": p * (1 - p), "linear": 1 - p, "capped": np.minimum(0.5, 1 - p)}
    chosen = weights[weighting]
    return chosen / chosen.sum() if chosen.sum() > 0 else np.full(len(p), 1 / len(p))


class Matchmaker(StrictModel):
    """Computes a learner's mixture of opponents."""

    @abstractmethod
    def mix(self, names: Sequence[str], win_rates: Mapping[str, float], solution: Mix) -> Mix:
        """Returns the mixture over `names`, the possible opponents, oldest first, at least one.

        `win_rates` are the learner's win rates against them (0.5 where missing), `solution` is a
        meta-solver's mixture over them; a matchmaker may ignore both.
        """


class LatestMatchmaker(Matchmaker):
    """Only the newest member: plain self-play."""

    type: Literal["latest"] = "latest"

    def mix(self, names: Sequence[str], win_rates: Mapping[str, float], solution: Mix) -> Mix:
        return {names[-1]: 1.0}


class HistoryMatchmaker(Matchmaker):
    """Uniform over the newest members; by default over all members, which is fictitious self-play."""

    # Bansal et al., 2018, sec. 3.2; their delta is 1 minus this one: the position of the oldest member

    type: Literal["history"] = "history"
    delta: float = Field(1.0, ge=0, le=1)
    """Fraction of the history to use, newest members first; 1: all, 0: only the newest member."""

    def mix(self, names: Sequence[str], win_rates: Mapping[str, float], solution: Mix) -> Mix:
        newest = names[-max(1, math.ceil(self.delta * len(names))) :]
        return dict.fromkeys(newest, 1 / len(newest))


class PFSPMatchmaker(Matchmaker):
    """Prioritised fictitious self-play: opponents weighted by the learner's win rate against them."""

    type: Literal["pfsp"] = "pfsp"
    weighting: PFSPWeighting = "squared"
    """Weight of an opponent at win rate p: `squared` (1 - p)^2, `variance` p (1 - p), `linear` 1 - p, `capped` min(0.5,
    1 - p)."""

    def mix(self, names: Sequence[str], win_rates: Mapping[str, float], solution: Mix) -> Mix:
        rates = np.array([win_rates.get(name, UNPLAYED_WIN_RATE) for name in names])
        shares = pfsp(rates, self.weighting)
        return {name: float(share) for name, share in zip(names, shares, strict=True) if share > 0}


class MetaSolverMatchmaker(Matchmaker):
    """The meta-solver's mixture, for example a Nash equilibrium."""

    type: Literal["solution"] = "solution"

    def mix(self, names: Sequence[str], win_rates: Mapping[str, float], solution: Mix) -> Mix:
        return solution


MatchmakerConfig = Annotated[
    LatestMatchmaker | HistoryMatchmaker | PFSPMatchmaker | MetaSolverMatchmaker, Field(discriminator="type")
]
