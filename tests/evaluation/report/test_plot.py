"""Plots of several runs: grouping, labels and bands."""

import re

import pytest
from helpers.command_line import palestra, refused

from palestra.evaluation.report.plot import FigureSpec, config_labels, draw_figure, group_by_config, with_default_eval
from palestra.runs import Run
from palestra.runs.series import RunLogs

TEXT = re.compile(r'(?: y="|translate\([\d.]+ )([\d.]+)[^>]*>([^<]+)</text>')  # y and content


def a_run(root, name, seed, k=4, rise=0.1):
    algorithm = f"{{type: grpo, k: {k}, branch_at: turn, continue_from: best, group_size: 8}}"
    config = f"name: {name}\nseed: {seed}\nalgorithm: {algorithm}\n"
    with Run.create(root, config, name) as run:
        for step in range(5):
            run.log_metrics(step, "team", {"success": rise * step + 0.01 * seed})
            run.log_metrics(step, "planner", {"entropy": 1.0 - 0.1 * step})
        for step in (-1, 4):
            run.log_eval(step, "test", {"success": 0.5, "returns": {"a": float(step)}})
    return run.path


@pytest.fixture
def runs(tmp_path):
    return [a_run(tmp_path, f"r{k}{seed}", seed, k) for k in (4, 8) for seed in (0, 1, 2)]


def test_seeds_of_one_config_are_one_curve(runs):
    four, eight = group_by_config([RunLogs(run) for run in runs], FigureSpec(), "success")
    assert (four.label, eight.label) == ("k=4", "k=8") and four.y.shape == (3, 5)
    assert four.x.tolist() == [1, 2, 3, 4, 5] and four.y.mean(0).tolist() == pytest.approx(
        [0.01, 0.11, 0.21, 0.31, 0.41]
    )


def test_labels_name_the_differing_settings():
    assert config_labels([{"a": {"k": 1, "x": 0}}, {"a": {"k": 2, "x": 0}}]) == ["k=1", "k=2"]
    assert config_labels([{"a": {"k": 1}, "b": {"k": 1}}, {"a": {"k": 2}, "b": {"k": 1}}]) == ["k=1", "k=2"]
    both = config_labels([{"a": {"k": 1}, "b": {"k": 1}}, {"a": {"k": 2}, "b": {"k": 3}}])
    assert both == ["a.k=1, b.k=1", "a.k=2, b.k=3"]


def test_seeds_without_a_common_step_are_refused(tmp_path):
    runs = [a_run(tmp_path, f"r{seed}", seed) for seed in (0, 1)]
    with Run.open(runs[1]) as run:
        (run.path / "metrics.jsonl").write_text("")
        run.log_metrics(7, "team", {"success": 1.0})
    with pytest.raises(ValueError, match="no step in common"):
        draw_figure(runs, FigureSpec(metric="success"), tmp_path / "a.svg")


def test_a_seed_counts_once(runs, tmp_path):
    again = a_run(tmp_path, "again", seed=0)
    for twice in (runs[0], again):
        with pytest.raises(ValueError, match=r"r40 and .* have one config and one seed, 0"):
            draw_figure([*runs[:3], twice], FigureSpec(), tmp_path / "a.svg")


def test_a_curve_that_ends_early_is_named(runs, tmp_path):
    with Run.open(runs[1]) as run:
        lines = (run.path / "metrics.jsonl").read_text().splitlines(keepends=True)
        (run.path / "metrics.jsonl").write_text("".join(lines[:6]))
    spec = FigureSpec(metric="success")
    first, second, _ = draw_figure(runs, spec, tmp_path / "a.svg")
    assert first == "k=4: 3 runs, success 0.21 at 3 training steps done, where r41 ends and others go on"
    assert second == "k=8: 3 runs, success 0.41 at the end"


def test_runs_that_count_other_steps_are_not_drawn_together(runs, tmp_path):
    games = a_run(tmp_path, "games", 0)
    with Run.open(games) as run:
        run.log_metrics(5, "team", {"success": 1.0, "env_steps": 4096})
    with pytest.raises(ValueError, match=r"r40 counts training steps done and .*games env steps: draw one figure"):
        draw_figure([runs[0], games], FigureSpec(metric="success"), tmp_path / "a.svg")


