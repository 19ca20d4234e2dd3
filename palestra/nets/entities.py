"""Attention over the entities of an observation, such as other agents and landmarks (Zambaldi et al., 2019): their
order does not matter, and their number may differ between seats.

Shapes: `P` members, `R` rows, `D` numbers of an arranged observation, `E` entities, `H` units.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from palestra.envs.vector.base import VectorEnv
from palestra.nets.attention import SelfAttentionBlock
from palestra.nets.dense import GAIN, Activation, Linear
from palestra.nets.on_device import all_known, constant, identity


@dataclass(frozen=True)
class EntityLayout:
    """Arrangement of observations: `own` numbers of the seat itself, then for each kind `counts[k]` entities of
    `widths[k]` numbers. `columns[seat]` are the columns of these numbers in the seat's observation, -1 for those of
    entities that it lacks; None for a seat that sees other kinds, or more."""

    own: int
    counts: tuple[int, ...]
    widths: tuple[int, ...]
    columns: tuple[tuple[int, ...] | None, ...]

    @property
    def size(self) -> int:
        """The numbers of an arranged observation, D."""
        return self.own + sum(count * width for count, width in zip(self.counts, self.widths, strict=True))

    def arrange(self, obs: Tensor, seats: Tensor) -> Tensor:
        """Returns observations [..., *seats.shape, any] of the seats with numbers `seats` as [..., *seats.shape, D],
        with zeros for entities that are missing."""
        lost = (-1,) * self.size
        columns = constant(tuple(lost if own is None else own for own in self.columns), obs.device)[seats]
        padded = nn.functional.pad(obs, (0, 1))
        index = torch.where(columns < 0, obs.shape[-1], columns)
        return padded.gather(-1, index.expand(*obs.shape[:-1], self.size))


def entity_layout(env: VectorEnv, seats: Sequence[int]) -> EntityLayout:
    """Returns the arrangement for some seats of an env. Raises ValueError if the env does not say where entities are,
    or if the seats see different kinds."""
    if not env.observation_entities:
        raise ValueError(
            f'encoder: attention needs to know the entities in observations, and env "{env.name}" does not say where '
            "they are (VectorEnv.observation_entities): use encoder: flat"
        )
    kinds = {_kinds(env, seat) for seat in seats}
    if len(kinds) > 1:
        raise ValueError(
            f"encoder: attention: {', '.join(env.seats[seat] for seat in seats)} see entities of different kinds: give "
            "each kind of seat a policy of its own"
        )
    (kind,) = kinds
    found = [[len(one.columns) for one in env.observation_entities[seat]] for seat in seats]
    counts = tuple(max(column) for column in zip(*found, strict=True))
    columns = tuple(
        _columns(env, seat, counts) if _kinds(env, seat) == kind else None for seat in range(len(env.seats))
    )
    return EntityLayout(kind[0], counts, kind[1:], columns)


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
    taken = [column for one in kinds for entity in one.columns for column in entity]
    arranged = [column for column in range(env.observation_shapes[seat][0]) if column not in set(taken)]
    for one, count in zip(kinds, counts, strict=True):
        arranged += [column for entity in one.columns for column in entity]
        arranged += [-1] * (count - len(one.columns)) * one.width
    return tuple(arranged)


class EntityEncoder(nn.Module):
    """Encodes arranged observations: [P, R, D] -> [P, R, H]. The seat itself and each entity are embedded, by kind, and
    attend to each other; the result is what becomes of the seat itself. An entity whose numbers are all zero is absent.
    Numbers after the arranged ones, such as a one-hot seat, are the seat's own."""

    def __init__(
        self,
        layout: EntityLayout,
        inputs: int,
        units: int,
        blocks: int,
        heads: int,
        activation: Activation,
        generators: Sequence[torch.Generator],
    ) -> None:
        super().__init__()
        self.layout, self.units, self.activation = layout, units, activation
        self.own = Linear(inputs - layout.size + layout.own, units, GAIN[activation], generators)
        self.kinds = nn.ModuleList(Linear(width, units, GAIN[activation], generators) for width in layout.widths)
        self.blocks = nn.ModuleList(SelfAttentionBlock(units, heads, activation, generators) for _ in range(blocks))

    def forward(self, obs: Tensor) -> Tensor:
        layout, (P, R, _) = self.layout, obs.shape
        own, entities, more = obs.split([layout.own, layout.size - layout.own, obs.shape[2] - layout.size], 2)
        tokens = [self.own(torch.cat([own, more], -1), self.activation)[:, :, None]]
        present = [torch.ones(P, R, 1, dtype=torch.bool, device=obs.device)]
        sizes = [count * width for count, width in zip(layout.counts, layout.widths, strict=True)]
        for kind, part, width in zip(self.kinds, entities.split(sizes, 2), layout.widths, strict=True):
            each = part.unflatten(2, (-1, width))  # [P, R, E, width]
            tokens.append(kind(each.flatten(1, 2), self.activation).view(*each.shape[:3], self.units))
            present.append((each != 0).any(-1))
        x, seen = torch.cat(tokens, 2), torch.cat(present, 2)
        mask = None if all_known(seen) else seen[:, :, None] | identity(seen.shape[2], seen.device).bool()
        for block in self.blocks:
            x = block(x, mask)
        return x[:, :, 0]
