"""The process group started by torchrun: rank and size, all-reduce, all-gather and broadcast.

All ranks run the same program on the same numbers. The work and its distribution follow from the config, its seed and
the rank number; no rank coordinates the others. With a single process every operation returns its own input.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

SumOverProcesses = Callable[[Tensor], Tensor]  # sums a tensor over all training processes

ALL_REDUCE_ELEMENTS = 25 * 2**20  # elements per all-reduce: limits the memory of the flat copy
COLLECTIVE_TIMEOUT = timedelta(minutes=60)  # ranks wait this long for the slowest rollout, then all fail


@dataclass(frozen=True)
class ProcessGroup:
    """A process group seen from rank `rank` of `world_size`."""

    rank: int = 0
    world_size: int = 1

    @property
    def is_rank_zero(self) -> bool:
        """True for rank 0, which writes files and prints."""
        return self.rank == 0

    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        """Replaces each tensor by its sum over all ranks (all-reduce), in place. The result is bit-identical on all
        ranks."""
        if self.world_size == 1:
            return
        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.flatten() for tensor in bucket])
            dist.all_reduce(flat)
            for tensor, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
                tensor.copy_(part.view_as(tensor))

    def all_gather(self, value: Any) -> list[Any]:
        """Returns every rank's `value` (any picklable object), in order of rank (all-gather)."""
        if self.world_size == 1:
            return [value]
        things: list[Any] = [None] * self.world_size
        dist.all_gather_object(things, value)
        return things

    def broadcast(self, value: Any) -> Any:
        """Returns rank 0's `value` (broadcast)."""
        return self.all_gather(value if self.is_rank_zero else None)[0]

    def any_rank(self, flag: bool) -> bool:
        """Returns whether `flag` is true on any rank."""
        return any(self.all_gather(flag))


SINGLE_PROCESS = ProcessGroup()


def join_process_group() -> ProcessGroup:
    """Returns this process's group; initialises torch.distributed at the first call. Size 1 if torchrun did not start
    the process."""
    size = int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1
    if size == 1:
        return SINGLE_PROCESS
    if not dist.is_initialized():
        _join(size)
    return ProcessGroup(dist.get_rank(), size)


def _join(size: int) -> None:
    if os.environ.get("LOCAL_WORLD_SIZE") == str(size):  # single machine: its host name may not resolve
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if os.uname().sysname == "Darwin" else "lo")
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=COLLECTIVE_TIMEOUT)


def leave_process_group() -> None:
    """Destroys the process group that `join_process_group` initialised."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yields groups of tensors of one dtype and device with at most `ALL_REDUCE_ELEMENTS` elements together (a single
    tensor may exceed it)."""
    part: list[Tensor] = []
    size = 0
    for tensor in tensors:
        other = part and (tensor.dtype, tensor.device) != (part[0].dtype, part[0].device)
        if part and (other or size + tensor.numel() > ALL_REDUCE_ELEMENTS):
            yield part
            part, size = [], 0
        part.append(tensor)
        size += tensor.numel()
    if part:
        yield part


def single_process_sum(x: Tensor) -> Tensor:
    """Returns `x`: the sum over a single process."""
    return x


@dataclass(frozen=True)
class GradientSync:
    """Gradient synchronisation of several processes that train the same networks; this process is `rank`. With one
    process it does nothing."""

    all_reduce: SumOverProcesses = single_process_sum
    num_processes: int = 1
    rank: int = 0

    def all_ready(self, ready: bool) -> bool:
        """Returns whether `ready` is true in every process: they average their gradients, so all must take part in an
        update."""
        return bool(self.all_reduce(torch.tensor([float(ready)])) == self.num_processes)
