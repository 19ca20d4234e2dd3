"""Several processes that train one set of networks: each plays its share of the games and learns from it, and all take
every step on the mean of their gradients. No weights and no moves travel, only gradients.

The first process is the one that the command line runs; it alone writes the run. The others do as it does.
"""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from palestra.learners.nets import Together
from palestra.roll import start_shielded

SLOT = 1 << 18  # numbers that a process shows the others at a time
LINE = 8  # counters apart, so that processes do not share a line of the processors' caches
PATIENCE = 2e-3  # seconds of watching before a process sleeps while it waits


class Board:
    """What each process shows the others: numbers in slots [2, processes, SLOT], and how often it has shown some.

    The two halves take turns. Who shows its n-th numbers has read the (n-1)th of all, so that nobody still reads the
    half that is written next.
    """

    def __init__(self, processes: int) -> None:
        self.slots = torch.zeros(2, processes, SLOT, dtype=torch.float64).share_memory_()
        self.counts = torch.zeros(processes * LINE, dtype=torch.int64).share_memory_()
        self.shown = 0

    def total(self, x: Tensor, rank: int) -> Tensor:
        """The sum of every process's `x`, in order of rank: the same bits everywhere."""
        flat = x.flatten()
        parts = [self._sum(part, rank) for part in flat.split(SLOT)]
        return torch.cat(parts).view_as(x).to(x.dtype)

    def _sum(self, part: Tensor, rank: int) -> Tensor:
        self.shown += 1
        half = self.slots[self.shown % 2, :, : len(part)]
        half[rank] = part
        counts = self.counts.numpy()[::LINE]
        with threading.Lock():  # orders memory, on processors that would not
            counts[rank] = self.shown
        self._wait(counts)
        with threading.Lock():
            return half.sum(0)

    def _wait(self, counts: np.ndarray) -> None:
        """Until all have shown as much. Raises RuntimeError where one of them is gone."""
        start, parent = time.perf_counter(), os.getppid()
        while counts.min() < self.shown:
            if time.perf_counter() - start > PATIENCE:
                time.sleep(1e-4)
                if lost() or os.getppid() != parent:
                    raise RuntimeError("a process that trains along has ended")


@dataclass(frozen=True)
class Place:
    """Which of `processes` this is, the file by which they find each other, and their board."""

    rank: int
    processes: int
    meeting: str
    board: Board | None = None

    def join(self) -> None:
        """Waits for all others."""
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if os.uname().sysname == "Darwin" else "lo")
        dist.init_process_group("gloo", init_method=f"file://{self.meeting}", rank=self.rank, world_size=self.processes)

    def together(self) -> Together:
        return Together(self.total, self.processes)

    def total(self, x: Tensor) -> Tensor:
        """The sum over all processes."""
        assert self.board is not None
        return self.board.total(x, self.rank)


def gather(thing: Any) -> list[Any]:
    """Every process's `thing`, in order of rank."""
    things: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(things, thing)
    return things


def start(processes: int, follow: Callable[[Place], None]) -> Place:
    """Starts all processes but the first, which is this one: each calls `follow` with its place. They end with it."""
    meeting, board = str(Path(tempfile.mkdtemp(prefix="palestra-")) / "meeting"), Board(processes)
    for rank in range(1, processes):
        worker = get_context("spawn").Process(
            target=_run, args=(Place(rank, processes, meeting, board), follow, torch.get_num_threads()), daemon=True
        )
        start_shielded(worker)
        STARTED.append(worker)
    place = Place(0, processes, meeting, board)
    place.join()
    return place


STARTED: list[BaseProcess] = []


def _run(place: Place, follow: Callable[[Place], None], threads: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the first process's to hear
    torch.set_num_threads(threads)
    place.join()
    follow(place)


def end() -> None:
    """Ends what `start` began."""
    if dist.is_initialized():
        dist.destroy_process_group()
    for worker in STARTED:
        worker.join(5)
        worker.kill()
    STARTED.clear()


def lost() -> str | None:
    """What to say of a process that died, if one did."""
    dead = [(rank, worker.exitcode) for rank, worker in enumerate(STARTED, 1) if not worker.is_alive()]
    if not dead:
        return None
    rank, code = dead[0]
    return f"training process {rank} of {len(STARTED) + 1} died (exit code {code})"
