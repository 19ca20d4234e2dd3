"""Payoff table of a population, which grows with it: statistics of games between members, and exact payoffs.

    payoffs = PayoffTable(["player_0", "player_1"])
    payoffs.add_member("player_0", "uniform")
    ...
    payoffs.add_games(("uniform", "uniform"), PayoffCell(games=100, mean=(0.1, -0.1), m2=(210.0, 210.0)))
    strategies = Nash().solve(payoffs.mean())

A cell is one member for each seat. If one population plays several seats, the game is assumed to be symmetric in them:
cells that differ only in the order of the members are one cell, whose statistics are permuted with the members.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import inf, sqrt

import numpy as np
from pydantic import ConfigDict

from palestra.populations.population import Player

MemberProfile = tuple[str, ...]  # the member at each seat


@dataclass(frozen=True)
class PayoffCell:
    """Statistics of games. Per seat: mean return, sum of squared deviations of returns (`m2`), and games won; in all:
    games and draws. Exact payoffs have expected numbers of wins and draws.

    PayoffCell(games=100, mean=(0.1, -0.1), m2=(210.0, 210.0), wins=(40, 30), draws=30)
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    games: int
    mean: tuple[float, ...]
    m2: tuple[float, ...]
    wins: tuple[int | float, ...]
    draws: int | float = 0
    exact: bool = False
    """True if `mean` was computed exactly, independently of games."""

    def merge(self, other: PayoffCell) -> PayoffCell:
        """Returns the cell of both cells' games (Chan et al., 1979, eq. 2.1). If one mean is exact, the result has it;
        if both are, the mean of `other`."""
        games = self.games + other.games
        wins = _sums(self.wins, other.wins)
        if self.exact or other.exact:
            mean = (other if other.exact else self).mean
            m2 = tuple(0.0 for _ in self.m2)
        else:
            share = other.games / max(games, 1)
            gaps = [theirs - ours for ours, theirs in zip(self.mean, other.mean, strict=True)]
            mean = _sums(self.mean, [gap * share for gap in gaps])
            m2 = _sums(_sums(self.m2, other.m2), [gap * gap * self.games * share for gap in gaps])
        return PayoffCell(games, mean, m2, wins, self.draws + other.draws, self.exact or other.exact)

    def permute_seats(self, order: Sequence[int]) -> PayoffCell:
        """Returns the cell with seats permuted: new seat `k` is old seat `order[k]`."""
        mean, m2, wins = (tuple(row[seat] for seat in order) for row in (self.mean, self.m2, self.wins))
        return PayoffCell(self.games, mean, m2, wins, self.draws, self.exact)

    def average_seats(self, groups: Sequence[Sequence[int]]) -> PayoffCell:
        """Returns the cell with each group of seats averaged, for seats that the same member plays."""
        mean = list(self.mean)
        m2 = list(self.m2)
        wins = list(self.wins)
        for group in (one for one in groups if len(one) > 1):
            middle = sum(self.mean[seat] for seat in group) / len(group)
            spread = sum(self.m2[seat] + self.games * (self.mean[seat] - middle) ** 2 for seat in group) / len(group)
            won = sum(self.wins[seat] for seat in group) / len(group)
            for seat in group:
                mean[seat], m2[seat], wins[seat] = middle, spread, won
        return PayoffCell(self.games, tuple(mean), tuple(m2), tuple(wins), self.draws, self.exact)

    @property
    def stderr(self) -> tuple[float, ...]:
        """Standard errors of the means, in units of return; infinite for fewer than two games, 0 for exact payoffs."""
        if self.exact:
            return tuple(0.0 for _ in self.m2)
        return tuple(sqrt(m2 / (self.games - 1) / self.games) if self.games > 1 else inf for m2 in self.m2)


def empty_cell(seats: int) -> PayoffCell:
    """Returns a cell without games."""
    zeros = (0.0,) * seats
    return PayoffCell(0, zeros, zeros, zeros)


