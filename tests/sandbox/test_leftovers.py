"""A thousand runs, some of them hostile, leave no processes, files or folders."""

import asyncio
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from palestra.sandbox import ResourceLimits, RunResult, Sandbox, client

RUNS = 1000
LIMITS = ResourceLimits(wall=2.0, cpu=0.5, memory=64 * 2**20, processes=6, output=2000, disk=2**19)
TOKEN = f"left{os.getpid()}"
NAMED = f"import ctypes, os, signal, time\nctypes.CDLL(None).prctl(15, b'{TOKEN}', 0, 0, 0)\n"
PLAIN = ["print(sum(range(1000)))", "import json; open('a.json', 'w').write('1')", "1 / 0", "exit(3)"]
NASTY = [
    "while True: pass",
    "time.sleep(60)",
    "for n in range(1, 65):\n    if n not in (9, 17, 19, 32, 33): signal.signal(n, signal.SIG_IGN)\ntime.sleep(60)",
    "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(60)",
    "for _ in range(50): os.fork() or os.setsid()\ntime.sleep(60)",
    "while True:\n    if os.fork(): os._exit(0)\n    os.setsid()",
    "for n in range(900): os.mkdir('d'); os.chdir('d')",
    "os.mkdir('d', 0o300); open('d/f', 'w').close(); os.mkdir('d/e', 0)",
    "os.mkfifo('p'); os.symlink('/', 'root'); os.link('p', 'q')\nimport socket; socket.socket(1).bind('s')",
    "while True: open(str(time.time()), 'w').write('x' * 5000)",
    "while True: print('x' * 500)",
    "x = b'x' * 2**27",
    "os.kill(os.getpid(), signal.SIGKILL)",
    "os.close(1); os.close(2); time.sleep(60)",
    "os.kill(os.getpid(), signal.SIGSTOP)",
]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("backend", ["sandlock", "bubblewrap"])
def test_thousand_runs_leave_no_process_or_file(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := client.backend_problem(backend):
        pytest.skip(f"{backend} does not work here: {reason}")
    client.stop_fork_server()
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # other tests may be running programs too
    before = traces()
    rng = random.Random(5)
    programs = [rng.choice(NASTY) if rng.random() < 0.2 else rng.choice(PLAIN) for _ in range(RUNS)]
    outcomes = asyncio.run(all_of(Sandbox(backend), programs))
    assert [outcome for program, outcome in zip(programs, outcomes, strict=True) if wrong(program, outcome)] == []
    assert len({outcome.ended for outcome in outcomes}) == 6  # all kinds of ends
    fork_server = Path(f"/proc/{client.fork_server().process.pid}")
    wait_for("", lambda: (fork_server / "task" / fork_server.name / "children").read_text())  # the last cancelled runs
    assert len(os.listdir(fork_server / "fd")) < 12
    (root,) = tmp_path.iterdir()
    assert list(root.iterdir()) == []
    client.stop_fork_server()
    wait_for(before, traces)
    assert list(tmp_path.iterdir()) == []


def wait_for(wanted: object, look: Callable[[], object], most: float = 10.0) -> None:
    end = time.monotonic() + most
    while (found := look()) != wanted and time.monotonic() < end:
        time.sleep(0.05)
    assert found == wanted


async def all_of(sandbox: Sandbox, programs: list[str]) -> list[RunResult]:
    """Runs all programs; cancels a tenth of those that would hang shortly after their start, and runs them again."""

    async def one(number: int, program: str) -> RunResult:
        if program in NASTY and number % 10 == 0:
            task = asyncio.create_task(sandbox.run_python(NAMED + program, limits=LIMITS))
            await asyncio.sleep(0.3)
            task.cancel()
        return await sandbox.run_python(NAMED + program, limits=LIMITS)

    return list(await asyncio.gather(*(one(number, program) for number, program in enumerate(programs))))


def wrong(program: str, outcome: RunResult) -> bool:
    if program in NASTY:
        return False
    return (outcome.ended, outcome.code) != ("exit", {"1 / 0": 1, "exit(3)": 3}.get(program, 0))


def traces() -> dict[str, set[object]]:
    """Traces that runs might leave besides folders: processes with our name, child processes, open files."""
    return {
        "named": {path for path in Path("/proc").glob("[0-9]*/comm") if _text(path).strip() == TOKEN},
        "children": set(_text(Path(f"/proc/self/task/{os.getpid()}/children")).split()),
        "files": {os.path.realpath(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")}
        - {f"/proc/{os.getpid()}/fd"},
        "shared memory": set(os.listdir("/dev/shm")),
    }


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # the process has ended
        return ""
