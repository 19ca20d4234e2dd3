"""One cell of a payoff table: running statistics of the games that the same members played."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt


@dataclass(frozen=True)
class PayoffCell:
    """Per seat: mean return, sum of squared deviations of returns (`m2`), and games won; draws of all seats together.

    Cell(games=100, mean=(0.1, -0.1), m2=(210.0, 210.0), wins=(40, 30), draws=30)
    """

    games: int
    mean: tuple[float, ...]
    m2: tuple[float, ...]
    wins: tuple[float, ...]
    draws: float = 0
    known: bool = False
    """True if `mean` is exact, whatever the number of games."""

    def merge(self, other: PayoffCell) -> PayoffCell:
        """Returns the cell of both cells' games (Chan et al., 1979, eq. 2.1). An exact mean is kept; of two, that of
        `other`."""
        games = self.games + other.games
        wins = _sums(self.wins, other.wins)
        if self.known or other.known:
            mean, m2 = (other if other.known else self).mean, tuple(0.0 for _ in self.m2)
        else:
            share = other.games / max(games, 1)
            gaps = [theirs - ours for ours, theirs in zip(self.mean, other.mean, strict=True)]
            mean = _sums(self.mean, [gap * share for gap in gaps])
            m2 = _sums(_sums(self.m2, other.m2), [gap * gap * self.games * share for gap in gaps])
        return PayoffCell(games, mean, m2, wins, self.draws + other.draws, self.known or other.known)

    def permute_seats(self, order: Sequence[int]) -> PayoffCell:
        """Returns the cell with seats permuted: new seat `k` is old seat `order[k]`."""
        mean, m2, wins = (tuple(row[seat] for seat in order) for row in (self.mean, self.m2, self.wins))
        return PayoffCell(self.games, mean, m2, wins, self.draws, self.known)

    def average_seats(self, groups: Sequence[Sequence[int]]) -> PayoffCell:
        """Returns the cell with each group of seats averaged, for seats that the same member plays."""
        mean, m2, wins = list(self.mean), list(self.m2), list(self.wins)
        for group in (one for one in groups if len(one) > 1):
            middle = sum(self.mean[seat] for seat in group) / len(group)
            spread = sum(self.m2[seat] + self.games * (self.mean[seat] - middle) ** 2 for seat in group) / len(group)
            won = sum(self.wins[seat] for seat in group) / len(group)
            for seat in group:
                mean[seat], m2[seat], wins[seat] = middle, spread, won
        return PayoffCell(self.games, tuple(mean), tuple(m2), tuple(wins), self.draws, self.known)

    @property
    def stderr(self) -> tuple[float, ...]:
        """Standard errors of the means, in units of return; infinite for fewer than two games, 0 for exact payoffs."""
        if self.known:
            return tuple(0.0 for _ in self.m2)
        return tuple(sqrt(m2 / (self.games - 1) / self.games) if self.games > 1 else inf for m2 in self.m2)


def empty_cell(seats: int) -> PayoffCell:
    """Returns a cell without games."""
    zeros = (0.0,) * seats
    return PayoffCell(0, zeros, zeros, zeros)


def _sums(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, ...]:
    return tuple(a + b for a, b in zip(ours, theirs, strict=True))
