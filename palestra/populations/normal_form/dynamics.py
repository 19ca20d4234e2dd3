"""Meta-solvers that play the table over and over: any number of players, any sums of payoffs.

What they return is an average over rounds. In two-player zero-sum tables it nears a Nash equilibrium; elsewhere it need
not: the average of regret matching's joint play is what nears a coarse correlated equilibrium, not its marginals.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from palestra.populations.normal_form.tables import Payoff, fronted, values

Strategies = list[np.ndarray]

FIRST_REGRET = 1e-6  # of every member, as in OpenSpiel: round one is uniform


def uniform(payoffs: Payoff) -> Strategies:
    """Every member alike."""
    return [np.full(members, 1 / members) for members in payoffs[0].shape]


def fictitious_play(payoffs: Payoff, *, iterations: int = 10_000) -> Strategies:
    """How often each member was the best answer to the others' averages so far (Brown, 1951). Players answer at once,
    first to uniform play; of equals the oldest member answers."""
    fronts, averages = fronted(payoffs), uniform(payoffs)
    counts = [np.zeros_like(average) for average in averages]
    for rounds in range(1, iterations + 1):
        for count, value in zip(counts, values(fronts, averages), strict=True):
            count[value.argmax()] += 1
        averages = [count / rounds for count in counts]
    return averages


def regret_matching(payoffs: Payoff, *, iterations: int = 10_000, gamma: float = 1e-6) -> Strategies:
    """The average over rounds in which each member is played in proportion to its positive regret (Hart & Mas-Colell,
    2000, sec. 3, against expected payoffs as in OpenSpiel), a share `gamma` of uniform play mixed in."""
    regrets = [np.full(members, FIRST_REGRET) for members in payoffs[0].shape]

    def step(strategies: Strategies, earned: Strategies) -> Strategies:
        for regret, strategy, value in zip(regrets, strategies, earned, strict=True):
            regret += value - value @ strategy
        return [_matched(regret, gamma) for regret in regrets]

    return _average(payoffs, step, iterations)


def _matched(regret: np.ndarray, gamma: float) -> np.ndarray:
    positive = np.maximum(regret, 0)
    total = positive.sum()
    level = 1 / len(regret)
    return gamma * level + (1 - gamma) * positive / total if total > 0 else np.full(len(regret), level)


def projected_replicator(
    payoffs: Payoff, *, iterations: int = 50_000, dt: float = 1e-3, gamma: float = 1e-6
) -> Strategies:
    """The average along projected replicator dynamics (Lanctot et al., 2017, sec. 3.2), from uniform play by Euler
    steps `dt`; `gamma` is every member's least probability.

    Payoffs count in their own units: the larger they are, the smaller a `dt` they need. Raises ValueError where
    `gamma` leaves no distribution.
    """
    if gamma * max(payoffs[0].shape) > 1:
        raise ValueError(f"{max(payoffs[0].shape)} members of probability at least {gamma} are no distribution")

    def step(strategies: Strategies, earned: Strategies) -> Strategies:
        moved = [
            strategy * (1 + dt * (value - value @ strategy)) for strategy, value in zip(strategies, earned, strict=True)
        ]
        return [one if one.min() >= gamma else project(one, gamma) for one in moved]  # replicators keep their sum

    return _average(payoffs, step, iterations)


def project(point: np.ndarray, gamma: float = 0.0) -> np.ndarray:
    """The nearest distribution whose every probability is at least `gamma` (Duchi et al., 2008, fig. 1)."""
    mass = 1 - gamma * len(point)
    above = np.sort(point - gamma)[::-1]
    levels = (above.cumsum() - mass) / np.arange(1, len(point) + 1)
    level = levels[np.flatnonzero(above > levels)[-1]] if mass > 0 else np.inf
    return np.maximum(point - gamma - level, 0) + gamma


def _average(payoffs: Payoff, step: Callable[[Strategies, Strategies], Strategies], iterations: int) -> Strategies:
    """The average of uniform play and of the rounds that follow from it."""
    fronts, strategies = fronted(payoffs), uniform(payoffs)
    totals = [strategy.copy() for strategy in strategies]
    for _ in range(iterations):
        strategies = step(strategies, values(fronts, strategies))
        for total, strategy in zip(totals, strategies, strict=True):
            total += strategy
    return [total / (iterations + 1) for total in totals]
