"""Seat mapping: which members of a stack play which seats, and how arrays over seats become rows of the stack."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from palestra.envs.vector.base import Space, VectorEnv


@dataclass(frozen=True)
class Seating:
    """`P` members (`names`), each at `S` of `of` = N seats: `seats[p]`. All these seats have the same observation shape
    `view` and action space `space`. With `seat_id` a one-hot seat is appended to the observation."""

    names: tuple[str, ...]
    seats: tuple[tuple[int, ...], ...]
    of: int
    view: tuple[int, ...]
    space: Space
    seat_id: bool = False

    @property
    def flat(self) -> list[int]:
        """The seats of all members, in order."""
        return [seat for own in self.seats for seat in own]

    @property
    def inputs(self) -> tuple[int, ...]:
        """The shape of a member's network input."""
        return (self.view[0] + self.of,) if self.seat_id else self.view

    def take(self, array: np.ndarray | Tensor, lead: int) -> Tensor:
        """Selects the members' seats: [..., N, *rest] with `lead` dimensions before the seats -> [P, ..., S, *rest]; no
        copy if one member plays all seats in order."""
        x = torch.as_tensor(array)
        if self.flat != list(range(self.of)):
            x = x.index_select(lead, torch.tensor(self.flat))
        shape = (*x.shape[:lead], len(self.names), len(self.seats[0]), *x.shape[lead + 1 :])
        return x.reshape(shape).movedim(lead, 0)

    def observe(self, obs: np.ndarray | Tensor, lead: int) -> Tensor:
        """Returns network inputs from observations: [..., N, *padded] -> [P, ..., S, *inputs]."""
        x = self.take(obs, lead)
        if len(self.view) == 1 and x.shape[-1] != self.view[0]:
            x = x[..., : self.view[0]]
        if not self.seat_id:
            return x
        ids = torch.eye(self.of)[torch.tensor(self.seats)]  # [P, S, N]
        ids = ids.view(len(self.names), *[1] * (x.dim() - 3), len(self.seats[0]), self.of)
        return torch.cat([x, ids.expand(*x.shape[:-1], self.of)], -1)

    def put(self, rows: Tensor) -> np.ndarray:
        """Returns rows in the order of `flat`: [P, B, S, *rest] -> [B, P*S, *rest] as an array."""
        return rows.movedim(0, 1).flatten(1, 2).numpy()


def seat_stacks(env: VectorEnv, seats: dict[str, list[int]], alike: dict[str, object]) -> list[Seating]:
    """Groups policies (name -> the seats it plays) into as few stacks as possible: those with equal observation shape,
    action space, number of seats and `alike` value share one.

    Raises ValueError if a policy's seats differ in observation shape or action space.
    """
    stacks: dict[tuple, list[str]] = {}
    for name, own in seats.items():
        kinds = {(env.views[seat], env.actions[seat]) for seat in own}
        if len(kinds) > 1:
            raise ValueError(
                f"policy {name} plays {', '.join(env.seats[s] for s in own)}, which differ in what they see or may do "
                f"({'; '.join(map(str, kinds))}): give each kind of seat a policy of its own"
            )
        stacks.setdefault((*kinds.pop(), len(own), repr(alike[name])), []).append(name)
    return [
        Seating(
            tuple(names),
            tuple(tuple(seats[name]) for name in names),
            len(env.seats),
            view,
            space,
            bool(getattr(alike[names[0]], "seat_id", False)) and len(seats[names[0]]) > 1 and len(view) == 1,
        )
        for (view, space, _, _), names in stacks.items()
    ]
