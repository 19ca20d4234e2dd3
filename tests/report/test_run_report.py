"""Pictures and tables of runs of every kind, the poorest too: no policy that learns, no exam, no step, no number."""

import pytest
from rich.console import Console

from palestra.report.run_report import plot_run, smooth, success_interval, summary_table, wilson_interval
from palestra.runs import Run

TEAM = {"success": 0.5, "steps_per_episode": 2.0, "episodes": 4.0, "failed": 0.0}
LEARNER = {"local_reward": 0.25, "team_reward": 1.0, "invalid": 0.0}
RUNS = {
    "nothing": ([], []),
    "nobody learns": ([(0, "team", TEAM)], []),
    "imitation": ([(0, "a", LEARNER | {"nll": 2.0}), (0, "team", TEAM)], [(-1, "dev", TEAM), (0, "dev", TEAM)]),
    "no samples, then some": (
        [(0, "a", LEARNER), (0, "team", TEAM), (1, "a", LEARNER | {"kl": 0.5, "entropy": 1.0}), (1, "team", TEAM)],
        [(-1, "dev", TEAM)],
    ),
    "not a number": ([(0, "a", LEARNER | {"kl": float("nan"), "entropy": float("nan")}), (0, "team", TEAM)], []),
    "eight policies": ([(0, f"p{i}", LEARNER | {"kl": 0.1}) for i in range(8)], []),
}


@pytest.mark.parametrize(("metrics", "evals"), RUNS.values(), ids=RUNS)
def test_every_run_can_be_drawn_and_told(tmp_path, metrics, evals):
    with Run.create(tmp_path, "") as run:
        for line in metrics:
            run.log_metrics(*line)
        for line in evals:
            run.log_eval(*line)
    assert plot_run(run.path).read_bytes().startswith(b"\x89PNG")
    console = Console(record=True, width=100, quiet=True)
    console.print(summary_table(run.path))


def test_the_table_tells_before_and_after(tmp_path):
    with Run.create(tmp_path, "") as run:
        for step, success in ((-1, 0.25), (9, 0.75)):
            run.log_eval(step, "dev", TEAM | {"success": success, "episodes": 100.0})
        for step in range(30):
            run.log_metrics(step, "a", LEARNER | {"local_reward": step / 10})
    console = Console(width=100)
    with console.capture() as capture:
        console.print(summary_table(run.path))
    text = capture.get()
    assert "25.0% [17.5%, 34.3%]" in text and "75.0% [65.7%, 82.5%]" in text
    assert "0.45" in text and "2.45" in text  # means of the first ten and the last ten steps


def test_the_interval_by_a_known_answer():
    """Wilson's interval for 8 of 10, as statsmodels and Brown, Cai and DasGupta (2001) compute it: 0.490 to 0.943."""
    assert wilson_interval(8, 10) == pytest.approx((0.4902, 0.9433), abs=2e-4)
    assert wilson_interval(0, 0) == (0, 1) and wilson_interval(0, 50)[0] == 0 and wilson_interval(50, 50)[1] == 1
    assert success_interval({"success": 0.8, "episodes": 10.0}) == "80.0% [49.0%, 94.3%]"


def test_smoothing_keeps_the_length_and_the_level():
    assert smooth([1.0, 2.0, 3.0]).tolist() == [1.5, 2.0, 2.5]
    for n in (1, 2, 8, 9, 30):
        assert smooth([4.0] * n) == pytest.approx([4.0] * n)
