"""The first choice: `sandlock`, which asks the kernel (Landlock, seccomp) to confine a process. No root, no namespaces.

What it leaves open at version 0.9, our own filter closes: acting on other processes of the same user, `memfd`, and the
owner's rights over files outside (mode, owner, times), which Landlock does not know. What stays open: a program that
guesses the name of a file can learn that it exists, its size and its dates; not a byte of it, and no folder's list.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import signal
import sys
from pathlib import Path
from typing import Any

from palestra.sandbox.base import Request
from palestra.sandbox.filters import rules
from palestra.sandbox.program import DEVICES, Program, command, environment, orders, readable

FIX = "pip install 'palestra[sandbox]' (it needs Linux 6.12 or newer)"


def missing() -> str | None:
    """Why it cannot work here, as far as can be told without trying."""
    if sys.platform != "linux":
        return "it needs Linux"
    return None if importlib.util.find_spec("sandlock") else "the package is not installed"


def load() -> None:
    """Loads the library once, ahead of the forks."""
    _library().landlock_abi_version()


def start(request: Request, folder: Path, *, mounts: bool) -> tuple[Program, bytes]:
    """The program, confined, and what to tell it first; with `mounts`, nothing in its folder can be executed."""
    sandlock = _library()
    _drop_capabilities()
    place = str(folder)
    box = sandlock.Sandbox(
        fs_readable=[*readable(), *filter(os.path.exists, DEVICES)],
        fs_writable=[place, "/dev/null"],
        cwd=place,
        clean_env=True,
        env=environment(place),
        max_processes=request.limits.processes,
    )
    piped = sandlock.StdioMode.PIPED
    process = box.popen(command(), stdin=piped, stdout=piped, stderr=piped)

    def end() -> int:
        process.kill()
        result = process.wait()  # lets go of the supervisor too: from here on, whatever is left cannot fork
        if result.reason == sandlock.ExitReason.EXITED:
            return int(result.exit_code)
        return -(result.signal if result.signal > 0 else signal.SIGKILL)

    program = Program(process.pid, process.stdin, process.stdout, process.stderr, end, place)
    return program, orders(request, rules(mounts=mounts))


def _library() -> Any:
    import sandlock

    return sandlock


def _drop_capabilities() -> None:
    """A program started by root would else keep root's powers; Landlock takes away only some of them."""

    class Header(ctypes.Structure):
        _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]

    none = (ctypes.c_uint32 * 6)()
    header = Header(0x2008_0522, 0)
    if ctypes.CDLL(None, use_errno=True).capset(ctypes.byref(header), ctypes.byref(none)):
        raise OSError(ctypes.get_errno(), "capset")
