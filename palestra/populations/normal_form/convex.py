"""The most random distribution under linear constraints, by convex programming.

A distribution is returned only after its constraints were checked. It is first computed by Newton's method on the dual,
which is fast and accurate but fails on degenerate tables (near ties, zero-sum games). If that fails, a second method is
used. Each of its iterates is a mean of solutions of linear programs and therefore meets the constraints.

Shapes: `R` rows (constraints), `N` entries of the distribution, `K` points. All arrays are float64.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from scipy.optimize import nnls

from palestra.populations.normal_form.linear_programs import (
    HIGHS_ZERO,
    cheapest_distribution,
    column_units,
    nearest_distribution,
    possible_support,
)

Objective = Literal["gini", "entropy"]

CONSTRAINT_TOLERANCE = 1e-8  # allowed violation of a constraint, in its unit
RANDOMNESS_TOLERANCE = 1e-4  # allowed distance from the largest randomness: nats, or Gini impurity

MAX_NEWTON_STEPS = 100  # iterations of Newton's method; about ten are typical
NEWTON_TOLERANCE = 1e-10  # Newton's method ends at this error, relative to min(a row's unit, its largest entry)
ROUNDING = 1e-9  # entries below this count as rounding errors, relative to the same minimum

FRANK_WOLFE_GAP = 1e-7  # target of the second method, in place of `RANDOMNESS_TOLERANCE`
MAX_CORNERS = 150  # maximum number of linear programs in the second method
MAX_WEIGHT_STEPS = 50  # maximum number of steps between two linear programs


def most_random_distribution(
    rows_RN: np.ndarray, objective: Objective, units_R: np.ndarray | None = None
) -> np.ndarray:
    """Returns the distribution x [N] with rows_RN @ x <= 0 and the largest entropy, or Gini impurity 1 - x @ x; it is
    unique.

    No row is violated by more than `CONSTRAINT_TOLERANCE` of its unit in `units_R` (None: the largest entry of all
    rows). The randomness is within `RANDOMNESS_TOLERANCE` of the largest, unless the second method stops after
    `MAX_CORNERS` programs or because of rounding: then the constraints hold, but the distribution may be less random.
    Raises ValueError if no distribution is found that meets the constraints.
    """
    size = np.abs(rows_RN).max(initial=0.0)
    rows = rows_RN / (size or 1.0) if units_R is None else rows_RN / units_R[:, None]
    rows = rows[(rows > 0).any(axis=1)]
    share = _by_prices(rows, objective) if len(rows) else np.full(rows.shape[1], 1 / rows.shape[1])
    if share is None or not _is_optimal(rows, share, objective):
        share = _by_corners(rows, share, objective)
    if constraint_violation(rows, share) > CONSTRAINT_TOLERANCE:
        raise ValueError(
            f"no distribution was found that meets these constraints: the best violates one by "
            f"{constraint_violation(rows, share):.1g} of its unit; the most is {CONSTRAINT_TOLERANCE:g}"
        )
    return share


def constraint_violation(rows: np.ndarray, share: np.ndarray) -> float:
    """Returns a distribution's largest violation of a row [R, N]; infinity for no distribution."""
    if not np.isfinite(share).all() or (share < 0).any() or abs(share.sum() - 1) > 1e-9:
        return float("inf")
    return float((rows @ share).max(initial=0.0))


def _is_optimal(rows: np.ndarray, share: np.ndarray, objective: Objective) -> bool:
    """True if a distribution meets the constraints and its randomness is the largest, both within tolerance."""
    if constraint_violation(rows, share) > CONSTRAINT_TOLERANCE:
        return False
    corner = cheapest_distribution(np.where(np.abs(rows) < HIGHS_ZERO, 0.0, rows), _slope(share, objective))
    return corner is not None and _gain(share, corner, objective) <= RANDOMNESS_TOLERANCE


def _gain(share: np.ndarray, corner: np.ndarray, objective: Objective) -> float:
    """Returns an upper bound on how much more random than `share` a distribution can be. `corner` is the distribution
    with the lowest cost under the slope at `share`."""
    return float(_slope(share, objective) @ (share - corner))


# ---- second method: means of corners


