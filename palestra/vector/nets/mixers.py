"""Value mixers: networks that combine the seats' values into one team value.

Shapes: `R` rows, `J` seats, `A` actions, `S` numbers of state, `E` units, `K` attention heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from palestra.vector.nets.dense import MLP, Linear
from palestra.vector.nets.layers import make_generators

SMALLEST_WEIGHT = 1e-10  # keeps weights positive
STATE_SHARE = 0.3  # initial gain of the state in mixing weights, relative to their bias


@dataclass(frozen=True)
class SeatValues:
    """Inputs of a mixer: values `q [R, J]` of the seats' actions. Only QPLEX reads `best [R, J]`, the values of the
    best legal actions, and the one-hot `actions [R, J * A]`. A seat that does not act has zeros."""

    q: Tensor
    best: Tensor | None = None
    actions: Tensor | None = None


class VDNMixer(nn.Module):
    """Value decomposition networks (Sunehag et al., 2018): the sum of the seats' values."""

    def forward(self, values: SeatValues, state: Tensor) -> Tensor:
        """Returns team values [R]; ignores the state [R, S]."""
        return values.q.sum(-1)


def fill_bias(net: nn.Module, value: float) -> None:
    """Sets the last bias of a network that generates mixing weights, so that an untrained mixer is
    near VDN. With a bias of 0 the weights in a state of zeros would be 0 and pass no gradient."""
    assert isinstance(net, MLP) and isinstance(net.layers[-1], Linear)
    nn.init.constant_(net.layers[-1].bias, value)


class QMIXMixer(nn.Module):
    """QMIX mixer (Rashid et al., 2018, section 4): a network with one hidden layer of `units` ELUs whose weights are
    generated from the state. The weights are nonnegative, so the team value never decreases in a seat's value and the
    seats' best actions form the best joint action. Biases may have any sign; the last one comes from a network with a
    ReLU layer. With `monotonic=False` the weights may have any sign too (FACMAC-nonmonotonic, Peng et al., 2021,
    section 4.2).

    Before training, the team value is near the sum of the seats' values. With `near_sum=False` its slope grows with the
    size of the state's numbers. Parameters have a leading dimension of one member, as in stacks.
    """

    def __init__(
        self, seats: int, state: int, units: int, seed: int, *, monotonic: bool = True, near_sum: bool = True
    ) -> None:
        super().__init__()
        self.seats = seats
        self.units = units
        self.monotonic = monotonic
        generators = make_generators([seed])
        biases = (1.0, 1 / units)
        gains = [1.0, 1.0]
        if near_sum:
            biases = (units**-0.5, units**-0.5)
            gains = [STATE_SHARE * bias for bias in biases]
        outputs = (seats * units, units)
        self.weights = nn.ModuleList(
            MLP(state, [], "relu", generators, size, gain=gain) for size, gain in zip(outputs, gains, strict=True)
        )
        self.bias = MLP(state, [], "relu", generators, units)
        self.last = MLP(state, [units], "relu", generators, 1)
        for make, bias in zip(self.weights, biases, strict=True):
            fill_bias(make, bias)

    def forward(self, values: SeatValues, state: Tensor) -> Tensor:
        """Returns team values [R] in states [R, S]."""
        first, second = (make(state[None])[0] for make in self.weights)
        if self.monotonic:
            first = first.abs()
            second = second.abs()
        hidden = torch.einsum("rj,rje->re", values.q, first.view(-1, self.seats, self.units))
        hidden = torch.nn.functional.elu(hidden + self.bias(state[None])[0])
        return (hidden * second).sum(-1) + self.last(state[None])[0, :, 0]


class QPLEXMixer(nn.Module):
    """QPLEX mixer (Wang et al., 2021, eqs. 9 to 11): the sum of the seats' values, scaled and shifted by the state,
    plus the sum of their advantages, weighted by the state and the joint action. The weights are positive, so the
    seats' best actions form the best joint action. Any team value with that property can be represented.

    As in the authors' code, advantages pass no gradient to the seats' networks. Parameters have a leading dimension of
    one member, as in stacks.
    """

    def __init__(self, seats: int, actions: int, state: int, units: int, heads: int, seed: int) -> None:
        super().__init__()
        self.seats = seats
        self.heads = heads
        generators = make_generators([seed])
        self.scale, self.shift = (MLP(state, [units], "relu", generators, seats) for _ in range(2))
        self.key = MLP(state, [units], "relu", generators, heads)
        self.by_seat = MLP(state, [units], "relu", generators, heads * seats)
        self.by_action = MLP(state + seats * actions, [units], "relu", generators, heads * seats)
        fill_bias(self.scale, 1)
        fill_bias(self.key, 4 / heads)  # both sigmoids are near 0.5 before training, so the weights are near 1

    def forward(self, values: SeatValues, state: Tensor) -> Tensor:
        """Returns team values [R] in states [R, S]."""
        assert values.best is not None and values.actions is not None
        scale = self.scale(state[None])[0].abs() + SMALLEST_WEIGHT
        advantages = (scale * (values.q - values.best)).detach()
        shifted = scale * values.q + self.shift(state[None])[0]
        weights = self.advantage_weights(values.actions, state)
        return (shifted + (weights - 1) * advantages).sum(-1)

    def advantage_weights(self, actions: Tensor, state: Tensor) -> Tensor:
        """Returns the positive weights of the seats' advantages: joint actions [R, J * A], states [R, S] -> [R, J]."""
        shape = (-1, self.heads, self.seats)
        key = self.key(state[None])[0].abs() + SMALLEST_WEIGHT
        by_seat = self.by_seat(state[None])[0].view(shape).sigmoid()
        by_action = self.by_action(torch.cat([state, actions], -1)[None])[0].view(shape).sigmoid()
        weights: Tensor = torch.einsum("rk,rkj,rkj->rj", key, by_seat, by_action)
        return weights
