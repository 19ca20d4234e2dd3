"""Correlated equilibria for any number of players: joint distributions from which each player is recommended its
member.

There are many. The most random one is unique, has the largest support, and treats players and members alike (Marris et
al., 2021: JPSRO).
"""

from __future__ import annotations

import numpy as np

from palestra.populations.normal_form.convex import Objective, most_random_distribution
from palestra.populations.normal_form.payoff_tensors import PayoffTensors, cce_gains, ce_gains

MAX_BYTES = 10**9  # bytes of the constraint matrices


def correlated_equilibrium(
    payoffs: PayoffTensors, *, objective: Objective = "gini", epsilon: float = 0.0
) -> np.ndarray:
    """Returns the correlated equilibrium, float64 [m_0, ..., m_n-1], of largest Gini impurity (Marris et al., 2021,
    sec. 4) or entropy (Ortiz et al., 2007).

    Given its recommendation, a player gains at most `epsilon` by another member, weighted by the probability of the
    recommendation. Raises ValueError if the table is too large.
    """
    _bound("ce", payoffs, sum(members * (members - 1) for members in payoffs[0].shape))
    return most_random_distribution(ce_gains(payoffs) - epsilon, objective).reshape(payoffs[0].shape)


def coarse_correlated_equilibrium(
    payoffs: PayoffTensors, *, objective: Objective = "gini", epsilon: float = 0.0
) -> np.ndarray:
    """Returns the coarse correlated equilibrium, float64 [m_0, ..., m_n-1], of largest Gini impurity or entropy.

    A player gains at most `epsilon` by a member chosen before recommendations (Moulin & Vial, 1978). Raises ValueError
    if the table is too large.
    """
    _bound("cce", payoffs, sum(payoffs[0].shape))
    return most_random_distribution(cce_gains(payoffs) - epsilon, objective).reshape(payoffs[0].shape)


def _bound(solver: str, payoffs: PayoffTensors, rows: int) -> None:
    """Raises ValueError if the constraints and the matrix over their rows would take more than `MAX_BYTES` bytes."""
    size = 8 * rows * (rows + payoffs[0].size)
    if size > MAX_BYTES:
        shape = " x ".join(map(str, payoffs[0].shape))
        fix = "stop after fewer iterations (iterations, stop_nash_conv)" + (", or take cce" if solver == "ce" else "")
        raise ValueError(
            f"solver {solver} on a table of {shape} members has {rows} constraints and takes {size / 1e9:.1f} GB; the "
            f"most is {MAX_BYTES / 1e9:g} GB: {fix}"
        )
