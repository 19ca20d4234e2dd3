"""The processes that torchrun started: who this one is, sums over all, things exchanged.

All ranks run the same program on the same numbers. A rank decides nothing: what there is to do follows from the config
and its seed, and who does which part of it from the rank's number. Where there is one process, every sum is its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET = 25 * 2**20  # numbers that are summed in one go: few enough that the copy costs little memory
PATIENCE = timedelta(minutes=60)  # a rank may play its games for so long while the others wait; then all end


@dataclass(frozen=True)
class Ranks:
    """Rank `rank` of `size`."""

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the one that writes and speaks."""
        return self.rank == 0

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Makes each tensor the sum of every rank's, in place: the same bits everywhere."""
        if self.size == 1:
            return
        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.flatten() for tensor in bucket])
            dist.all_reduce(flat)
            for tensor, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
                tensor.copy_(part.view_as(tensor))

    def gather(self, thing: Any) -> list[Any]:
        """Every rank's `thing`, in order of rank."""
        if self.size == 1:
            return [thing]
        things: list[Any] = [None] * self.size
        dist.all_gather_object(things, thing)
        return things

    def told(self, thing: Any) -> Any:
        """What `thing` is on the first rank."""
        return self.gather(thing if self.first else None)[0]

    def any(self, flag: bool) -> bool:
        """Whether it is so on any rank."""
        return any(self.gather(flag))


ALONE = Ranks()


def here() -> Ranks:
    """This process among those of torchrun, joined at the first call; one alone where torchrun did not start it."""
    size = int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1
    if size == 1:
        return ALONE
    if not dist.is_initialized():
        _join(size)
    return Ranks(dist.get_rank(), size)


def _join(size: int) -> None:
    if os.environ.get("LOCAL_WORLD_SIZE") == str(size):  # one machine: its name need not mean an address
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if os.uname().sysname == "Darwin" else "lo")
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=PATIENCE)


def leave() -> None:
    """Ends what `here` joined."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one type and place at most `BUCKET` numbers at a time (one alone may have more)."""
    part: list[Tensor] = []
    size = 0
    for tensor in tensors:
        other = part and (tensor.dtype, tensor.device) != (part[0].dtype, part[0].device)
        if part and (other or size + tensor.numel() > BUCKET):
            yield part
            part, size = [], 0
        part.append(tensor)
        size += tensor.numel()
    if part:
        yield part
