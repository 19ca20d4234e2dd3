"""CPU, memory and GPU use of this process, for timings.jsonl."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from palestra.core.types import Metrics

GIB = 2**30  # bytes
STATM = Path("/proc/self/statm")


class ResourceMeter:
    """Measures this process, without its children, between calls of `metrics`."""

    def __init__(self) -> None:
        self._before = time.monotonic(), time.process_time()

    def metrics(self) -> Metrics:
        """Returns `cpu_percent` since the last call (100: one core busy all the time), `rss_gib` (resident memory now;
        absent without /proc) and, where PyTorch uses a GPU, `gpu_memory_gib` (the most that it has allocated so far,
        on the current device)."""
        now = time.monotonic(), time.process_time()
        wall_s, cpu_s = now[0] - self._before[0], now[1] - self._before[1]
        self._before = now
        found = {"cpu_percent": 100 * cpu_s / wall_s} if wall_s > 0 else {}
        return found | _resident_memory() | _gpu_memory()


def _resident_memory() -> Metrics:
    try:
        pages = int(STATM.read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return {}
    return {"rss_gib": pages * os.sysconf("SC_PAGE_SIZE") / GIB}


def _gpu_memory() -> Metrics:
    torch = sys.modules.get("torch")  # a run that has not loaded it uses no GPU
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return {}
    return {"gpu_memory_gib": torch.cuda.max_memory_allocated() / GIB}
