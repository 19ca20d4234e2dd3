"""Critics: of state values, and of action values with target networks.

Shapes: `K` critics, `P` members of a stack, `R` rows, `A` numbers of an encoded action, `O` outputs.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from palestra.learners.policy_stack import StackedAdam
from palestra.nets.layers import Net
from palestra.nets.normalise import RunningNorm
from palestra.nets.seat_mapping import SeatMapping


@dataclass
class ValueCritic:
    """Critic networks for the seats of a stack. `recurrent_states` maps each batch source to the state [P, C, H] at the
    start of its next batch, for recurrent critics."""

    seat_mapping: SeatMapping
    net: Net
    optimizer: StackedAdam
    norm: RunningNorm | None
    recurrent_states: dict[int, Tensor] = field(default_factory=dict)

    def values(self, out: Tensor) -> Tensor:
        """Returns state values [...] in units of reward from the network's outputs [..., 1]."""
        return (self.norm.denormalise(out) if self.norm else out)[..., 0]


@dataclass
class CriticEnsemble:
    """The `K` critics of each policy of a stack: network k*P + p is the k-th critic of policy p. `target` is the target
    network. With `value_per_action` a critic outputs a value for each discrete action of its seat and does not take the
    action as input."""

    net: Net
    target: Net
    optimizer: StackedAdam
    num_critics: int
    value_per_action: bool

    def q_values(self, net: Net, seen: Tensor, code: Tensor) -> Tensor:
        """Returns values [K, P, R, O] float32 for inputs `seen` [P, R, ...] and encoded actions `code` [P, R, A]. O is
        1, or A with `value_per_action`."""
        x = seen if self.value_per_action else torch.cat([seen, code], -1)
        return net(x.expand(self.num_critics, *x.shape).flatten(0, 1)).unflatten(0, (self.num_critics, -1))

    def taken_q_values(self, seen: Tensor, code: Tensor) -> Tensor:
        """Returns the values [K, P, R] of the encoded actions `code` [P, R, A]."""
        q = self.q_values(self.net, seen, code)
        return (q * code).sum(-1) if self.value_per_action else q[..., 0]


def frozen_copy(net: Net) -> Net:
    """Returns a copy of the network without gradients."""
    return copy.deepcopy(net).requires_grad_(False)


@torch.no_grad()
def polyak_update(net: Net, target: Net, tau: float) -> None:
    """Polyak update: moves the parameters of `target` towards those of `net` by a share of `tau`."""
    for slow, fast in zip(target.parameters(), net.parameters(), strict=True):
        slow.lerp_(fast, tau)


@contextmanager
def frozen_parameters(net: Net) -> Iterator[None]:
    """Context in which gradients flow through `net` to its inputs but not to its parameters."""
    net.requires_grad_(False)
    try:
        yield
    finally:
        net.requires_grad_(True)
