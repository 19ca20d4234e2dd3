"""Attention over the entities of an observation, such as other agents and landmarks (Zambaldi et al., 2019), or over
the nearest entities (DGN; Jiang et al., 2020). The order of entities does not matter, and their number may differ
between seats.

Shapes: `P` members, `R` rows, `D` numbers of an arranged observation, `E` entities, `H` units.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn

from palestra.envs.vector_base import VectorEnv
from palestra.vector.nets.attention import BlockShape, SelfAttentionBlock, attention_mask
from palestra.vector.nets.dense import GAIN, Activation, Linear
from palestra.vector.nets.on_device import constant, identity


@dataclass(frozen=True)
class EntityLayout:
    """Arrangement of observations: `own` numbers of the seat itself, then for each kind k `counts[k]` entities of
    `widths[k]` numbers. `columns[seat]` are the columns of these numbers in the seat's observation, -1 for entities
    that it does not see. It is None for a seat that sees entities of other kinds, or more of them. `positions[k]` are
    the indices, among the `widths[k]` numbers, of an entity's position relative to the seat (empty: unknown)."""

    own: int
    counts: tuple[int, ...]
    widths: tuple[int, ...]
    columns: tuple[tuple[int, ...] | None, ...]
    positions: tuple[tuple[int, ...], ...] = ()

    @property
    def size(self) -> int:
        """Length of an arranged observation, D."""
        return self.own + sum(count * width for count, width in zip(self.counts, self.widths, strict=True))

    def arrange(self, obs: Tensor, seats: Tensor) -> Tensor:
        """Returns arranged observations [..., *seats.shape, D], with zeros for missing entities,
        from observations [..., *seats.shape, any] of the seats numbered `seats`."""
        lost = (-1,) * self.size
        columns = constant(tuple(of_seat or lost for of_seat in self.columns), obs.device)[seats]
        padded = nn.functional.pad(obs, (0, 1))
        index = torch.where(columns < 0, obs.shape[-1], columns)
        return padded.gather(-1, index.expand(*obs.shape[:-1], self.size))


def entity_layout(env: VectorEnv, seats: Sequence[int]) -> EntityLayout:
    """Returns the arrangement for some seats of an env. Raises ValueError if the env does not say
    which columns of observations are entities, or if the seats see entities of different kinds."""
    if not env.observation_entities:
        raise ValueError(
            f'encoder: attention and graph need the entities in observations, and env "{env.name}" does not say where '
            "they are (VectorEnv.observation_entities): use encoder: flat"
        )
    if any(map(env.images_of, seats)):
        raise ValueError(
            f'encoder: attention and graph rearrange rows of numbers, and in env "{env.name}" they begin with images: '
            "use encoder: flat"
        )
    kinds = {_kinds(env, seat) for seat in seats}
    if len(kinds) > 1:
        raise ValueError(
            f"encoder: attention, graph: {', '.join(env.seats[seat] for seat in seats)} see entities of different "
            "kinds: give each kind of seat a policy of its own"
        )
    (kind,) = kinds
    of_kind = zip(*(env.observation_entities[seat] for seat in seats), strict=True)
    counts = tuple(max(len(one.columns) for one in entities) for entities in of_kind)
    columns = tuple(
        _columns(env, seat, counts) if _kinds(env, seat) == kind else None for seat in range(len(env.seats))
    )
    positions = tuple(one.position for one in env.observation_entities[seats[0]])
    return EntityLayout(kind[0], counts, kind[1:], columns, positions)


def _kinds(env: VectorEnv, seat: int) -> tuple[int, ...]:
    """Returns how many numbers a seat sees of itself, and of an entity of each kind."""
    kinds = env.observation_entities[seat]
    of_entities = sum(len(one.columns) * one.width for one in kinds)
    return env.observation_shapes[seat][0] - of_entities, *(one.width for one in kinds)