def _by_corners(rows: np.ndarray, near: np.ndarray | None, objective: Objective) -> np.ndarray:
    """Returns the most random mean of corners of the constraints, by simplicial decomposition (von Hohenbalken, 1977).

    A linear program finds the corner that would increase randomness most, and the weights of all corners so far are
    optimised again, until the gap (Frank & Wolfe, 1956) is at most `FRANK_WOLFE_GAP`.
    """
    uniform = np.full(rows.shape[1], 1 / rows.shape[1])
    exact_rows = rows
    rows = np.where(np.abs(rows) < HIGHS_ZERO, 0.0, rows)
    starts = [uniform] if near is None or not np.isfinite(near).all() else [near, uniform]
    points = np.stack([nearest_distribution(rows, start) for start in starts], 1)
    weights = np.full(len(starts), 1 / len(starts))
    inside = points @ weights
    for _ in range(MAX_CORNERS):
        weights = _optimal_weights(points, weights, objective)
        points = points[:, weights > 0]
        weights = weights[weights > 0]
        share = points @ weights
        corner = cheapest_distribution(rows, _slope(share, objective))
        if corner is None or _gain(share, corner, objective) <= FRANK_WOLFE_GAP:
            break
        points = np.c_[points, corner]
        weights = np.r_[weights, 0.0]
    return _moved_inside(exact_rows, share / share.sum(), inside)


def _moved_inside(rows: np.ndarray, share: np.ndarray, inside: np.ndarray) -> np.ndarray:
    """Returns the distribution [N] on the line from `share` to `inside` that is nearest to `share` and meets the
    constraints.

    Between near ties HiGHS returns corners that violate a row by a little more than its tolerance.
    """
    far = rows @ share
    near = rows @ inside
    most = 0.9 * CONSTRAINT_TOLERANCE
    beyond = (far > CONSTRAINT_TOLERANCE) & (near < most)
    if not beyond.any():
        return share
    step = float(((far - most)[beyond] / (far - near)[beyond]).max())
    return share + step * (inside - share)


def _optimal_weights(points: np.ndarray, weights: np.ndarray, objective: Objective) -> np.ndarray:
    """Returns the weights [K] of points [N, K] whose mean is most random, by Newton steps that each solve a
    non-negative least-squares problem.

    The last point may be new, so the first step goes towards it.
    """
    toward = np.eye(len(weights))[-1]
    for number in range(MAX_WEIGHT_STEPS):
        before = _lack(points @ weights, objective)
        weights = _better(points, weights, toward, objective)
        if number and before - _lack(points @ weights, objective) <= 1e-12:
            break
        toward = _model(points, points @ weights, objective)
    return weights


def _model(points: np.ndarray, share: np.ndarray, objective: Objective) -> np.ndarray:
    """Returns the weights [K] whose mean is most random under the quadratic model at `share`, which is exact for Gini
    impurity; empty if the solver does not converge."""
    bend = np.ones_like(share)
    aim = np.zeros_like(share)
    if objective == "entropy":
        positive = np.maximum(share, 1e-12)
        bend = 1 / positive
        aim = positive * (1 - np.log(positive) + _lack(share, objective))
    heavy = 1e3 * np.sqrt(bend.max())
    try:
        weights, _ = nnls(
            np.vstack([np.sqrt(bend)[:, None] * points, np.full(points.shape[1], heavy)]),
            np.r_[np.sqrt(bend) * aim, heavy],
        )
    except RuntimeError:  # too many iterations: no step
        return np.zeros(0)
    return weights / weights.sum()


def _better(points: np.ndarray, weights: np.ndarray, toward: np.ndarray, objective: Objective) -> np.ndarray:
    """Returns the most random weights on the line from `weights` to `toward`, by golden-section search; `weights` if
    that gains nothing."""
    if not len(toward):
        return weights
    here = points @ weights
    target = points @ toward
    low = 0.0
    high = 1.0
    for _ in range(40):
        a = high - 0.618034 * (high - low)
        b = low + 0.618034 * (high - low)
        if _lack(here + a * (target - here), objective) <= _lack(here + b * (target - here), objective):
            high = b
        else:
            low = a
    steps = [1.0, (low + high) / 2]
    step = min(steps, key=lambda step: _lack(here + step * (target - here), objective))
    if _lack(here + step * (target - here), objective) >= _lack(here, objective):
        return weights
    return weights + step * (toward - weights)


def _lack(share: np.ndarray, objective: Objective) -> float:
    """Returns negative randomness, up to a constant: the objective to minimise."""
    if objective == "gini":
        return float(share @ share)
    return float(share @ np.log(np.maximum(share, 1e-300)))


def _slope(share: np.ndarray, objective: Objective) -> np.ndarray:
    """Returns the gradient [N] of `_lack`."""
    return 2 * share if objective == "gini" else np.log(np.maximum(share, 1e-12)) + 1


# ---- first method: Newton's method on the dual


