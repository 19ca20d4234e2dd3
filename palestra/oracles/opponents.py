"""Opponents of a learner by a task's order, and the learner's results against each of them.

Shapes: `F` finished games, `N` seats, `S` seats of opponents.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from palestra.oracles.tally import against
from palestra.policies.frozen import FrozenMember
from palestra.policies.mixture import Independent, Jointly, Lots
from palestra.populations.population import Player
from palestra.populations.tasks import Result
from palestra.rollouts.scores import averaged
from palestra.types import Batch, Metrics


class Cast:
    """Frozen members by key (`player/name`), numbered in the order in which they are added; `read` loads one."""

    def __init__(self, read: Callable[[Player, str], FrozenMember]) -> None:
        self.read = read
        self.members: dict[str, FrozenMember] = {}
        self.names: list[str] = []

    def number(self, player: Player, name: str) -> int:
        """Returns a member's number; loads the member first if needed."""
        key = self.key(player, name)
        return list(self.members).index(key)

    def key(self, player: Player, name: str) -> str:
        """Returns a member's key, `player/name`; loads the member first if needed."""
        key = f"{player}/{name}"
        if key not in self.members:
            self.add(key, name, self.read(player, name))
        return key

    def add(self, key: str, name: str, member: FrozenMember) -> int:
        """Adds a loaded member and returns its number."""
        self.members[key] = member
        self.names.append(name)
        return len(self.names) - 1


def lots_of(order: Mapping[str, Any], cast: Cast, players: Sequence[Player]) -> Lots:
    """Returns the sampler of opponents for seats with these `players`, by a `train` order."""
    if (joint := order.get("joint")) is not None:
        lineups = [[cast.number(player, members[player]) for player in players] for members, _ in joint]
        return Jointly(lineups, [p for _, p in joint])
    mixes = [order["opponents"][player] for player in players]
    return Independent(
        [
            {cast.number(player, name): p for name, p in mix.items() if p > 0}
            for player, mix in zip(players, mixes, strict=True)
        ]
    )


class Against:
    """Counts results of the learner at `seat` against the members at seats `others`."""

    def __init__(self, seat: int, others: Sequence[int], names: Sequence[str]) -> None:
        self.seat, self.others, self.names = seat, list(others), names
        self.returns: list[np.ndarray] = []
        self.members: list[np.ndarray] = []
        self.figures: list[Metrics] = []

    def add(self, batch: Batch, members: np.ndarray, figures: Metrics) -> None:
        """Adds a sweep's finished games, the members int [F, S] that played them, and the update's metrics."""
        self.returns.append(batch.games["returns"])
        self.members.append(members)
        if figures:
            self.figures.append(figures)

    def result(self) -> Result:
        """Returns `return` (None if no game ended), `against` by member, and the mean `metrics`."""
        returns, members = np.concatenate(self.returns), np.concatenate(self.members)
        counted = against(returns[:, self.seat], returns[:, self.others], members, self.names)
        return counted | {"metrics": averaged(self.figures)}
