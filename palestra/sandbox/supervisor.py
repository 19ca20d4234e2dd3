"""Supervisor process of one run: starts the program, feeds it, monitors it, kills all its processes, and replies.

It is connected to the requesting process by one socket. If that closes, the program is killed.
"""

from __future__ import annotations

import contextlib
import socket
from functools import partial
from pathlib import Path
from types import ModuleType

from palestra.sandbox import bubblewrap, cgroup, process_tree, sandlock, unsafe, workdir
from palestra.sandbox.base import LENGTH_BYTES, WORKDIR, EndReason, RunRequest, RunResult, encode_message
from palestra.sandbox.kernel_memory import HeldResources
from palestra.sandbox.monitor import ProcessMonitor

BACKENDS: dict[str, ModuleType] = {"sandlock": sandlock, "bubblewrap": bubblewrap, "unsafe": unsafe}


def supervise(requester: socket.socket, folder: Path, *, mounts: bool, group: Path | None) -> None:
    """Executes the request read from `requester` and sends the result there.

    `folder` is created for the program and removed. `mounts`: it lies in its own file system. `group`: the cgroup in
    which cgroups of runs are made (None: none). Raises ConnectionError if the requester disconnects before the request
    is complete.
    """
    with requester.makefile("rb") as stream:
        size = int.from_bytes(stream.read(LENGTH_BYTES), "big")
        body = stream.read(size)
    if not size or len(body) < size:
        raise ConnectionError("the requester disconnected")
    request = RunRequest.from_bytes(body)
    limited = None
    process_tree.become_subreaper()
    # if memory runs out, the kernel must kill programs before training processes
    with contextlib.suppress(OSError):  # not on other systems
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    try:
        workdir.create(folder, request, mounts=mounts)
        limited = cgroup.make_run(group, folder.name, request.limits) if group else None
        answer = _run(request, folder, requester, mounts=mounts, limited=limited).to_bytes()
    except (OSError, RuntimeError, ValueError) as error:  # of the sandbox or its backend, never of the program
        answer = encode_message({"error": f"sandbox {request.backend} failed: {error!r}"})
    finally:
        if limited:
            cgroup.remove(limited)
        process_tree.kill_descendants()
        if not mounts:
            workdir.remove(folder)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the requester is gone
        requester.sendall(answer)


def _run(request: RunRequest, folder: Path, asker: socket.socket, *, mounts: bool, limited: Path | None) -> RunResult:
    measure = workdir.mount_exceeds_limit if mounts else workdir.exceeds_limit
    over = partial(measure, folder, request.limits.disk)
    with cgroup.entered_cgroup(limited) if limited else contextlib.nullcontext():
        program, orders = BACKENDS[request.backend].start(request, folder, mounts=mounts)
    watch = ProcessMonitor(request.limits, over, program, asker)
    watch.run_until_end(orders + request.stdin.encode("utf-8", "surrogatepass"))
    code = program.stop()
    process_tree.kill_descendants(program.pid)
    stdout, stderr = watch.close()
    by_kernel: EndReason | None = "memory" if limited and cgroup.ran_out_of_memory(limited) else None
    ended = watch.exceeded_limit or by_kernel or ("output" if over(HeldResources()) else _how(code, stderr))
    return RunResult(
        stdout=_text(stdout, program.folder),
        stderr=_text(stderr, program.folder),
        code=code if ended in ("exit", "signal") else None,
        ended=ended,
        seconds=watch.seconds,
        files=_files(request, folder),
    )


def _files(request: RunRequest, folder: Path) -> dict[str, bytes]:
    if isinstance(request.keep, bool):
        return workdir.read_files(folder, request.limits.disk) if request.keep else {}
    return workdir.read_heads(folder, request.keep)


def _how(code: int, stderr: bytes) -> EndReason:
    """Returns the reason of an end without exceeded limit. A MemoryError shows that RLIMIT_DATA was reached."""
    if code == 1 and stderr.rstrip().rpartition(b"\n")[2].startswith(b"MemoryError"):
        return "memory"
    return "exit" if code >= 0 else "signal"


def _text(data: bytes, folder: str) -> str:
    """Decodes output as UTF-8; replaces the folder's real path, which differs between runs, by `WORKDIR`."""
    return data.replace(folder.encode(), WORKDIR.encode()).decode("utf-8", "replace")
