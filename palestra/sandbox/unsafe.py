"""No sandbox: a plain process with limits, which can read, write and reach whatever its user can. For code that is
trusted, on systems where nothing better works."""

from __future__ import annotations

import subprocess
from pathlib import Path

from palestra.sandbox.base import Request
from palestra.sandbox.program import Program, command, environment, orders


def missing() -> str | None:
    return None


def load() -> None:
    pass


def start(request: Request, folder: Path, *, mounts: bool) -> tuple[Program, bytes]:
    """The program, unconfined, and what to tell it first."""
    place = str(folder)
    process = subprocess.Popen(
        command(),
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

    return Program(process.pid, process.stdin, process.stdout, process.stderr, end, place), orders(request, b"")
