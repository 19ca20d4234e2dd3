"""Per-worker counters of work done outside the run's own process, written to workers.jsonl at most every
`REPORT_INTERVAL_S` seconds.

    worker_stats.count("env server", "host1:50051", done=1)
    worker_stats.count("local worker", "process 4711 on box", lost=1, why="exit code -9, SIGKILL")
    worker_stats.take_report()  # [{"worker": "env server host1:50051", "kind": "env server", "done": 1.0, ...

`done` counts finished tasks, sessions or requests, depending on the kind of worker; `seconds` is the time they took;
`lost` counts those that were started and failed; `replays` counts episodes restored there after another server lost
them. All this depends on the machines and not on the seed, and no training depends on it.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

REPORT_INTERVAL_S = 5.0  # seconds between two reports; a loss is reported at once
COUNTERS = ("done", "seconds", "lost", "replays")


class WorkerStats:
    """Counters by worker since the last report. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reported_at = 0.0
        self._lines: dict[str, dict[str, Any]] = {}
        self._why: dict[str, str] = {}  # reason of the last loss, by worker

    def count(self, kind: str, where: str, why: str = "", **counters: float) -> None:
        """Adds to the counters of a worker, and unless it is a loss sets when the worker was last seen."""
        seen = {} if counters.get("lost") else {"seen": round(time.time(), 1)}
        self.merge([{"worker": f"{kind} {where}", "kind": kind, "where": where, **seen, **counters, "why": why}])

    def merge(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Adds counters that another process reported."""
        with self._lock:
            for line in lines:
                known = self._lines.setdefault(line["worker"], {key: line[key] for key in ("worker", "kind", "where")})
                known |= {key: known.get(key, 0.0) + line[key] for key in COUNTERS if key in line}
                if "seen" in line:
                    known["seen"] = line["seen"]
                if line.get("why"):
                    self._why[line["worker"]] = line["why"]

    def take_report(self, min_interval_s: float = REPORT_INTERVAL_S) -> list[dict[str, Any]]:
        """Returns a dict for each worker with changes since the last report, and resets the counters. Returns [] if the
        last report is less than `min_interval_s` seconds old and nothing was lost."""
        with self._lock:
            now = time.monotonic()
            if now - self._reported_at < min_interval_s and not any("lost" in line for line in self._lines.values()):
                return []
            self._reported_at, found = now, list(self._lines.values())
            self._lines = {}
            return [line | ({"why": why} if (why := self._why.get(line["worker"])) else {}) for line in found]


worker_stats = WorkerStats()  # the counters of this process


def process_label(pid: int | None = None) -> str:
    """Returns a label of this process, or of process `pid` on this machine: "process 4711 on box"."""
    return f"process {os.getpid() if pid is None else pid} on {socket.gethostname()}"
