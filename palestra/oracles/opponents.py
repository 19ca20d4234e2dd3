"""Whom a learner meets, by a task's order, and what it wins from each of them.

Shapes: `F` games that ended, `N` seats, `S` seats of the others.
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
    """Members numbered as they are named, each as a player of the meta-game; `read` says how they play."""

    def __init__(self, read: Callable[[Player, str], FrozenMember]) -> None:
        self.read = read
        self.members: dict[str, FrozenMember] = {}
        self.names: list[str] = []

    def number(self, player: Player, name: str) -> int:
        """Its number, for whoever draws; read first, where it is new."""
        key = self.key(player, name)
        return list(self.members).index(key)

    def key(self, player: Player, name: str) -> str:
        """What it is called here, by player and name."""
        key = f"{player}/{name}"
        if key not in self.members:
            self.add(key, name, self.read(player, name))
        return key

    def add(self, key: str, name: str, member: FrozenMember) -> int:
        self.members[key] = member
        self.names.append(name)
        return len(self.names) - 1


def lots_of(order: Mapping[str, Any], cast: Cast, players: Sequence[Player]) -> Lots:
    """Who sits at the other seats, whose players are `players`, by a `train` order."""
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
    """Counts what the learner's `seat` wins from the members at seats `others`."""

    def __init__(self, seat: int, others: Sequence[int], names: Sequence[str]) -> None:
        self.seat, self.others, self.names = seat, list(others), names
        self.returns: list[np.ndarray] = []
        self.members: list[np.ndarray] = []
        self.figures: list[Metrics] = []

    def add(self, batch: Batch, members: np.ndarray, figures: Metrics) -> None:
        """Takes in a sweep's games, the members [F, S] that played them, and what learning from it said."""
        self.returns.append(batch.games["returns"])
        self.members.append(members)
        if figures:
            self.figures.append(figures)

    def result(self) -> Result:
        """`return` (None where no game ended), `against` by member, and the means of what learning said."""
        returns, members = np.concatenate(self.returns), np.concatenate(self.members)
        counted = against(returns[:, self.seat], returns[:, self.others], members, self.names)
        return counted | {"metrics": averaged(self.figures)}
