"""Value mixers: networks that combine the seats' values into one team value.

Shapes: `R` rows, `J` seats, `S` numbers of state, `E` units.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from palestra.nets.layers import MLP, make_generators


class VDNMixer(nn.Module):
    """Value decomposition networks (Sunehag et al., 2018): the sum of the seats' values."""

    def forward(self, q: Tensor, state: Tensor) -> Tensor:
        """Returns team values: [R, J], state [R, S] -> [R]."""
        return q.sum(-1)


class QMIXMixer(nn.Module):
    """QMIX mixer (Rashid et al., 2018, section 4): a network with one hidden layer of `units` ELUs whose weights are
    generated from the state. The weights are nonnegative, so the team value never decreases in a seat's value and each
    seat's best action is the team's. Biases may be any number; the last one comes from a ReLU layer.

    Parameters have a leading dimension of one member, as in stacks.
    """

    def __init__(self, seats: int, state: int, units: int, seed: int) -> None:
        super().__init__()
        self.seats, self.units = seats, units
        own = make_generators([seed])
        self.weights = nn.ModuleList([MLP(state, [], "relu", own, seats * units), MLP(state, [], "relu", own, units)])
        self.bias = MLP(state, [], "relu", own, units)
        self.last = MLP(state, [units], "relu", own, 1)

    def forward(self, q: Tensor, state: Tensor) -> Tensor:
        """Returns team values: [R, J], state [R, S] -> [R]."""
        first, second = (make(state[None])[0].abs() for make in self.weights)
        hidden = torch.einsum("rj,rje->re", q, first.view(-1, self.seats, self.units))
        hidden = torch.nn.functional.elu(hidden + self.bias(state[None])[0])
        return (hidden * second).sum(-1) + self.last(state[None])[0, :, 0]