def _sums(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, ...]:
    return tuple(a + b for a, b in zip(ours, theirs, strict=True))


class PayoffTable:
    """Payoffs of an n-player, general-sum game between members; `seats` names the player (population) at each seat.

    `stored` holds the cells with games, by members in canonical order.
    """

    def __init__(self, seats: Sequence[Player]) -> None:
        """Raises ValueError if `seats` is empty."""
        if not seats:
            raise ValueError("a payoff table needs the player at each seat, for example PayoffTable(['red', 'blue'])")
        self.seats = tuple(seats)
        self.members: dict[Player, list[str]] = {player: [] for player in self.seats}
        self.stored: dict[MemberProfile, PayoffCell] = {}
        self._place: dict[tuple[Player, str], int] = {}  # index of a member in its player's list

    # ---- adding members and games

    def add_member(self, player: Player, name: str) -> None:
        """Adds a member without games. Raises ValueError if the player is unknown or the name is taken."""
        if player not in self.members:
            raise ValueError(f'"{player}" plays no seat here; players are {", ".join(self.members)}')
        if (player, name) in self._place:
            raise ValueError(f'"{player}" already has a member "{name}"; names of members must be unique')
        self._place[player, name] = len(self.members[player])
        self.members[player].append(name)

    def add_games(self, members: Sequence[str], cell: PayoffCell) -> None:
        """Adds games of these members, by seat. An exact cell counts no games, since none was played, but keeps its
        expected wins and draws, which ratings are computed from.

        Raises ValueError if a member is unknown or the numbers do not fit the seats.
        """
        if cell.games < 0 or not len(cell.mean) == len(cell.m2) == len(cell.wins) == len(self.seats):
            raise ValueError(
                f"{cell} is not a cell of {len(self.seats)} seats: mean, m2 and wins need a number for each"
            )
        self._add(members, replace(cell, games=0) if cell.exact else cell)

    def set_exact(self, members: Sequence[str], mean: Sequence[float]) -> None:
        """Sets exact payoffs, by seat. Raises ValueError if a member is unknown or the number of payoffs is wrong."""
        if len(mean) != len(self.seats):
            raise ValueError(f"{len(mean)} payoffs for {len(self.seats)} seats")
        zeros = tuple(0.0 for _ in self.seats)
        self._add(members, PayoffCell(0, tuple(map(float, mean)), zeros, tuple(0 for _ in self.seats), exact=True))

    def _add(self, members: Sequence[str], cell: PayoffCell) -> None:
        key, order = self.canonical(members)
        assigned = list(zip(self.seats, key, strict=True))
        alike = [[seat for seat, one in enumerate(assigned) if one == other] for other in dict.fromkeys(assigned)]
        cell = cell.permute_seats(order).average_seats(alike)
        self.stored[key] = self.stored[key].merge(cell) if key in self.stored else cell

    def canonical(self, members: Sequence[str]) -> tuple[MemberProfile, tuple[int, ...]]:
        """Returns the members in the order in which their cell is stored, and the original seat of each."""
        if len(members) != len(self.seats):
            raise ValueError(f"{list(members)} are {len(members)} members for {len(self.seats)} seats")
        places = [self._place_of(player, name) for player, name in zip(self.seats, members, strict=True)]
        order = list(range(len(members)))
        for player in self.members:
            at = [seat for seat, other in enumerate(self.seats) if other == player]
            for seat, source in zip(at, sorted(at, key=places.__getitem__), strict=True):
                order[seat] = source
        return tuple(members[seat] for seat in order), tuple(order)

    def _place_of(self, player: Player, name: str) -> int:
        if (player, name) not in self._place:
            have = ", ".join(self.members[player]) or "none"
            raise ValueError(
                f'"{name}" is not a member of "{player}", which has {have}: add members before their games'
            )
        return self._place[player, name]

    # ---- cells

    def cell(self, members: Sequence[str]) -> PayoffCell:
        """Returns the statistics of these members, by seat; a cell with 0 games if they never met. Raises ValueError if
        a member is unknown."""
        key, order = self.canonical(members)
        back = [order.index(seat) for seat in range(len(order))]
        return self.stored[key].permute_seats(back) if key in self.stored else empty_cell(len(self.seats))

    def cells(self) -> Iterator[MemberProfile]:
        """Yields each cell of the table once, in canonical order."""
        seen = set()
        for index in np.ndindex(self.shape):
            key, _ = self.canonical(self.members_at(index))
            if key not in seen:
                seen.add(key)
                yield key

    def cells_below(self, games: int = 1) -> list[MemberProfile]:
        """Returns the cells with fewer than `games` games that are not exact."""
        return [key for key in self.cells() if not self.cell(key).exact and self.cell(key).games < games]

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of members [m_0, ..., m_n-1] by seat."""
        return tuple(len(self.members[player]) for player in self.seats)

    def members_at(self, index: Sequence[int]) -> MemberProfile:
        """Returns the members at index `index` [n] of the table, by seat."""
        return tuple(self.members[player][number] for player, number in zip(self.seats, index, strict=True))

    # ---- tables

    def mean(self, unplayed: float = np.nan) -> list[np.ndarray]:
        """Returns mean returns, float64 [m_0, ..., m_n-1] for each seat; `unplayed` where there are no games."""
        return self._tables(lambda cell: cell.mean if cell.exact or cell.games else [unplayed] * len(cell.mean))

    def stderr(self) -> list[np.ndarray]:
        """Returns the standard errors of `mean`; infinite for fewer than two games, 0 for exact payoffs."""
        return self._tables(lambda cell: cell.stderr)

    def games(self) -> np.ndarray:
        """Returns the number of games, int64 [m_0, ..., m_n-1]."""
        return self._tables(lambda cell: [cell.games] * len(self.seats))[0].astype(int)

    def _tables(self, of: Callable[[PayoffCell], Sequence[float]]) -> list[np.ndarray]:
        rows = np.array([of(self.cell(self.members_at(index))) for index in np.ndindex(self.shape)], float)
        return [column.reshape(self.shape) for column in rows.reshape(-1, len(self.seats)).T]

    def pairwise_scores(self) -> tuple[list[str], np.ndarray]:
        """Returns the members' names and `points_MM` float64 [M, M]: how often the row's member beat the column's, a
        draw counting half; of exact payoffs, how often in expectation.

        Ratings are computed from it. Games of a member against itself are left out. Raises ValueError unless there are
        two seats.
        """
        if len(self.seats) != 2:
            raise ValueError(
                f"pairwise scores need a game with two seats, and this one has {len(self.seats)}: `palestra league "
                "crossplay RUN --csv FILE` writes the payoffs of all cells"
            )
        names = list(dict.fromkeys(chain.from_iterable(self.members.values())))
        number = {name: place for place, name in enumerate(names)}
        points_MM = np.zeros((len(names), len(names)))
        for (one, other), cell in self.stored.items():
            if one != other:
                points_MM[number[one], number[other]] += cell.wins[0] + cell.draws / 2
                points_MM[number[other], number[one]] += cell.wins[1] + cell.draws / 2
        return names, points_MM

    # ---- files

    def to_csv(self) -> str:
        """Returns one line for each non-empty cell, with a header; numbers in Python's repr."""
        columns = ("members", "mean", "stderr", "wins")
        seats = range(len(self.seats))
        text = io.StringIO()
        rows = csv.writer(text, lineterminator="\n")
        rows.writerow([f"{name}_{seat}" for name in columns for seat in seats] + ["games", "draws", "exact"])
        for key, cell in self.stored.items():
            rows.writerow([*key, *cell.mean, *cell.stderr, *cell.wins, cell.games, cell.draws, cell.exact])
        return text.getvalue()