def _by_prices(rows: np.ndarray, objective: Objective) -> np.ndarray | None:
    """Returns the most random distribution [N], or None if Newton's method does not find it."""
    size = np.abs(rows).max(axis=1, keepdims=True, initial=0.0)
    rows = np.where(np.abs(rows) > ROUNDING * np.minimum(size, 1.0), rows, 0.0)
    size = np.where(size > 0, size, 1.0)
    try:
        alive = possible_support(rows * column_units(rows) / np.minimum(size, 1.0))
    except ValueError:
        return None
    if not alive.any():
        return None
    rows = (rows / size)[:, alive]
    binding = (rows > 0).any(axis=1)
    rows, which = np.unique(rows[binding], axis=0, return_inverse=True)
    strictness = np.ones(len(rows))
    np.maximum.at(strictness, which.ravel(), size[binding, 0])
    alive_share = _solve_dual(rows, strictness, objective) if len(rows) else np.full(int(alive.sum()), 1 / alive.sum())
    if alive_share is None:
        return None
    share = np.zeros(len(alive))
    share[alive] = alive_share
    return share


def _solve_dual(rows: np.ndarray, strictness: np.ndarray, objective: Objective) -> np.ndarray | None:
    """Returns the most random distribution [N] with rows @ x <= 0, by a damped Newton's method on its dual over
    multipliers (`prices`) >= 0; None if it does not converge. Errors count times the `strictness` [R] of their row.

    Multipliers at 0 whose gradient points below 0 are held fixed (Bertsekas, 1982, eq. 32 to 37).
    """
    here = _DualPoint.at(np.zeros(len(rows)), rows, strictness, objective)
    damping = 1e-12
    for _ in range(MAX_NEWTON_STEPS):
        if here.error <= NEWTON_TOLERANCE:
            break
        try:
            step = here.step(rows, objective, damping)
        except np.linalg.LinAlgError:
            break
        if not np.isfinite(step).all():
            break
        candidate = _DualPoint.at(np.maximum(here.prices + step, 0), rows, strictness, objective)
        if here.worse_than(candidate):
            here = candidate
            damping = max(damping / 100, 1e-12)
        else:
            damping *= 10
    total = here.share.sum()
    return here.share / total if np.isfinite(total) and total > 0 else None


class _DualPoint(NamedTuple):
    """A point of the dual: multipliers [R], the primal x [N] that they imply (not normalised for Gini), value and
    gradient [R] of the dual, and the strictness of each row [R].

    For entropy x ~ exp(-prices @ rows), and the value is the logarithm of the sum (Ortiz et al., 2007). For Gini x ~ [1
    - prices @ rows]+, and the value is half its square: x has the direction of the projection of the vector of ones
    onto the cone rows @ x <= 0, x >= 0.
    """

    prices: np.ndarray
    share: np.ndarray
    value: float
    slope: np.ndarray
    strictness: np.ndarray

    @classmethod
    def at(cls, prices: np.ndarray, rows: np.ndarray, strictness: np.ndarray, objective: Objective) -> _DualPoint:
        pull = -prices @ rows
        if objective == "gini":
            share = np.maximum(1 + pull, 0)
            value = float(share @ share) / 2
        else:
            top = pull.max()
            share = np.exp(pull - top)
            value = float(top + np.log(share.sum()))
            share /= share.sum()
        return cls(prices, share, value, -(rows @ share), strictness)

    @property
    def error(self) -> float:
        """Largest violation of a row or of complementary slackness, relative to the sum of x, times strictness."""
        total = self.share.sum()
        missed = np.abs(np.minimum(self.prices, self.slope)) * self.strictness
        return float(missed.max() / total) if total > 0 else np.inf

    def step(self, rows: np.ndarray, objective: Objective, damping: float) -> np.ndarray:
        """Returns the damped Newton step [R]."""
        free = ~((self.prices <= min(1e-3, self.error)) & (self.slope > 0))
        bend = self._curvature(rows[free], objective)
        bend[np.diag_indices_from(bend)] += damping * max(
            np.trace(bend) / len(bend), 1e-300
        )  # rows may be linearly dependent
        step = -self.slope
        step[free] = np.linalg.solve(bend, step[free])
        return step

    def _curvature(self, rows: np.ndarray, objective: Objective) -> np.ndarray:
        if objective == "gini":
            support_rows = rows[:, self.share > 0]
            return support_rows @ support_rows.T
        mean = rows @ self.share
        return (rows * self.share) @ rows.T - np.outer(mean, mean)

    def worse_than(self, other: _DualPoint) -> bool:
        """True if the step to `other` lowers the value sufficiently (Armijo) or, where rounding hides a change of the
        value, lowers the error."""
        promised = 1e-4 * float(self.slope @ (self.prices - other.prices))
        alike = abs(other.value - self.value) <= 1e-13 * (1 + abs(self.value))
        return 0 < promised <= self.value - other.value or (alike and other.error < 0.9 * self.error)
