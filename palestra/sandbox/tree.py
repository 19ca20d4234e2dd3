"""The processes below one: who they are, what they use, and their end. Linux only: elsewhere none are found.

`adopt` makes a process the parent of every orphan below it, so that nothing that daemonises gets out of sight.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

PR_SET_CHILD_SUBREAPER = 36
PATIENCE = 5.0  # seconds that killing a tree may take: what the kernel holds on to for longer, no signal moves
TICK = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Usage:
    """What living processes use: `cpu` in seconds, with those of children they have waited for; `memory` in bytes;
    `starved`, the seconds that they were ready to run, added up, while others had the processors."""

    cpu: float = 0.0
    memory: int = 0
    processes: int = 0
    threads: int = 0
    starved: float = 0.0


@dataclass(frozen=True)
class Process:
    """A process as it was found: `folder` is where /proc tells of its memory and files, `cpu` as in `Usage`."""

    pid: int
    folder: str
    cpu: float
    threads: int


def adopt() -> None:
    """Makes orphans below this process its own children."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def below(spare: Iterable[int] = ()) -> list[int]:
    """All descendants of this process, parents first, but those to `spare` and what is below them."""
    spared = set(spare)
    found = [pid for pid in _children(os.getpid()) if pid not in spared]
    for pid in found:
        found.extend(_children(pid))
    return found


def _children(pid: int) -> Iterator[int]:
    folder = f"/proc/{pid}/task"
    try:
        threads = os.listdir(folder)
    except OSError:  # gone
        return
    for thread in threads:
        for child in _read(f"{folder}/{thread}/children").split():
            yield int(child)


def processes(pids: Iterable[int]) -> list[Process]:
    """Those of these processes that are still there."""
    return [process for pid in pids if (process := _process(pid))]


def _process(pid: int) -> Process | None:
    stat = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    if len(stat) < 22:  # gone
        return None
    ticks, threads = sum(int(field) for field in stat[11:15]), int(stat[17])
    folder = _living_thread(pid) if stat[0] == "Z" and threads > 1 else f"/proc/{pid}"
    return Process(pid, folder, ticks / TICK, threads)


def _living_thread(pid: int) -> str:
    """The folder of a thread that is alive: the first one has neither memory nor files once it has ended."""
    with contextlib.suppress(OSError):  # gone
        for thread in os.listdir(f"/proc/{pid}/task"):
            folder = f"/proc/{pid}/task/{thread}"
            if "\nVmPTE:" in _read(f"{folder}/status"):
                return folder
    return f"/proc/{pid}"


def usage(found: Iterable[Process], most: int) -> Usage:
    """What these processes use together. Pages that several share count once, which is measured only where counting
    them often would exceed `most`: it takes the kernel longer."""
    found = list(found)
    memory = sum(_memory(process) for process in found)
    if memory > most:
        memory = sum(_own_share(process) for process in found)
    return Usage(
        cpu=sum(process.cpu for process in found),
        memory=memory,
        processes=len(found),
        threads=sum(process.threads for process in found),
        starved=sum(starved(process.pid) for process in found),
    )


def starved(pid: int) -> float:
    """Seconds that a process was ready to run while others had the processors; 0 where the kernel does not say."""
    fields = _read(f"/proc/{pid}/schedstat").split()
    return int(fields[1]) / 1e9 if len(fields) > 1 else 0.0


def _memory(process: Process) -> int:
    """Bytes that are no file's, in memory and swapped out, with the page tables."""
    return _sum(f"{process.folder}/status", ("RssAnon:", "RssShmem:", "VmSwap:", "VmPTE:"))


def _own_share(process: Process) -> int:
    """The same, with each shared page divided by the number of those that share it."""
    share = _sum(f"{process.folder}/smaps_rollup", ("Pss_Anon:", "Pss_Shmem:", "SwapPss:"))
    return share + _sum(f"{process.folder}/status", ("VmPTE:",)) if share else _memory(process)


def _sum(path: str, fields: tuple[str, ...]) -> int:
    """These lines of a file, which are in KiB, added up, in bytes."""
    return sum(int(line.split()[1]) * 1024 for line in _read(path).splitlines() if line.startswith(fields))


def cpu_of_the_dead() -> float:
    """Seconds of processor time of the children that this process has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def kill(group: int | None = None, spare: Iterable[int] = ()) -> None:
    """Kills and reaps all processes below this one but those to `spare` and what is below them; those of the process
    group `group` first.

    Whoever forks while it is being killed leaves a child that is found the next time round.
    """
    if group:
        _signal(-group)
    end = time.monotonic() + PATIENCE
    while (pids := below(spare)) and time.monotonic() < end:
        for pid in pids:
            _signal(pid)
            _reap(pid)
        time.sleep(0.001)


def _signal(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # dead; or, on macOS, a zombie
        os.kill(pid, signal.SIGKILL)


def _reap(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):  # somebody else's child, as yet
        os.waitpid(pid, os.WNOHANG)


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError:  # gone, or not ours to read
        return ""
