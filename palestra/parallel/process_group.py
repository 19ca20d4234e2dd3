"""Processes that run the same program together: all-reduce, all-gather and broadcast.

All ranks run the same program on the same numbers. The work and its distribution follow from the config, its seed and
the rank number; no rank coordinates the others. torchrun starts them (`torch_group.py`), or they are processes of one
machine (`shared_memory.py`). This module loads no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

SumOverProcesses = Callable[["Tensor"], "Tensor"]  # sums a tensor over all training processes


class ProcessGroup:
    """Rank `rank` of `world_size` processes; here a single one, whose operations return their inputs."""

    rank: int = 0
    world_size: int = 1

    @property
    def is_rank_zero(self) -> bool:
        """True for rank 0, which writes files and prints."""
        return self.rank == 0

    def all_reduce(self, x: Tensor) -> Tensor:
        """Returns the sum of `x` over all ranks, bit-identical on all of them; may write it to `x`."""
        return x

    def all_gather(self, item: T) -> list[T]:
        """Returns every rank's `item` (any picklable object), in order of rank."""
        return [item]

    def broadcast(self, item: T) -> T:
        """Returns rank 0's `item`."""
        return self.all_gather(item)[0]

    def any_rank(self, flag: bool) -> bool:
        """Returns whether `flag` is true on any rank."""
        return any(self.all_gather(flag))

    def all_ranks(self, flag: bool) -> bool:
        """Returns whether `flag` is true on every rank."""
        return all(self.all_gather(flag))

    def explain_lost_rank(self, resume: str) -> AbstractContextManager[None]:
        """Context that turns the error of a lost connection into one that says which process ended, as far as it is
        known; `resume` is the command that continues the run."""
        return nullcontext()

    def leave(self) -> None:
        """Leaves the group; ends the processes that this one started for it."""


SINGLE_PROCESS = ProcessGroup()
