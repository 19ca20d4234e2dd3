"""results/real/compare.py with few steps: its own runs, TRL's in a process of TRL's venv, and its figures."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.peer_cases import TRL

from palestra.runs import list_checkpoints
from results.real import compare

SCRIPT = Path(__file__).parents[2] / "results/real/compare.py"


@pytest.fixture
def real(monkeypatch):
    monkeypatch.setattr(compare, "HELD_OUT", 4)
    return compare


def test_rate_counts_the_steps_after_the_first(real):
    assert real.Measured([10.0, 12.0, 14.0], 100.0, samples=8).rate == 4.0  # 16 samples in 4 seconds


def test_learning_is_compared_by_the_minutes_until_the_peers_last_success(real):
    peer = [real.Point(4, 5.0, 0.7), real.Point(8, 10.0, 0.6)]
    ours = [real.Point(4, 0.5, 0.4), real.Point(8, 1.0, 0.6), real.Point(12, 1.5, 0.9)]
    assert real.compare_learning(ours, peer) == 0.1
    assert real.compare_learning(ours[:1], peer) is None  # not reached


def test_the_peer_is_trained_with_the_prompts_of_our_env(real):
    problems = real.make_problems(3)
    assert len({problem["prompt"] for problem in problems}) == 3
    for seed, problem in enumerate(problems):
        env = real.make_env(**real.ALONE)
        ((_, chat),) = env.reset(seed).observations.items()
        assert all(message["content"] in problem["prompt"] for message in chat.messages)
        assert problem["gold"] == env.problem.answer and env.step({"reasoner": problem["gold"]}).rewards["reasoner"] > 0


@pytest.mark.slow
def test_our_run_is_measured_and_its_checkpoints_are_evaluated(real, tmp_path):
    measured = real.run_ours(real.TEAM, real.Size(2, 2, 1), tmp_path, "team", "cpu", seed=0)
    assert len(measured.seconds) == 2 and measured.seconds == sorted(measured.seconds) and measured.rate > 0
    assert measured.samples == 2 * 8 * 2 and measured.peak_mb > 100  # prompts, siblings, seats
    assert len(list_checkpoints(tmp_path / "team")) == 2
    target = lambda step: real.find_target(tmp_path / "team", step=step)  # noqa: E731
    curve = real.learning_curve("palestra", measured, 1, target)
    assert [point.step for point in curve] == [1, 2] and all(0 <= point.success <= 1 for point in curve)
    assert [point.minutes * 60 for point in curve] == pytest.approx(measured.seconds)


@pytest.mark.peers
@pytest.mark.timeout(900)
@pytest.mark.skipif(not TRL.exists(), reason="TRL is not installed: make test-trl")
def test_speed_and_memory_beside_trl(tmp_path):
    command = [sys.executable, SCRIPT, "--quick", "--only", "trl", "--peers", TRL.parent.parent]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["bench"] == "real" and set(result["figures"]) == {"samples_vs_trl", "peak_vs_trl"}
    assert result["targets"] == {"samples_vs_trl": 3.0, "peak_vs_trl": 0.33} and result["device"] == "cpu"
    figures = result["figures"]  # 18 and 0.26 on docs/results-real.md
    assert figures["samples_vs_trl"] > 1 > figures["peak_vs_trl"]


@pytest.mark.peers
@pytest.mark.timeout(900)
@pytest.mark.skipif(not TRL.exists(), reason="TRL is not installed: make test-trl")
def test_adapters_that_trl_saved_are_evaluated_by_palestra(real, tmp_path):
    size = real.Size(2, 2, 1)
    measured = real.run_peer(TRL, "compare_trl.py", size, tmp_path, 1, "cpu", seed=0)
    assert len(measured.seconds) == 2 and measured.samples == 2 * 8
    target = lambda step: real.peer_target(tmp_path / "peer" / str(step), tmp_path, "cpu")  # noqa: E731
    curve = real.learning_curve("TRL", measured, 1, target)
    assert [point.step for point in curve] == [1, 2] and all(0 <= point.success <= 1 for point in curve)
