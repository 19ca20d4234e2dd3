"""Finds, measures and kills the descendants of this process. Linux only: on other systems none are found.

`become_subreaper` makes this process the parent of its orphaned descendants, so that daemonised processes are still
found.
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
KILL_TIMEOUT_S = 5.0  # seconds to try to kill all descendants; longer ones are stuck in the kernel
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class ResourceUsage:
    """Resources used by living processes.

    `cpu_s`: CPU seconds, including reaped children. `memory_bytes`: bytes. `cpu_wait_s`: summed seconds that they were
    runnable but waited for a CPU.
    """

    cpu_s: float = 0.0
    memory_bytes: int = 0
    num_processes: int = 0
    num_threads: int = 0
    cpu_wait_s: float = 0.0


@dataclass(frozen=True)
class ProcessInfo:
    """A process at the time of measurement.

    `proc_folder`: its folder in /proc for memory and files. `cpu_s`: as in `ResourceUsage`.
    """

    pid: int
    proc_folder: str
    cpu_s: float
    num_threads: int


def become_subreaper() -> None:
    """Makes this process the parent of its orphaned descendants (PR_SET_CHILD_SUBREAPER)."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(exclude: Iterable[int] = ()) -> list[int]:
    """Returns the pids of all descendants of this process, parents first, without those in `exclude` and theirs."""
    spared = set(exclude)
    found = [pid for pid in _read_children(os.getpid()) if pid not in spared]
    for pid in found:
        found.extend(_read_children(pid))
    return found


def _read_children(pid: int) -> Iterator[int]:
    folder = f"/proc/{pid}/task"
    try:
        threads = os.listdir(folder)
    except OSError:  # gone
        return
    for thread in threads:
        for child in _read(f"{folder}/{thread}/children").split():
            yield int(child)


def measure_processes(pids: Iterable[int]) -> list[ProcessInfo]:
    """Measures the processes `pids`; leaves out those that have exited."""
    return [process for pid in pids if (process := _process(pid))]


def _process(pid: int) -> ProcessInfo | None:
    stat = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    if len(stat) < 22:  # gone
        return None
    ticks = sum(int(field) for field in stat[11:15])
    threads = int(stat[17])
    folder = _living_thread(pid) if stat[0] == "Z" and threads > 1 else f"/proc/{pid}"
    return ProcessInfo(pid, folder, ticks / TICKS_PER_S, threads)


def _living_thread(pid: int) -> str:
    """Returns the /proc folder of a living thread: the first shows no memory or files once it exited."""
    with contextlib.suppress(OSError):  # gone
        for thread in os.listdir(f"/proc/{pid}/task"):
            folder = f"/proc/{pid}/task/{thread}"
            if "\nVmPTE:" in _read(f"{folder}/status"):
                return folder
    return f"/proc/{pid}"


def total_usage(found: Iterable[ProcessInfo], exact_above_bytes: int) -> ResourceUsage:
    """Sums the resources of processes. Shared pages count once; the slower measurement that this needs is done only if
    the sum with repeated counting exceeds `exact_above_bytes` bytes."""
    found = list(found)
    memory = sum(_memory(process) for process in found)
    if memory > exact_above_bytes:
        memory = sum(_own_share(process) for process in found)
    return ResourceUsage(
        cpu_s=sum(process.cpu_s for process in found),
        memory_bytes=memory,
        num_processes=len(found),
        num_threads=sum(process.num_threads for process in found),
        cpu_wait_s=sum(cpu_wait_s(process.pid) for process in found),
    )


def cpu_wait_s(pid: int) -> float:
    """Returns the seconds that a process was runnable but waited for a CPU; 0 if the kernel does not report it."""
    fields = _read(f"/proc/{pid}/schedstat").split()
    return int(fields[1]) / 1e9 if len(fields) > 1 else 0.0


def _memory(process: ProcessInfo) -> int:
    """Returns the bytes of non-file memory, resident and swapped, and of page tables."""
    return _sum(f"{process.proc_folder}/status", ("RssAnon:", "RssShmem:", "VmSwap:", "VmPTE:"))


def _own_share(process: ProcessInfo) -> int:
    """Returns the bytes of `_memory`, with each shared page divided by the number of processes that share it."""
    share = _sum(f"{process.proc_folder}/smaps_rollup", ("Pss_Anon:", "Pss_Shmem:", "SwapPss:"))
    return share + _sum(f"{process.proc_folder}/status", ("VmPTE:",)) if share else _memory(process)


def _sum(path: str, fields: tuple[str, ...]) -> int:
    """Returns the sum, in bytes, of the named lines (in KiB) of a file."""
    return sum(int(line.split()[1]) * 1024 for line in _read(path).splitlines() if line.startswith(fields))


def reaped_cpu_s() -> float:
    """Returns the CPU seconds of the children that this process has reaped."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def kill_descendants(group: int | None = None, exclude: Iterable[int] = ()) -> None:
    """Kills and reaps all descendants of this process, except those in `exclude` and theirs; the process group `group`
    first.

    Repeats until none are left, at most `KILL_TIMEOUT_S` seconds: a process that forks while being killed leaves a
    child.
    """
    if group:
        _signal(-group)
    end = time.monotonic() + KILL_TIMEOUT_S
    while (pids := descendants(exclude)) and time.monotonic() < end:
        for pid in pids:
            _signal(pid)
            with contextlib.suppress(ChildProcessError):  # still another process's child
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.001)


def _signal(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # dead; or, on macOS, a zombie
        os.kill(pid, signal.SIGKILL)


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError:  # gone, or not ours to read
        return ""
