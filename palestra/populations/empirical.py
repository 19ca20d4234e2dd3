"""The empirical game: payoffs among frozen members and among policies in training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations_with_replacement, permutations, product
from typing import Any

import numpy as np

from palestra.populations.payoffs import MemberProfile, PayoffTable
from palestra.populations.population import Player


class EmpiricalGame:
    """Payoffs by members, frozen (`payoffs`) or in training (`snapshot_returns`).

    `snapshot_returns` maps members, one for each seat, to the mean returns of their newest snapshots; at least one of
    the members is in training, and is listed under the name that it will have once frozen.
    """

    def __init__(self, seats: Sequence[Player]) -> None:
        self.seats = tuple(seats)
        self.payoffs = PayoffTable(seats)
        self.snapshot_returns: dict[MemberProfile, tuple[float, ...]] = {}

    def add_games(self, games: Mapping[str, Any]) -> None:
        """Adds games of frozen members; payoffs that are `exact` are stored as known."""
        if games.get("exact"):
            self.payoffs.set_exact(games["members"], games["mean"])
        else:
            self.payoffs.add_games(games)

    def set_snapshot_returns(self, members: Sequence[str], mean: Sequence[float]) -> None:
        """Sets the mean returns of snapshots, replacing those of earlier snapshots."""
        for order in permutations(range(len(self.seats))):
            if all(self.seats[seat] == self.seats[source] for seat, source in enumerate(order)):
                self.snapshot_returns[tuple(members[source] for source in order)] = tuple(
                    mean[source] for source in order
                )

    def payoff_tensors(self, names: Sequence[Sequence[str]]) -> list[np.ndarray]:
        """Returns mean returns, a float64 array [m_0, ..., m_n-1] for each seat, over `names` by seat.

        Raises KeyError for members without payoffs.
        """
        rows = np.array([self._mean(members) for members in product(*names)])
        return [column.reshape([len(own) for own in names]) for column in rows.T]

    def has_payoffs(self, members: MemberProfile) -> bool:
        """True if there are payoffs for these members."""
        return members in self.snapshot_returns or self._played(members)

    def _mean(self, members: MemberProfile) -> tuple[float, ...]:
        return self.payoffs.cell(members).mean if self._played(members) else self.snapshot_returns[members]

    def _played(self, members: MemberProfile) -> bool:
        frozen = all(name in self.payoffs.members[player] for player, name in zip(self.seats, members, strict=True))
        return frozen and ((cell := self.payoffs.cell(members)).known or cell.games > 0)


def cells_containing(
    seats: Sequence[Player], names: Mapping[Player, Sequence[str]], player: Player, name: str
) -> Iterator[MemberProfile]:
    """Yields the cells that contain member `name` of `player`, each once. `names` are all members of each player,
    `name` included."""
    choices = []
    for other in dict.fromkeys(seats):
        fixed = (name,) if other == player else ()
        rest = combinations_with_replacement(names[other], seats.count(other) - len(fixed))
        choices.append([(other, (*fixed, *chosen)) for chosen in rest])
    for chosen in product(*choices):
        left = {other: list(members) for other, members in chosen}
        yield tuple(left[seat].pop(0) for seat in seats)
