"""The process group started by torchrun."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from palestra.parallel.process_group import SINGLE_PROCESS, ProcessGroup

T = TypeVar("T")

ALL_REDUCE_ELEMENTS = 25 * 2**20  # elements per all-reduce: limits the memory of the flat copy
COLLECTIVE_TIMEOUT = timedelta(minutes=60)  # ranks wait this long for the slowest rollout, then all fail
CONNECTION_LOST_SIGNS = (
    "closed by peer",
    "reset by peer",
    "Broken pipe",
    "imed out",
    "remote process exited",
)  # substrings of torch's error messages when the connection to a rank is lost


def choose_loopback() -> None:
    """Lets gloo connect processes of one machine, whose host name may not resolve."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if os.uname().sysname == "Darwin" else "lo")


@dataclass(frozen=True)
class TorchGroup(ProcessGroup):
    """The default group of torch.distributed."""

    rank: int
    world_size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    def all_gather(self, item: T) -> list[T]:
        items: list[Any] = [None] * self.world_size
        dist.all_gather_object(items, item)
        return items

    @contextmanager
    def explain_lost_rank(self, resume: str) -> Iterator[None]:
        """Context that turns the error of a lost connection into a ValueError that explains it."""
        try:
            yield
        except RuntimeError as error:
            if not any(sign in str(error) for sign in CONNECTION_LOST_SIGNS):
                raise
            raise ValueError(
                f"another rank ended or did not answer: see its output. Resume the run under torchrun: {resume}"
            ) from error

    def leave(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def join_process_group() -> ProcessGroup:
    """Returns the group that torchrun started, joined at the first call; else a process alone."""
    size = int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1
    if size == 1:
        return SINGLE_PROCESS
    if not dist.is_initialized():
        if os.environ.get("LOCAL_WORLD_SIZE") == str(size):
            choose_loopback()
        backends = "gloo"
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
            backends = "cpu:gloo,cuda:nccl"
        dist.init_process_group(backends, timeout=COLLECTIVE_TIMEOUT)
    return TorchGroup(dist.get_rank(), size)


def sum_in_place(group: ProcessGroup, tensors: Sequence[Tensor]) -> None:
    """Replaces each tensor by its sum over all ranks of `group`."""
    if group.world_size == 1:
        return
    for bucket in _buckets(tensors):
        flat = group.all_reduce(torch.cat([tensor.flatten() for tensor in bucket]))
        for tensor, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
            tensor.copy_(part.view_as(tensor))


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yields groups of tensors of one dtype and device, each of at most `ALL_REDUCE_ELEMENTS` or one tensor."""
    part: list[Tensor] = []
    size = 0
    for tensor in tensors:
        other = part and (tensor.dtype, tensor.device) != (part[0].dtype, part[0].device)
        if part and (other or size + tensor.numel() > ALL_REDUCE_ELEMENTS):
            yield part
            part = []
            size = 0
        part.append(tensor)
        size += tensor.numel()
    if part:
        yield part
