"""Sandbox backend unsafe: a plain process with resource limits but no isolation.

The program has all file and network access of its user. For trusted code on systems without a working backend.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from palestra.sandbox.base import RunRequest
from palestra.sandbox.program import RunningProgram, boot_message, environment, interpreter_command


def missing() -> str | None:
    """Returns None: this backend works everywhere."""
    return None


def load() -> None:
    """Does nothing: there is nothing to load."""
    pass


def start(request: RunRequest, folder: Path, *, mounts: bool) -> tuple[RunningProgram, bytes]:
    """Starts the program without isolation; returns it and the boot message for its stdin."""
    place = str(folder)
    process = subprocess.Popen(
        interpreter_command(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        cwd=place,
        env=environment(place),
        process_group=0,
    )
    assert process.stdin and process.stdout and process.stderr

    def end() -> int:
        process.kill()
        return process.wait()

    return RunningProgram(process.pid, process.stdin, process.stdout, process.stderr, end, place), boot_message(
        request, b""
    )
