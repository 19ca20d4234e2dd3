"""Series of a run by hand: reading from logs, smoothing, thinning, alignment and comparison."""

import numpy as np
import pytest

from palestra.runs import Run
from palestra.runs.series import (
    RunLogs,
    Series,
    align,
    band_bounds,
    clip_x,
    end_windows,
    mean_of,
    moving_mean,
    series_of,
    smooth,
    success_bounds,
    success_interval,
    thin,
    wilson_interval,
)


def ramp(*x):
    """A series whose values are its positions."""
    return Series(np.array(x, float), np.array(x, float))


# ---- reading


def test_x_axis_counts_finished_training_steps(tmp_path):
    with Run.create(tmp_path, "") as run:
        for step in range(3):
            run.log_metrics(step, "team", {"success": step / 10})
        run.log_eval(-1, "test", {"success": 0.25, "returns": {"red": 1.5}})
        run.log_eval(2, "test", {"success": 0.75, "returns": {"red": 2.5}})
    logs = RunLogs(run.path)
    assert logs.x_title == "training steps done"
    assert logs.series(logs.team, "success").x.tolist() == [1, 2, 3]
    x, y = logs.series(logs.evals["test"], "returns.red")
    assert x.tolist() == [0, 3] and y.tolist() == [1.5, 2.5]


def test_x_axis_counts_env_steps_if_the_run_does(tmp_path):
    """Steps of unequal length: an evaluation after step 1 is at the env steps after it, not at the mean per step."""
    with Run.create(tmp_path, "") as run:
        for step, done in enumerate((100, 300, 900)):
            run.log_metrics(step, "team", {"env_steps": done})
            run.log_metrics(step, "a", {"loss": 1.0})
        for step in (-1, 1):
            run.log_eval(step, "test", {"return": 1.0})
    logs = RunLogs(run.path)
    assert logs.x_title == "env steps"
    assert logs.series(logs.policies["a"], "loss").x.tolist() == [100, 300, 900]
    assert logs.series(logs.evals["test"], "return").x.tolist() == [0, 300]


def test_constant_zero_counter_is_not_used_as_axis(tmp_path):
    with Run.create(tmp_path, "") as run:
        for step in range(2):
            run.log_metrics(step, "team", {"env_steps": 0, "nash_conv": 1.0})
    logs = RunLogs(run.path)
    assert logs.series(logs.team, "nash_conv").x.tolist() == [1, 2]


def test_lines_without_the_metric_are_left_out():
    lines = [{"step": 0, "kl": None}, {"step": 1, "kl": 0.5}, {"step": 2}, {"step": 3, "kl": "high"}, {"kl": 1.0}]
    assert series_of(lines, "kl") == ([1], [0.5])
    assert len(series_of([], "kl").x) == 0
    assert np.isnan(series_of([{"step": 0, "kl": float("inf")}], "kl").y).all()


# ---- smoothing and thinning


def test_smoothing_is_a_centred_mean():
    assert moving_mean(np.array([0.0, 3, 6]), 3).tolist() == [0, 3, 4.5]
    assert moving_mean(np.array([0.0, 3, 6]), 1).tolist() == [0, 3, 6]
    for n in (1, 2, 8, 9, 30):
        assert moving_mean(np.full(n, 4.0), 9) == pytest.approx([4.0] * n)


def test_smoothing_skips_missing_values():
    assert moving_mean(np.array([0.0, np.nan, 6]), 3).tolist() == [0, 3, 6]
    assert moving_mean(np.array([2.0, np.inf, 6]), 3).tolist() == [2, 4, 6]
    alone = moving_mean(np.array([1.0, np.nan, np.nan, np.nan, 5]), 3)
    assert alone[[0, 1, 3, 4]].tolist() == [1, 1, 5, 5] and np.isnan(alone[2])


def test_smoothing_window_is_at_most_a_quarter_of_the_run():
    y = np.array([0.0, 8, 0, 8, 0, 8, 0, 8])
    assert smooth(y, 9).tolist() == moving_mean(y, 2).tolist() and smooth(y[:4], 9).tolist() == [0, 8, 0, 8]


def test_thinning_keeps_every_spike():
    x, y = np.arange(10_000.0), np.zeros(10_000)
    y[[17, 5000, 9998]] = [9, -7, 5]
    few_x, few_y = thin(Series(x, y), 200)
    assert len(few_x) <= 210 and few_x[0] == 0 and few_x[-1] == 9999
    assert {17, 5000, 9998} <= set(few_x.tolist()) and few_y.max() == 9 and few_y.min() == -7
    assert (np.diff(few_x) > 0).all()
    assert len(thin(Series(x[:50], y[:50]), 200).x) == 50


