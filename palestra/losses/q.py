"""Targets and losses of values of discrete actions: pure functions.

Shapes: `A` actions; `...` are rows of any shape. `share` says how much a row counts. No gradient flows through a
target.
"""

from __future__ import annotations

from torch import Tensor

NEVER = -1e9  # the value of an illegal action where the best is looked for


def best(q: Tensor, legal: Tensor | None) -> Tensor:
    """The action of highest value among the legal ones [...]; the first of equals."""
    if legal is not None:
        q = q.masked_fill(~legal[..., : q.shape[-1]], NEVER)
    return q.argmax(-1)


def value_of(q: Tensor, action: Tensor) -> Tensor:
    """The value of given actions: [..., A], [...] -> [...]."""
    return q.gather(-1, action[..., None])[..., 0]


def duelling_values(out: Tensor) -> Tensor:
    """[..., 1 + A], a value and advantages, -> values of actions [..., A]: the value plus how much better than the mean
    an action is (Wang et al., 2016, eq. 9)."""
    return out[..., :1] + out[..., 1:] - out[..., 1:].mean(-1, keepdim=True)


def next_value(judge: Tensor, chooser: Tensor, legal: Tensor | None) -> Tensor:
    """What `judge` [..., A] says of the action that `chooser` [..., A] prefers [...]. With one network as both this is
    Q-learning's maximum (Watkins, 1989); with the network in training as chooser and its slow copy as judge, double
    Q-learning (van Hasselt et al., 2016, eq. 4)."""
    return value_of(judge, best(chooser, legal))


def q_target(reward: Tensor, discount: Tensor, following: Tensor) -> Tensor:
    """What a decision turned out to be worth [...]: its reward, and the value of what follows at its discount, which is
    0 where the game terminated."""
    return (reward + discount * following).detach()


def q_loss(q: Tensor, target: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """Half the squared error, as shares of rows: the sum over all of them, and the errors [...], target less value."""
    error = target.detach() - q
    return 0.5 * (share * error.square()).sum(), error.detach()


def sequence_priority(error: Tensor, known: Tensor, eta: float = 0.9) -> Tensor:
    """How urgent stretches of time are, [T, M] -> [M]: `eta` of the largest error and the rest of the mean over known
    steps (Kapturowski et al., 2019, section 2.3)."""
    size = error.abs() * known
    mean = size.sum(0) / known.sum(0).clamp(min=1)
    return eta * size.amax(0) + (1 - eta) * mean