def _columns(env: VectorEnv, seat: int, counts: Sequence[int]) -> tuple[int, ...] | None:
    """Returns the columns of a seat, or None if it sees more entities than `counts`."""
    kinds = env.observation_entities[seat]
    if any(len(one.columns) > count for one, count in zip(kinds, counts, strict=True)):
        return None
    entity_columns = set(chain.from_iterable(chain.from_iterable(one.columns for one in kinds)))
    arranged = [column for column in range(env.observation_shapes[seat][0]) if column not in entity_columns]
    for one, count in zip(kinds, counts, strict=True):
        arranged += chain.from_iterable(one.columns)
        arranged += [-1] * (count - len(one.columns)) * one.width
    return tuple(arranged)


class EntityEncoder(nn.Module):
    """Encodes arranged observations: [P, R, D] -> [P, R, H]. The seat itself and each entity are embedded, by kind, and
    attend to each other; the result is the seat's own features after the last block. An entity whose numbers are all
    zero is absent. Numbers after the arranged ones, such as a one-hot seat, belong to the seat itself.

    With `neighbours` the seat and each entity attend only to themselves and to that many nearest others (more where
    distances are equal). These are the edges of a graph, along which each block passes messages once. Raises ValueError
    if `neighbours` is set and the positions are unknown."""

    def __init__(
        self,
        layout: EntityLayout,
        inputs: int,
        units: int,
        blocks: int,
        heads: int,
        activation: Activation,
        generators: Sequence[torch.Generator],
        neighbours: int | None = None,
    ) -> None:
        super().__init__()
        dimensions = {len(position) for position in layout.positions}
        if neighbours is not None and (len(dimensions) != 1 or 0 in dimensions):
            raise ValueError(
                "graph_neighbours: the nearest entities are found by position, and the env does not say which numbers "
                "of every entity are its position (Entities.position): leave graph_neighbours out"
            )
        self.layout = layout
        self.units = units
        self.activation = activation
        self.neighbours = neighbours
        self.own = Linear(inputs - layout.size + layout.own, units, GAIN[activation], generators)
        self.kinds = nn.ModuleList(Linear(width, units, GAIN[activation], generators) for width in layout.widths)
        shape = BlockShape(units, heads, activation)
        self.blocks = nn.ModuleList(SelfAttentionBlock(shape, generators) for _ in range(blocks))

    def forward(self, obs: Tensor) -> Tensor:
        layout, (P, R, _) = self.layout, obs.shape
        self_columns, entities, more = obs.split([layout.own, layout.size - layout.own, obs.shape[2] - layout.size], 2)
        sizes = [count * width for count, width in zip(layout.counts, layout.widths, strict=True)]
        by_kind = [  # [P, R, E, width]
            rows.unflatten(2, (-1, width)) for rows, width in zip(entities.split(sizes, 2), layout.widths, strict=True)
        ]
        tokens = [self.own(torch.cat([self_columns, more], -1), self.activation)[:, :, None]]
        present = [torch.ones(P, R, 1, dtype=torch.bool, device=obs.device)]
        for kind, each in zip(self.kinds, by_kind, strict=True):
            tokens.append(kind(each.flatten(1, 2), self.activation).view(*each.shape[:3], self.units))
            present.append((each != 0).any(-1))
        x = torch.cat(tokens, 2)
        seen = torch.cat(present, 2)
        if self.neighbours is None:
            mask = attention_mask(seen)
        else:
            places = [each[..., list(at)] for each, at in zip(by_kind, layout.positions, strict=True)]
            mask = nearest(nn.functional.pad(torch.cat(places, 2), (0, 0, 1, 0)), seen, self.neighbours)
        for block in self.blocks:
            x = block(x, mask)
        return x[:, :, 0]


def nearest(places: Tensor, present: Tensor, neighbours: int) -> Tensor:
    """Returns which nodes of a graph each node attends to [P, R, E, E] bool: itself, and every
    other node `present` [P, R, E] bool that is no farther away than its `neighbours`-th nearest.
    `places` are the positions of the nodes [P, R, E, any]."""
    E = places.shape[2]
    itself = identity(E, places.device).bool()
    distances = (places[:, :, :, None] - places[:, :, None]).square().sum(-1)
    distances = distances.masked_fill(itself | ~present[:, :, None], torch.inf)
    within = distances <= distances.kthvalue(min(neighbours, E), -1, keepdim=True).values
    return itself | (within & present[:, :, None])
