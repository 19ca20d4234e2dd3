"""The sandbox as the rest of the house sees it."""

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

from palestra.sandbox import bubblewrap, sandlock
from palestra.sandbox.base import PREFIX, Limits, Outcome, Request, SandboxError

NO_LIMITS: Limits = Limits()
PATIENCE = 10.0  # seconds that a warden may take to go
FIRST_TO_LAST: dict[str, ModuleType] = {"sandlock": sandlock, "bubblewrap": bubblewrap}
DIED = "the sandbox's keeper died before it answered; what it said is on stderr"

# What a sandbox must not let pass, one attempt a line; and what it must.
PROBE = """
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
    """Runs programs by one backend: "sandlock", "bubblewrap" or "unsafe", which is none."""

    def __init__(self, name: str) -> None:
        self.name = name

    async def run_python(
        self,
        source: str,
        *,
        stdin: str = "",
        files: Mapping[str, str | bytes] = {},
        limits: Limits = NO_LIMITS,
        keep: bool | Mapping[str, int] = False,
    ) -> Outcome:
        """What comes of running `source` as a program in a fresh folder that holds `files`; with `keep`,
        `Outcome.files` is what the folder then holds. `keep={"a": 100}` returns at most the first 100 bytes of "a" and
        no other file; a name that is missing, or no regular file, is left out.

        Never raises for what the program does; SandboxError where the sandbox itself fails. Ends the program, and all
        that it started, if the awaiting task is cancelled. A run waits for its turn where 64 others are running.
        """
        data = {
            name: text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
            for name, text in files.items()
        }
        request = Request(self.name, source, stdin, data, limits, keep if isinstance(keep, bool) else dict(keep))
        reader, writer = await asyncio.open_connection(sock=_warden().connect())
        try:
            writer.write(request.packed())
            size = int.from_bytes(await reader.readexactly(PREFIX), "big")
            return Outcome.unpacked(await reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise SandboxError(DIED) from error
        finally:
            writer.close()


def open_sandbox(unsafe: bool = False) -> Sandbox:
    """The first backend that works here, sandlock or bubblewrap; where neither does, none at all if `unsafe`.

    What works is found out once in a process, by a program that tries to get out. Raises ValueError that says what each
    backend lacks and how to mend it where none works.
    """
    reasons: list[str] = []
    for name in FIRST_TO_LAST:
        if (reason := why_not(name)) is None:
            return Sandbox(name)
        reasons.append(f"{name}: {reason} (fix: {FIRST_TO_LAST[name].FIX})")
    if unsafe:
        return Sandbox("unsafe")
    raise ValueError(
        f"programs cannot be run safely here. {'; '.join(reasons)}. Or set unsafe: true, and each program can read, "
        "write and send whatever you can"
    )


@cache
def why_not(name: str) -> str | None:
    """What keeps a backend from working here, None where nothing does."""
    if reason := FIRST_TO_LAST[name].missing():
        return str(reason)
    try:
        outcome = _ask(Request(name, PROBE, "", {}, NO_LIMITS, keep=False))
    except SandboxError as error:
        return str(error)
    if outcome.ok and outcome.stdout == "alive\n":
        return None
    return f"a trial program was not contained or did not run: {outcome.stdout}{outcome.stderr[-500:]}".strip()


def _ask(request: Request) -> Outcome:
    """As `run_python`, for those who cannot await."""
    with _warden().connect() as connection, connection.makefile("rb") as stream:
        connection.sendall(request.packed())
        body = stream.read(int.from_bytes(stream.read(PREFIX), "big"))
    if not body:
        raise SandboxError(DIED)
    return Outcome.unpacked(body)


class _Warden:
    """The warden of this process (`palestra.sandbox.warden`), as seen from here."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        code = f"import sys; sys.path[:] = {sys.path!r}; from palestra.sandbox.warden import main; main()"
        with theirs:  # in a session of its own: what stops us at the terminal must not stop it before it has cleared up
            self.process = subprocess.Popen([sys.executable, "-c", code], stdin=theirs.fileno(), start_new_session=True)
        self.owner, self.door = os.getpid(), ours

    def connect(self) -> socket.socket:
        """A socket to a keeper of our own."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self.door, [b"+"], [theirs.fileno()])
            except OSError as error:
                ours.close()
                raise SandboxError("the sandbox's warden is gone; what it said is on stderr") from error
        return ours

    def usable(self) -> bool:
        """Not after a fork, nor once it has died."""
        return self.owner == os.getpid() and self.process.poll() is None

    def close(self) -> None:
        self.door.close()
        if self.owner == os.getpid():
            try:
                self.process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                self.process.kill()


_held: list[_Warden] = []
_lock = threading.Lock()


def _warden() -> _Warden:
    """The one warden, started at first use."""
    with _lock:
        if _held and not _held[0].usable():
            _held.pop().close()
        if not _held:
            _held.append(_Warden())
            atexit.register(close)
        return _held[0]


def close() -> None:
    """Ends this process's warden, and with it all runs; the next run starts another."""
    with _lock:
        while _held:
            _held.pop().close()
