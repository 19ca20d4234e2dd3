"""Payoff table of a population: statistics of games between members, and exact payoffs; it grows with the population.

    payoffs = Payoffs(["player_0", "player_1"])
    payoffs.add_member("player_0", "uniform")
    ...
    payoffs.add_games({"members": ["uniform", "uniform"], "games": 100, "mean": [0.1, -0.1], "m2": [210.0, 210.0]})
    strategies = Nash().solve(payoffs.mean())
    for members, games in payoffs.allocate_games(strategies, 1000).items(): ...

A cell is one member for each seat. If one population plays several seats, the game is taken to be symmetric in them:
cells that differ only in the order of its members are one cell, whose numbers follow the members.
"""

from __future__ import annotations

import csv
import heapq
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np

from palestra.populations.normal_form.payoff_tensors import joint_distribution
from palestra.populations.payoff_cell import PayoffCell, empty_cell
from palestra.populations.population import Player

MemberProfile = tuple[str, ...]  # the member at each seat


class PayoffTable:
    """Payoffs of an n-player, general-sum game between members; `seats` names the player (population) at each seat."""

    def __init__(self, seats: Sequence[Player]) -> None:
        """Raises ValueError if `seats` is empty."""
        if not seats:
            raise ValueError("a payoff table needs the player at each seat, for example Payoffs(['red', 'blue'])")
        self.seats = tuple(seats)
        self.members: dict[Player, list[str]] = {player: [] for player in self.seats}
        self._cells: dict[MemberProfile, PayoffCell] = {}  # by members in canonical order
        self._place: dict[tuple[Player, str], int] = {}  # index of a member in its player's list

    # ---- adding members and games

    def add_member(self, player: Player, name: str) -> None:
        """Adds a member without games. Raises ValueError if the player is unknown or the name is taken."""
        if player not in self.members:
            raise ValueError(f'"{player}" plays no seat here; players are {", ".join(self.members)}')
        if (player, name) in self._place:
            raise ValueError(f'"{name}" is a member of "{player}" already; names of members are unique')
        self._place[player, name] = len(self.members[player])
        self.members[player].append(name)

    def add_games(self, games: Mapping[str, Any]) -> None:
        """Adds games: `{"members": [...], "games": n, "mean": [...], "m2": [...], "wins": [...], "draws": d}`, lists by
        seat.

        `wins` and `draws` are optional. Raises ValueError if a member is unknown or the numbers do not fit the seats.
        """
        seats = len(self.seats)
        cell = PayoffCell(
            int(games["games"]),
            tuple(map(float, games["mean"])),
            tuple(map(float, games["m2"])),
            tuple(games.get("wins") or [0] * seats),
            games.get("draws", 0),
        )
        if cell.games < 0 or not len(cell.mean) == len(cell.m2) == len(cell.wins) == seats:
            raise ValueError(f"{dict(games)} are no games of {seats} seats: mean, m2 and wins need a number for each")
        self._add(games["members"], cell)

    def set_exact(self, members: Sequence[str], mean: Sequence[float]) -> None:
        """Sets exact payoffs, by seat. Raises ValueError if a member is unknown or the number of payoffs is wrong."""
        if len(mean) != len(self.seats):
            raise ValueError(f"{len(mean)} payoffs for {len(self.seats)} seats")
        zeros = tuple(0.0 for _ in self.seats)
        self._add(members, PayoffCell(0, tuple(map(float, mean)), zeros, tuple(0 for _ in self.seats), known=True))

    def _add(self, members: Sequence[str], cell: PayoffCell) -> None:
        key, order = self._canonical(members)
        who = list(zip(self.seats, key, strict=True))
        alike = [[seat for seat, one in enumerate(who) if one == other] for other in dict.fromkeys(who)]
        cell = cell.permute_seats(order).average_seats(alike)
        self._cells[key] = self._cells[key].merge(cell) if key in self._cells else cell

    def _canonical(self, members: Sequence[str]) -> tuple[MemberProfile, tuple[int, ...]]:
        """Returns the members in the order under which their cell is stored, and the seat from which each was taken."""
        if len(members) != len(self.seats):
            raise ValueError(f"{list(members)} are {len(members)} members for {len(self.seats)} seats")
        places = [self._place_of(player, name) for player, name in zip(self.seats, members, strict=True)]
        order = list(range(len(members)))
        for player in self.members:
            at = [seat for seat, who in enumerate(self.seats) if who == player]
            for seat, source in zip(at, sorted(at, key=places.__getitem__), strict=True):
                order[seat] = source
        return tuple(members[seat] for seat in order), tuple(order)

    def _place_of(self, player: Player, name: str) -> int:
        if (player, name) not in self._place:
            have = ", ".join(self.members[player]) or "none"
            raise ValueError(f'"{name}" is no member of "{player}", which has {have}: add members before their games')
        return self._place[player, name]

    # ---- cells

    def cell(self, members: Sequence[str]) -> PayoffCell:
        """Returns the statistics of these members, by seat; a cell with 0 games if they never met. Raises ValueError if
        a member is unknown."""
        key, order = self._canonical(members)
        back = [order.index(seat) for seat in range(len(order))]
        return self._cells[key].permute_seats(back) if key in self._cells else empty_cell(len(self.seats))

    def cells(self) -> Iterator[MemberProfile]:
        """Yields each cell of the table once, in canonical order."""
        seen = set()
        for index in np.ndindex(self.shape):
            key, _ = self._canonical(self._at(index))
            if key not in seen:
                seen.add(key)
                yield key

    def cells_below(self, games: int = 1) -> list[MemberProfile]:
        """Returns the cells with fewer than `games` games, without exact ones."""
        return [key for key in self.cells() if not self.cell(key).known and self.cell(key).games < games]

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of members [m_0, ..., m_n-1] by seat."""
        return tuple(len(self.members[player]) for player in self.seats)

    def _at(self, index: Sequence[int]) -> MemberProfile:
        return tuple(self.members[player][number] for player, number in zip(self.seats, index, strict=True))

    # ---- tables

    def mean(self, unplayed: float = np.nan) -> list[np.ndarray]:
        """Returns mean returns, a float64 array [m_0, ..., m_n-1] for each seat; `unplayed` where there are no
        games."""
        return self._tables(lambda cell: cell.mean if cell.known or cell.games else [unplayed] * len(cell.mean))

    def stderr(self) -> list[np.ndarray]:
        """Returns the standard errors of `mean`, in the same shapes; infinite for fewer than two games, 0 for exact
        payoffs."""
        return self._tables(lambda cell: cell.stderr)

    def games(self) -> np.ndarray:
        """Returns the number of games, int64 [m_0, ..., m_n-1]."""
        return self._tables(lambda cell: [cell.games] * len(self.seats))[0].astype(int)

    def _tables(self, of: Callable[[PayoffCell], Sequence[float]]) -> list[np.ndarray]:
        rows = np.array([of(self.cell(self._at(index))) for index in np.ndindex(self.shape)], float)
        return [column.reshape(self.shape) for column in rows.reshape(-1, len(self.seats)).T]

    def pairwise_scores(self) -> tuple[list[str], np.ndarray]:
        """Returns the members' names and `pairwise_scores` float64 [M, M]: how often the row's member beat the
        column's, a draw counting half.

        Ratings are computed from it. Games of a member against itself are left out. Raises ValueError unless there are
        two seats.
        """
        if len(self.seats) != 2:
            raise ValueError(f"wins of one over another need a game of two; this one seats {len(self.seats)}")
        names = list(dict.fromkeys(name for player in self.members for name in self.members[player]))
        number = {name: place for place, name in enumerate(names)}
        points_MM = np.zeros((len(names), len(names)))
        for (one, other), cell in self._cells.items():
            if one != other:
                points_MM[number[one], number[other]] += cell.wins[0] + cell.draws / 2
                points_MM[number[other], number[one]] += cell.wins[1] + cell.draws / 2
        return names, points_MM

    # ---- where to play

    def allocate_games(
        self, strategies: Sequence[np.ndarray] | np.ndarray, games: int, chunk: int = 1
    ) -> dict[MemberProfile, int]:
        """Returns how to distribute `games` new games over cells, `chunk` at a time.

        Each chunk goes where it most lowers the total variance of what members earn against the others' meta-strategy:
        the sum over seats i and cells c of sigma_-i(c)^2 variance_i(c) / (games(c) + 1). `strategies` is one
        distribution [m_i] for each seat, or a joint one [m_0, ..., m_n-1].

        These are the numbers that a solver compares, for members out of the support too, so cells far from the support
        get no games. A cell's variance is shrunk towards the pooled variance by one game (1 if that is 0), and each
        cell counts as having one more game, so that cells without games have a finite weight. Exact payoffs get no
        games. Raises ValueError if the strategies do not fit the table.
        """
        gains = self._gains(strategies)
        queue = [(-gain * _drop(played, chunk), key) for key, (gain, played) in gains.items() if gain > 0]
        heapq.heapify(queue)
        given: dict[MemberProfile, int] = {}
        for left in range(games, 0, -chunk):
            if not queue:
                break
            _, key = heapq.heappop(queue)
            given[key] = given.get(key, 0) + min(chunk, left)
            gain, played = gains[key]
            heapq.heappush(queue, (-gain * _drop(played + given[key], chunk), key))
        return given

    def _gains(self, strategies: Sequence[np.ndarray] | np.ndarray) -> dict[MemberProfile, tuple[float, int]]:
        """Returns for each cell that is not exact: squared weights times variances, summed over seats, and its
        games."""
        joint = joint_distribution(strategies)
        if joint.shape != self.shape:
            raise ValueError(f"strategies over {joint.shape} members; there are {self.shape}")
        others = [joint.sum(axis=seat, keepdims=True) for seat in range(joint.ndim)]
        weights = [np.broadcast_to(share**2, self.shape) for share in others]
        prior = self._pooled_variance()
        gains: dict[MemberProfile, tuple[float, int]] = {}
        for index in np.ndindex(self.shape):
            key, order = self._canonical(self._at(index))
            cell = self._cells.get(key, empty_cell(len(self.seats)))
            if not cell.known:
                variance = [(m2 + prior) / max(cell.games, 1) for m2 in cell.m2]
                gain = sum(float(weights[seat][index]) * variance[place] for place, seat in enumerate(order))
                gains[key] = (gains.get(key, (0.0, 0))[0] + gain, cell.games)
        return gains

    def _pooled_variance(self) -> float:
        played = [cell for cell in self._cells.values() if cell.games > 1 and not cell.known]
        freedom = sum(cell.games - 1 for cell in played) * len(self.seats)
        return (sum(sum(cell.m2) for cell in played) / freedom if freedom else 0.0) or 1.0

    # ---- files

    def to_json(self) -> dict[str, Any]:
        """Returns the whole table; `from_json` restores it bit for bit."""
        cells = [{"members": list(key), **vars(cell)} for key, cell in self._cells.items()]
        return {
            "seats": list(self.seats),
            "members": {player: list(names) for player, names in self.members.items()},
            "cells": cells,
        }

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> Self:
        """Returns the table that `to_json` wrote."""
        table = cls(tree["seats"])
        for player, names in tree["members"].items():
            for name in names:
                table.add_member(player, name)
        for entry in tree["cells"]:
            mean, m2, wins = (tuple(entry[name]) for name in ("mean", "m2", "wins"))
            table._cells[tuple(entry["members"])] = PayoffCell(
                entry["games"], mean, m2, wins, entry["draws"], entry["known"]
            )
        return table

    def to_csv(self) -> str:
        """Returns one line for each non-empty cell, with a header; numbers in Python's repr."""
        columns = ("members", "mean", "stderr", "wins")
        seats = range(len(self.seats))
        text = io.StringIO()
        rows = csv.writer(text, lineterminator="\n")
        rows.writerow([f"{name}_{seat}" for name in columns for seat in seats] + ["games", "draws", "known"])
        for key, cell in self._cells.items():
            rows.writerow([*key, *cell.mean, *cell.stderr, *cell.wins, cell.games, cell.draws, cell.known])
        return text.getvalue()


def _drop(games: int, more: int) -> float:
    return 1 / (games + 1) - 1 / (games + 1 + more)
