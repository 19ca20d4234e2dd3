"""Aggregate statistics over tasks and seeds (Agarwal et al., 2021, "Deep reinforcement learning at the edge of the
statistical precipice").

Scores are normalised, one float64 array per task: `scores[m]` [N_m], a score per seed. Intervals are percentiles of a
bootstrap that resamples seeds within each task (stratified).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from scipy.stats import trim_mean

Scores = Sequence[np.ndarray]
Statistic = Callable[[Scores], float]
REPLICATES = 2000
LEVEL = 0.95


class Estimate(NamedTuple):
    """A statistic and its 95 % interval, which is None if a task has a single seed."""

    value: float
    interval: tuple[float, float] | None


def interquartile_mean(scores: Scores) -> float:
    """Returns the mean of the middle half: a quarter, rounded down, is left out at each end."""
    return float(trim_mean(np.concatenate(scores), 0.25))


def mean_score(scores: Scores) -> float:
    """Returns the mean over tasks of the mean over seeds."""
    return float(np.mean([runs.mean() for runs in scores]))


def median_score(scores: Scores) -> float:
    """Returns the median over tasks of the mean over seeds."""
    return float(np.median([runs.mean() for runs in scores]))


def optimality_gap(scores: Scores, target: float = 1.0) -> float:
    """Returns the mean amount by which scores are below `target`; scores above it count 0. Less is better."""
    return float(np.mean([target - np.minimum(runs, target).mean() for runs in scores]))


STATISTICS: dict[str, Statistic] = {
    "iqm": interquartile_mean,
    "mean": mean_score,
    "median": median_score,
    "optimality_gap": optimality_gap,
}


def estimate(statistic: Statistic, scores: Scores, seed: int = 0) -> Estimate:
    """Returns a statistic with its stratified bootstrap interval."""
    if min(len(runs) for runs in scores) < 2:
        return Estimate(statistic(scores), None)
    return Estimate(statistic(scores), interval([statistic(drawn) for drawn in resamples(scores, seed)]))


def probability_of_improvement(ours: Scores, theirs: Scores) -> float:
    """Returns the probability that a run of ours scores above one of theirs on a random task; ties count half (Mann &
    Whitney, 1947)."""
    each = [(np.sign(x[:, None] - y[None]).mean() + 1) / 2 for x, y in zip(ours, theirs, strict=True)]
    return float(np.mean(each))


def estimate_improvement(ours: Scores, theirs: Scores) -> Estimate:
    """Returns the probability of improvement with its stratified bootstrap interval."""
    value = probability_of_improvement(ours, theirs)
    if min(len(runs) for runs in [*ours, *theirs]) < 2:
        return Estimate(value, None)
    pairs = zip(resamples(ours, 0), resamples(theirs, 1), strict=True)
    return Estimate(value, interval([probability_of_improvement(x, y) for x, y in pairs]))


def performance_profile(scores: Scores, thresholds: np.ndarray) -> np.ndarray:
    """Returns the share of runs that score above each threshold [K], as a mean over tasks (Agarwal et al., eq. 1)."""
    return np.mean([(runs[:, None] > thresholds).mean(0) for runs in scores], axis=0)


def profile_bounds(scores: Scores, thresholds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the pointwise lower and upper bound [K] of a performance profile."""
    drawn = np.stack([performance_profile(sample, thresholds) for sample in resamples(scores, 0)])
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
    return low, high


def resamples(scores: Scores, seed: int) -> list[list[np.ndarray]]:
    """Returns `REPLICATES` samples. Each draws seeds of every task with replacement, as many as the task has."""
    generator = np.random.default_rng(seed)
    drawn = [runs[generator.integers(len(runs), size=(REPLICATES, len(runs)))] for runs in scores]
    return [list(sample) for sample in zip(*drawn, strict=True)]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Returns the 95 % percentile interval of bootstrap replicates."""
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
