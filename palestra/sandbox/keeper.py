"""Supervisor process of one run: starts the program, feeds it, monitors it, kills all its processes, and replies.

It is connected to the requesting process by one socket. If that closes, the program is killed.
"""

from __future__ import annotations

import contextlib
import socket
from functools import partial
from pathlib import Path
from types import ModuleType

from palestra.sandbox import bubblewrap, sandlock, scratch, tree, unsafe
from palestra.sandbox.base import PLACE, PREFIX, Ended, Outcome, Request, pack
from palestra.sandbox.held import Held
from palestra.sandbox.watch import Watch

BACKENDS: dict[str, ModuleType] = {"sandlock": sandlock, "bubblewrap": bubblewrap, "unsafe": unsafe}


def keep(asker: socket.socket, folder: Path, *, mounts: bool) -> None:
    """Executes the request read from `asker` and sends the result there.

    `folder` is created for the program and removed. `mounts`: it lies in its own file system. Raises ConnectionError if
    the requester disconnects before the request is complete.
    """
    request = Request.unpacked(_receive(asker))
    tree.adopt()
    _first_to_go()
    try:
        scratch.make(folder, request, mounts=mounts)
        answer = _run(request, folder, asker, mounts=mounts).packed()
    except (OSError, RuntimeError, ValueError) as error:  # of the sandbox or its backend, never of the program
        answer = pack({"error": f"sandbox {request.backend} failed: {error!r}"})
    finally:
        tree.kill()
        if not mounts:
            scratch.remove(folder)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the requester is gone
        asker.sendall(answer)


def _run(request: Request, folder: Path, asker: socket.socket, *, mounts: bool) -> Outcome:
    measure = scratch.over_mount if mounts else scratch.over
    over = partial(measure, folder, request.limits.disk)
    program, orders = BACKENDS[request.backend].start(request, folder, mounts=mounts)
    watch = Watch(request.limits, over, program, asker)
    watch.until_the_end(orders + request.stdin.encode("utf-8", "surrogatepass"))
    code = program.end()
    tree.kill(program.pid)
    stdout, stderr = watch.close()
    ended = watch.ended or ("output" if over(Held()) else _how(code, stderr))
    return Outcome(
        stdout=_text(stdout, program.folder),
        stderr=_text(stderr, program.folder),
        code=code if ended in ("exit", "signal") else None,
        ended=ended,
        seconds=watch.seconds,
        files=_files(request, folder),
    )


def _files(request: Request, folder: Path) -> dict[str, bytes]:
    if isinstance(request.keep, bool):
        return scratch.contents(folder, request.limits.disk) if request.keep else {}
    return scratch.heads(folder, request.keep)


def _how(code: int, stderr: bytes) -> Ended:
    """Returns the reason of an end without exceeded limit. A MemoryError shows that RLIMIT_DATA was reached."""
    if code == 1 and stderr.rstrip().rpartition(b"\n")[2].startswith(b"MemoryError"):
        return "memory"
    return "exit" if code >= 0 else "signal"


def _text(data: bytes, folder: str) -> str:
    """Decodes output as UTF-8; replaces the folder's real path, which differs between runs, by PLACE."""
    return data.replace(folder.encode(), PLACE.encode()).decode("utf-8", "replace")


def _first_to_go() -> None:
    """Raises the OOM score: if memory runs out, the kernel must kill programs before training processes."""
    with contextlib.suppress(OSError):  # not on other systems
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def _receive(asker: socket.socket) -> bytes:
    with asker.makefile("rb") as stream:
        size = int.from_bytes(stream.read(PREFIX), "big")
        body = stream.read(size)
    if not size or len(body) < size:
        raise ConnectionError("the asker left")
    return body
