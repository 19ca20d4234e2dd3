"""`palestra train --engine URL` is `palestra train`: the same figures, the same checkpoints, the same friendliness."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from processes import PALESTRA, Server

from palestra.engine.sampler import Sampling
from palestra.files import read_lines
from palestra.learners.lm import FullPolicyConfig, LoraPolicyConfig
from palestra.losses.policy import clipped_policy_loss, dro_loss
from palestra.runs import checkpoints
from palestra.service import connection
from palestra.service.client import connect, spoken
from palestra.service.connection import Refused

STEPS = 6


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    data = tmp_path_factory.mktemp("server")
    add = [*PALESTRA, "keys", "add", "ada", "--auth", str(data / "keys")]
    key = subprocess.run(add, check=True, capture_output=True, text=True).stdout.strip()
    started = Server(data / "data", "--auth", str(data / "keys"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_API_KEY", key)
        yield started
    started.kill()


def config(folder: Path, name: str, **changes: Any) -> Path:
    speech = {"type": "lora", "base": "tiny", "rank": 4, "lr": 1e-3, "sampling": {"max_tokens": 4}}
    tree: dict[str, Any] = {
        "name": name,
        "steps": STEPS,
        "episodes": 4,
        "env": {"type": "plan_path", "size": 5, "team": "planner_executor", "turns": 2, "reward": "dense"},
        "policies": {"planner": speech, "executor": speech | {"batch": 8}},
        "algorithm": {"type": "grpo", "k": 4, "entropy": 0.05},
        "exams": {"dev": {"episodes": 4, "every": 3}},
        "checkpoint_every": 2,
    }
    for path, value in changes.items():
        branch = tree
        *way, last = path.split("__")
        for key in way:
            branch = branch[key]
        branch[last] = value
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(tree))
    return folder / f"{name}.yaml"


def palestra(folder: Path, *words: Any, **given: Any) -> subprocess.Popen[str]:
    command = [*PALESTRA, *map(str, words)]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **given)


def ended(process: subprocess.Popen[str]) -> str:
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 0, said
    return said


def refused(folder: Path, *words: Any, key: str | None = None) -> str:
    """What the command line says where it refuses something; in a process of its own, for its threads."""
    env = os.environ | ({"TINKER_API_KEY": key} if key else {})
    done = palestra(folder, *words, env=env)
    said, _ = done.communicate(timeout=240)
    assert done.returncode == 2, said
    assert "Traceback" not in said
    return " ".join(said.split())


TIMES = ("seconds", "time", "per_second", "_s")


def figures(run: Path, log: str = "metrics.jsonl") -> list[dict[str, float]]:
    lines = [{k: v for k, v in line.items() if isinstance(v, float)} for line in read_lines(run / log)]
    return [{k: v for k, v in line.items() if not any(word in k for word in TIMES)} for line in lines]


def assert_alike(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> None:
    assert len(ours) == len(theirs) > 0
    for a, b in zip(ours, theirs, strict=True):
        assert a == pytest.approx(b, abs=1e-5, rel=1e-4)


def test_training_on_a_server_is_training_here_killed_or_not(server: Server, tmp_path: Path) -> None:
    path = config(tmp_path, "here")
    here = palestra(tmp_path, "train", path)
    there = palestra(tmp_path, "train", path, "--engine", server.url, "--name", "there")
    run = tmp_path / "runs" / "there"
    while len(read_lines(run / "metrics.jsonl")) < 2 * 3:
        assert there.poll() is None, there.communicate()
        time.sleep(0.01)
    there.kill()
    there.communicate()
    assert there.returncode == -signal.SIGKILL
    ended(palestra(tmp_path, "train", "--resume", run))
    ended(here)
    assert_alike(figures(run), figures(tmp_path / "runs" / "here"))
    assert_alike(figures(run, "evals.jsonl"), figures(tmp_path / "runs" / "here", "evals.jsonl"))
    assert checkpoints(run)[-1].step == STEPS - 1
    exam = ended(palestra(tmp_path, "eval", run, "--episodes", 5))  # in process, from what was downloaded
    assert "5 episodes" in exam


def test_what_a_server_cannot_do_is_said_before_anything_is_trained(server: Server, tmp_path: Path) -> None:
    engines = connect(server.url)
    speech: dict[str, Any] = {"type": "lora", "base": "tiny", "sampling": Sampling(max_tokens=4)}
    with pytest.raises(ValueError, match="temperature must be 1"):
        engines.learner("x", LoraPolicyConfig(**speech | {"sampling": Sampling(max_tokens=4, temperature=0.7)}), 1)
    with pytest.raises(ValueError, match="servers train adapters"):
        engines.learner("x", FullPolicyConfig(**speech | {"type": "full"}), 1)
    with pytest.raises(ValueError, match="all layers of a part or none"):
        engines.learner("x", LoraPolicyConfig(**speech, targets=["q_proj"]), 1)
    with pytest.raises(Refused, match='this server has no base "other"'):
        engines.learner("x", LoraPolicyConfig(**speech | {"base": "other"}), 1)
    with pytest.raises(ValueError, match="KL penalty"):
        spoken(clipped_policy_loss, {"kl": 0.1})
    with pytest.raises(ValueError, match="do not know the loss dro_loss"):
        spoken(dro_loss, {})
    engines.connection.close()


def test_a_server_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "FIRST", 0.2)
    began = time.monotonic()
    with pytest.raises(ConnectionError, match="Is `palestra serve` running"):
        connect("http://127.0.0.1:9")
    assert time.monotonic() - began < 10


def test_a_key_that_the_server_does_not_know(server: Server, tmp_path: Path) -> None:
    with pytest.raises(Refused, match="answered 401: this server wants an API key that it knows"):
        connect(server.url, "tml-wrong")
    said = refused(tmp_path, "train", config(tmp_path, "wrong"), "--engine", server.url, key="tml-wrong")
    assert "set TINKER_API_KEY" in said
