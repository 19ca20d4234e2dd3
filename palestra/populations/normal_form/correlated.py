"""Correlated equilibria of any number of players: a joint distribution from which each is told its own member.

There are many; the one that leaves most to chance is unique, keeps every member in play that it can, and treats
players and members alike (Marris et al., 2021: JPSRO).
"""

from __future__ import annotations

import numpy as np

from palestra.populations.normal_form.convex import Objective, most_random
from palestra.populations.normal_form.tables import Payoff, coarse_gains, switch_gains

MOST = 10**9  # bytes


def correlated_equilibrium(payoffs: Payoff, *, objective: Objective = "gini", epsilon: float = 0.0) -> np.ndarray:
    """The correlated equilibrium [m_0, ..., m_n-1] of largest Gini impurity (Marris et al., 2021, sec. 4) or entropy
    (Ortiz et al., 2007): told its member, a player gains at most `epsilon` by another (weighed by how often it is
    told)."""
    _bound("ce", payoffs, sum(members * (members - 1) for members in payoffs[0].shape))
    return most_random(switch_gains(payoffs) - epsilon, objective).reshape(payoffs[0].shape)


def coarse_correlated_equilibrium(
    payoffs: Payoff, *, objective: Objective = "gini", epsilon: float = 0.0
) -> np.ndarray:
    """The coarse correlated equilibrium [m_0, ..., m_n-1] of largest Gini impurity or entropy: a player gains at most
    `epsilon` by a member that it fixes before it is told one (Moulin & Vial, 1978)."""
    _bound("cce", payoffs, sum(payoffs[0].shape))
    return most_random(coarse_gains(payoffs) - epsilon, objective).reshape(payoffs[0].shape)


def _bound(solver: str, payoffs: Payoff, rows: int) -> None:
    """Raises ValueError where the constraints, and the matrices of their rows, would take more than `MOST` bytes."""
    size = 8 * rows * (rows + payoffs[0].size)
    if size > MOST:
        shape = " x ".join(map(str, payoffs[0].shape))
        fix = "stop after fewer iterations (iterations, stop)" + (", or take cce" if solver == "ce" else "")
        raise ValueError(
            f"solver {solver} on a table of {shape} members has {rows} constraints and takes {size / 1e9:.1f} GB; the "
            f"most is {MOST / 1e9:g} GB: {fix}"
        )
