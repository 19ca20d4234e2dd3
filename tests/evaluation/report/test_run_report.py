"""Charts and tables of runs of every kind, also of those without learning policies, evaluations, steps or metrics."""

import pytest
from rich.console import Console

from palestra.evaluation.report.run_charts import plot_run
from palestra.evaluation.report.run_report import summary_table
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
@pytest.mark.few(3)
def test_every_run_has_plot_and_summary(tmp_path, metrics, evals):
    with Run.create(tmp_path, "") as run:
        for line in metrics:
            run.log_metrics(*line)
        for line in evals:
            run.log_eval(*line)
    assert plot_run(run.path).read_bytes().startswith(b"\x89PNG")
    console = Console(record=True, width=100, quiet=True)
    console.print(summary_table(run.path))


def test_summary_table_compares_first_and_last_lines(tmp_path):
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
    assert "0.45" in text and "2.45" in text and "a: means of the first and last 10 lines of 30" in text


@pytest.mark.parametrize(("step", "cells"), [(-1, ["25.0%", "-"]), (9, ["-", "25.0%"])])
def test_single_evaluation_is_shown_once(tmp_path, step, cells):
    with Run.create(tmp_path, "") as run:
        run.log_eval(step, "dev", TEAM | {"success": 0.25, "episodes": 100.0})
    table = summary_table(run.path)
    success = [next(iter(column.cells)) for column in table.columns]
    assert success[0] == "dev: success of 100" and [str(cell).split(" ")[0] for cell in success[1:]] == cells


def test_short_run_is_summarised_by_first_and_last_line(tmp_path):
    """Windows of ten lines would share all but two of the twelve lines."""
    with Run.create(tmp_path, "") as run:
        for step in range(4):
            run.log_metrics(step, "a", LEARNER | {"local_reward": step / 10})
    console = Console(width=100)
    with console.capture() as capture:
        console.print(summary_table(run.path))
    text = capture.get()
    assert "0.00" in text and "0.30" in text and "a: first and last line of 4" in text


def test_search_success_is_labelled_and_below_the_evaluation(tmp_path):
    config = "algorithm: {type: grpo, branch_at: turn, continue_from: best, group_size: 8}\n"
    with Run.create(tmp_path, config) as run:
        for step in (-1, 9):
            run.log_eval(step, "dev", TEAM | {"episodes": 100.0})
        for step in range(3):
            run.log_metrics(step, "team", TEAM | {"success": 0.9 + 0.05 * step})
    console = Console(width=120)
    with console.capture() as capture:
        console.print(summary_table(run.path))
    held_out, search = (capture.get().index(words) for words in ("dev: success of", "search success (best of 8)"))
    assert held_out < search and "100.0%" in capture.get()