def test_range_includes_one_neighbour_on_each_side():
    x, y = clip_x(ramp(*range(10)), 3.5, 5.5)
    assert x.tolist() == y.tolist() == [3, 4, 5, 6]


# ---- comparing


def test_seeds_are_aligned_on_their_common_range():
    x, y = align([ramp(0, 2, 4), ramp(1, 3)])
    assert x.tolist() == [1, 2, 3] and y.tolist() == [[1, 2, 3], [1, 2, 3]]
    x, y = align([ramp(0, 1), ramp(5, 6)])
    assert len(x) == 0 and y.shape == (2, 0)
    x, y = align([ramp(), ramp()])
    assert len(x) == 0 and y.shape == (2, 0)
    assert align([ramp(), ramp(1, 2)])[1].tolist() == [[1, 2]]


@pytest.mark.parametrize("points", [10, 100])
def test_long_seeds_are_thinned(points):
    long = Series(np.arange(5000.0), np.ones(5000))
    x, y = align([long, long], points)
    assert len(x) == points and y.shape == (2, points)


def test_bands_match_known_answers():
    """Of 1, 2 and 3: standard deviation 1, and Student's 95 % interval of the mean is 4.303 / sqrt(3) wide each way."""
    y = np.array([[1.0], [2.0], [3.0]])
    assert band_bounds(y, "sd") == (pytest.approx([1.0]), pytest.approx([3.0]))
    assert band_bounds(y, "ci")[1] == pytest.approx([2 + 4.303 / 3**0.5], abs=1e-3)
    twelve = np.array([[0.0], [1.0]] * 6)  # standard deviation sqrt(3 / 11); t at 97.5 % with 11 degrees is 2.201
    assert band_bounds(twelve, "ci")[1] == pytest.approx([0.5 + 2.201 * (3 / 11 / 12) ** 0.5], abs=1e-4)
    assert band_bounds(y, "range") == (pytest.approx([1.0]), pytest.approx([3.0]))


@pytest.mark.parametrize(
    ("n", "size", "label"),
    [
        (2, 1, "first and last line of 2"),
        (5, 1, "first and last line of 5"),
        (6, 2, "means of the first and last 2 lines of 6"),
        (20, 6, "means of the first and last 6 lines of 20"),
        (30, 10, "means of the first and last 10 lines of 30"),
        (1000, 10, "means of the first and last 10 lines of 1000"),
    ],
)
def test_first_and_last_windows_do_not_overlap(n, size, label):
    lines = [{"step": step} for step in range(n)]
    first, last, which = end_windows(lines)
    assert (list(first), list(last), which) == (lines[:size], lines[-size:], label) and 2 * size <= n


def test_single_line_has_no_first_window():
    first, last, which = end_windows([{"step": 0, "kl": 2.0}])
    assert (mean_of(first, "kl"), mean_of(last, "kl"), which) == (None, 2.0, "the only line")
    assert end_windows([])[:2] == ([], [])


def test_means_skip_missing_values():
    assert mean_of([{"kl": 1.0}, {"kl": None}, {}, {"kl": 3}], "kl") == 2.0


def test_wilson_interval_matches_a_known_answer():
    """Wilson's interval for 8 of 10, as statsmodels and Brown, Cai and DasGupta (2001) compute it: 0.490 to 0.943."""
    assert wilson_interval(8, 10) == pytest.approx((0.4902, 0.9433), abs=2e-4)
    assert wilson_interval(0, 0) == (0, 1) and wilson_interval(0, 50)[0] == 0 and wilson_interval(50, 50)[1] == 1
    assert success_interval({"success": 0.8, "episodes": 10.0}) == "80.0% [49.0%, 94.3%]"


def test_failed_episodes_are_no_evidence_of_success():
    """40 valid of 100 episodes; likewise with 4 samples of each instance, of which 240 failed."""
    line = {"success": 0.5, "episodes": 100.0, "failed": 60.0}
    assert success_interval(line) == "50.0% [35.2%, 64.8%]"
    assert success_bounds(line | {"failed": 240.0, "samples": 4.0}) == success_bounds(line)
    assert success_interval({"success": 0.0, "episodes": 9.0, "failed": 9.0}) == "0.0% [0.0%, 100.0%]"
