"""Seat mapping: which members of a stack play which seats, and how arrays over seats become rows of the stack."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from palestra.envs.vector_base import Space, VectorEnv
from palestra.vector.nets.entities import EntityLayout, entity_layout
from palestra.vector.nets.images import image_layout
from palestra.vector.nets.layers import Layout
from palestra.vector.nets.on_device import constant, identity


@dataclass(frozen=True)
class SeatMapping:
    """The `P` members (`names`) of a stack and their seats: member p plays the `S` seats `seats[p]` of `num_seats` = N.
    All these seats have the same `observation_shape` and `action_space`. With `seat_id` a one-hot seat is appended to
    the observation. `layout` says where entities or images are in observations (None: neither); `observation_shape` is
    the shape of an observation whose entities are arranged."""

    names: tuple[str, ...]
    seats: tuple[tuple[int, ...], ...]
    num_seats: int
    observation_shape: tuple[int, ...]
    action_space: Space
    seat_id: bool = False
    layout: Layout | None = None

    @property
    def label(self) -> str:
        """The name of the members' common player."""
        return "+".join(self.names)

    @cached_property
    def all_seats(self) -> tuple[int, ...]:
        """The seats of all members, in order."""
        return tuple(chain.from_iterable(self.seats))

    def seat_index(self, device: torch.device) -> Tensor:
        """Returns the seats of all members, in order, int64 [P*S]."""
        return constant(self.all_seats, device)

    def one_hot_seats(self, device: torch.device) -> Tensor:
        """Returns the seats of each member as one-hot vectors [P, S, N] float32."""
        return identity(self.num_seats, device)[constant(self.seats, device)]

    @cached_property
    def _in_order(self) -> bool:
        """True if the members play all seats in order."""
        return self.all_seats == tuple(range(self.num_seats))

    @property
    def input_shape(self) -> tuple[int, ...]:
        if self.seat_id:
            return (self.observation_shape[0] + self.num_seats,)
        return self.observation_shape

    def select_seats(self, array: np.ndarray | Tensor, leading_dims: int) -> Tensor:
        """Selects the members' seats: [..., N, *rest] with `leading_dims` dimensions before the seats -> [P, ..., S,
        *rest]; no copy if one member plays all seats in order."""
        x = torch.as_tensor(array)
        if not self._in_order:
            x = x.index_select(leading_dims, constant(self.all_seats, x.device))
        shape = (*x.shape[:leading_dims], len(self.names), len(self.seats[0]), *x.shape[leading_dims + 1 :])
        return x.reshape(shape).movedim(leading_dims, 0)

    def network_inputs(self, obs: np.ndarray | Tensor, leading_dims: int) -> Tensor:
        """Returns network inputs from observations: [..., N, *padded] -> [P, ..., S, *inputs]."""
        x = self.select_seats(obs, leading_dims)
        if isinstance(self.layout, EntityLayout):
            x = self.layout.arrange(x, constant(self.seats, x.device).view(len(x), *[1] * (x.dim() - 3), -1))
        elif len(self.observation_shape) == 1 and x.shape[-1] != self.observation_shape[0]:
            x = x[..., : self.observation_shape[0]]
        if not self.seat_id:
            return x
        ids = self.one_hot_seats(x.device)
        ids = ids.view(len(self.names), *[1] * (x.dim() - 3), len(self.seats[0]), self.num_seats)
        return torch.cat([x, ids.expand(*x.shape[:-1], self.num_seats)], -1)

    def by_seat(self, rows: Tensor) -> Tensor:
        """Reorders rows, [P, T, B*S, ...] -> [T, B, P*S, ...], whose seats are in the order of `all_seats`."""
        return rows.unflatten(2, (-1, len(self.seats[0]))).movedim(0, 2).flatten(2, 3)

    def repeat_games(self, x: Tensor) -> Tensor:
        """Repeats each game's value for all of its rows: [T, B] -> [P, T, B*S]."""
        rows = x.repeat_interleave(len(self.seats[0]), 1)
        return rows.expand(len(self.names), *rows.shape)

    def in_seat_order(self, rows: Tensor) -> Tensor:
        """Returns rows in the order of `all_seats`: [P, B, S, *rest] -> [B, P*S, *rest]."""
        return rows.movedim(0, 1).flatten(1, 2)


def group_into_stacks(env: VectorEnv, seats: dict[str, list[int]], configs: dict[str, object]) -> list[SeatMapping]:
    """Groups policies (name -> the seats it plays) into as few stacks as possible: policies with equal observation
    shape, images, action space, number of seats and `configs` value share one.

    Raises ValueError if a policy's seats differ in observation shape, images or action space.
    """
    stacks: dict[tuple[Any, ...], list[str]] = {}
    layouts: dict[str, Layout | None] = {}
    for name, own in seats.items():
        arranged = entity_layout(env, own) if getattr(configs[name], "encoder", "flat") != "flat" else None
        layouts[name] = arranged or image_layout(env, own[0])
        kinds = set()
        for seat in own:
            shape = (arranged.size,) if arranged else env.observation_shapes[seat]
            kinds.add((shape, env.action_spaces[seat], *env.images_of(seat)))
        if len(kinds) > 1:
            raise ValueError(
                f"policy {name} plays {', '.join(env.seats[s] for s in own)}, which differ in observation shape or "
                f"action space ({'; '.join(map(str, kinds))}): give each kind of seat a policy of its own"
            )
        entities = arranged and (arranged.own, arranged.counts, arranged.widths)
        stacks.setdefault((*kinds.pop(), len(own), repr(configs[name]), entities), []).append(name)
    mappings = []
    for (view, space, *_), names in stacks.items():
        first = names[0]
        one_hot = bool(getattr(configs[first], "seat_one_hot", False)) and len(seats[first]) > 1 and len(view) == 1
        played = tuple(tuple(seats[name]) for name in names)
        mappings.append(SeatMapping(tuple(names), played, len(env.seats), view, space, one_hot, layouts[first]))
    return mappings
