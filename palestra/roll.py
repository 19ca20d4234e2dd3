"""Who does a run's work where its own process does not, and how they fare: counted at once, told now and then.

    roll.note("env server", "host1:50051", done=1)
    roll.note("local worker", "process 4711 on box", lost=1, why="its process ended with exit code -9")
    roll.lines()  # [{"worker": "env server host1:50051", "kind": "env server", "where": "host1:50051", "done": 1.0, ...

`done` counts tasks, sessions or requests, by the kind of worker; `seconds` are what they took there; `lost`, what was
begun there and came to nothing; `replays`, games brought back there that another server had lost. All this is of the
machines and not of the seed: nothing that is learned depends on it.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any

PAUSE = 5.0  # seconds between two tellings, but that a loss is told at once
FIGURES = ("done", "seconds", "lost", "replays")


class Roll:
    """What has come to pass since it was last told, by worker. For every thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._told = 0.0
        self._lines: dict[str, dict[str, Any]] = {}
        self._why: dict[str, str] = {}  # by worker, of its last loss

    def note(self, kind: str, where: str, why: str = "", **figures: float) -> None:
        """Adds to the figures of a worker; whatever is not a loss is a sign of life."""
        seen = {} if figures.get("lost") else {"seen": round(time.time(), 1)}
        self.add([{"worker": f"{kind} {where}", "kind": kind, "where": where, **seen, **figures, "why": why}])

    def add(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Adds what another process has told."""
        with self._lock:
            for line in lines:
                known = self._lines.setdefault(line["worker"], {key: line[key] for key in ("worker", "kind", "where")})
                known |= {key: known.get(key, 0.0) + line[key] for key in FIGURES if key in line}
                known |= {"seen": line["seen"]} if "seen" in line else {}
                self._why |= {line["worker"]: line["why"]} if line.get("why") else {}

    def lines(self, pause: float = PAUSE) -> list[dict[str, Any]]:
        """A line for each worker of which there is news; none where the last ones are not `pause` seconds old."""
        with self._lock:
            now = time.monotonic()
            if now - self._told < pause and not any("lost" in line for line in self._lines.values()):
                return []
            self._told, found = now, list(self._lines.values())
            self._lines = {}
            return [line | ({"why": why} if (why := self._why.get(line["worker"])) else {}) for line in found]


roll = Roll()  # of this process


def here(pid: int | None = None) -> str:
    """This process, or another of this machine, as others are told of it."""
    return f"process {os.getpid() if pid is None else pid} on {socket.gethostname()}"


def start_shielded(worker: BaseProcess) -> None:
    """Starts a worker's process so that Ctrl-C, which goes to all processes of a terminal, never reaches it, not even
    before its own first line: its parent decides when it ends."""
    resource_tracker.ensure_running()  # starting it, as the first worker would, unblocks the signal again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # a child begins with what its parent blocks
    try:
        worker.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
