"""Memory and CPU time of processes, read from /proc (Linux), the growth of memory, and statistics of durations."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

Curve = list[tuple[float, float]]  # seconds since the start, MB of a process


@dataclass
class SoakResult:
    """The result of one part: figures for the JSON line, headings and rows of a table, memory curves by process
    group."""

    figures: dict[str, float]
    heads: Sequence[str]
    rows: Sequence[tuple[str, ...]]
    curves: dict[str, Curve] = field(default_factory=dict)


class Durations:
    """A histogram of durations in steps of half a percent, from a microsecond to a day. Its size is fixed, whereas a
    list of durations would grow within the memory that is watched."""

    LEAST, STEP = 1e-6, 1.005

    def __init__(self) -> None:
        self._counts = np.zeros(1 + math.ceil(math.log(86_400 / self.LEAST, self.STEP)), np.int64)

    def add(self, seconds: float) -> None:
        place = math.log(max(seconds, self.LEAST) / self.LEAST, self.STEP)
        self._counts[min(round(place), len(self._counts) - 1)] += 1

    def __len__(self) -> int:
        return int(self._counts.sum())

    def percentile(self, share: float) -> float:
        """Returns the duration in seconds that `share` percent of all do not exceed, within half a percent."""
        place = np.searchsorted(np.cumsum(self._counts), len(self) * share / 100)
        return float(self.LEAST * self.STEP**place)


class MemoryWatch:
    """Context manager whose thread reads the memory of process groups every `interval_s` seconds.

    `groups` returns the process ids of each group, by its name; a curve has the mean over the processes of its group.
    Memory is anonymous: pages of files and of Ray's object store, which processes share, do not count.
    """

    def __init__(self, groups: Callable[[], Mapping[str, Sequence[int]]], interval_s: float = 1.0) -> None:
        self.groups, self.interval_s = groups, interval_s
        self.curves: dict[str, Curve] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._start = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(self.interval_s):
            now = time.monotonic() - self._start
            for name, pids in self.groups().items():
                if sizes := [size for pid in pids if (size := anonymous_mb(pid))]:
                    self.curves.setdefault(name, []).append((now, float(np.mean(sizes))))


def anonymous_mb(pid: int) -> float:
    """Returns the resident anonymous memory of a process in MB; 0 if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1000 for line in lines if line.startswith("RssAnon")), 0.0)


def cpu_seconds(pid: int) -> float:
    """Returns the CPU seconds of a process so far; 0 if it is gone."""
    try:
        numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, numbers[11:13])) / os.sysconf("SC_CLK_TCK")


def process_tree(pid: int) -> list[int]:
    """Returns the ids of a process and all that descend from it."""
    found = [pid]
    for parent in found:  # `found` grows during the loop
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            try:
                found += map(int, children.read_text().split())
            except OSError:
                continue  # it has just ended
    return found


def growth(curve: Curve) -> float:
    """Returns the relative growth over the last two thirds of a curve: the median of the last quarter of these points
    over the median of the first quarter, less 1; 0 for a curve with too few points."""
    sizes = [size for _, size in curve][len(curve) // 3 :]
    part = len(sizes) // 4
    return float(np.median(sizes[-part:]) / np.median(sizes[:part])) - 1 if part else 0.0


def at_tenths(curve: Curve) -> list[float]:
    """Returns the MB at 0, 10, ..., 100 % of a curve."""
    return [curve[round(i / 10 * (len(curve) - 1))][1] for i in range(11)] if curve else []
