"""Aggregate statistics by hand, their intervals, and properties of all of them."""

import hypothesis.extra.numpy as arrays
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from palestra.api.experiments import statistics
from palestra.api.experiments.statistics import (
    STATISTICS,
    estimate,
    estimate_improvement,
    interquartile_mean,
    mean_score,
    median_score,
    optimality_gap,
    performance_profile,
    probability_of_improvement,
    profile_bounds,
)

TWO_TASKS = [np.array([0.0, 0.2, 0.4, 2.0]), np.array([0.6, 0.8, 1.0, 1.2])]


def test_aggregates_by_hand() -> None:
    # the middle four of 0, .2, .4, .6, .8, 1, 1.2, 2 are .4 to 1
    assert interquartile_mean(TWO_TASKS) == pytest.approx(0.7)
    assert mean_score(TWO_TASKS) == pytest.approx((0.65 + 0.9) / 2)
    assert median_score([*TWO_TASKS, np.array([5.0])]) == pytest.approx(0.9)
    # shortfalls of the first 1, .8, .6, 0 and of the second .4, .2, 0, 0
    assert optimality_gap(TWO_TASKS) == pytest.approx((2.4 / 4 + 0.6 / 4) / 2)


def test_aggregates_are_rliable_s() -> None:
    """The numbers are rliable 1.2.0's, of the same scores."""
    generator = np.random.default_rng(0)
    ours = np.round(generator.normal(0.6, 0.4, (5, 4)), 1)
    theirs = np.round(generator.normal(0.4, 0.4, (7, 4)), 1)
    expected = {"iqm": 0.53, "mean": 0.53, "median": 0.56, "optimality_gap": 0.475}
    assert {name: statistic(list(ours.T)) for name, statistic in STATISTICS.items()} == pytest.approx(expected)
    assert probability_of_improvement(list(ours.T), list(theirs.T)) == pytest.approx(0.5607142857142857)


def test_interquartile_mean_ignores_outliers_and_keeps_small_samples() -> None:
    assert interquartile_mean([np.array([0.0, 1.0, 2.0, 1e9])]) == pytest.approx(1.5)
    # a quarter of 3 runs, rounded down, is 0
    assert interquartile_mean([np.array([1.0, 3.0, 8.0])]) == pytest.approx(4)


def test_probability_of_improvement_by_hand() -> None:
    # on the first task 1 beats 0 and ties with 1, 3 beats both; on the second all tie
    ours, theirs = [np.array([1.0, 3.0]), np.array([2.0])], [np.array([0.0, 1.0]), np.array([2.0])]
    assert probability_of_improvement(ours, theirs) == pytest.approx((3.5 / 4 + 0.5) / 2)
    assert estimate_improvement(ours, theirs).interval is None


def test_performance_profile_by_hand() -> None:
    shares = performance_profile(TWO_TASKS, np.array([-0.1, 0.0, 0.5, 1.0, 2.0]))
    assert shares.tolist() == pytest.approx([1, (0.75 + 1) / 2, (0.25 + 1) / 2, (0.25 + 0.25) / 2, 0])


def test_single_seed_has_no_interval() -> None:
    assert estimate(mean_score, [np.array([1.0]), np.array([1.0, 2.0])]).interval is None


scores = st.lists(arrays.arrays(np.float64, st.integers(2, 6), elements=st.floats(-2, 2)), min_size=1, max_size=4)


@settings(max_examples=40, deadline=None)
@given(ours=scores, shift=st.floats(0.1, 3))
def test_properties_of_statistics(ours: list[np.ndarray], shift: float) -> None:
    every = np.concatenate(ours)
    for name, statistic in STATISTICS.items():
        value = statistic(ours)
        if name == "optimality_gap":
            assert statistic([own + shift for own in ours]) <= value + 1e-12
        else:
            assert every.min() - 1e-12 <= value <= every.max() + 1e-12
            assert statistic([own + shift for own in ours]) == pytest.approx(value + shift)
    better = [own + shift for own in ours]
    chance = probability_of_improvement(better, ours)
    assert 0.5 <= chance <= 1 and chance + probability_of_improvement(ours, better) == pytest.approx(1)
    shares = performance_profile(ours, np.linspace(-3, 3, 30))
    assert shares[0] == 1 and shares[-1] == 0 and (np.diff(shares) <= 0).all()


def test_intervals_cover_the_true_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """95 % intervals of 5 tasks with 10 normal seeds each; the percentile bootstrap is slightly too narrow for so
    few."""
    monkeypatch.setattr(statistics, "REPLICATES", 200)
    generator, covered = np.random.default_rng(0), 0
    for seed in range(150):
        own = [generator.normal(task, 1, 10) for task in range(5)]
        low, high = estimate(mean_score, own, seed).interval or (0, 0)
        covered += low <= 2 <= high
    assert 0.86 <= covered / 150 <= 1


def test_bounds_of_profiles_enclose_them() -> None:
    thresholds = np.linspace(0, 2, 21)
    low, high = profile_bounds(TWO_TASKS, thresholds)
    shares = performance_profile(TWO_TASKS, thresholds)
    assert (low <= shares + 1e-12).all() and (shares <= high + 1e-12).all() and (high - low).max() > 0.2
