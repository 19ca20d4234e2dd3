"""Equilibria of games in normal form: Nash equilibria of two-player constant-sum games, and correlated equilibria for
any number of players, in which each player is recommended its member.

There are many correlated equilibria. The most random one is unique, has the largest support, and treats players and
members alike (Marris et al., 2021: JPSRO).
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from palestra.populations.normal_form.convex import Objective, most_random_distribution
from palestra.populations.normal_form.linear_programs import linear_program
from palestra.populations.normal_form.payoff_tensors import PayoffTensors, cce_gains, ce_gains

NASH_CONV_TOLERANCE = 1e-7  # largest NashConv of a solution, relative to the largest payoff
MAX_BYTES = 10**9  # bytes of the constraint matrices of a correlated equilibrium


def nash(payoffs: PayoffTensors, *, ties: Literal["vertex", "entropy"] = "vertex") -> list[np.ndarray]:
    """Returns a Nash equilibrium, float64 [m_i] for each player, by linear programming (von Neumann, 1928; Dantzig,
    1951).

    If there are several, `vertex` returns the one at which the simplex method ends: deterministic, but equal members
    may get different probabilities; `entropy` returns each player's most random strategy, which treats equal members
    alike. Raises ValueError unless there are two players and their payoffs add up to a constant.
    """
    if len(payoffs) != 2:
        raise ValueError(f"nash is for two players, this table has {len(payoffs)}: take prd, alpha_rank, ce or cce")
    row, column = payoffs
    total = row + column
    size = max(float(np.abs(row).max()), float(np.abs(column).max()), 1e-300)
    if float(np.ptp(total)) > 1e-6 * size:
        raise ValueError(
            f"nash is for payoffs that add up to a constant; these add up to {total.min():.4g} to {total.max():.4g}: "
            f"take prd, alpha_rank, ce or cce"
        )
    strategies = [maximin(row / size, ties), maximin(column.T / size, ties)]
    gain = float((row @ strategies[1]).max() + (strategies[0] @ column).max() - total.mean())
    if gain > NASH_CONV_TOLERANCE * size + 2 * float(np.ptp(total)):
        raise ValueError(f"no equilibrium of these payoffs was found: players gain {gain:.1g} by leaving the best one")
    return strategies


def game_value(table: np.ndarray) -> float:
    """Returns the value for the row player of a zero-sum game with its payoffs [rows, columns]."""
    return float((maximin(table) @ table).min())


def maximin(table: np.ndarray, ties: Literal["vertex", "entropy"] = "vertex") -> np.ndarray:
    """Returns the row player's maximin strategy, float64 [rows], for payoffs [rows, columns]."""
    rows, columns = table.shape
    found = linear_program(  # the last variable is the value, a lower bound on every column
        np.r_[np.zeros(rows), -1.0],
        A_ub=np.c_[-table.T, np.ones(columns)],
        b_ub=np.zeros(columns),
        A_eq=np.r_[np.ones(rows), 0.0][None],
        b_eq=[1.0],
        bounds=[(0, None)] * rows + [(None, None)],
    )
    strategy = np.maximum(found[:rows], 0)
    strategy /= strategy.sum()
    if ties == "vertex":
        return strategy
    return most_random_distribution(float((strategy @ table).min()) - table.T, "entropy")


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
