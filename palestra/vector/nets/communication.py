"""Communication between the seats of a team (CommNet; Sukhbaatar et al., 2016).

Shapes: `P` members, `R` = G*S rows, `G` games, `S` seats of a team, `H` units.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from palestra.vector.nets.dense import GAIN, Activation, Linear


class Communication(nn.Module):
    """Rounds of communication: [P, R, H] -> [P, R, H]. In each, a seat's features h become activation(A h + B c + b),
    where c is the mean of the features of the team's other seats that act, or 0 (Sukhbaatar et al., 2016, eq. 1 and
    2). `team_size` consecutive rows are a team."""

    def __init__(self, units: int, rounds: int, activation: Activation, generators: Sequence[torch.Generator]) -> None:
        super().__init__()
        self.activation = activation
        self.rounds = nn.ModuleList(Linear(2 * units, units, GAIN[activation], generators) for _ in range(rounds))

    def forward(self, x: Tensor, acts: Tensor | None, team_size: int) -> Tensor:
        """Returns features [P, R, H] after all rounds. `acts` [P, R] bool marks the seats that act (None: all); the
        others send nothing."""
        for layer in self.rounds:
            x = layer(torch.cat([x, mean_of_others(x, acts, team_size)], -1), self.activation)
        return x


def mean_of_others(x: Tensor, acts: Tensor | None, team_size: int) -> Tensor:
    """Returns for each row the mean of the other acting rows of its team [P, R, H]; 0 where there are none."""
    by_team = x.unflatten(1, (-1, team_size))  # [P, G, S, H]
    sends = by_team.new_ones(by_team.shape[:3]) if acts is None else acts.view(by_team.shape[:3]).float()
    sent = by_team * sends[..., None]
    others = (sends.sum(2, keepdim=True) - sends).clamp(min=1)[..., None]
    return ((sent.sum(2, keepdim=True) - sent) / others).flatten(1, 2)
