"""Local workers: they end with their parent, however it ends, and leave no files."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.processes import workers_of
from helpers.toy_tasks import Adder, ProcessInfo, Teller, TellTask

from palestra.parallel.local import LocalBackend
from palestra.runs import Run, read_lines

TESTS = Path(__file__).parents[1]


def start(root: Path, seconds: str) -> subprocess.Popen[str]:
    """A process that runs a plan of slow tasks with two workers; returns in the middle of it."""
    Run.create(root, "").close()
    command = [sys.executable, "-m", "helpers.toy_follow", str(root / "run"), "local", "8", "-1", seconds]
    environment = {**os.environ, "TMPDIR": str(root)}
    process = subprocess.Popen(
        command, cwd=TESTS, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    wait_until(lambda: len(read_lines(root / "run" / "tasks.jsonl")) >= 2)
    return process


def wait_until(true: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}/cmdline").exists() and bool(Path(f"/proc/{pid}/cmdline").read_bytes())


def test_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    process = start(tmp_path, "0.3")
    workers = workers_of(process.pid)
    assert len(workers) == 2
    process.kill()
    process.communicate()
    wait_until(lambda: not any(map(alive, workers)), 10.0)
    wait_until(lambda: not list(tmp_path.glob("palestra-*")))  # also the unfinished output folders


def test_ctrl_c_is_handled_by_the_parent_only(tmp_path: Path) -> None:
    """The whole foreground process group gets the signal; the parent stops the running tasks, records the stop and
    exits."""
    process = start(tmp_path, "0.3")
    workers = workers_of(process.pid)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0 and "Traceback" not in said, said
    assert 2 <= len(read_lines(tmp_path / "run" / "tasks.jsonl")) <= 8
    assert not any(map(alive, workers)) and not list(tmp_path.glob("palestra-*"))


def test_abandoned_tasks_are_terminated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    backend = LocalBackend(Teller, 2)
    backend.submit(TellTask("play/1"))
    found = backend.wait(60.0)
    backend.submit(TellTask("play/2", 1e3))
    backend.close()
    assert (
        found and isinstance(found.result, ProcessInfo) and not alive(found.result.pid) and not list(tmp_path.iterdir())
    )


def test_backend_needs_at_least_one_worker() -> None:
    with pytest.raises(ValueError, match="workers is 0: at least one"):
        LocalBackend(Adder, 0)
