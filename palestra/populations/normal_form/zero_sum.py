"""Nash equilibria of two-player constant-sum games."""

from __future__ import annotations

from typing import Literal

import numpy as np

from palestra.populations.normal_form.convex import linear_program, most_random_distribution
from palestra.populations.normal_form.payoff_tensors import PayoffTensors


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


NASH_CONV_TOLERANCE = 1e-7  # largest NashConv of a solution, relative to the largest payoff


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
