"""SIGTERM to every process of a run at once, as systemd and Slurm send it: only the first process obeys. The step in
progress ends as always, a checkpoint is written, and no process is left."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from helpers.processes import Server, finish, left, signal_all, start

from palestra.runs import list_checkpoints, load_episodes, read_lines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NET = {"type": "net", "hidden": [8]}
PPO = {"type": "ppo", "rollout_length": 5, "epochs": 1, "minibatches": 1}
SPREAD = {"type": "simple_spread", "num_envs": 4, "max_cycles": 7}
VECTOR = {"env": SPREAD, "policies": {"agent": NET}, "algorithm": PPO, "env_steps": 4_000_000, "log_every": 1}
ORACLE = {"type": "net", "policy": NET, "algorithm": PPO, "num_envs": 4}
POPULATION = {
    "env": {"type": "kuhn_poker", "num_envs": 4},
    "population": {"type": "psro", "iterations": 30, "env_steps": 400, "games_per_cell": 50, "adaptive_games": 50},
    "oracle": {"type": "net", "policy": NET, "algorithm": PPO},
    "backend": {"type": "local", "workers": 2},
}


def tree_of(kind: str, base: Path) -> dict[str, Any]:
    speech = {"type": "lora", "base": str(base), "sampling": {"max_tokens": 2}}
    text = {
        "steps": 500,
        "episodes": 4,
        "env": {"type": "helpers.toy_children:Judged"},
        "policies": {"speaker": speech},
        "algorithm": {"type": "grpo", "group_size": 3},
        "max_failed": 0.0,
        "checkpoint_every": 1000,
    }
    trees: dict[str, dict[str, Any]] = {
        "judges": text,
        "samplers": text | {"sampler": {"type": "processes", "count": 2}},
        "workers": text | {"backend": {"type": "local", "workers": 2}},
        "two processes": VECTOR | {"num_processes": 2},
        "actors": VECTOR | {"num_actors": 2, "algorithm": PPO | {"off_policy_correction": "vtrace"}},
        "population": POPULATION,
    }
    return trees[kind] | {"name": "run"}


def wait_for(condition: Callable[[], bool], process: Any, timeout_s: float = 150) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None and time.monotonic() < until, process.communicate(timeout=20)
        time.sleep(0.02)


@pytest.mark.parametrize("kind", ["judges", "samplers", "workers", "two processes", "actors", "population"])
def test_sigterm_to_all_processes_ends_with_a_checkpoint(base: Path, tmp_path: Path, kind: str) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree_of(kind, base)))
    process, run = start(tmp_path, "run.yaml"), tmp_path / "runs/run"
    wait_for(lambda: len(read_lines(run / "metrics.jsonl")) > 3 if (run / "metrics.jsonl").exists() else False, process)
    time.sleep(random.Random(kind).uniform(0, 0.3))
    children = signal_all(process.pid, signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0 and "stopped; resume with" in out, out + err
    assert "Traceback" not in out + err and not left(children), (out, err, children)
    if kind != "population":
        assert list_checkpoints(run)[-1].step == read_lines(run / "metrics.jsonl")[-1]["step"]
    for file in (run / "episodes").glob("*"):
        assert all(episode.error is None for episode in load_episodes(file))


@pytest.mark.parametrize("kind", ["judges", "samplers", "workers", "actors", "population"])
def test_kill_9_leaves_no_process(base: Path, tmp_path: Path, kind: str) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree_of(kind, base)))
    process, run = start(tmp_path, "run.yaml"), tmp_path / "runs/run"
    wait_for(lambda: len(read_lines(run / "metrics.jsonl")) > 3 if (run / "metrics.jsonl").exists() else False, process)
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate()
    assert children and not left(children), left(children)


def test_sigterm_to_all_processes_of_the_service_saves_its_models(tmp_path: Path) -> None:
    server = Server(tmp_path / "data")
    wait_for(lambda: bool(server.workers()), server.process)
    speech = {"type": "lora", "base": "tiny", "lr": 1e-3, "sampling": {"max_tokens": 2}}
    changes = {"engine": server.url, "policies": {"guide": speech, "walker": speech}, "steps": 3}
    tree = tree_of("judges", tmp_path) | changes | {"env": {"type": "helpers.toys:Whisper"}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    finish(start(tmp_path, "run.yaml"))
    children = signal_all(server.process.pid, signal.SIGTERM)
    out, _ = server.process.communicate(timeout=120)
    assert server.process.returncode == 0 and "died" not in out and "Traceback" not in out, out
    assert len(children) >= 2 and not left(children), children
