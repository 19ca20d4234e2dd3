"""SIGTERM and Ctrl-C end a run of any kind with what a resume needs."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.processes import finish, start

import palestra as pl
from palestra.core.config import dump, validate
from palestra.runs import Run, list_checkpoints, read_lines
from palestra.vector.config import VectorConfig

NETS: dict[str, Any] = {
    "name": "nets",
    "env": {"type": "simple_spread", "num_envs": 16, "max_cycles": 7},
    "policies": {"agent": {"type": "net", "hidden": [16]}},
    "algorithm": {"type": "ppo", "rollout_length": 5, "epochs": 1, "minibatches": 4},
    "env_steps": 16 * 5 * 3000,
    "checkpoint_every": 10_000_000,
    "log_every": 1,
}


def start_run(folder: Path, tree: dict[str, Any]) -> tuple[Any, Path]:
    (folder / "run.yaml").write_text(yaml.safe_dump(tree))
    return start(folder, "run.yaml"), folder / "runs" / str(tree["name"])


def wait_until(process: Any, condition: Callable[[], Any]) -> None:
    until = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.005)


@pytest.mark.parametrize("num_processes", [1, 2])
def test_sigterm_to_all_processes_of_a_run_of_networks_writes_a_checkpoint(tmp_path: Path, num_processes: int) -> None:
    """As a cluster sends it: to the process group. The run would have written its first checkpoint much later."""
    process, run = start_run(tmp_path, NETS | {"num_processes": num_processes})
    wait_until(process, lambda: len(read_lines(run / "metrics.jsonl")) > 4)
    os.killpg(process.pid, signal.SIGTERM)
    out = finish(process)
    assert "stopping after this step; again to stop now" in out and "palestra train --resume" in out
    (checkpoint,) = list_checkpoints(run)
    assert checkpoint.step == read_lines(run / "metrics.jsonl")[-1]["step"] < 2999


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_it_at_once(tmp_path: Path, number: signal.Signals) -> None:
    process, run = start_run(tmp_path, NETS)
    wait_until(process, lambda: len(read_lines(run / "metrics.jsonl")) > 4)
    process.send_signal(number)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode in (0, 130) and "Traceback" not in out + err
    assert "palestra train --resume" in out


def test_a_resume_without_a_checkpoint_or_a_step_says_so(tmp_path: Path) -> None:
    tree = NETS | {"env_steps": 16 * 5, "algorithm": {"type": "ppo", "rollout_length": 5, "minibatches": 1}}
    Run.create(tmp_path, dump(validate(VectorConfig, tree)), "begun").close()
    out = finish(start(tmp_path, "--resume", tmp_path / "begun"))
    assert "no checkpoint yet: starts from the beginning\n" in out


def test_a_killed_run_without_a_checkpoint_says_what_is_lost(tmp_path: Path) -> None:
    process, run = start_run(tmp_path, NETS | {"env_steps": 16 * 5 * 150})
    wait_until(process, lambda: len(read_lines(run / "metrics.jsonl")) > 9)
    process.kill()
    process.communicate()
    lost = read_lines(run / "metrics.jsonl")[-1]["step"] + 1
    out = finish(start(tmp_path, "--resume", run))
    assert f"no checkpoint yet: starts from the beginning, {lost} steps are lost" in out
    assert len({line["step"] for line in read_lines(run / "metrics.jsonl")}) == 150


def test_training_outside_the_main_thread_says_that_no_signal_stops_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    thread = threading.Thread(target=pl.train, args=(NETS | {"env_steps": 80},), kwargs={"root": tmp_path})
    thread.start()
    thread.join()
    assert "not in the main thread: Callback.stop() ends the run with a checkpoint" in capsys.readouterr().out
