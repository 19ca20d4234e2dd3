"""Public interface of the sandbox: chooses a backend and sends runs to the fork server of this process."""

from __future__ import annotations

import asyncio
import atexit
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from functools import cache
from types import ModuleType

from palestra.core.stop_signals import stop_signals_blocked
from palestra.sandbox import bubblewrap, cgroup, sandlock
from palestra.sandbox.base import LENGTH_BYTES, RUN, ResourceLimits, RunRequest, RunResult, SandboxError

DEFAULT_LIMITS: ResourceLimits = ResourceLimits()
FORK_SERVER_ENV = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # threads do not survive a fork
STOP_TIMEOUT_S = 10.0  # seconds until a stopped fork server is killed
BACKENDS_BY_PREFERENCE: dict[str, ModuleType] = {"sandlock": sandlock, "bubblewrap": bubblewrap}
SUPERVISOR_DIED = "the sandbox's supervisor process died before it replied; see its output on stderr"

# The trial program: each attempt must fail, writing a file in its folder must succeed.
TRIAL_PROGRAM = """
import os, socket
for attempt in (
    lambda: open("../palestra-was-here", "w"),
    lambda: open("/etc/passwd"),
    lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
    lambda: os.sched_setaffinity(1, {0}),
):
    try:
        attempt()
    except OSError:
        continue
    print("not contained")
open("inside", "w").write("x")
print("alive")
"""


class Sandbox:
    """Runs programs with one backend: "sandlock", "bubblewrap" or "unsafe" (no isolation)."""

    def __init__(self, name: str) -> None:
        self.name = name

    async def run_python(
        self,
        source: str,
        *,
        stdin: str = "",
        files: Mapping[str, str | bytes] = {},
        limits: ResourceLimits = DEFAULT_LIMITS,
        keep: bool | Mapping[str, int] = False,
    ) -> RunResult:
        """Runs the Python program `source` in a new folder with `files` and returns its result.

        `keep=True` returns all final files of the folder in `RunResult.files`; `keep={"a": 100}` returns at most the
        first 100 bytes of "a" and no other file. Names that are missing or no regular file are left out.

        Never raises for what the program does. Raises SandboxError if the sandbox itself fails, ValueError for names
        outside the folder. Cancelling the awaiting task kills the program and all its descendants. At most 64 runs are
        active at a time; further ones wait.
        """
        data = {
            name: text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
            for name, text in files.items()
        }
        request = RunRequest(self.name, source, stdin, data, limits, keep if isinstance(keep, bool) else dict(keep))
        reader, writer = await asyncio.open_connection(sock=fork_server().connect())
        try:
            writer.write(request.to_bytes())
            size = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
            return RunResult.from_bytes(await reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise SandboxError(SUPERVISOR_DIED) from error
        finally:
            writer.close()


def open_sandbox(unsafe: bool = False) -> Sandbox:
    """Returns a sandbox with the first working backend: sandlock, then bubblewrap, then, if `unsafe`, no isolation.

    Each backend is tested once per process with a program that tries to escape. Raises ValueError, with the reason and
    the fix for each backend, if none works, or if `PALESTRA_CGROUP` names a cgroup that cannot be used.
    """
    cgroup.find_parent()
    reasons: list[str] = []
    for name in BACKENDS_BY_PREFERENCE:
        if (reason := backend_problem(name)) is None:
            return Sandbox(name)
        reasons.append(f"{name}: {reason} (fix: {BACKENDS_BY_PREFERENCE[name].FIX})")
    if unsafe:
        return Sandbox("unsafe")
    raise ValueError(
        f"programs cannot be run safely here. {'; '.join(reasons)}. Or set unsafe: true, and each program can read, "
        "write and send whatever you can"
    )


@cache
def backend_problem(name: str) -> str | None:
    """Returns why the backend `name` does not work here, or None if it works. Cached per process."""
    if reason := BACKENDS_BY_PREFERENCE[name].missing():
        return str(reason)
    try:
        outcome = _ask(RunRequest(name, TRIAL_PROGRAM, "", {}, DEFAULT_LIMITS, keep=False))
    except SandboxError as error:
        return str(error)
    if outcome.ok and outcome.stdout == "alive\n":
        return None
    return f"a trial program was not contained or did not run: {outcome.stdout}{outcome.stderr[-500:]}".strip()


def _ask(request: RunRequest) -> RunResult:
    """Runs a request synchronously. Raises SandboxError if the sandbox fails."""
    with fork_server().connect() as connection, connection.makefile("rb") as stream:
        try:
            connection.sendall(request.to_bytes())
            body = stream.read(int.from_bytes(stream.read(LENGTH_BYTES), "big"))
        except ConnectionError as error:
            raise SandboxError(SUPERVISOR_DIED) from error
    if not body:
        raise SandboxError(SUPERVISOR_DIED)
    return RunResult.from_bytes(body)


class ForkServerClient:
    """Client side of a fork server (fork_server.py), a process that gets this one's `sys.path`, and its environment
    changed by `FORK_SERVER_ENV`."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        code = f"import sys; sys.path[:] = {sys.path!r}; from palestra.sandbox.fork_server import main; main()"
        env = os.environ | FORK_SERVER_ENV
        if env.get("PYTHONHASHSEED", "random") == "random":  # some problems that a grader makes depend on it
            env["PYTHONHASHSEED"] = "0"
        with theirs, stop_signals_blocked():  # what it runs inherits the mask
            self.process = subprocess.Popen(
                [sys.executable, "-c", code], stdin=theirs.fileno(), env=env, start_new_session=True
            )
        self.owner_pid = os.getpid()
        self.control_socket = ours

    def connect(self, kind: bytes = RUN) -> socket.socket:
        """Returns a socket to a new child for a request. Raises SandboxError if the fork server is gone."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self.control_socket, [kind], [theirs.fileno()])
            except OSError as error:
                ours.close()
                raise SandboxError("the sandbox's fork server has died; see its output on stderr") from error
        return ours

    def is_usable(self) -> bool:
        """Returns False if the fork server has died, or if this process is a fork of the one that started it."""
        return self.owner_pid == os.getpid() and self.process.poll() is None

    def close(self) -> None:
        """Stops the fork server; kills it after STOP_TIMEOUT_S."""
        self.control_socket.close()
        if self.owner_pid == os.getpid():
            try:
                self.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


_held: list[ForkServerClient] = []
_lock = threading.Lock()


def fork_server() -> ForkServerClient:
    """Returns the fork server of this process, starting it if needed."""
    with _lock:
        if _held and not _held[0].is_usable():
            _held.pop().close()
        if not _held:
            _held.append(ForkServerClient())
            atexit.register(stop_fork_server)
        return _held[0]


def stop_fork_server() -> None:
    """Stops this process's fork server and all its runs. The next run starts a new one."""
    with _lock:
        while _held:
            _held.pop().close()
