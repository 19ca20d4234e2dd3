"""What every backend starts: this Python, bare, which reads its orders from stdin and becomes the program (`boot`)."""

from __future__ import annotations

import marshal
import math
import os
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO

from palestra.sandbox.base import Request

HEADROOM = 4  # address space over memory: threads and allocators reserve what they never touch
OPEN_FILES = 64
SIGNALS = 1024  # that wait, of all the user's processes
SYSTEM = ("/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache")
DEVICES = ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom")  # /dev/zero makes shared memory that none counts

# Reads compiled code, which is quicker than compiling it for every run.
LOADER = """
import marshal, os
def read(size):
    data = b""
    while len(data) < size: data += os.read(0, size - len(data)) or os._exit(127)
    return data
exec(marshal.loads(read(int.from_bytes(read(8), "big"))))
"""


@dataclass
class Program:
    """A started program. `end` kills it, if need be, and returns its exit status, minus the number of a signal.

    `own` processes below it are the backend's. `folder` is what the program calls its folder.
    """

    pid: int
    stdin: IO[bytes]
    stdout: IO[bytes]
    stderr: IO[bytes]
    end: Callable[[], int]
    folder: str
    own: int = 0


def command() -> list[str]:
    """No site packages and no user's: programs get the standard library, which is the same for every user of a Python.
    Not `-I`, which would ignore our own clean environment with the rest."""
    return [interpreter(), "-s", "-S", "-P", "-B", "-X", "utf8", "-c", LOADER]


def environment(folder: str) -> dict[str, str]:
    """All that a program finds in its environment. Hashes are fixed, so that sets print the same every time."""
    return {"HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "MALLOC_ARENA_MAX": "2"}


def orders(request: Request, rules: bytes, *, user: int = 0, tasks: int = 0) -> bytes:
    """What `boot` reads: the user to become, hard limits, the filter of system calls, the program."""
    limits = request.limits
    most = {
        resource.RLIMIT_CPU: math.ceil(limits.cpu) + 1,
        resource.RLIMIT_DATA: HEADROOM * limits.memory,
        resource.RLIMIT_FSIZE: limits.disk,
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_CORE: 1,  # with 0, Linux still hands the memory to a program that collects crashes
    }
    if sys.platform == "linux":
        most |= {resource.RLIMIT_MSGQUEUE: 0, resource.RLIMIT_MEMLOCK: 0, resource.RLIMIT_SIGPENDING: SIGNALS}
    if tasks:
        most[resource.RLIMIT_NPROC] = tasks
    return _boot() + _sized(marshal.dumps((user, list(most.items()), rules, request.source)))


@cache
def interpreter() -> str:
    """This Python itself, not a virtual environment's link to it."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


@cache
def readable() -> tuple[str, ...]:
    """What a program may read: the interpreter, its library and the system's shared ones."""
    bases = (sys.base_prefix, sys.base_exec_prefix)
    libraries = [os.path.join(base, name) for base in bases for name in ("lib", "lib64")]
    paths = dict.fromkeys([interpreter(), *libraries, *SYSTEM])
    return tuple(path for path in paths if os.path.exists(path))


@cache
def _boot() -> bytes:
    text = Path(__file__).with_name("boot.py").read_text(encoding="utf-8")
    return _sized(marshal.dumps(compile(text, "boot.py", "exec", dont_inherit=True)))


def _sized(body: bytes) -> bytes:
    return len(body).to_bytes(8, "big") + body
