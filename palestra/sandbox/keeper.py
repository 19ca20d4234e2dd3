"""The process that keeps one program: starts it, feeds it, watches it, ends it with all that it started, and answers.

It hears from the asker through one socket. Should that close, nobody waits for the answer, and the program ends.
"""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path
from types import ModuleType

from palestra.sandbox import bubblewrap, sandlock, scratch, tree, unsafe
from palestra.sandbox.base import PLACE, PREFIX, Ended, Outcome, Request, pack
from palestra.sandbox.watch import Watch

BACKENDS: dict[str, ModuleType] = {"sandlock": sandlock, "bubblewrap": bubblewrap, "unsafe": unsafe}


def keep(asker: socket.socket, folder: Path) -> None:
    """Answers the request that comes through `asker`; `folder` is made for the program and removed."""
    request = Request.unpacked(_receive(asker))
    tree.adopt()
    _first_to_go()
    folder.mkdir()
    try:
        scratch.fill(folder, request.files)
        answer = _run(request, folder, asker).packed()
    except (OSError, RuntimeError, ValueError) as error:  # ours or the backend's, never the program's
        answer = pack({"error": f"sandbox {request.backend} failed: {error!r}"})
    finally:
        tree.kill()
        scratch.remove(folder)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # nobody waits any more
        asker.sendall(answer)


def _run(request: Request, folder: Path, asker: socket.socket) -> Outcome:
    program, orders = BACKENDS[request.backend].start(request, folder)
    watch = Watch(request.limits, folder, program, asker)
    watch.until_the_end(orders + request.stdin.encode("utf-8", "surrogatepass"))
    code = program.end()
    tree.kill(program.pid)
    stdout, stderr = watch.close()
    ended = watch.ended or _how(code, stderr)
    return Outcome(
        stdout=_text(stdout, program.folder),
        stderr=_text(stderr, program.folder),
        code=code if ended in ("exit", "signal") else None,
        ended=ended,
        seconds=watch.seconds,
        files=scratch.contents(folder, request.limits.disk) if request.keep else {},
    )


def _how(code: int, stderr: bytes) -> Ended:
    """How a program ended that no limit of ours did end. The kernel's own limit on memory shows as an exception."""
    if code == 1 and stderr.rstrip().rpartition(b"\n")[2].startswith(b"MemoryError"):
        return "memory"
    return "exit" if code >= 0 else "signal"


def _text(data: bytes, folder: str) -> str:
    """What a program said; its folder, whose true name differs from run to run, goes by one name."""
    return data.replace(folder.encode(), PLACE.encode()).decode("utf-8", "replace")


def _first_to_go() -> None:
    """Where all memory is used up, the kernel shall kill programs before it kills those that train on them."""
    with contextlib.suppress(OSError):  # other systems have no such thing
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def _receive(asker: socket.socket) -> bytes:
    with asker.makefile("rb") as stream:
        size = int.from_bytes(stream.read(PREFIX), "big")
        body = stream.read(size)
    if not size or len(body) < size:
        raise ConnectionError("the asker left")
    return body
