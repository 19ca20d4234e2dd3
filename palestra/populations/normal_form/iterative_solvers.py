"""Iterative meta-solvers for any number of players and general-sum payoffs.

They return each player's average over rounds. In two-player zero-sum tables these averages approach a Nash equilibrium;
in other games they need not: with regret matching, the average joint play approaches a coarse correlated equilibrium,
but the averages returned are only its marginals.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from palestra.populations.normal_form.payoff_tensors import PayoffTensors, member_returns, own_axis_first

Strategies = list[np.ndarray]

# default Euler step; its largest relative change of a probability
DEFAULT_DT = 1e-3
SMALL_STEP = 0.05
ROUNDING = 1e-14  # differences of payoffs below this are rounding errors, relative to the largest payoff
INITIAL_REGRET = 1e-6  # initial regret of every member, as in OpenSpiel, so that the first round is uniform


def uniform_strategies(payoffs: PayoffTensors) -> Strategies:
    """Returns the uniform distribution float64 [m_i] for each player."""
    return [np.full(members, 1 / members) for members in payoffs[0].shape]


def fictitious_play(payoffs: PayoffTensors, *, iterations: int = 10_000) -> Strategies:
    """Returns the share of rounds in which each member was the best response to the others' averages (Brown, 1951),
    float64 [m_i] for each player.

    Players respond simultaneously, at first to uniform play; of equal responses, the oldest member is chosen.
    """
    fronts = own_axis_first(payoffs)
    averages = uniform_strategies(payoffs)
    counts = [np.zeros_like(average) for average in averages]
    for rounds in range(1, iterations + 1):
        for count, value in zip(counts, member_returns(fronts, averages), strict=True):
            count[value.argmax()] += 1
        averages = [count / rounds for count in counts]
    return averages


def regret_matching(payoffs: PayoffTensors, *, iterations: int = 10_000, gamma: float = 1e-6) -> Strategies:
    """Returns average strategies, float64 [m_i] for each player, when members are played in proportion to their
    positive regret (Hart & Mas-Colell, 2000, sec. 3, with expected payoffs as in OpenSpiel).

    A share `gamma` of uniform play is mixed in.
    """
    regrets = [np.full(members, INITIAL_REGRET) for members in payoffs[0].shape]

    def step(strategies: Strategies, earned: Strategies) -> Strategies:
        for regret, strategy, value in zip(regrets, strategies, earned, strict=True):
            regret += value - value @ strategy
        return [_match_regret(regret, gamma) for regret in regrets]

    return _average(payoffs, step, iterations)


def _match_regret(regret: np.ndarray, gamma: float) -> np.ndarray:
    positive = np.maximum(regret, 0)
    total = positive.sum()
    level = 1 / len(regret)
    return gamma * level + (1 - gamma) * positive / total if total > 0 else np.full(len(regret), level)


def projected_replicator(
    payoffs: PayoffTensors, *, iterations: int = 50_000, dt: float | None = None, gamma: float = 1e-6
) -> Strategies:
    """Returns the average along projected replicator dynamics (Lanctot et al., 2017, sec. 3.2), float64 [m_i] for each
    player.

    Starts from uniform play, with Euler steps `dt`; `gamma` is the lower bound of every probability. Without `dt` steps
    depend on the largest difference of a player's payoffs: `DEFAULT_DT` between 1 and 50; larger for smaller payoffs,
    in proportion, since their dynamics are slower; smaller for larger ones, so that a step changes no probability by
    more than a share of `SMALL_STEP`. Raises ValueError if `gamma` is too large for a distribution, or `dt` so large
    that a step can make a probability negative.
    """
    if gamma * max(payoffs[0].shape) > 1:
        raise ValueError(
            f"{max(payoffs[0].shape)} members cannot each have a probability of at least {gamma}: lower gamma"
        )
    rounding = ROUNDING * max(float(np.abs(table).max()) for table in payoffs)
    payoffs = [table - table.mean() for table in payoffs]  # a large constant would leave rounding errors in each step
    spread = max(float(np.ptp(table)) for table in payoffs)
    if dt is None:
        dt = min(DEFAULT_DT * max(1, 1 / spread), SMALL_STEP / spread) if spread > rounding else DEFAULT_DT
    elif dt * spread > 1:
        raise ValueError(
            f"dt: {dt:g} is too large for payoffs that differ by up to {spread:.3g}, since probabilities become "
            f"negative: set at most {SMALL_STEP / spread:.2g}, or leave dt out"
        )

    def step(strategies: Strategies, earned: Strategies) -> Strategies:
        moved = [
            strategy * (1 + dt * (value - value @ strategy)) for strategy, value in zip(strategies, earned, strict=True)
        ]
        return [
            one if one.min() >= gamma else project_to_simplex(one, gamma) for one in moved
        ]  # replicator steps preserve the sum

    return _average(payoffs, step, iterations)


def project_to_simplex(point: np.ndarray, gamma: float = 0.0) -> np.ndarray:
    """Returns the Euclidean projection of a point [m] on the distributions with all probabilities at least `gamma`
    (Duchi et al., 2008, fig. 1)."""
    mass = 1 - gamma * len(point)
    above = np.sort(point - gamma)[::-1]
    levels = (above.cumsum() - mass) / np.arange(1, len(point) + 1)
    level = levels[np.flatnonzero(above > levels)[-1]] if mass > 0 else np.inf
    return np.maximum(point - gamma - level, 0) + gamma


def _average(
    payoffs: PayoffTensors, step: Callable[[Strategies, Strategies], Strategies], iterations: int
) -> Strategies:
    """Returns the average over uniform play and the rounds that follow."""
    fronts = own_axis_first(payoffs)
    strategies = uniform_strategies(payoffs)
    totals = [strategy.copy() for strategy in strategies]
    for _ in range(iterations):
        strategies = step(strategies, member_returns(fronts, strategies))
        for total, strategy in zip(totals, strategies, strict=True):
            total += strategy
    return [total / (iterations + 1) for total in totals]
