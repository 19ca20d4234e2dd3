"""The convex programs behind equilibria: linear ones, and the most random distribution that meets constraints."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from scipy.optimize import linprog, nnls

Objective = Literal["gini", "entropy"]

ROUNDS = 300  # of Newton's method; it takes about ten
TOLERANCE = 1e-10  # of constraints, in units of their largest entry
SMALL = 1e-9  # an entry that is rounding, in units of its row's largest
LARGE = 1e6  # how much likelier than another an entry may be that is sure to be kept


def linear_program(cost: np.ndarray, **constraints: object) -> np.ndarray:
    """The x that minimises cost @ x; constraints as `scipy.optimize.linprog` takes them. Raises ValueError where there
    is none."""
    tight = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}
    found = linprog(cost, method="highs", options=tight, **constraints)
    if found.x is None:
        raise ValueError(f"the linear program of these payoffs was not solved: {found.message}")
    return found.x


def most_random(rows_RN: np.ndarray, objective: Objective) -> np.ndarray:
    """The distribution x [N] with rows @ x <= 0 that has the largest entropy, or Gini impurity 1 - x @ x: there is one.
    Raises ValueError where no distribution meets the constraints."""
    size = np.abs(rows_RN).max(axis=1, keepdims=True, initial=0.0)
    rows = np.where(np.abs(rows_RN) > SMALL * size, rows_RN, 0.0) / np.where(size > 0, size, 1.0)
    alive = _support(rows)
    if not alive.any():
        raise ValueError("no distribution meets these constraints")
    rows = rows[:, alive]
    rows = np.unique(rows[(rows > 0).any(axis=1)], axis=0)
    share = np.zeros(len(alive))
    if len(rows):
        share[alive] = _priced(rows, objective)
    else:
        share[alive] = 1 / alive.sum()
    return share


def _support(rows: np.ndarray) -> np.ndarray:
    """Which entries of x [N] are positive in some solution of rows @ x <= 0, x >= 0. Solutions form a cone, so one
    that has them all is as large as it needs to be: maximise the sum of t <= x, t <= 1."""
    alive = np.ones(rows.shape[1], bool)
    while True:  # what a row without a negative entry forbids: members dominated, mostly
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
            bounds=[(0, 1)] * count + [(0, LARGE)] * count,
        )
        alive[np.flatnonzero(alive)[within[:count] < 0.5]] = False
    return alive


def _priced(rows: np.ndarray, objective: Objective) -> np.ndarray:
    """The most random distribution [N] with rows @ x <= 0, by a damped Newton's method on its dual over prices >= 0 of
    the rows; prices at 0 that want to fall are held (Bertsekas, 1982, eq. 32 to 37)."""
    here, damping = _Dual.at(np.zeros(len(rows)), rows, objective), 1e-12
    for _ in range(ROUNDS):
        if here.error <= TOLERANCE:
            return here.share / here.share.sum()
        there = _Dual.at(np.maximum(here.prices + here.step(rows, objective, damping), 0), rows, objective)
        if here.worse_than(there):
            here, damping = there, max(damping / 100, 1e-12)
        else:
            damping *= 10
    if objective == "gini":
        return _nearest(rows)
    raise ValueError(
        f"the equilibrium was not found in {ROUNDS} rounds: it misses by {here.error:.1g} of the largest payoff. "
        f"Payoffs that differ by little more than rounding do this; round them, or allow a gain of epsilon"
    )


def _nearest(rows: np.ndarray) -> np.ndarray:
    """The distribution with rows @ x <= 0 nearest to uniform, by non-negative least squares: a hundred times slower
    than Newton's method on large tables, and not to be confused by degenerate ones. It is the ones minus their
    projection onto the cone that rows and negative axes span (Moreau), up to its sum."""
    against = np.hstack([rows.T, -np.eye(rows.shape[1])])
    weights, _ = nnls(against, np.ones(len(against)), maxiter=100 * against.shape[1])
    share = np.maximum(1 - against @ weights, 0)
    return share / share.sum()


class _Dual(NamedTuple):
    """Prices [R] of the rows, what they make of uniform play up to its sum, and the dual's value and slope there.

    For entropy x ~ exp(-prices @ rows), the value being the logarithm of the sum (Ortiz et al., 2007). For Gini
    x ~ [1 - prices @ rows]+, the value being half its square: x points where the projection of the ones onto the cone
    rows @ x <= 0, x >= 0 does.
    """

    prices: np.ndarray
    share: np.ndarray
    value: float
    slope: np.ndarray

    @classmethod
    def at(cls, prices: np.ndarray, rows: np.ndarray, objective: Objective) -> _Dual:
        pull = -prices @ rows
        if objective == "gini":
            share = np.maximum(1 + pull, 0)
            value = float(share @ share) / 2
        else:
            top = pull.max()
            share = np.exp(pull - top)
            value = float(top + np.log(share.sum()))
            share /= share.sum()
        return cls(prices, share, value, -(rows @ share))

    @property
    def error(self) -> float:
        """By how much the distribution breaks a row, or a price is paid for one that does not bind."""
        return float(np.abs(np.minimum(self.prices, self.slope)).max() / self.share.sum())

    def step(self, rows: np.ndarray, objective: Objective, damping: float) -> np.ndarray:
        free = ~((self.prices <= min(1e-3, self.error)) & (self.slope > 0))
        bend = self._curvature(rows[free], objective)
        bend[np.diag_indices_from(bend)] += damping * max(np.trace(bend) / len(bend), 1e-300)  # rows may be dependent
        step = -self.slope
        step[free] = np.linalg.solve(bend, step[free])
        return step

    def _curvature(self, rows: np.ndarray, objective: Objective) -> np.ndarray:
        if objective == "gini":
            kept = rows[:, self.share > 0]
            return kept @ kept.T
        mean = rows @ self.share
        return (rows * self.share) @ rows.T - np.outer(mean, mean)

    def worse_than(self, other: _Dual) -> bool:
        """Whether the step from here to `other` lowers the value as the slope promises or, where rounding hides that,
        the error."""
        promised = 1e-4 * float(self.slope @ (self.prices - other.prices))
        alike = abs(other.value - self.value) <= 1e-13 * (1 + abs(self.value))
        return 0 < promised <= self.value - other.value or (alike and other.error < 0.9 * self.error)
