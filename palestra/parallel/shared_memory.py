"""Data-parallel training: several processes train the same networks, each on its own games, and all apply the mean
gradient.

Only gradients are exchanged, no weights and no transitions. Rank 0 is the process that the command line started; only
it writes the run. The others execute the same steps.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from palestra.core.failures import RunFailed, is_out_of_memory
from palestra.parallel.process_group import ProcessGroup
from palestra.parallel.processes import exit_reason, join_or_kill, leave_signals_to_parent, start_process
from palestra.parallel.torch_group import TorchGroup, choose_loopback

T = TypeVar("T")

CHUNK_ELEMENTS = 1 << 18  # elements summed at a time
COUNTER_STRIDE = 8  # int64 elements between two counters, so that no two processes write to the same cache line
EXIT_DELAY_S = 2.0  # from the end of a process's connections to its exit code
BUSY_WAIT_S = 2e-3  # seconds of busy waiting before a process begins to sleep between checks


class SharedMemoryAllReduce:
    """All-reduce of float64 sums in shared memory, for processes on one machine.

    `chunks` [2, processes, CHUNK_ELEMENTS] float64 holds each process's chunk, `counts` how many chunks each process
    has written. The two halves of `chunks` alternate: a process that writes chunk n has read chunk n - 1 of all
    processes, so no process still reads the half that is written next.
    """

    def __init__(self, processes: int) -> None:
        self.chunks = torch.zeros(2, processes, CHUNK_ELEMENTS, dtype=torch.float64).share_memory_()
        self.counts = torch.zeros(processes * COUNTER_STRIDE, dtype=torch.int64).share_memory_()
        self.num_chunks = 0

    def all_reduce(self, x: Tensor, rank: int) -> Tensor:
        """Returns the sum of all processes' `x`, of the same shape, dtype and device, summed in float64 in rank order:
        bit-identical in every process.

        Raises RuntimeError if another process has ended.
        """
        flat = x.flatten()
        parts = [self._sum(part, rank) for part in flat.split(CHUNK_ELEMENTS)]
        return torch.cat(parts).view_as(x).to(x)

    def _sum(self, part: Tensor, rank: int) -> Tensor:
        self.num_chunks += 1
        half = self.chunks[self.num_chunks % 2, :, : len(part)]
        half[rank] = part
        counts = self.counts.numpy()[::COUNTER_STRIDE]
        with threading.Lock():  # a memory barrier, needed on processors with weak memory ordering
            counts[rank] = self.num_chunks
        self._wait(counts)
        with threading.Lock():
            return half.sum(0)

    def _wait(self, counts: np.ndarray) -> None:
        """Waits until all processes have written as many chunks. Raises RuntimeError if one of them has ended."""
        start = time.perf_counter()
        parent = os.getppid()
        while counts.min() < self.num_chunks:
            if time.perf_counter() - start > BUSY_WAIT_S:
                time.sleep(1e-4)
                if dead_process_message() or os.getppid() != parent:
                    raise RuntimeError("another training process has ended")


@dataclass(frozen=True, kw_only=True)
class SharedMemoryGroup(TorchGroup):
    """Processes of one machine, which meet at `rendezvous_file` and sum in shared memory."""

    rendezvous_file: str
    all_reducer: SharedMemoryAllReduce

    def join(self) -> None:
        """Joins the gloo group once all have joined. Raises RuntimeError if another process has ended."""
        self.all_reduce(torch.zeros(1))  # the group's own start would wait half an hour for a process that died
        choose_loopback()
        dist.init_process_group(
            "gloo", init_method=f"file://{self.rendezvous_file}", rank=self.rank, world_size=self.world_size
        )

    def all_reduce(self, x: Tensor) -> Tensor:
        return self.all_reducer.all_reduce(x, self.rank)

    def all_ranks(self, flag: bool) -> bool:
        return bool(self.all_reduce(torch.tensor([float(flag)])) == self.world_size)  # called before every update

    @contextmanager
    def explain_lost_rank(self, resume: str) -> Iterator[None]:
        with explain_dead_process(resume):
            yield

    def leave(self) -> None:
        stop_processes()


def start_processes(processes: int, run_rank: Callable[[ProcessGroup], None]) -> ProcessGroup:
    """Starts the processes of rank 1 and above and returns rank 0, which is this process.

    Each new process calls `run_rank` with its rank. They end when this process ends. Raises RunFailed if one of them
    dies at its start.
    """
    folder = tempfile.mkdtemp(prefix="palestra-")
    all_reducer = SharedMemoryAllReduce(processes)
    ranks = [
        SharedMemoryGroup(
            rank=rank, world_size=processes, rendezvous_file=f"{folder}/rendezvous", all_reducer=all_reducer
        )
        for rank in range(processes)
    ]
    weakref.finalize(ranks[0], shutil.rmtree, folder, ignore_errors=True)
    for rank in ranks[1:]:
        CHILD_PROCESSES.append(start_process(_run, (rank, run_rank, torch.get_num_threads()), daemon=True))
    with explain_dead_process():
        ranks[0].join()
    return ranks[0]


CHILD_PROCESSES: list[BaseProcess] = []


def _run(rank: SharedMemoryGroup, run_rank: Callable[[ProcessGroup], None], threads: int) -> None:
    leave_signals_to_parent()
    torch.set_num_threads(threads)
    try:
        rank.join()
        run_rank(rank)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        sys.exit(f"training process {rank.rank} is out of memory: {error}")


def stop_processes() -> None:
    """Leaves the group and ends the processes that this one started; kills those that run after 5 s."""
    if dist.is_initialized():
        dist.destroy_process_group()
    for worker in CHILD_PROCESSES:
        join_or_kill(worker, 5.0)
    CHILD_PROCESSES.clear()


@contextmanager
def explain_dead_process(resume: str = "palestra train --resume") -> Iterator[None]:
    """Context that turns a lost connection into RunFailed, with the dead process and the command `resume`."""
    try:
        yield
    except RuntimeError as error:
        wait([worker.sentinel for worker in CHILD_PROCESSES], EXIT_DELAY_S)
        if not (what := dead_process_message()):
            raise
        raise RunFailed(f"{what}; resume from the last checkpoint: {resume}") from error


def dead_process_message() -> str | None:
    """Returns a message about the first process that died, or None."""
    dead = [(rank, worker.exitcode) for rank, worker in enumerate(CHILD_PROCESSES, 1) if not worker.is_alive()]
    if not dead:
        return None
    rank, code = dead[0]
    return f"training process {rank} of {len(CHILD_PROCESSES) + 1} died ({exit_reason(code)})"
