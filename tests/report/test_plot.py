"""One figure of several runs: who is drawn together, under which name, with which band."""

from __future__ import annotations

import numpy as np
import pytest
from trained import palestra, refused

from palestra.report.plot import FigureSpec, align_curves, band_bounds, config_labels, group_by_config
from palestra.runs import Run


def a_run(root, name, seed, k=4, rise=0.1):
    config = f"name: {name}\nseed: {seed}\nalgorithm: {{type: grpo, k: {k}, scale: none}}\n"
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
    four, eight = group_by_config(runs, FigureSpec(), "success")
    assert (four.label, eight.label) == ("k=4", "k=8") and four.y.shape == (3, 5)
    assert four.x.tolist() == [1, 2, 3, 4, 5] and four.y.mean(0).tolist() == pytest.approx(
        [0.01, 0.11, 0.21, 0.31, 0.41]
    )


def test_labels_name_what_differs():
    assert config_labels([{"a": {"k": 1, "x": 0}}, {"a": {"k": 2, "x": 0}}]) == ["k=1", "k=2"]
    assert config_labels([{"a": {"k": 1}, "b": {"k": 1}}, {"a": {"k": 2}, "b": {"k": 1}}]) == ["k=1", "k=2"]
    both = config_labels([{"a": {"k": 1}, "b": {"k": 1}}, {"a": {"k": 2}, "b": {"k": 3}}])
    assert both == ["a.k=1, b.k=1", "a.k=2, b.k=3"]


def test_the_band_by_known_answers():
    """Of 1, 2 and 3: standard deviation 1, and Student's 95 % interval of the mean is 4.303 / sqrt(3) wide each way."""
    y = np.array([[1.0], [2.0], [3.0]])
    assert band_bounds(y, "sd") == (pytest.approx([1.0]), pytest.approx([3.0]))
    assert band_bounds(y, "ci")[1] == pytest.approx([2 + 4.303 / 3**0.5], abs=1e-3)
    assert band_bounds(y, "range") == (pytest.approx([1.0]), pytest.approx([3.0]))


def test_curves_that_end_apart_are_compared_where_both_are():
    x, y = align_curves(
        [(np.array([0.0, 2.0, 4.0]), np.array([0.0, 2.0, 4.0])), (np.array([1.0, 3.0]), np.array([1.0, 3.0]))], 1
    )
    assert x.tolist() == [2.0] and y.tolist() == [[2.0], [2.0]]
    with pytest.raises(ValueError, match="no step in common"):
        align_curves([(np.array([0.0, 1.0]), np.zeros(2)), (np.array([5.0, 6.0]), np.zeros(2))], 1)


def test_the_command_draws_vectors_that_are_the_same_each_time(runs, tmp_path):
    told = palestra("plot", *runs, "--out", tmp_path / "a.svg", "--smooth", 3)
    assert "k=4: 3 runs" in told and "k=8: 3 runs" in told
    palestra("plot", *runs, "--out", tmp_path / "b.svg", "--smooth", 3)
    svg = (tmp_path / "a.svg").read_text()
    assert (
        svg == (tmp_path / "b.svg").read_text() and ">success</text>" in svg and ">k=8</text>" in svg
    )  # letters stay so
    assert 'width="237.6pt"' in svg  # 3.3 inches
    palestra("plot", runs[0], "--eval", "test", "--metric", "returns.a", "--out", tmp_path / "e.pdf")
    assert (tmp_path / "e.pdf").read_bytes().startswith(b"%PDF")
    palestra("plot", *runs, "--policy", "planner", "--metric", "entropy", "--band", "sd", "--out", tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_mistakes_are_told(runs, tmp_path):
    out = ("--out", tmp_path / "a.svg")
    assert "has no figure loss of team; it has: step, success" in refused("plot", runs[0], "--metric", "loss", *out)
    assert 'has no "dev"; it has: test' in refused("plot", runs[0], "--eval", "dev", *out)
    assert "none of success" in refused("plot", runs[0], "--policy", "planner", *out)
    assert "none of the endings" in refused("plot", runs[0], "--out", tmp_path / "a.jpg")
    assert "--band is one of" in refused("plot", runs[0], "--band", "iqr", *out)
    assert "is not a run" in refused("plot", tmp_path, *out)
