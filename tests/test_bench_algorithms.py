"""The comparison of language algorithms as a user runs it: several runs at once, one that fails, a second start."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
METHODS = ["GRPO", "distillation", "SFT, own wins"]


def run_bench(folder, *options, script=None):
    start = [sys.executable, *(["-c", script] if script else [str(ROOT / "bench/algorithms.py")])]
    return subprocess.run([*start, *options], cwd=folder, capture_output=True, text=True)


@pytest.mark.slow
def test_runs_at_once_with_a_teacher_and_a_second_start_that_runs_nothing(tmp_path):
    options = ["--quick", "--tasks", "duel", "--methods", *METHODS, "--processes", "2"]
    first = run_bench(tmp_path, *options)
    assert first.returncode == 0, first.stdout + first.stderr
    ledger = tmp_path / "runs/algorithms/quick.jsonl"
    lines = [json.loads(line) for line in ledger.read_text().splitlines()]
    runs = sorted((line["method"], line["seed"]) for line in lines)
    assert runs == [("GRPO", 0), ("GRPO", 100), ("SFT, own wins", 0), ("distillation", 0), ("untrained", 0)]
    assert all(line["cpu"] > 0 and line["kl"] is not None for line in lines if line["seed"] == 0 and "cpu" in line)
    order = [line["method"] for line in lines]
    assert order.index("distillation") > [line["seed"] for line in lines].index(100)  # its teacher came first

    second = run_bench(tmp_path, *options)
    assert second.returncode == 0 and ", seed " not in second.stdout and len(ledger.read_text().splitlines()) == 5

    report = run_bench(tmp_path, "--quick", "--report")
    assert report.returncode == 0, report.stderr
    assert "### duel" in report.stdout and "| distillation | 1 |" in report.stdout
    assert (tmp_path / "runs/algorithms/quick.png").stat().st_size > 10_000


FAILING = f"""
import sys
sys.path.insert(0, {str(ROOT / "bench")!r})
from pathlib import Path
from algorithms_parts.jobs import Schedule, run_all
from algorithms_parts.methods import METHODS, TASKS, Method
from algorithms_parts.runs import Place
if __name__ == "__main__":
    duel, grpo = TASKS[1], METHODS[0]
    place = Place(Path("runs"), Path("ledger.jsonl"), quick=True)
    run_all(Schedule([duel], [Method("unheard of", {{}}), grpo], 1, place, tune=False), 1)
"""


@pytest.mark.slow
def test_a_run_that_fails_is_reported_and_does_not_stop_the_others(tmp_path):
    done = run_bench(tmp_path, script=FAILING)
    assert done.returncode == 0, done.stderr
    assert 'failed: duel, unheard of, lr 0.002, seed 0: ValueError: no method "unheard of"' in done.stdout
    lines = (tmp_path / "ledger.jsonl").read_text().splitlines()
    assert [json.loads(line)["method"] for line in lines] == ["untrained", "GRPO"]
