"""Sandbox backend unsafe: a plain process with resource limits but no isolation.

The program has all file and network access of its user. For trusted code on systems without a working backend.
"""

from __future__ import annotations

from pathlib import Path

from palestra.sandbox.base import RunRequest
from palestra.sandbox.program import RunningProgram, boot_message, environment, interpreter_command, start_program


def start(request: RunRequest, folder: Path, *, mounts: bool) -> tuple[RunningProgram, bytes]:
    """Starts the program without isolation; returns it and the boot message for its stdin."""
    place = str(folder)
    program = start_program(interpreter_command(), place, cwd=place, env=environment(place), process_group=0)
    return program, boot_message(request, b"")
