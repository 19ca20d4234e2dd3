"""Runs each measurement in a process of its own, and each peer in a virtual environment of its own.

`bench/peers/NAME.txt` lists all packages that a peer needs, with exact versions; nothing else is installed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

HERE = Path(__file__).parent
VENVS = HERE.parent.parent / ".cache" / "peers"
PEERS = ("jaxmarl", "benchmarl", "rllib", "sample_factory")
OURS = ("ours", "raw", "raw_spiel")  # scripts that run in palestra's virtual environment
LEARNING = ("ours_learning", "benchmarl_learning", "plain_mappo")  # scripts that train the same tasks
VENV_OF = {"jaxmarl_qmix": "jaxmarl"} | dict.fromkeys(LEARNING, "beside")  # scripts in a shared virtual environment
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE.parent.parent)]),
    "PYTHONSAFEPATH": "1",  # otherwise bench/peers/NAME.py would hide the package NAME
    "CUDA_VISIBLE_DEVICES": "",
    "JAX_PLATFORMS": "cpu",
    "PYGAME_HIDE_SUPPORT_PROMPT": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}


class ScriptJob(Protocol):
    """A script of bench/peers and its arguments as JSON."""

    @property
    def script(self) -> str: ...

    def spec_json(self, seconds: float) -> str: ...


@dataclass(frozen=True)
class Job:
    """One measurement: a script and its arguments, which `timing.Spec` describes."""

    script: str
    what: str
    env: str
    workers: int = 2
    games: int = 240
    horizon: int = 25

    def spec_json(self, seconds: float) -> str:
        spec = {name: value for name, value in asdict(self).items() if name != "script"}
        return json.dumps(spec | {"seconds": seconds})


class Failed(Exception):
    """A failed measurement; the message ends with the tail of its output."""


def python(script: str) -> str:
    return sys.executable if script in OURS else str(VENVS / VENV_OF.get(script, script) / "bin" / "python")


def installed(peer: str) -> bool:
    """True if a peer's virtual environment exists and was made from its current list of packages."""
    mark = VENVS / peer / ".installed"
    return mark.exists() and mark.read_text() == (HERE / f"{peer}.txt").read_text()


def install(peer: str) -> None:
    """Makes a peer's virtual environment, unless it is there. Installs torch first and alone, as the Makefile does,
    then all packages without their dependencies: the list is complete, so that pip resolves nothing and brings no other
    torch."""
    if installed(peer):
        return
    venv, packages = VENVS / peer, HERE / f"{peer}.txt"
    torch = [line for line in packages.read_text().splitlines() if line.startswith("torch==")]
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    for wanted in (torch, ["--no-deps", "-r", str(packages)]):
        if wanted:
            subprocess.run([str(venv / "bin" / "pip"), "install", "--quiet", *wanted], check=True)
    (venv / ".installed").write_text(packages.read_text())


def run(job: ScriptJob, seconds: float, limit: float) -> dict[str, Any]:
    """Returns the result that a job's script prints; raises `Failed` if it prints none within `limit` seconds."""
    command = [python(job.script), str(HERE / f"{job.script}.py"), job.spec_json(seconds)]
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        # files instead of pipes: a pipe stays open as long as any process that the peer leaves behind
        process = subprocess.Popen(
            command, env=os.environ | ENVIRONMENT, stdout=output, stderr=errors, start_new_session=True
        )
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end(process)
        output.seek(0)
        errors.seek(0)
        printed, complaints = output.read().strip(), errors.read().strip()
    if code != 0:
        what = f"not done after {limit:.0f} s" if code is None else f"exit code {code}"
        raise Failed(f"{what}\n{last(complaints or printed)}")
    return json.loads(printed.splitlines()[-1])


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends a script and the processes that it started: SIGTERM, then SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        time.sleep(3)
    process.wait()


def last(text: str, lines: int = 12) -> str:
    return "\n".join(text.strip().splitlines()[-lines:])
