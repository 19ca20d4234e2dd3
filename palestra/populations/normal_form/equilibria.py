"""Equilibria of games in normal form: Nash equilibria of two-player constant-sum games, and correlated equilibria for
any number of players, in which each player is recommended its member.

There are many correlated equilibria. The most random one is unique, has the largest support, and treats players and
members equally (Marris et al., 2021: JPSRO).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from palestra.populations.normal_form.convex import Objective, most_random_distribution
from palestra.populations.normal_form.linear_programs import linear_program
from palestra.populations.normal_form.payoff_tensors import (
    PayoffTensors,
    cce_gains,
    ce_gains,
    member_returns,
    own_axis_first,
)

GAIN_TOLERANCE = 1e-7  # largest gain by leaving a Nash equilibrium, relative to the spread of the player's payoffs
CONSTANT_SUM_TOLERANCE = 1e-6  # largest variation of the sum of payoffs, relative to the smaller spread
# see `gain_units`; the latter in units of return
MAX_UNIT_RATIO = 100.0
MIN_UNIT = 1.0
ROUNDING = 1e-14  # differences of payoffs below this are rounding errors, relative to a player's largest
MAX_BYTES = 10**9  # largest size of the constraint matrices of a correlated equilibrium

CorrelatedSolver = Literal["ce", "cce"]


def nash(payoffs: PayoffTensors, *, ties: Literal["vertex", "entropy"] = "vertex") -> list[np.ndarray]:
    """Returns a Nash equilibrium, float64 [m_i] for each player, by linear programming (von Neumann, 1928; Dantzig,
    1951).

    If there are several, `vertex` returns the one at which the simplex method ends: deterministic, but equal members
    may get different probabilities; `entropy` returns each player's most random strategy, in which equal members have
    equal probabilities. Raises ValueError unless there are two players and their payoffs add up to a constant, up to
    `CONSTANT_SUM_TOLERANCE`, or if a player gains more than `GAIN_TOLERANCE` by another strategy. Both tolerances are
    relative to the spread of a player's payoffs, the largest minus the smallest.
    """
    if len(payoffs) != 2:
        raise ValueError(f"nash is for two players, this table has {len(payoffs)}: use prd, alpha_rank, ce or cce")
    total = payoffs[0] + payoffs[1]
    sizes = [float(np.abs(table).max()) for table in payoffs]
    spreads = np.array([np.ptp(table) for table in payoffs])
    unequal = float(np.ptp(total))
    rounding = ROUNDING * max(sizes)
    if unequal > CONSTANT_SUM_TOLERANCE * spreads.min() + rounding:
        raise ValueError(
            f"nash is for payoffs that add up to a constant; these add up to {total.min():.8g} to {total.max():.8g}: "
            f"use prd, alpha_rank, ce or cce"
        )
    tables = [  # centred and scaled: a large constant would hide differences of payoffs from the linear program
        (table - table.mean()) / spread if spread > 0 else np.zeros_like(table)
        for table, spread in zip(payoffs, spreads, strict=True)
    ]
    strategies = [maximin(tables[0], ties), maximin(tables[1].T, ties)]
    earned = member_returns(own_axis_first(tables), strategies)
    gains = spreads * [(value - value @ strategy).max() for value, strategy in zip(earned, strategies, strict=True)]
    excess = gains - GAIN_TOLERANCE * spreads - unequal  # maximin strategies of such tables gain up to `unequal`
    if excess.max() > 0:
        player = int(excess.argmax())
        raise ValueError(
            f"no equilibrium of these payoffs was found: in the best one, player {player} gains {gains[player]:.1g} by "
            f"leaving it, and its payoffs differ by up to {spreads[player]:.4g}: use prd, alpha_rank, ce or cce"
        )
    return strategies


def maximin(table: np.ndarray, ties: Literal["vertex", "entropy"] = "vertex") -> np.ndarray:
    """Returns the row player's maximin strategy, float64 [rows], for payoffs [rows, columns]."""
    rows, columns = table.shape
    x = linear_program(  # the last variable is the value, a lower bound on every column
        np.r_[np.zeros(rows), -1.0],
        A_ub=np.c_[-table.T, np.ones(columns)],
        b_ub=np.zeros(columns),
        A_eq=np.r_[np.ones(rows), 0.0][None],
        b_eq=[1.0],
        bounds=[(0, None)] * rows + [(None, None)],
    )
    strategy = np.maximum(x[:rows], 0)
    strategy /= strategy.sum()
    if ties == "vertex":
        return strategy
    return most_random_distribution(float((strategy @ table).min()) - table.T, "entropy")


