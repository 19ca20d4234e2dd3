"""Mixing of the values of a team's seats into one team value, shared by QMIX and FACMAC.

Shapes: `P` members of a stack, `T` steps, `M` transitions or sequences, `R` rows, `J` seats that learn, `A` actions,
`G` numbers of the state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor, nn

from palestra.envs.vector_base import VectorEnv
from palestra.vector.learners.policy_stack import PolicyStack
from palestra.vector.nets.mixers import SeatValues
from palestra.vector.nets.on_device import constant


def mix_values(
    mixer: nn.Module, stacks: Sequence[PolicyStack], values: Sequence[SeatValues], agent_mask: Tensor, state: Tensor
) -> Tensor:
    """Returns the team's value [T, M] from the inputs of each stack's seats (`q` and `best` [P, T, R], `actions`
    [P, T, R, A]), the agent mask [T, M, N] and the state [T, M, G]. A seat that does not act enters with zeros."""
    seats = tuple(chain.from_iterable(stack.seat_mapping.all_seats for stack in stacks))
    acts = agent_mask[..., constant(seats, agent_mask.device)]

    def joint(parts: list[Tensor]) -> Tensor:
        """Returns [T*M, J, ...] from the stacks' [P, T, R, ...]."""
        by_seat = torch.cat([stack.seat_mapping.by_seat(own) for stack, own in zip(stacks, parts, strict=True)], 2)
        some = acts.view(*acts.shape, *[1] * (by_seat.dim() - 3))
        return torch.where(some, by_seat, 0.0).flatten(0, 1)  # a product would keep the NaN of a seat without a value

    best = [own.best for own in values if own.best is not None]
    actions = [own.actions for own in values if own.actions is not None]
    inputs = SeatValues(joint([own.q for own in values]))
    if best:
        inputs = replace(inputs, best=joint(best))
    if actions:
        inputs = replace(inputs, actions=joint(actions).flatten(1))
    mixed: Tensor = mixer(inputs, state.flatten(0, 1)).view(acts.shape[:2])
    return mixed


def check_mixer_sees_state(mixer: str, env: VectorEnv) -> None:
    """Raises ValueError if a mixer that reads the state would have to read pixels."""
    if mixer != "vdn" and not env.state_size and any(map(env.sees_image, range(len(env.seats)))):
        raise ValueError(
            f'the mixer of {mixer} cannot see the pixels of env "{env.name}", which has no global state: set mixer: vdn'
        )
