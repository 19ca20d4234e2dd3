"""Tensors on the device of a run: cached constants, random numbers, and a rollout as tensors.

Only `to_arrays` and `numbers_of` wait for the device: they copy results to the CPU, all at once.

Shapes: `T` steps, `B` games, `N` seats, `F` ended games, `A` actions, `S` numbers of state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from palestra.core.types import RolloutBatch

CPU = torch.device("cpu")


@cache
def constant(numbers: tuple[Any, ...], device: torch.device) -> Tensor:
    """Returns nested tuples of integers as an int64 tensor. It is cached and must not be changed."""
    return torch.tensor(numbers, dtype=torch.int64).to(device)


@cache
def identity(size: int, device: torch.device) -> Tensor:
    """Returns the identity matrix [size, size] float32. It is cached and must not be changed."""
    return torch.eye(size).to(device)


def as_tensor(x: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """Returns an array as a tensor on `device`; on the CPU it shares the array's memory."""
    tensor = torch.as_tensor(x)
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)


def pinned_zeros(shape: tuple[int, ...], dtype: np.dtype | type) -> np.ndarray:
    """Returns an array of zeros in page-locked memory, which is copied to a GPU faster and without waiting for it."""
    zeros: np.ndarray = torch.zeros(shape, dtype=torch.from_numpy(np.zeros(0, dtype)).dtype, pin_memory=True).numpy()
    return zeros


def to_arrays(actions: Tensor, logp: Tensor | None) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns actions [B, S, ...] (integers or float32) and log-probabilities [B, S] float32 (None: none) as arrays.
    From a device other than the CPU both are copied at once, 32 bits per number, and integers become int32."""
    if logp is None:
        if not actions.is_floating_point() and not actions.is_cpu:
            actions = actions.int()
        return actions.cpu().numpy(), None
    if actions.is_cpu:
        return actions.numpy(), logp.numpy()
    dtype: Any = np.float32
    if not actions.is_floating_point():
        actions = actions.int()
        dtype = np.int32
    bits = actions.view(torch.int32).reshape(*logp.shape, -1)  # one number, or several, per action
    both = torch.cat([bits, logp.view(torch.int32)[..., None]], -1).cpu().numpy()
    chosen = np.ascontiguousarray(both[..., :-1]).view(dtype).reshape(actions.shape)
    return chosen, np.ascontiguousarray(both[..., -1]).view(np.float32)


def numbers_of(lines: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Returns `lines` of metrics with numbers in place of scalar tensors on another device, copied
    all at once. Returns `lines` itself if the first line has no such tensor."""
    if not lines or not any(isinstance(value, Tensor) and not value.is_cpu for value in lines[0].values()):
        return lines
    values = filter(torch.is_tensor, chain.from_iterable(line.values() for line in lines))
    numbers = iter(torch.stack([value.detach().float() for value in values]).tolist())
    changed = []
    for line in lines:
        changed.append({key: next(numbers) if torch.is_tensor(value) else value for key, value in line.items()})
    return changed


def all_known(mask: Tensor) -> bool:
    """Returns whether a mask is known to be true everywhere. On devices other than the CPU this is False, since reading
    the mask would wait for the device: the caller then applies a mask that may change nothing."""
    return mask.is_cpu and bool(mask.all())


# ---- random numbers: drawn on the generator's device, returned on the device of `x`


def make_generator(device: torch.device, seed: int) -> torch.Generator:
    """Returns a seeded generator, on `device` if it is a GPU and otherwise on the CPU. The same
    seed gives different numbers on the two."""
    return torch.Generator(device if device.type == "cuda" else CPU).manual_seed(seed)


def normal_like(x: Tensor, generator: torch.Generator) -> Tensor:
    """Returns standard normal numbers in the shape of x."""
    if x.is_cpu:
        return torch.empty_like(x).normal_(generator=generator)
    return torch.empty_like(x, device=generator.device).normal_(generator=generator).to(x.device)


def exponential_like(x: Tensor, generator: torch.Generator) -> Tensor:
    """Returns standard exponential numbers in the shape of x."""
    if x.is_cpu:
        return torch.empty_like(x).exponential_(generator=generator)
    return torch.empty_like(x, device=generator.device).exponential_(generator=generator).to(x.device)


def uniform(shape: Sequence[int], generator: torch.Generator, device: torch.device) -> Tensor:
    """Returns numbers from 0 to 1, float32."""
    return torch.rand(*shape, generator=generator, device=generator.device).to(device)


# ---- rollouts


@dataclass(frozen=True)
class RolloutTensors:
    """A `RolloutBatch` as tensors on one device, with the same names, shapes and dtypes.
    `end_index` are the step and the game of every game end [F]."""

    obs: Tensor
    agent_mask: Tensor
    actions: Tensor
    logp: Tensor
    rewards: Tensor
    is_first: Tensor
    end_index: tuple[Tensor, Tensor]
    final_obs: Tensor
    seats_terminated: Tensor
    seats_done: Tensor
    action_mask: Tensor | None = None
    state: Tensor | None = None
    final_state: Tensor | None = None
    seat_terminated: Tensor | None = None
    recurrent_state: dict[str, Tensor] = field(default_factory=dict)
    worker: int = 0

    @classmethod
    def of(cls, batch: RolloutBatch, device: torch.device = CPU) -> RolloutTensors:
        """Returns the tensors of a batch: on the CPU in its memory, elsewhere copied once."""

        def to_device(x: np.ndarray | None) -> Any:
            return None if x is None else as_tensor(x, device)

        memories = {name: h.to(device) for name, h in batch.recurrent_state.items() if isinstance(h, Tensor)}
        names = ("obs", "agent_mask", "actions", "logp", "rewards", "is_first", "final_obs")
        optional = ("action_mask", "state", "final_state", "seat_terminated", "seats_terminated", "seats_done")
        times, games = batch.end_index
        return cls(
            **{name: to_device(getattr(batch, name)) for name in (*names, *optional)},
            end_index=(to_device(times), to_device(games)),
            recurrent_state=memories,
            worker=batch.worker,
        )

    def spread_ends(self, values: Tensor) -> Tensor:
        """Returns values [F, N] after the ends of games as [T, B, N]: 0 elsewhere, and for seats that terminated, even
        if the game was truncated for the others."""
        spread = torch.zeros_like(self.rewards)
        spread[self.end_index] = torch.where(self.seats_terminated[self.end_index], 0.0, values)
        return spread

    def last_action_masks(self) -> Tensor | None:
        """Returns the action masks [F, N, A] of each seat's last decision before the ends of games; for a seat without
        a decision in the batch, the mask of its first step. None: every action is legal."""
        if self.action_mask is None:
            return None
        times, games = self.end_index
        steps = torch.arange(len(self.agent_mask), device=times.device)[:, None, None]
        last = torch.where(self.agent_mask, steps, 0).cummax(0).values
        seats = torch.arange(last.shape[-1], device=times.device)
        return self.action_mask[last[times, games], games[:, None], seats]
