"""Finds, measures and kills the descendants of this process. Linux only: on other systems none are found.

`adopt` makes this process the parent of its orphaned descendants, so that daemonised processes are still found.
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
PATIENCE = 5.0  # seconds to try to kill all descendants; longer ones are stuck in the kernel
TICK = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Usage:
    """Resources used by living processes.

    `cpu`: CPU seconds, including reaped children. `memory`: bytes. `starved`: summed seconds that they were runnable
    but waited for a CPU.
    """

    cpu: float = 0.0
    memory: int = 0
    processes: int = 0
    threads: int = 0
    starved: float = 0.0


@dataclass(frozen=True)
class Process:
    """A process at the time of measurement.

    `folder`: its folder in /proc for memory and files. `cpu`: as in `Usage`.
    """

    pid: int
    folder: str
    cpu: float
    threads: int


def adopt() -> None:
    """Makes this process the parent of its orphaned descendants (PR_SET_CHILD_SUBREAPER)."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def below(spare: Iterable[int] = ()) -> list[int]:
    """Returns the pids of all descendants of this process, parents first, without those in `spare` and theirs."""
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
    """Measures the processes `pids`; leaves out those that have exited."""
    return [process for pid in pids if (process := _process(pid))]


def _process(pid: int) -> Process | None:
    stat = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    if len(stat) < 22:  # gone
        return None
    ticks, threads = sum(int(field) for field in stat[11:15]), int(stat[17])
    folder = _living_thread(pid) if stat[0] == "Z" and threads > 1 else f"/proc/{pid}"
    return Process(pid, folder, ticks / TICK, threads)


def _living_thread(pid: int) -> str:
    """/proc folder of a living thread: the first thread shows neither memory nor files once it has exited."""
    with contextlib.suppress(OSError):  # gone
        for thread in os.listdir(f"/proc/{pid}/task"):
            folder = f"/proc/{pid}/task/{thread}"
            if "\nVmPTE:" in _read(f"{folder}/status"):
                return folder
    return f"/proc/{pid}"


def usage(found: Iterable[Process], most: int) -> Usage:
    """Sums the resources of processes. Shared pages count once; the slower measurement that this needs is done only if
    the sum with repeated counting exceeds `most` bytes."""
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
    """Seconds that a process was runnable but waited for a CPU; 0 if the kernel does not report it."""
    fields = _read(f"/proc/{pid}/schedstat").split()
    return int(fields[1]) / 1e9 if len(fields) > 1 else 0.0


def _memory(process: Process) -> int:
    """Bytes of non-file memory, resident and swapped, and of page tables."""
    return _sum(f"{process.folder}/status", ("RssAnon:", "RssShmem:", "VmSwap:", "VmPTE:"))


def _own_share(process: Process) -> int:
    """As `_memory`, but each shared page is divided by the number of processes that share it."""
    share = _sum(f"{process.folder}/smaps_rollup", ("Pss_Anon:", "Pss_Shmem:", "SwapPss:"))
    return share + _sum(f"{process.folder}/status", ("VmPTE:",)) if share else _memory(process)


def _sum(path: str, fields: tuple[str, ...]) -> int:
    """Sum, in bytes, of the named lines (in KiB) of a file."""
    return sum(int(line.split()[1]) * 1024 for line in _read(path).splitlines() if line.startswith(fields))


def cpu_of_the_dead() -> float:
    """CPU seconds of the children that this process has reaped."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def kill(group: int | None = None, spare: Iterable[int] = ()) -> None:
    """Kills and reaps all descendants of this process, except those in `spare` and theirs; the process group `group`
    first.

    Repeats until none are left, at most PATIENCE seconds: a process that forks while being killed leaves a child.
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
    with contextlib.suppress(ChildProcessError):  # still another process's child
        os.waitpid(pid, os.WNOHANG)


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError:  # gone, or not ours to read
        return ""
