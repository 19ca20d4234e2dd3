"""A run in a notebook: its tables, trees and HTML."""

import subprocess
import sys

import pytest

import palestra
from palestra.api.trained_run import lines_to_table
from palestra.core.files import read_lines
from palestra.core.types import Answer, Episode, Node
from palestra.runs import Run


@pytest.fixture
def path(tmp_path):
    node = Node(0, None, 0, {"a": "<b>see</b>"}, {"a": Answer("<script>up</script>", "a@0")}, {"a": 0.5}, done=True)
    with Run.create(tmp_path, "name: a\nseed: 3\n", "a", {"seed": 3}) as run:
        run.log_eval(-1, "test", {"success": 0.25, "episodes": 4, "returns": {"a": 1}})
        run.log_eval(1, "test", {"success": 0.75, "episodes": 4, "returns": {"a": 2.5}, "deviation": 0.0})
        for step in range(2):
            run.log_metrics(step, "a", {"loss": None if step == 0 else 0.5})
            run.write_episodes(step, [Episode("maze", step, {"a": "a@0"}, [node])])
    return run.path


def test_run_logs_are_tables(path):
    run = palestra.load_run(path)
    assert run.config["seed"] == run.meta["seed"] == 3
    evals, metrics = (lines_to_table(read_lines(path / f"{name}.jsonl")) for name in ("evals", "metrics"))
    assert evals.column("returns.a").to_pylist() == [1.0, 2.5] and evals.column("deviation").to_pylist() == [None, 0]
    assert metrics.column("loss").to_pylist() == [None, 0.5]
    assert len(run.evals) == len(run.metrics) == 2 and len(run.timings) == 0
    assert run.episodes().num_rows == 2 and run.episodes(1).column("step").to_pylist() == [1]
    assert [episode.seed for episode in run.trees()] == [1] and run.trees(0)[0].seed == 0 and run.population is None
    with pytest.raises(ValueError, match="it has those of: 0, 1"):
        run.trees(5)
    with pytest.raises(ValueError, match="is not a run"):
        palestra.load_run(path.parent)


def test_tables_are_pandas_frames_where_it_is_installed(path):
    pytest.importorskip("pandas")
    frame = palestra.load_run(path).evals
    assert frame["success"].tolist() == [0.25, 0.75]


def test_html_of_runs_and_episodes_is_escaped(path):
    run = palestra.load_run(path)
    page = run._repr_html_()
    assert "25.0%" in page and "75.0%" in page and '<img src="data:image/svg+xml;base64,' in page
    (episode,) = run.trees()
    shown = episode._repr_html_()
    assert "&lt;script&gt;up" in shown and "<script>" not in shown and "+0.5" in shown


def test_opening_a_run_loads_neither_torch_nor_matplotlib(path):
    code = f"import sys, palestra; palestra.load_run({str(path)!r}).evals"
    code += "; sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_showing_a_run_keeps_the_matplotlib_backend(path):
    """A notebook sets its own backend; pyplot figures would appear in its cells."""
    code = f"""
import matplotlib, sys, palestra
matplotlib.use("svg")
before = dict(matplotlib.rcParams)
run = palestra.load_run({str(path)!r})
run._repr_html_(), run.plot()
assert dict(matplotlib.rcParams) == before and matplotlib.get_backend() == "svg"
assert "matplotlib.pyplot" not in sys.modules
"""
    assert subprocess.run([sys.executable, "-W", "error", "-c", code]).returncode == 0


def test_missing_attributes_are_named():
    with pytest.raises(AttributeError, match="no attribute 'load_runs'"):
        _ = palestra.load_runs


@pytest.mark.slow
def test_population_html_shows_the_payoff_table(tmp_path):
    from helpers.trained import palestra as command

    small = ("--root", tmp_path, "--backend", "inline", "--set", "population.iterations=1")
    command(
        "train", "configs/populations/kuhn_psro.yaml", "--name", "pop", *small, "--set", "population.env_steps=2000"
    )
    run = palestra.load_run(tmp_path / "pop")
    assert "player_0-1" in run.population._repr_html_() and "what the row" in run._repr_html_()
