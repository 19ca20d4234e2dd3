"""Resource use of a run's processes and machine, and counters of its workers, for the dashboard's System page and the
Prometheus sink.

Processes and the machine are read from /proc, workers from workers.jsonl.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from palestra.core.process_memory import resident_memory
from palestra.core.types import Metrics
from palestra.parallel.worker_stats import COUNTERS
from palestra.runs.metric_log import MetricLog

SAMPLE_S = 0.1  # seconds over which CPU use is measured


class Sample(NamedTuple):
    """A value of a metric, by its labels. Counters only grow, but for a new process."""

    name: str
    labels: dict[str, str]
    value: float


HELP = {  # of all metrics, by name
    "worker_done": "Tasks, sessions or requests that a worker finished",
    "worker_seconds": "Seconds that they took",
    "worker_lost": "Tasks, sessions or requests that were begun and failed",
    "worker_replays": "Episodes restored at a worker after another one lost them",
    "worker_seen_timestamp_seconds": "When a worker last finished something",
    "process_memory_bytes": "Resident memory of a process of the run",
    "process_threads": "Threads of a process of the run",
    "process_cpu_seconds": "CPU seconds of a process of the run",
    "machine_cores": "Cores of the machine",
    "machine_load": "Load of the machine over the last minute",
    "machine_memory_bytes": "Memory of the machine",
    "machine_available_bytes": "Memory of the machine that is available",
}
COUNTED = {*(f"worker_{key}" for key in COUNTERS), "process_cpu_seconds"}  # the counters among them


def system_samples(path: Path, log: MetricLog) -> Iterator[Sample]:
    """Yields samples of a run's workers, from `log`, of its processes here, and of the machine."""
    log.refresh()
    for row in worker_rows(log):
        labels = {"kind": row["kind"], "where": row["where"]}
        yield from (Sample(f"worker_{key}", labels, row[key]) for key in COUNTERS)
        if row["seen"] is not None:
            yield Sample("worker_seen_timestamp_seconds", labels, row["seen"])
    pid = writing_process(path / ".lock")
    pids = [pid, *descendant_pids(pid)] if pid else []
    for each in pids:
        info = process_info(each)
        labels = {"pid": str(each), "name": str(info.get("name", ""))}
        known = {"memory_bytes": info.get("memory"), "threads": info.get("threads"), "cpu_seconds": cpu_seconds(each)}
        yield from (Sample(f"process_{key}", labels, value) for key, value in known.items() if value is not None)
    units = {"memory": "memory_bytes", "available": "available_bytes"}
    for key, value in machine_info().items():
        if value is not None:
            yield Sample(f"machine_{units.get(key, key)}", {}, value)


def worker_rows(log: MetricLog) -> list[dict[str, Any]]:
    """Returns one dict per worker: sums of its counters over the whole run, when it last finished something (`seen`,
    Unix time in seconds, None for never), and the reason of its last loss."""
    rows = []
    for name, last in log.last_by_name().items():
        row: dict[str, Any] = {"kind": str(last.get("kind", "")), "where": str(last.get("where", name))}
        row |= {key: float(log.column(name, key)[1].sum()) for key in COUNTERS}
        seen = log.column(name, "seen")[1]
        row |= {"seen": None, "why": str(last.get("why", ""))[:2000]}
        if len(seen):
            row["seen"] = float(seen.max())
        rows.append(row)
    return rows


def writing_process(lock: Path) -> int | None:
    """Returns the id of the process of this machine that holds a run's `.lock`, and so writes it; None if none does."""
    return held_locks().get(lock.stat().st_ino) if lock.exists() else None


def held_locks() -> dict[int, int]:
    """Returns inode -> process id of all locked files; {} if the system does not list locks. Testing a run's lock
    directly would mean holding it for a moment, in which a starting run would fail."""
    try:
        rows = [row.split() for row in Path("/proc/locks").read_text().splitlines()]
    except OSError:
        return {}
    return {int(row[5].rsplit(":", 1)[1]): int(row[4]) for row in rows if len(row) > 5 and row[1] == "FLOCK"}


def process_table(pids: list[int]) -> list[dict[str, Any]]:
    """Returns `process_info` of each process and, where known, `cpu`: the cores that it used over the last
    `SAMPLE_S` seconds, during which this call sleeps."""
    before = [cpu_seconds(pid) for pid in pids]
    began = time.monotonic()
    time.sleep(SAMPLE_S)
    seconds = time.monotonic() - began
    rows = []
    for pid, earlier in zip(pids, before, strict=True):
        now = cpu_seconds(pid)
        row = process_info(pid)
        if now is not None and earlier is not None:
            row["cpu"] = max(0.0, now - earlier) / seconds
        rows.append(row)
    return rows


def cpu_seconds(pid: int) -> float | None:
    """Returns a process's CPU seconds (fields 14 and 15 of /proc/PID/stat); None if unknown."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None


def machine_info() -> dict[str, float | None]:
    """Returns cores, load of the last minute, and bytes of memory; None where unknown."""
    try:
        rows = dict(row.split(":", 1) for row in Path("/proc/meminfo").read_text().splitlines() if ":" in row)
        sizes = {key: int(rows[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable")}
    except (OSError, ValueError, KeyError):
        sizes = {}
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    memory = {"memory": sizes.get("MemTotal"), "available": sizes.get("MemAvailable")}
    return {"cores": os.cpu_count(), "load": load, **memory}


def process_info(pid: int) -> dict[str, Any]:
    """Returns name, resident bytes and threads of a process; only the pid without /proc."""
    found: dict[str, Any] = {"pid": pid}
    try:
        rows = dict(row.split(":", 1) for row in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in row)
    except (OSError, ValueError):
        return found
    found["name"] = rows.get("Name", "").strip()
    if "VmRSS" in rows:
        found["memory"] = int(rows["VmRSS"].split()[0]) * 1024
    return found | {"threads": int(rows.get("Threads", "1"))}


def descendant_pids(pid: int | None) -> list[int]:
    """Returns the ids of all child processes, recursively, at most about 256."""
    found: list[int] = []
    waiting = [pid] if pid else []
    while waiting and len(found) < 256:
        try:
            children = Path(f"/proc/{waiting[0]}/task/{waiting[0]}/children").read_text().split()
        except OSError:
            children = []
        found += map(int, children)
        waiting = [*waiting[1:], *map(int, children)]
    return found


GIB = 2**30  # bytes


class ResourceMeter:
    """Measures this process, without its children, between calls of `metrics`."""

    def __init__(self) -> None:
        self._before = time.monotonic(), time.process_time()

    def metrics(self) -> Metrics:
        """Returns `cpu_percent` since the last call (100: one core busy all the time), `rss_gib` (resident memory now;
        absent without /proc) and, where PyTorch uses a GPU, `gpu_memory_gib` (the most that it has allocated so far,
        on the current device)."""
        now = time.monotonic(), time.process_time()
        wall_s = now[0] - self._before[0]
        cpu_s = now[1] - self._before[1]
        self._before = now
        found: Metrics = {}
        if wall_s > 0:
            found["cpu_percent"] = 100 * cpu_s / wall_s
        if (resident := resident_memory()) is not None:
            found["rss_gib"] = resident / GIB
        return found | _gpu_memory()


def _gpu_memory() -> Metrics:
    torch = sys.modules.get("torch")  # a run that has not loaded it uses no GPU
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return {}
    return {"gpu_memory_gib": torch.cuda.max_memory_allocated() / GIB}
