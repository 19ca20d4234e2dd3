"""Sandbox backend sandlock, the preferred one: Landlock and seccomp, without root and without namespaces.

palestra's seccomp filter covers what sandlock 0.9 leaves open: actions on other processes of the same user, `memfd`,
and changes of mode, owner and times of outside files, which Landlock does not restrict. Remaining gap: a program that
guesses a file's name can learn its existence, size and dates, but no content and no directory listing.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import signal
import sys
from pathlib import Path

from palestra.sandbox.base import RunRequest
from palestra.sandbox.program import (
    DEVICES,
    RunningProgram,
    boot_message,
    environment,
    interpreter_command,
    readable_paths,
)
from palestra.sandbox.seccomp import seccomp_filter

FIX = "pip install 'palestra[sandbox]' (it needs Linux 6.12 or newer)"


def missing() -> str | None:
    """Returns why the backend cannot work here, as far as it is known without a trial, or None."""
    if sys.platform != "linux":
        return "it needs Linux"
    return None if importlib.util.find_spec("sandlock") else "the package is not installed"


def load() -> None:
    """Loads the library once, before the fork server forks."""
    import sandlock

    sandlock.landlock_abi_version()


def start(request: RunRequest, folder: Path, *, mounts: bool) -> tuple[RunningProgram, bytes]:
    """Starts the program confined; returns it and the boot message for its stdin.

    `mounts`: its folder is a separate file system, mounted noexec.
    """
    import sandlock

    _drop_capabilities()
    place = str(folder)
    box = sandlock.Sandbox(
        fs_readable=[*readable_paths(), *filter(os.path.exists, DEVICES)],
        fs_writable=[place, "/dev/null"],
        cwd=place,
        clean_env=True,
        env=environment(place),
        max_processes=request.limits.processes,
    )
    piped = sandlock.StdioMode.PIPED
    process = box.popen(interpreter_command(), stdin=piped, stdout=piped, stderr=piped)

    def end() -> int:
        process.kill()
        result = process.wait()  # also ends sandlock's supervisor: remaining processes cannot fork from here on
        if result.reason == sandlock.ExitReason.EXITED:
            return int(result.exit_code)
        return -(result.signal if result.signal > 0 else signal.SIGKILL)

    program = RunningProgram(process.pid, process.stdin, process.stdout, process.stderr, end, place)
    return program, boot_message(request, seccomp_filter(mounts=mounts))


def _drop_capabilities() -> None:
    """Drops all capabilities: a program started by root would keep them, and Landlock restricts only some."""

    class Header(ctypes.Structure):
        _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]

    none = (ctypes.c_uint32 * 6)()
    header = Header(0x2008_0522, 0)
    if ctypes.CDLL(None, use_errno=True).capset(ctypes.byref(header), ctypes.byref(none)):
        raise OSError(ctypes.get_errno(), "capset")
