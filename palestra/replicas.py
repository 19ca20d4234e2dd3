"""Several processes that train one set of networks: each plays its share of the games and learns from it, and all take
every step on the mean of their gradients. No weights and no moves travel, only gradients.

The first process is the one that the command line runs; it alone writes the run. The others do as it does.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from palestra.learners.nets import Together


@dataclass(frozen=True)
class Place:
    """Which of `processes` this is, and the file by which they find each other."""

    rank: int
    processes: int
    meeting: str

    def join(self) -> None:
        """Waits for all others."""
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if os.uname().sysname == "Darwin" else "lo")
        dist.init_process_group("gloo", init_method=f"file://{self.meeting}", rank=self.rank, world_size=self.processes)

    def together(self) -> Together:
        return Together(total, self.processes)


def total(x: Tensor) -> Tensor:
    """The sum over all processes."""
    summed = x.clone()
    dist.all_reduce(summed)
    return summed


def gather(thing: Any) -> list[Any]:
    """Every process's `thing`, in order of rank."""
    things: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(things, thing)
    return things


class Follower:
    """Stands where the run stands in the first process, and writes nothing."""

    path = Path()
    next_step = 0

    def resume(self) -> None:
        return None

    def checkpoint(
        self, step: int, write: Callable[[Path], None], info: Mapping[str, Any] | None = None, keep: bool = False
    ) -> None:
        write(Path())  # where to is what the first process says
        self.next_step = step + 1

    def log(self, *_: Any) -> None:
        """Nothing."""

    time = eval = log

    def sync(self) -> None:
        """Nothing."""


def start(processes: int, follow: Callable[[Place], None]) -> Place:
    """Starts all processes but the first, which is this one: each calls `follow` with its place. They end with it."""
    meeting = str(Path(tempfile.mkdtemp(prefix="palestra-")) / "meeting")
    for rank in range(1, processes):
        worker = get_context("spawn").Process(
            target=_run, args=(Place(rank, processes, meeting), follow, torch.get_num_threads()), daemon=True
        )
        worker.start()
        STARTED.append(worker)
    place = Place(0, processes, meeting)
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
