"""System status of a run: processes, workers, queues, failures and disk use."""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from palestra.dashboard.catalog import CatalogRun
from palestra.dashboard.logs import MetricLog
from palestra.dashboard.run_status import disk_usage, held_locks, phase_keys
from palestra.runs.worker_stats import COUNTERS
from palestra.types import TEAM

MAX_ERRORS = 20  # distinct errors that are listed, the most frequent first
SAMPLE_S = 0.1  # seconds over which CPU use is measured


def system_status(run: CatalogRun) -> dict[str, Any]:
    """Returns local processes, this machine's load, workers, queues, newest timings, failures, disk use in bytes, and
    meta.json."""
    lock = run.file(".lock")
    pid = held_locks().get(lock.stat().st_ino) if lock.exists() else None
    table, missing = run.episodes.table()
    return {
        "process": pid,
        "processes": process_table([pid, *descendant_pids(pid)]) if pid else [],
        "machine": machine_info(),
        "workers": worker_rows(run.workers),
        "queues": queue_metrics(run),
        "timings": {name: _seconds(line) for name, line in run.timings.last_by_name().items()},
        "phases": phase_keys(run.timings),
        "failures": failure_counts(table),
        "unread": missing,
        "broken": {str(step): why for step, why in run.episodes.unreadable.items()},
        "torn": {
            log.path.name: log.num_unparsed
            for log in (run.metrics, run.timings, run.evals, run.workers)
            if log.num_unparsed
        },
        "disk": disk_usage(run.path),
        "meta": {key: value for key, value in run.meta.items() if key not in ("command", "config", "changed")},
        "command": [str(word) for word in run.meta.get("command") or []],
    }


def worker_rows(log: MetricLog) -> list[dict[str, Any]]:
    """Returns one dict per worker: sums of its counters over the whole run, when it last finished something (`seen`,
    Unix time in seconds, None for never), and the reason of its last loss."""
    return [
        {
            "kind": str(last.get("kind", "")),
            "where": str(last.get("where", name)),
            **{key: float(log.column(name, key)[1].sum()) for key in COUNTERS},
            "seen": float(seen.max()) if len(seen := log.column(name, "seen")[1]) else None,
            "why": str(last.get("why", ""))[:2000],
        }
        for name, last in log.last_by_name().items()
    ]


def _seconds(line: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in line.items() if key != "policy"}


def queue_metrics(run: CatalogRun) -> dict[str, float]:
    """Returns the number of buffered episodes, their staleness, and the seconds that training waited."""
    found: dict[str, float] = {}
    buffer = run.path / "buffer"
    if buffer.is_dir():
        found["episodes played ahead"] = float(sum(1 for path in buffer.rglob("*") if path.is_file()))
    for line in run.metrics.last_by_name().values():
        for key in ("staleness", "staleness_max"):
            if key in line:
                found[key] = max(found.get(key, 0.0), float(line[key]))
    waited = run.timings.last_by_name().get(TEAM, {}).get("wait_s")
    return found | ({"wait_s": float(waited)} if waited is not None else {})


def failure_counts(table: Any) -> list[dict[str, Any]]:
    """Returns the most frequent errors of failed episodes, with count and the latest occurrence."""
    if "error" not in table.column_names:
        return []
    failed = table.select(["step", "episode", "error"]).filter(pc.is_valid(table["error"])).to_pylist()
    counts = Counter(row["error"] for row in failed)
    newest = {row["error"]: row for row in failed}
    return [
        {"error": error[:2000], "count": count, "step": newest[error]["step"], "episode": newest[error]["episode"]}
        for error, count in counts.most_common(MAX_ERRORS)
    ]


def process_table(pids: list[int]) -> list[dict[str, Any]]:
    """Returns `process_info` of each process and, where known, `cpu`: the cores that it used over the last
    `SAMPLE_S` seconds, during which this call sleeps."""
    before, began = [cpu_seconds(pid) for pid in pids], time.monotonic()
    time.sleep(SAMPLE_S)
    seconds = time.monotonic() - began
    rows = []
    for pid, earlier in zip(pids, before, strict=True):
        now = cpu_seconds(pid)
        used = {} if now is None or earlier is None else {"cpu": max(0.0, now - earlier) / seconds}
        rows.append(process_info(pid) | used)
    return rows


def cpu_seconds(pid: int) -> float | None:
    """Returns the CPU seconds, user and system, that a process has used (field 14 and 15 of /proc/PID/stat); None
    without /proc or the process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None


def machine_info() -> dict[str, float | None]:
    """Returns the machine's cores, load of the last minute, memory and available memory in bytes; None where the system
    does not tell."""
    try:
        rows = dict(row.split(":", 1) for row in Path("/proc/meminfo").read_text().splitlines() if ":" in row)
        sizes = {key: int(rows[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable")}
    except (OSError, ValueError, KeyError):
        sizes = {}
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    memory = {"memory": sizes.get("MemTotal"), "available": sizes.get("MemAvailable")}
    return {"cores": os.cpu_count(), "load": load, **memory}


def process_info(pid: int) -> dict[str, Any]:
    """Returns name, resident memory (bytes) and number of threads of a process from /proc; only the pid without
    /proc."""
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