def test_a_diverged_evaluation_has_no_interval(tmp_path):
    run = a_run(tmp_path, "r", 0)
    with Run.open(run) as opened:
        opened.log_eval(5, "test", {"return": 1.0, "return_stderr": 0.1, "episodes": 10})
        opened.log_eval(6, "test", {"return": float("nan"), "return_stderr": 0.1, "episodes": 10})
    lines = draw_figure([run], FigureSpec(metric="return", eval_name="test"), tmp_path / "a.svg")
    assert lines[0] == "r: 1 runs, return 1 at the end"


def test_plot_command_is_deterministic(runs, tmp_path):
    output = palestra("plot", *runs, "--out", tmp_path / "a.svg", "--smooth", 3)
    assert "k=4: 3 runs" in output and "k=8: 3 runs" in output
    palestra("plot", *runs, "--out", tmp_path / "b.svg", "--smooth", 3)
    svg = (tmp_path / "a.svg").read_text()
    assert (
        svg == (tmp_path / "b.svg").read_text() and ">held-out success, test</text>" in svg and ">k=8</text>" in svg
    )  # text stays text
    assert 'width="237.6pt"' in svg  # 3.3 inches
    palestra("plot", *runs, "--metric", "success", "--out", tmp_path / "s.svg")
    assert ">search success (best of 8)</text>" in (tmp_path / "s.svg").read_text()
    palestra("plot", runs[0], "--eval", "test", "--metric", "returns.a", "--out", tmp_path / "e.pdf")
    assert (tmp_path / "e.pdf").read_bytes().startswith(b"%PDF")
    palestra("plot", *runs, "--policy", "planner", "--metric", "entropy", "--band", "sd", "--out", tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_invalid_arguments_are_refused_with_the_reason(runs, tmp_path):
    out = ("--out", tmp_path / "a.svg")
    assert "has no metric loss of team; it has: step, success" in refused("plot", runs[0], "--metric", "loss", *out)
    assert 'has no "dev"; it has: test' in refused("plot", runs[0], "--eval", "dev", *out)
    assert "none of success" in refused("plot", runs[0], "--policy", "planner", *out)
    assert "none of the endings" in refused("plot", runs[0], "--out", tmp_path / "a.jpg")
    assert "--band is one of" in refused("plot", runs[0], "--band", "iqr", *out)
    assert "is not a run" in refused("plot", tmp_path, *out)


def test_evaluation_with_the_most_points_is_drawn_with_the_intervals_of_a_single_run(tmp_path):
    path = a_run(tmp_path, "one", 0)
    with Run.open(path) as run:
        for step in range(-1, 4):
            run.log_eval(step, "dev", {"success": 0.5 + 0.1 * step, "episodes": 100, "failed": 0})
    logs = RunLogs(path)
    figure = with_default_eval([logs], FigureSpec())
    assert figure.eval_name == "dev"
    (group,) = group_by_config([logs], figure, "success")
    low, high = group.bounds
    assert (low[1], high[1]) == pytest.approx((0.4038, 0.5962), abs=1e-4) and (low < group.y[0]).all()
    assert group_by_config([logs], FigureSpec(eval_name="test"), "success")[0].bounds is None  # no number of episodes
    palestra("plot", path, "--out", tmp_path / "a.svg")
    assert ">held-out success, dev</text>" in (tmp_path / "a.svg").read_text()


def test_legend_is_below_the_axes_and_names_whole_settings(runs, tmp_path):
    long = tmp_path / "long"
    for name in ("x", "y"):
        config = f"name: {name}\nalgorithm: {{an_entry_of_twenty_letters: {name * 30}, another_entry: {name * 30}}}\n"
        with Run.create(long, config, name) as run:
            run.log_metrics(0, "team", {"success": 0.5})
    palestra("plot", long / "x", long / "y", "--metric", "success", "--out", tmp_path / "a.svg")
    svg = (tmp_path / "a.svg").read_text()
    assert "x" * 30 in svg and "y" * 30 in svg
    heights = {text: float(y) for y, text in TEXT.findall(svg)}
    below = heights["training steps done"]
    assert below < min(y for text, y in heights.items() if "entry_of" in text)


def test_held_out_evaluation_is_the_default(runs, tmp_path):
    logs = [RunLogs(run) for run in runs]
    assert with_default_eval(logs, FigureSpec()).eval_name == "test"
    for asked in (FigureSpec(metric="success"), FigureSpec(policy="planner")):
        assert with_default_eval(logs, asked) == asked
    (runs[1] / "evals.jsonl").write_text("")
    assert with_default_eval([RunLogs(run) for run in runs], FigureSpec()).eval_name is None
