"""Faults of the machine, with real processes: kill -9 at random moments of every kind of run, signals in every phase, a
folder that is full, read-only or moved, a suspended process, and too little memory."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from helpers.processes import Server, finish, left, start, workers_of

from palestra.core.files import TEMPORARY_PREFIX
from palestra.runs import list_checkpoints, read_lines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

TESTS = Path(__file__).parents[1]
KILLS = 4  # of each kind of run
NET = {"type": "net", "hidden": [8]}
SPREAD = {"type": "simple_spread", "num_envs": 4, "max_cycles": 7}
PPO = {"type": "ppo", "rollout_length": 5, "epochs": 1, "minibatches": 1}
QMIX = {"type": "qmix", "rollout_length": 5, "buffer_size": 64, "batch_size": 8, "learning_starts": 16}
EVALS = {"held_out": {"episodes": 4, "every": 400}}
NETS = {"env": SPREAD, "policies": {"agent": NET}, "algorithm": PPO, "evals": EVALS, "env_steps": 4000, "log_every": 1}
ORACLE = {"type": "net", "policy": NET, "algorithm": PPO, "num_envs": 4}
KUHN = {"env": {"type": "kuhn_poker", "num_envs": 4}, "oracle": {"type": "net", "policy": NET, "algorithm": PPO}}
PSRO = {"type": "psro", "iterations": 3, "env_steps": 160, "games_per_cell": 50, "adaptive_games": 50}
PBT = {"type": "pbt", "num_learners": 3, "slices": 4, "env_steps": 160, "select_every": 1}
LEAGUE = {"type": "league", "slices": 2, "env_steps": 160, "games_per_cell": 50, "main_exploiters": 1}
POPULATIONS = {str(plan["type"]): KUHN | {"population": plan} for plan in (PSRO, PBT, LEAGUE)}


def tree_of(kind: str, base: Path) -> dict[str, Any]:
    speech = {"type": "lora", "base": str(base), "lr": 1e-3, "sampling": {"max_tokens": 2}}
    talk = {
        "steps": 12,
        "episodes": 4,
        "env": {"type": "helpers.toys:Whisper"},
        "policies": {"guide": speech, "walker": speech},
        "algorithm": {"type": "grpo", "group_size": 2},
        "evals": {"dev": {"episodes": 4, "every": 3}},
        "checkpoint_every": 2,
    }
    sft = {"algorithm": {"type": "sft"}, "steps": 3, "name": "imitate"}
    dpo = {"algorithm": {"type": "dpo", "group_size": 2}, "steps": 3, "name": "prefer"}
    staged = {key: value for key, value in talk.items() if key not in ("steps", "algorithm")}
    trees: dict[str, dict[str, Any]] = {
        "ppo": NETS,
        "qmix": NETS | {"algorithm": QMIX},
        "two processes": NETS | {"num_processes": 2},
        "text": talk,
        "async": talk | {"staleness": 1},
        "stages": staged | {"stages": [sft, dpo]},
    } | POPULATIONS
    return trees[kind] | {"name": "run"}


def write(folder: Path, tree: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "run.yaml").write_text(yaml.safe_dump(tree))
    return folder / "runs" / "run"


def results(run: Path) -> dict[str, bytes]:
    """The files that the seed determines: logs, members, and the newest checkpoint."""
    files = [run / name for name in ("metrics.jsonl", "evals.jsonl", "tasks.jsonl", "population.json", "payoffs.csv")]
    newest = sorted((run / "checkpoints").glob("step-*"))[-1:]
    files += [file for folder in (*newest, run / "members") for file in folder.rglob("*") if file.is_file()]
    return {str(file.relative_to(run)): file.read_bytes() for file in files if file.exists()}


def size(run: Path) -> int:
    log = run / "metrics.jsonl"
    return log.stat().st_size if log.exists() else 0


@pytest.mark.parametrize("kind", ["ppo", "qmix", "two processes", "text", "async", "stages", "psro", "pbt"])
def test_resume_after_kills_is_bit_identical(base: Path, tmp_path: Path, kind: str) -> None:
    """Also those in the start, before the first checkpoint and while a resume reads."""
    tree, rng, killed = tree_of(kind, base), random.Random(kind), 0
    whole = write(tmp_path / "whole", tree)
    finish(start(whole.parents[1], "run.yaml"))
    run = write(tmp_path / "killed", tree)
    for _ in range(KILLS):
        again = (run / "config.yaml").exists()
        if not again:
            shutil.rmtree(run, ignore_errors=True)  # killed before it was a run
        process = start(run.parents[1], *(("--resume", run) if again else ("run.yaml",)))
        target, until = size(run) + rng.uniform(-0.1, 0.3) * size(whole), time.monotonic() + rng.uniform(20, 60)
        while size(run) < target and process.poll() is None and time.monotonic() < until:
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.05))
        process.kill()
        process.communicate()
        killed += process.returncode == -signal.SIGKILL
    finish(start(run.parents[1], "--resume", run))
    print(f"\n{kind}: killed {killed} times")
    assert killed >= 2
    if kind == "async":  # the age of the weights that played an episode depends on the time
        assert [line["step"] for line in read_lines(run / "evals.jsonl")] == [-1, 2, 5, 8, 11]
    else:
        assert results(run) == results(whole)


LONG = NETS | {"name": "run", "env_steps": 400_000, "checkpoint_every": 20, "evals": {}}


def phase_reached(run: Path, phase: str) -> bool:
    if phase == "start":
        return True
    if phase == "checkpoint":
        return any((run / "checkpoints").glob(f"{TEMPORARY_PREFIX}*"))
    if phase == "evaluation":
        return (run / "config.yaml").exists()
    return len(read_lines(run / "metrics.jsonl")) > 4


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("phase", ["start", "evaluation", "rollout or update", "checkpoint"])
def test_a_signal_in_any_phase_leaves_a_resumable_run(tmp_path: Path, phase: str, number: signal.Signals) -> None:
    changes = {"evals": {"held_out": {"episodes": 2000}}} if phase == "evaluation" else {}
    run = write(tmp_path / "a", LONG | changes)
    process = start(run.parents[1], "run.yaml")
    until = time.monotonic() + 100
    while not phase_reached(run, phase):
        assert process.poll() is None and time.monotonic() < until, process.communicate()
    time.sleep(0.3 if phase == "start" else 0)
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert "Traceback" not in out + err, out + err
    if (run / "config.yaml").exists() and list_checkpoints(run):
        steps = list_checkpoints(run)[-1].step + 1
        assert process.returncode == 0 and "stopped; resume with" in out
        assert steps == read_lines(run / "metrics.jsonl")[-1]["step"] + 1
    else:
        assert process.returncode in (130, -number)  # before the command began


def has_begun(pid: int) -> bool:
    """True if the process handles SIGTERM: before, Python itself imports the command line."""
    handled = int(Path(f"/proc/{pid}/status").read_text().partition("SigCgt:")[2].split()[0], 16)
    return bool(handled >> (signal.SIGTERM - 1) & 1)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", POPULATIONS)
def test_signals_in_any_phase_of_a_population_leave_a_resumable_run(tmp_path: Path, kind: str, workers: int) -> None:
    """At random moments of the start, of training and of games: each run goes on where the one before ended."""
    backend = {"type": "local", "workers": workers} if workers else {"type": "inline"}
    tree, rng, stopped = POPULATIONS[kind] | {"name": "run", "backend": backend}, random.Random(kind), 0
    whole = write(tmp_path / "whole", tree)
    finish(start(whole.parents[1], "run.yaml"))
    run = write(tmp_path / "stopped", tree)
    for number in (signal.SIGTERM, signal.SIGINT) * 2:
        again = (run / "config.yaml").exists()
        process = start(run.parents[1], *(("--resume", run) if again else ("run.yaml",)))
        target, until = size(run) + rng.uniform(-0.1, 0.4) * size(whole), time.monotonic() + 60
        while size(run) < target and process.poll() is None and time.monotonic() < until:
            time.sleep(0.002)
        while process.poll() is None and not has_begun(process.pid):
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.2))
        process.send_signal(number)
        out, err = process.communicate(timeout=120)
        assert "Traceback" not in out + err, out + err
        assert process.returncode in (0, 130), (process.returncode, out, err)
        stopped += "stopped; resume with" in out
        if process.returncode == 130:
            assert "before the run began" in out or "resume from the last checkpoint" in out or "Aborted" in err, out
    finish(start(run.parents[1], "--resume", run))
    print(f"\n{kind}: stopped {stopped} times")
    assert stopped >= 1 and results(run) == results(whole)


@pytest.mark.parametrize("kind", POPULATIONS)
def test_killed_workers_and_then_the_first_process_change_no_number(tmp_path: Path, kind: str) -> None:
    """A worker trains a member of PBT or plays payoffs: it is replaced, and its task is done again."""
    tree = POPULATIONS[kind] | {"name": "run", "backend": {"type": "local", "workers": 2}}
    whole = write(tmp_path / "whole", tree)
    finish(start(whole.parents[1], "run.yaml"))
    run, rng, killed = write(tmp_path / "killed", tree), random.Random(kind), 0
    process = start(run.parents[1], "run.yaml")
    while process.poll() is None:
        time.sleep(rng.uniform(0.05, 0.4))
        workers = workers_of(process.pid) if size(run) else []
        if workers and killed < 3:
            os.kill(rng.choice(workers), signal.SIGKILL)
            killed += 1
        elif killed == 3 and size(run) > size(whole) / 2:
            process.kill()
            break
    process.communicate()
    finish(start(run.parents[1], "--resume", run))
    print(f"\n{kind}: killed {killed} workers, first process {process.returncode}")
    assert killed == 3 and results(run) == results(whole)


def test_a_suspended_process_and_a_moved_folder(tmp_path: Path) -> None:
    run = write(tmp_path / "a", LONG | {"env_steps": 8_000, "checkpoint_every": 400})
    process = start(run.parents[1], "run.yaml")
    while len(read_lines(run / "metrics.jsonl")) < 5:
        assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGSTOP)
    time.sleep(3)
    process.send_signal(signal.SIGCONT)
    before = size(run)
    while size(run) == before or not list_checkpoints(run):
        assert process.poll() is None, process.communicate()
    run.rename(run.with_name("moved"))
    out, err = process.communicate(timeout=120)
    assert process.returncode == 1 and "Traceback" not in out + err, out + err
    assert "error:" in err and len(err.splitlines()) == 1, err
    moved = run.with_name("moved")
    assert "resuming after" in finish(start(run.parents[1], "--resume", moved))


IN_TMPFS = """
import subprocess, sys
folder, size, *command = sys.argv[1:]
subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", folder], check=True)
done = subprocess.run(command, capture_output=True, text=True)
print(done.stderr[-3000:])
sys.exit(done.returncode)
"""


@pytest.mark.parametrize("options", ["size=64k", "size=200k", "size=1m,ro"])
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="mounts a file system")
def test_a_full_or_read_only_folder_is_one_line(tmp_path: Path, options: str) -> None:
    write(tmp_path / "a", LONG)
    (tmp_path / "full").mkdir()
    train = ["-m", "palestra", "train", str(tmp_path / "a/run.yaml"), "--root", str(tmp_path / "full")]
    command = ["unshare", "-m", sys.executable, "-c", IN_TMPFS, str(tmp_path / "full"), options, sys.executable, *train]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    print(done.stdout)
    assert done.returncode == 1 and "Traceback" not in done.stdout and "error:" in done.stdout, done.stdout


def test_too_little_memory_is_no_traceback(tmp_path: Path) -> None:
    write(tmp_path / "a", LONG | {"env_steps": 400})
    limit = lambda: resource.setrlimit(resource.RLIMIT_AS, (900 << 20, 900 << 20))  # noqa: E731
    command = [sys.executable, "-m", "palestra", "train", "run.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path / "a", preexec_fn=limit, timeout=300)
    print(done.returncode, done.stderr[-1500:])
    assert done.returncode == 1 and "error: out of memory" in done.stderr and "Traceback" not in done.stderr


MEMORY = {  # bytes of address space with which a run of large batches starts, and does not get through
    "ppo": 1200 << 20,
    "two processes": 1330 << 20,
    "text": 1230 << 20,
}


@pytest.mark.parametrize("kind", MEMORY)
def test_memory_that_runs_out_is_one_line_and_the_run_can_be_resumed(tmp_path: Path, kind: str) -> None:
    tree = tree_of(kind, Path("tiny")) | {"evals": {}}
    if kind == "text":
        speech = {"type": "lora", "base": "tiny", "lr": 1e-3, "sampling": {"max_tokens": 200}}
        tree |= {"steps": 1, "episodes": 256, "policies": {"guide": speech, "walker": speech}}
    else:
        nets = {"env": SPREAD | {"num_envs": 2000}, "policies": {"agent": NET | {"hidden": [1024]}}}
        tree |= nets | {"env_steps": 20_000}
    run, limit = write(tmp_path / "a", tree), (MEMORY[kind],) * 2
    words = [sys.executable, "-m", "palestra", "train", "run.yaml"]
    process = psutil.Popen(
        words,
        cwd=run.parents[1],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}", "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, limit),
    )
    children: set[psutil.Process] = set()
    while process.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):
            children.update(process.children(recursive=True))
        time.sleep(0.1)
    out, err = process.communicate()
    print(process.returncode, out[-500:], err[-1500:])
    assert process.returncode == 1 and "Traceback" not in out + err and not left([*children])
    *others, last = err.splitlines()
    assert "out of memory" in err and last.startswith("error:") and len(others) <= (kind == "two processes")
    finish(start(run.parents[1], *(("--resume", run) if (run / "config.yaml").exists() else ("run.yaml",))))


@pytest.mark.parametrize("what", ["worker", "front", "all"])
def test_a_training_on_a_service_that_is_killed_can_be_resumed(tmp_path: Path, what: str) -> None:
    """The training waits for a front end that comes back; of a worker it says what was lost, and a resume goes on from
    the last checkpoint to the same result."""
    speech = {"type": "lora", "base": "tiny", "lr": 1e-3, "sampling": {"max_tokens": 2}}
    tree = tree_of("text", Path("tiny")) | {"policies": {"guide": speech, "walker": speech}, "steps": 20}
    server = Server(tmp_path / "data")
    try:
        whole = write(tmp_path / "whole", tree | {"engine": server.url})
        finish(start(whole.parents[1], "run.yaml"))
        run = write(tmp_path / "killed", tree | {"engine": server.url})
        process = start(run.parents[1], "run.yaml")
        while not (run / "metrics.jsonl").exists() or len(read_lines(run / "metrics.jsonl")) < 12:
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        server.kill(what)
        if what != "worker":
            server.start()
        out, err = process.communicate(timeout=300)
        print(process.returncode, out[-1000:], err[-2000:])
        assert "Traceback" not in out + err, out + err
        if process.returncode:
            assert process.returncode == 1 and len(err.strip().splitlines()) == 1 and "error:" in err, err
            finish(start(run.parents[1], "--resume", run))
    finally:
        server.kill()
    ours, theirs = read_lines(run / "metrics.jsonl"), read_lines(whole / "metrics.jsonl")
    assert len(ours) == len(theirs) == 60
    for line, expected in zip(ours, theirs, strict=True):  # batches of the server differ, and with them the rounding
        assert line.pop("policy") == expected.pop("policy") and line == pytest.approx(expected, rel=1e-3, abs=1e-5)
