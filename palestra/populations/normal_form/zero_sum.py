"""Nash equilibria of two players whose payoffs add up to a constant."""

from __future__ import annotations

from typing import Literal

import numpy as np

from palestra.populations.normal_form.convex import linear_program, most_random
from palestra.populations.normal_form.tables import Payoff


def nash(payoffs: Payoff, *, ties: Literal["vertex", "entropy"] = "vertex") -> list[np.ndarray]:
    """A Nash equilibrium, by linear programming (von Neumann, 1928; Dantzig, 1951).

    Where there are several, `vertex` gives the one the simplex method ends at, which is always the same but treats
    equal members unlike; `entropy` gives each player its most random one, which does not. Raises ValueError unless two
    play and their payoffs add up to a constant.
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
    if gain > TOLERANCE * size + 2 * float(np.ptp(total)):
        raise ValueError(f"no equilibrium of these payoffs was found: players gain {gain:.1g} by leaving the best one")
    return strategies


TOLERANCE = 1e-7  # the NashConv that a solution may have, in units of the largest payoff


def value(table: np.ndarray) -> float:
    """What the row player is worth in a zero-sum game [rows, columns] of its payoffs."""
    return float((maximin(table) @ table).min())


def maximin(table: np.ndarray, ties: Literal["vertex", "entropy"] = "vertex") -> np.ndarray:
    """The strategy [rows] whose worst column [rows, columns] is best for the row player."""
    rows, columns = table.shape
    found = linear_program(  # the last variable is the value, which no column may fall below
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
    return most_random(float((strategy @ table).min()) - table.T, "entropy")
