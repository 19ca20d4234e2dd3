"""Action-value critics with target networks.

Shapes: `K` critics, `P` members of a stack, `R` rows, `A` numbers of an encoded action, `O` outputs.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from palestra.learners.nets import Optimizer
from palestra.nets.layers import Net


@dataclass
class Critic:
    """The `K` critics of each policy of a stack: network k*P + p is the k-th critic of policy p. `target` is the target
    network. With `branches` a critic outputs a value for each discrete action of its seat and does not take the action
    as input."""

    net: Net
    target: Net
    optimizer: Optimizer
    twins: int
    branches: bool

    def judge(self, net: Net, seen: Tensor, code: Tensor) -> Tensor:
        """Returns values [K, P, R, O] float32 for inputs `seen` [P, R, ...] and encoded actions `code` [P, R, A]. O is
        1, or A with `branches`."""
        x = seen if self.branches else torch.cat([seen, code], -1)
        return net(x.expand(self.twins, *x.shape).flatten(0, 1)).unflatten(0, (self.twins, -1))

    def of_taken(self, seen: Tensor, code: Tensor) -> Tensor:
        """Returns the values [K, P, R] of the encoded actions `code` [P, R, A]."""
        q = self.judge(self.net, seen, code)
        return (q * code).sum(-1) if self.branches else q[..., 0]


def copy_of(net: Net) -> Net:
    """Returns a copy of the network without gradients."""
    return copy.deepcopy(net).requires_grad_(False)


@torch.no_grad()
def follow(net: Net, target: Net, tau: float) -> None:
    """Polyak update: moves the parameters of `target` towards those of `net` by a share of `tau`."""
    for slow, fast in zip(target.parameters(), net.parameters(), strict=True):
        slow.lerp_(fast, tau)


@contextmanager
def held(net: Net) -> Iterator[None]:
    """Context in which gradients flow through `net` to its inputs but not to its parameters."""
    net.requires_grad_(False)
    try:
        yield
    finally:
        net.requires_grad_(True)