def correlated_equilibrium(
    payoffs: PayoffTensors, solver: CorrelatedSolver, *, objective: Objective = "gini", epsilon: float = 0.0
) -> np.ndarray:
    """Returns the correlated equilibrium (`ce`), or the coarse one (`cce`), with the largest Gini
    impurity (Marris et al., 2021, sec. 4) or entropy (Ortiz et al., 2007), float64 [m_0, ..., m_n-1].

    A player gains at most `epsilon` by another member than the one that is recommended to it,
    weighted by the probability of the recommendation; in a coarse equilibrium, by a member chosen
    before recommendations (Moulin & Vial, 1978). The tolerance is 1e-8 in the units of
    `gain_units`. Raises ValueError if the table is too large, or its payoffs differ too much in
    size for this tolerance.
    """
    shape = payoffs[0].shape
    if not fits_memory(solver, shape):
        members = " x ".join(map(str, shape))
        rows = sum(constraint_counts(solver, shape))
        fix = "stop after fewer iterations (iterations, stop_nash_conv)" + (", or use cce" if solver == "ce" else "")
        raise ValueError(
            f"solver {solver} on a table of {members} members has {rows} constraints and needs "
            f"{_num_bytes(solver, shape) / 1e9:.1f} GB; the limit is {MAX_BYTES / 1e9:g} GB: {fix}"
        )
    gains = ce_gains(payoffs) if solver == "ce" else cce_gains(payoffs)
    units = np.repeat(gain_units(payoffs), constraint_counts(solver, shape))
    try:
        return most_random_distribution(gains - epsilon, objective, units).reshape(shape)
    except ValueError as error:
        spread = max(float(np.ptp(table)) for table in payoffs)
        raise ValueError(
            f"solver {solver} found no equilibrium of this table, whose payoffs differ by up to {spread:.3g}: if a few "
            f"are far larger than the others, clip them ({error})"
        ) from error


def gain_units(payoffs: PayoffTensors) -> np.ndarray:
    """Returns the unit of each player's gains by deviation, float64 [players].

    It is the largest difference of payoffs between two members of any player, or `MAX_UNIT_RATIO` times the median of
    the player's own differences if that is smaller, so that one extreme payoff does not hide gains in all others. In a
    table of near ties the median may be close to 0, so the second bound is at least `MIN_UNIT`.
    """
    gaps = []
    for table in own_axis_first(payoffs):
        one, other = np.triu_indices(len(table), 1)
        gaps.append(np.abs(table[one] - table[other]).ravel())
    largest = max((float(gap.max(initial=0.0)) for gap in gaps), default=0.0)
    if largest == 0:
        return np.ones(len(payoffs))
    medians = [np.quantile(gap[gap > ROUNDING * gap.max()], 0.5, method="lower") if gap.any() else 0.0 for gap in gaps]
    return np.minimum(np.maximum(MAX_UNIT_RATIO * np.array(medians), MIN_UNIT), largest)


def constraint_counts(solver: CorrelatedSolver, shape: Sequence[int]) -> list[int]:
    """Returns the number of constraints of each player in a table of `shape`."""
    return [members * (members - 1) if solver == "ce" else members for members in shape]


def fits_memory(solver: CorrelatedSolver, shape: Sequence[int]) -> bool:
    """Returns whether the solver's matrices for a table of `shape` fit into `MAX_BYTES`."""
    return _num_bytes(solver, shape) <= MAX_BYTES


def _num_bytes(solver: CorrelatedSolver, shape: Sequence[int]) -> int:
    """Returns the size in bytes of the constraint matrix and of the square matrix over its rows."""
    rows = sum(constraint_counts(solver, shape))
    return 8 * rows * (rows + math.prod(shape))
