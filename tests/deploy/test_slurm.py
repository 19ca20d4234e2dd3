"""The Slurm scripts, run to the end: a fake `srun` starts each node's processes on this machine."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from helpers import fake_slurm
from helpers.command_line import ROOT, palestra

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

POPULATION = {
    "name": "tiny",
    "env": {"type": "kuhn_poker", "num_envs": 16},
    "population": {"type": "psro", "iterations": 6, "env_steps": 4000, "games_per_cell": 200, "nash_conv_every": 0},
    "oracle": {
        "type": "net",
        "policy": {"hidden": [16]},
        "algorithm": {"type": "ppo", "rollout_length": 16, "epochs": 4, "minibatches": 4},
    },
    "backend": {"type": "inline"},
}


class Slurm:
    """A cluster of two nodes, both on this machine, and the jobs submitted to it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls = folder, folder / "calls"
        self.programs = fake_slurm.install(folder / "bin")
        self.jobs: list[subprocess.Popen[bytes]] = []

    def submit(self, script: str, *arguments: object, **settings: object) -> subprocess.Popen[bytes]:
        """Starts a script as `sbatch` would."""
        path = [str(self.programs), str(Path(sys.executable).parent), os.environ["PATH"]]
        settings |= {
            "PATH": os.pathsep.join(path),
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
            "SLURM_CALLS": self.calls,
            "SLURM_JOB_ID": 42,
            "SLURM_JOB_NODELIST": "localhost,127.0.0.1",
            "SLURM_CPUS_PER_TASK": 2,
            "SLURM_SUBMIT_DIR": self.folder,
            "RAY_TMPDIR": "/tmp",
        }
        with open(self.folder / f"job-{len(self.jobs)}.log", "w") as log:
            job = subprocess.Popen(
                ["bash", ROOT / "deploy/slurm" / script, *map(str, arguments)],
                env=os.environ | {name: str(value) for name, value in settings.items()},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.jobs.append(job)
        return job

    def printed(self) -> str:
        """The output of the last job so far."""
        return (self.folder / f"job-{len(self.jobs) - 1}.log").read_text()

    def wait_until(self, happened: Callable[[], bool]) -> None:
        """Waits until a condition on the last job holds."""
        end = time.monotonic() + 240
        while not happened():
            assert self.jobs[-1].poll() is None and time.monotonic() < end, self.printed()
            time.sleep(0.1)

    def wait(self) -> int:
        """Ends the steps of the last job once its script has ended, as Slurm does; returns its exit code."""
        code = self.jobs[-1].wait(timeout=300)
        self.end()
        return code

    def called(self, program: str) -> list[list[str]]:
        lines = self.calls.read_text().splitlines() if self.calls.exists() else []
        return [line.split()[1:] for line in lines if line.startswith(f"{program} ")]

    def end(self) -> None:
        """Kills all remaining processes."""
        tasks = [int(task) for call in self.called("srun") for task in call[1:]]
        for session in [*tasks, *(job.pid for job in self.jobs)]:
            with suppress(ProcessLookupError):
                os.killpg(session, signal.SIGKILL)
        for job in self.jobs:
            job.wait()


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    found = Slurm(tmp_path)
    yield found
    found.end()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_ray_job_survives_a_node_and_its_time_limit(slurm: Slurm, tmp_path: Path) -> None:
    """Three workers on two nodes; one node is lost; then the job's time limit passes, and the next attempt completes
    the run."""
    config, runs = tmp_path / "tiny.yaml", tmp_path / "runs"
    config.write_text(yaml.safe_dump(POPULATION))
    palestra("train", config, "--name", "whole", "--root", runs)
    tasks = runs / "tiny/tasks.jsonl"

    job = slurm.submit("ray.sbatch", config, "tiny", PALESTRA_WORKERS=3, PALESTRA_PORT=free_port())
    slurm.wait_until(lambda: len(lines(tasks)) > 4)
    assert [call[0] for call in slurm.called("srun")] == ["localhost", "127.0.0.1"]
    os.killpg(int(slurm.called("srun")[1][1]), signal.SIGKILL)  # all processes of the second node
    before = len(lines(tasks))
    slurm.wait_until(lambda: len(lines(tasks)) > before)
    os.kill(job.pid, signal.SIGUSR1)  # Slurm sends this to the script before the time limit
    assert slurm.wait() == 0 and "stopping after this step" in slurm.printed(), slurm.printed()
    assert slurm.called("scontrol")[-1] == ["requeue", "42"]
    assert len(lines(tasks)) < len(lines(runs / "whole/tasks.jsonl"))

    slurm.submit("ray.sbatch", config, "tiny", PALESTRA_WORKERS=3, PALESTRA_PORT=free_port())
    assert slurm.wait() == 0 and "resuming after" in slurm.printed(), slurm.printed()
    assert slurm.called("scontrol").count(["requeue", "42"]) == 1
    for name in ("payoffs.csv", "metrics.jsonl"):
        assert (runs / "tiny" / name).read_bytes() == (runs / "whole" / name).read_bytes()
    assert sum(line.get("lost", 0) for line in lines(runs / "tiny/workers.jsonl")) >= 1


def test_torchrun_job_trains_on_both_nodes(slurm: Slurm, base: Path, tmp_path: Path) -> None:
    """A rank on each of two nodes; the job's time limit passes in the middle, and the next attempt completes the
    run."""
    speech = {"type": "lora", "base": str(base), "sampling": {"max_tokens": 2}}
    config, metrics = tmp_path / "short.yaml", tmp_path / "runs/short/metrics.jsonl"
    tree = {
        "name": "short",
        "steps": 60,
        "episodes": 4,
        "env": {"type": "helpers.toys:Whisper"},
        "policies": {"default": speech},
    }
    config.write_text(yaml.safe_dump(tree | {"algorithm": {"type": "grpo", "group_size": 2}, "evals": {}}))

    job = slurm.submit("torchrun.sbatch", config, "short", PALESTRA_PORT=free_port())
    slurm.wait_until(lambda: len(lines(metrics)) > 4)
    assert len(slurm.called("srun")[0]) == 3  # one step of two tasks
    os.kill(job.pid, signal.SIGUSR1)
    slurm.wait()
    assert slurm.called("scontrol")[-1] == ["requeue", "42"]
    steps = max(line["step"] for line in lines(metrics)) + 1
    assert steps < 60, slurm.printed()

    slurm.submit("torchrun.sbatch", config, "short", PALESTRA_PORT=free_port())
    assert slurm.wait() == 0 and f"resuming after {steps} steps" in slurm.printed(), slurm.printed()
    assert max(line["step"] for line in lines(metrics)) == 59
