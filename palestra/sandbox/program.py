"""The process that every backend starts: a bare Python interpreter that reads its boot message from stdin."""

from __future__ import annotations

import marshal
import math
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import IO, Any

from palestra.sandbox.base import RunRequest

ADDRESS_SPACE_FACTOR = 4  # RLIMIT_DATA as a multiple of the memory limit: threads and allocators reserve unused space
MAX_OPEN_FILES = 64
MAX_PENDING_SIGNALS = 1024  # pending signals of all the user's processes
SYSTEM_PATHS = (
    "/lib",
    "/lib32",
    "/lib64",
    "/usr/lib",
    "/usr/lib32",
    "/usr/lib64",
    "/usr/share/zoneinfo",
    "/etc/ld.so.cache",
)
DEVICES = ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom")  # /dev/zero would give uncounted shared memory

# Loads compiled code: faster than compiling boot.py for every run.
LOADER = """
import marshal, os
def read(size):
    data = b""
    while len(data) < size: data += os.read(0, size - len(data)) or os._exit(127)
    return data
exec(marshal.loads(read(int.from_bytes(read(8), "big"))))
"""


@dataclass
class RunningProgram:
    """A started program.

    `stop`: kills it if it still runs, and returns its exit status (negative signal number after a signal). `folder`:
    its folder as the program sees it. `num_backend_processes`: number of its descendants that belong to the backend.
    """

    pid: int
    stdin: IO[bytes]
    stdout: IO[bytes]
    stderr: IO[bytes]
    stop: Callable[[], int]
    folder: str
    num_backend_processes: int = 0


def start_program(
    command: Sequence[str],
    folder: str,
    exit_code: Callable[[int], int] = lambda code: code,
    *,
    num_backend_processes: int = 0,
    **options: Any,
) -> RunningProgram:
    """Starts a command with pipes to its standard streams and with `options` of `subprocess.Popen`. `exit_code` returns
    the program's exit code from the command's. For the other arguments see `RunningProgram`."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, **options)
    assert process.stdin and process.stdout and process.stderr

    def end() -> int:
        process.kill()
        return exit_code(process.wait())

    pipes = (process.stdin, process.stdout, process.stderr)
    return RunningProgram(process.pid, *pipes, end, folder, num_backend_processes)


def interpreter_command() -> list[str]:
    """Returns the interpreter's command line: standard library only, no site packages.

    Not `-I`, which would also ignore PYTHONHASHSEED in the environment that palestra sets.
    """
    return [interpreter(), "-s", "-S", "-P", "-B", "-X", "utf8", "-c", LOADER]


def environment(folder: str) -> dict[str, str]:
    """Returns the complete environment of a program.

    Hashes are fixed, so that sets print in the same order every time.
    """
    return {"HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "MALLOC_ARENA_MAX": "2"}


def boot_message(request: RunRequest, rules: bytes, *, user: int = 0, tasks: int = 0) -> bytes:
    """Returns the boot message: code of boot.py, then user id, hard limits, seccomp filter and source of the program.

    `user`: user id to switch to (0: none). `tasks`: RLIMIT_NPROC (0: unset).
    """
    limits = request.limits
    most = {
        resource.RLIMIT_CPU: math.ceil(limits.cpu) + 1,
        resource.RLIMIT_DATA: ADDRESS_SPACE_FACTOR * limits.memory,
        resource.RLIMIT_FSIZE: limits.disk,
        resource.RLIMIT_NOFILE: MAX_OPEN_FILES,
        resource.RLIMIT_CORE: 1,  # with 0, Linux still hands the memory to a program that collects crashes
    }
    if sys.platform == "linux":
        most |= {
            resource.RLIMIT_MSGQUEUE: 0,
            resource.RLIMIT_MEMLOCK: 0,
            resource.RLIMIT_SIGPENDING: MAX_PENDING_SIGNALS,
        }
    if tasks:
        most[resource.RLIMIT_NPROC] = tasks
    return _boot() + _with_size(marshal.dumps((user, list(most.items()), rules, request.source)))


@cache
def interpreter() -> str:
    """Returns the path of the Python interpreter itself, not of a virtual environment's link to it."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


@cache
def readable_paths() -> tuple[str, ...]:
    """Returns the paths that a program may read: the interpreter, its library and the system's shared libraries."""
    bases = (sys.base_prefix, sys.base_exec_prefix)
    libraries = [os.path.join(base, name) for base, name in product(bases, ("lib", "lib64"))]
    paths = dict.fromkeys([interpreter(), *libraries, *SYSTEM_PATHS])
    return tuple(path for path in paths if os.path.exists(path))


@cache
def _boot() -> bytes:
    text = Path(__file__).with_name("boot.py").read_text(encoding="utf-8")
    return _with_size(marshal.dumps(compile(text, "boot.py", "exec", dont_inherit=True)))


def _with_size(body: bytes) -> bytes:
    return len(body).to_bytes(8, "big") + body
