"""Linear programs behind equilibria: distributions that meet linear constraints rows_RN @ x <= 0.

Shapes: `R` rows (constraints), `N` entries of the distribution. All arrays are float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.optimize import linprog

UNSOLVED = (1, 4)  # linprog status: too many iterations, numerical difficulties; another setting often succeeds
HIGHS_SETTINGS = (  # method, and tolerances of primal and dual feasibility
    ("highs-ds", 1e-10, 1e-10),
    ("highs-ds", 1e-10, 1e-7),
    ("highs-ipm", 1e-10, 1e-7),
    ("highs-ipm", 1e-10, 1e-10),
    ("highs-ipm", 1e-9, 1e-7),
    ("highs-ds", 1e-7, 1e-7),
)
MAX_ITERATIONS_PER_SIZE = 20  # iterations per row and variable, since the simplex method may cycle between near ties

HIGHS_ZERO = 1e-9  # HiGHS treats smaller entries as zero
LP_SLACK = 2e-9  # slack of linear programs, so that they stay feasible when entries are treated as zero
MAX_LP_VIOLATION = 4e-9  # violation of a row, with the slack, above which a distribution is corrected
CORRECTION_SCALE = 1e-3  # unit of the entries of a correction
MAX_PROBABILITY_RATIO = 1e6  # ratio of probabilities up to which an entry is certain to stay in the support


def linear_program(cost: np.ndarray, **constraints: Any) -> np.ndarray:
    """Returns the x [N] that minimises cost @ x, as `linprog` does. Raises ValueError for none."""
    most = MAX_ITERATIONS_PER_SIZE * (len(cost) + len(np.atleast_2d(constraints["A_ub"])))
    for method, primal, dual in HIGHS_SETTINGS:
        tight = {"primal_feasibility_tolerance": primal, "dual_feasibility_tolerance": dual, "maxiter": most}
        result = linprog(cost, method=method, options=tight, **constraints)
        if result.status not in UNSOLVED:
            break
    if not result.success:
        raise ValueError(f"the linear program of these payoffs was not solved: {result.message}")
    return result.x


def column_units(rows: np.ndarray) -> np.ndarray:
    """Returns the unit [N] of each entry of a distribution in linear programs: the inverse of its largest coefficient
    if that is above 1. An entry with a far larger payoff than others has a far smaller probability, which in units of 1
    would be lost in the tolerances of HiGHS."""
    return 1 / np.maximum(np.abs(rows).max(axis=0, initial=0.0), 1.0)


def cheapest_distribution(rows: np.ndarray, cost: np.ndarray) -> np.ndarray | None:
    """Returns the distribution [N] of lowest cost under the constraints; None if none is found."""
    units = column_units(rows)
    slack = np.full(len(rows), LP_SLACK)
    sums = {"A_eq": units[None], "b_eq": [1.0]}
    try:
        return _distribution(
            units * linear_program(cost * units, A_ub=rows * units, b_ub=slack, bounds=(0, None), **sums)
        )
    except ValueError:
        return None


def nearest_distribution(rows: np.ndarray, share: np.ndarray) -> np.ndarray:
    """Returns the distribution [N] under the constraints nearest to `share` (L1). Raises ValueError for none."""
    count = len(share)
    eye = np.eye(len(share))
    units = column_units(rows)
    x = linear_program(  # entries, then how much each lies above or below
        np.r_[np.zeros(count), np.ones(2 * count)],
        A_ub=np.hstack([rows * units, np.zeros((len(rows), 2 * count))]),
        b_ub=np.full(len(rows), LP_SLACK),
        A_eq=np.vstack([np.hstack([eye * units, -eye, eye]), np.r_[units, np.zeros(2 * count)]]),
        b_eq=np.r_[share, 1.0],
        bounds=(0, None),
    )
    nearest = _distribution(units * x[:count])
    return nearest if (rows @ nearest).max(initial=0.0) <= MAX_LP_VIOLATION else _refine_distribution(rows, nearest)


def _refine_distribution(rows: np.ndarray, share: np.ndarray) -> np.ndarray:
    """Returns the distribution [N] under the constraints that is nearest to `share`, which almost meets them. It is a
    step of iterative refinement (Gleixner et al., 2016): a linear program for the correction, scaled up so that HiGHS's
    tolerance is finer."""
    count = len(share)
    units = column_units(rows)
    change = linear_program(  # how much each entry rises, then how much each falls
        np.r_[units, units],
        A_ub=np.hstack([rows * units, -rows * units]),
        b_ub=(LP_SLACK - rows @ share) / CORRECTION_SCALE,
        A_eq=np.r_[units, -units][None],
        b_eq=[0.0],
        bounds=[(0, None)] * count + [(0, p) for p in (share / units / CORRECTION_SCALE).tolist()],
    )
    return _distribution(share + CORRECTION_SCALE * units * (change[:count] - change[count:]))


def _distribution(x: np.ndarray) -> np.ndarray:
    share = np.maximum(x, 0.0)
    return share / share.sum()


def possible_support(rows: np.ndarray) -> np.ndarray:
    """Returns bool [N]: which entries are positive in some solution of rows @ x <= 0, x >= 0.

    Solutions form a cone, so a solution with all these entries can be scaled up: maximise the sum of t <= x, t <= 1.
    """
    alive = np.ones(rows.shape[1], bool)
    while True:  # a row without negative entries forces its positive ones to 0: mostly dominated members
        barred = rows[(rows[:, alive] >= 0).all(axis=1)] > 0
        dead = barred.any(axis=0) & alive
        if not dead.any():
            break
        alive &= ~dead
    left = rows[:, alive]
    left = left[(left > 0).any(axis=1)]
    count = int(alive.sum())
    if count and len(left):
        within = linear_program(  # the entries of x up to 1, then what they have above it
            np.r_[-np.ones(count), np.zeros(count)],
            A_ub=np.hstack([left, left]),
            b_ub=np.zeros(len(left)),
            bounds=[(0, 1)] * count + [(0, MAX_PROBABILITY_RATIO)] * count,
        )
        alive[np.flatnonzero(alive)[within[:count] < 0.5]] = False
    return alive
