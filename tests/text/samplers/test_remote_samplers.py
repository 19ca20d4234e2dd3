"""Runs whose samplers are other processes: the same episodes, whichever process dies, and no process left behind."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.processes import finish, start
from helpers.samplers import serving
from typer.testing import CliRunner, Result

from palestra.cli.main import app
from palestra.core.config import dump, validate
from palestra.core.types import Answer, Episode
from palestra.runs import Run, load_episodes, read_lines
from palestra.runs.loop import Callback, run_training
from palestra.text.build.build import build
from palestra.text.config import TextConfig
from palestra.text.samplers.processes import SamplerProcesses
from palestra.text.samplers.remote_samplers import RemoteSamplers
from palestra.text.samplers.vllm import VllmSampler
from palestra.text.training.trainer import TextTrainer

TWO = {"type": "processes", "count": 2}


def tree(**changes: Any) -> dict[str, Any]:
    """A run of two adapters and a frozen base, with three steps."""
    speech = {"type": "lora", "base": "tiny", "rank": 4, "lr": 3e-3, "sampling": {"max_tokens": 6}}
    whole: dict[str, Any] = {
        "name": "apart",
        "steps": 3,
        "episodes": 4,
        "env": {"type": "plan_path", "size": 5, "team": "planner_executor", "max_turns": 2, "reward": "dense"},
        "policies": {"planner": speech, "executor": speech | {"rank": 2}, "plain": frozen_base_policy()},
        "algorithm": {"type": "grpo", "group_size": 4},
        "evals": {"dev": {"episodes": 4, "seats": {"executor": "plain"}}},
        "checkpoint_every": 1,
    }
    return whole | changes


def frozen_base_policy() -> dict[str, Any]:
    return {"type": "frozen", "base": "tiny", "sampling": {"max_tokens": 6}}


def train_run(folder: Path, name: str, watcher: Callback | None = None, **changes: Any) -> Path:
    config = validate(TextConfig, tree(**changes))
    setup = build(config)
    if isinstance(watcher, Killer):
        watcher.sampler = sampler_of(setup)
    with Run.create(folder, dump(config), name) as run:
        assert run_training(setup, run, watcher)
    return run.path


def sampler_of(setup: TextTrainer) -> VllmSampler:
    sampler = next(iter(setup.learners.values())).sampler  # type: ignore[attr-defined]
    assert isinstance(sampler, VllmSampler)
    return sampler


def episodes_of(run: Path) -> list[Episode]:
    return [episode for file in sorted((run / "episodes").iterdir()) for episode in load_episodes(file)]


def answers(run: Path) -> list[Answer]:
    return [answer for episode in episodes_of(run) for node in episode.nodes for answer in node.answers.values()]


def assert_the_same(here: Path, there: Path) -> None:
    """Tokens are equal exactly, log-probabilities and metrics up to rounding, since batches differ."""
    ours, theirs = answers(here), answers(there)
    assert len(ours) == len(theirs) > 0
    for a, b in zip(ours, theirs, strict=True):
        assert (a.policy, a.stop_reason, a.text) == (b.policy, b.stop_reason, b.text)
        assert np.array_equal(a.prompt_ids, b.prompt_ids) and np.array_equal(a.token_ids, b.token_ids)
        assert b.logprobs == pytest.approx(a.logprobs, abs=5e-5)
    for log in ("metrics.jsonl", "evals.jsonl"):
        for x, y in zip(figures(here, log), figures(there, log), strict=True):
            assert y == pytest.approx(x, abs=1e-5, rel=1e-3)


def figures(run: Path, log: str) -> list[dict[str, float]]:
    return [{k: v for k, v in line.items() if isinstance(v, float)} for line in read_lines(run / log)]


class Killer(Callback):
    """Kills a sampler process of the run, by SIGKILL, in the middle of its second step."""

    sampler: VllmSampler
    killed = 0

    def __init__(self) -> None:
        self.steps = 0

    def on_step(self, step: int, metrics: Any) -> None:
        self.steps += 1

    def on_episode(self, episode: Episode) -> None:
        if self.steps == 1 and not self.killed and self.sampler.processes:
            process = self.sampler.processes.children[0].process
            assert process is not None
            self.killed = process.pid
            os.kill(process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_run(tmp_path_factory.mktemp("here"), "here")


@pytest.mark.slow
def test_remote_samplers_give_the_same_run(here: Path, tmp_path: Path) -> None:
    (tmp_path / "apart.yaml").write_text(dump(validate(TextConfig, tree(sampler=TWO, kv_cache_gib=0.5))))
    finish(start(tmp_path, "apart.yaml"))
    assert_the_same(here, tmp_path / "runs" / "apart")


@pytest.mark.slow
def test_killed_sampler_is_restarted_without_changing_the_run(here: Path, tmp_path: Path) -> None:
    killer = Killer()
    there = train_run(tmp_path, "there", killer, sampler=TWO)
    assert killer.killed and not any(episode.error for episode in episodes_of(there))
    assert_the_same(here, there)


@pytest.mark.slow
def test_remote_rollouts_run_during_training(tmp_path: Path) -> None:
    config = validate(TextConfig, tree(sampler=TWO, staleness=1, steps=4))
    with Run.create(tmp_path, dump(config), "ahead") as run:
        assert run_training(build(config), run)
    figures = [line for line in read_lines(run.path / "metrics.jsonl") if line["policy"] == "planner"]
    assert [line["staleness"] for line in figures] == [0, 1, 1, 1] and all(line["updates"] for line in figures)
    assert not any(episode.error for episode in episodes_of(run.path))


@pytest.mark.slow
def test_killed_run_resumes_with_new_samplers_and_leaves_none(here: Path, tmp_path: Path) -> None:
    (tmp_path / "apart.yaml").write_text(dump(validate(TextConfig, tree(sampler=TWO))))
    run, first = tmp_path / "runs" / "apart", start(tmp_path, "apart.yaml")
    while len(read_lines(run / "checkpoints.jsonl")) < 1:
        assert first.poll() is None, first.communicate()
        time.sleep(0.02)
    samplers = children(first.pid)
    assert len(samplers) == 2
    first.kill()
    first.communicate()
    finish(start(tmp_path, "--resume", run))
    assert_the_same(here, run)
    until = time.monotonic() + 30
    while any(alive(pid) for pid in samplers) and time.monotonic() < until:
        time.sleep(0.1)
    assert not any(alive(pid) for pid in samplers)


def children(pid: int) -> list[int]:
    found = subprocess.run(["ps", "-ww", "-o", "pid=,args=", "--ppid", str(pid)], capture_output=True, text=True)
    return [int(line.split()[0]) for line in found.stdout.splitlines() if "serve-sampler" in line]


def alive(pid: int) -> bool:
    try:
        return "serve-sampler" in Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return False


@pytest.mark.slow
def test_eval_and_collect_use_remote_samplers(tmp_path: Path) -> None:
    def palestra(*words: Any) -> Result:
        return CliRunner().invoke(app, [str(word) for word in words])

    with serving("--base", "tiny") as (url, _):
        there = train_run(tmp_path, "there", sampler={"type": "vllm", "urls": [url]}, steps=1)
        command = ["eval", there, "--episodes", "3", "--json"]
        elsewhere, here = palestra(*command), palestra(*command, "--in-process")
        assert elsewhere.exit_code == 0 and json.loads(elsewhere.stdout) == json.loads(here.stdout)
        kept = palestra("collect", there, "--out", tmp_path / "kept.parquet", "--episodes", "3")
        assert "3 of 3 episodes" in kept.stdout
    gone = palestra(*command)
    assert gone.exit_code == 2 and "Is it running?" in gone.stderr
    assert palestra(*command, "--in-process").stdout == here.stdout


@pytest.mark.slow
def test_sampler_start_errors_are_reported(tmp_path: Path) -> None:
    processes = SamplerProcesses(["--base", "./nothing"], 1, [], tmp_path)
    with pytest.raises(ValueError, match=r"a sampler process does not start \(exit code 2\): .*no model at nothing"):
        processes.children[0].wait_url()
    processes.close()


@pytest.mark.parametrize(
    ("sampler", "said"),
    [
        ({"type": "vllm", "urls": ["localhost:8001"]}, "is not an address of a server"),
        ({"type": "vllm", "urls": []}, "sampler.urls: List should have at least 1"),
        ({"type": "processes", "count": 1, "gpus": [0, 1]}, "do not go together"),
        ({"type": "procesess"}, "processes"),
    ],
)
def test_invalid_sampler_configs_are_refused(sampler: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        validate(TextConfig, tree(sampler=sampler))


def test_policies_without_remote_sampling_are_refused() -> None:
    with pytest.raises(ValueError, match="the server samples, too"):
        validate(TextConfig, tree(sampler=TWO, engine="http://localhost:8000"))
    full = {"planner": {"type": "full", "base": "tiny"}, "executor": frozen_base_policy()}
    with pytest.raises(ValueError, match=r"policies\.planner is a full model"):
        build(validate(TextConfig, tree(sampler=TWO, policies=full, evals={})))
    elsewhere = RemoteSamplers(
        validate(TextConfig, tree(sampler={"type": "vllm", "urls": ["http://127.0.0.1:9"]})).sampler
    )  # type: ignore[arg-type]
    place = {"dtype": "auto", "device": "cpu", "max_num_seqs": 8}
    elsewhere.open("tiny", **place)
    with pytest.raises(ValueError, match="servers of one base, but the policies use tiny and tasks"):
        elsewhere.open("tasks", **place)
