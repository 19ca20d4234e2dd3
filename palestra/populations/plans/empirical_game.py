"""The empirical game of a population: payoffs among frozen members and policies in training, the
`play` tasks that measure them, and the allocation of further games."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, combinations_with_replacement, permutations, product

import numpy as np

from palestra.populations.normal_form.payoff_tensors import joint_distribution
from palestra.populations.payoffs import MemberProfile, PayoffTable, empty_cell
from palestra.populations.population import Member, Player, Population
from palestra.populations.tasks import PlayResult, PlayTask


class EmpiricalGame:
    """Payoffs of a population, and the tasks that measure them.

    Each cell gets `games` games, each task `cells` cells; `seats` names the player at each seat.
    `payoffs` are of frozen members. `snapshot_returns` maps members, one for each seat, to the mean
    returns of their newest snapshots: at least one of them is in training and has the name that it
    will have once frozen. `num_games` counts the games played (not exact payoffs); `open_tasks`
    holds the names of pending tasks between frozen members.
    """

    def __init__(self, population: Population, seats: Sequence[Player], games: int, cells: int) -> None:
        self.population = population
        self.seats = tuple(seats)
        self.games_per_cell = games
        self.cells_per_task = cells
        self.payoffs = PayoffTable(seats)
        self.snapshot_returns: dict[MemberProfile, tuple[float, ...]] = {}
        self.num_games = 0
        self.open_tasks: set[str] = set()
        self._snapshot_cells: dict[str, Sequence[MemberProfile]] = {}  # by task: its cells, under future members' names

    # ---- payoffs

    def payoff_tensors(self, names: Sequence[Sequence[str]]) -> list[np.ndarray]:
        """Returns mean returns, a float64 array [m_0, ..., m_n-1] for each seat, over `names` by seat.

        Raises KeyError for members without payoffs.
        """
        rows = np.array([self._mean(members) for members in product(*names)])
        return [column.reshape([len(seat_names) for seat_names in names]) for column in rows.T]

    def has_payoffs(self, members: MemberProfile) -> bool:
        """True if there are payoffs for these members."""
        return members in self.snapshot_returns or self._has_games(members)

    def _mean(self, members: MemberProfile) -> tuple[float, ...]:
        return self.payoffs.cell(members).mean if self._has_games(members) else self.snapshot_returns[members]

    def _has_games(self, members: MemberProfile) -> bool:
        frozen = all(name in self.payoffs.members[player] for player, name in zip(self.seats, members, strict=True))
        return frozen and ((cell := self.payoffs.cell(members)).exact or cell.games > 0)

    # ---- tasks

    def initial_tasks(self) -> list[PlayTask]:
        """Returns tasks for the games among the population's initial members."""
        for player in self.population.players:
            for name in self.population.names_of(player):
                self.payoffs.add_member(player, name)
        return self._add_open(self._tasks("play/first", self.payoffs.cells_below(), self.games_per_cell))

    def add_member(self, member: Member) -> list[PlayTask]:
        """Adds a member to the population; returns tasks for its games against the other members."""
        self.population.add(member)
        self.payoffs.add_member(member.player, member.name)
        cells = cells_containing(self.seats, self.payoffs.members, member.player, member.name)
        return self._add_open(self._tasks(f"play/{member.name}", list(cells), self.games_per_cell))

    def snapshot_tasks(self, player: Player, name: str, training: Mapping[Player, Mapping[str, str]]) -> list[PlayTask]:
        """Returns tasks for the games of the newest snapshot of `name`, in cells with at least one policy in training.

        `training` maps, for each player, the future name of each policy in training to its newest snapshot.
        """
        names = {who: [*self.payoffs.members[who], *training.get(who, {})] for who in self.population.players}
        newest = {one: snapshot for snapshots in training.values() for one, snapshot in snapshots.items()}
        cells = [cell for cell in cells_containing(self.seats, names, player, name) if newest.keys() & {*cell}]
        played = [tuple(newest.get(one, one) for one in cell) for cell in cells]
        tasks = self._tasks(f"sketch/{newest.get(name, name)}", played, self.games_per_cell)
        for i, task in enumerate(tasks):
            self._snapshot_cells[task.name] = cells[i * self.cells_per_task : (i + 1) * self.cells_per_task]
        return tasks

    def adaptive_tasks(self, strategies: np.ndarray, games: int, label: str) -> list[PlayTask]:
        """Returns tasks for `games` more games, in the cells where the meta-strategy is most uncertain
        (`allocate_games`).

        `strategies` is the joint distribution [m_0, ..., m_n-1].
        """
        new_games = allocate_games(self.payoffs, strategies, games, max(1, games // 10))
        tasks: list[PlayTask] = []
        for count in sorted(set(new_games.values())):
            cells = [members for members, new_count in new_games.items() if new_count == count]
            tasks += self._tasks(f"play/{label}-{count}", cells, count)
        return self._add_open(tasks)

    def _add_open(self, tasks: list[PlayTask]) -> list[PlayTask]:
        self.open_tasks |= {task.name for task in tasks}
        return tasks

    def _tasks(self, name: str, cells: Sequence[MemberProfile], games: int) -> list[PlayTask]:
        return play_tasks(self.population, name, cells, games=games, cells_per_task=self.cells_per_task)

    # ---- results

    def record_result(self, task: PlayTask, result: PlayResult) -> None:
        self.open_tasks.discard(task.name)
        self.num_games += result.num_games
        if named := self._snapshot_cells.pop(task.name, None):
            for members, cell in zip(named, result.payoffs, strict=True):
                self.set_snapshot_returns(members, cell.mean)
        else:
            for members, cell in zip(task.cells, result.payoffs, strict=True):
                self.payoffs.add_games(members, cell)

    def set_snapshot_returns(self, members: Sequence[str], mean: Sequence[float]) -> None:
        """Sets the mean returns of snapshots, replacing those of earlier snapshots."""
        for order in permutations(range(len(self.seats))):
            if all(self.seats[seat] == self.seats[source] for seat, source in enumerate(order)):
                names = tuple(members[source] for source in order)
                self.snapshot_returns[names] = tuple(mean[source] for source in order)


def play_tasks(
    population: Population, name: str, cells: Sequence[MemberProfile], *, games: int, cells_per_task: int
) -> list[PlayTask]:
    """Returns tasks `name`/0, ... of `games` games of each of up to `cells_per_task` cells."""
    chunks = [cells[i : i + cells_per_task] for i in range(0, len(cells), cells_per_task)]
    return [
        PlayTask(
            f"{name}/{number}",
            cells=tuple(chunk),
            games_per_cell=games,
            members=population.names_with_files(chain.from_iterable(chunk)),
        )
        for number, chunk in enumerate(chunks)
    ]


def cells_containing(
    seats: Sequence[Player], names: Mapping[Player, Sequence[str]], player: Player, name: str
) -> Iterator[MemberProfile]:
    """Yields the cells that contain member `name` of `player`, without duplicates. `names` are all members of each
    player, `name` included."""
    choices = []
    for other in dict.fromkeys(seats):
        fixed = (name,) if other == player else ()
        rest = combinations_with_replacement(names[other], seats.count(other) - len(fixed))
        choices.append([(other, (*fixed, *chosen)) for chosen in rest])
    for chosen in product(*choices):
        left = {other: list(members) for other, members in chosen}
        yield tuple(left[seat].pop(0) for seat in seats)


def allocate_games(
    table: PayoffTable, strategies: Sequence[np.ndarray] | np.ndarray, games: int, chunk: int = 1
) -> dict[MemberProfile, int]:
    """Returns the number of new games for each cell of `table`, `games` in all, allocated `chunk` at a time.

    Each chunk goes to the cell where it most lowers the total variance of the members' mean returns against the others'
    meta-strategy: the sum over seats i and cells c of sigma_-i(c)^2 variance_i(c) / (games(c) + 1). `strategies` is one
    distribution [m_i] for each seat, or a joint one [m_0, ..., m_n-1].

    A solver compares these mean returns, also of members outside the support. A cell gets no games if for every seat
    the other members are outside the support. A cell's variance is shrunk towards the pooled variance by one game (1 if
    that is 0), and each cell counts as having one more game, so that cells without games have a finite weight. Exact
    payoffs get no games. Raises ValueError if the strategies do not fit the table.
    """
    gains = _variance_gains(table, strategies)
    queue = [(-gain * _variance_drop(played, chunk), key) for key, (gain, played) in gains.items() if gain > 0]
    heapq.heapify(queue)
    new_games: dict[MemberProfile, int] = {}
    for left in range(games, 0, -chunk):
        if not queue:
            break
        _, key = heapq.heappop(queue)
        new_games[key] = new_games.get(key, 0) + min(chunk, left)
        gain, played = gains[key]
        heapq.heappush(queue, (-gain * _variance_drop(played + new_games[key], chunk), key))
    return new_games


def _variance_gains(
    table: PayoffTable, strategies: Sequence[np.ndarray] | np.ndarray
) -> dict[MemberProfile, tuple[float, int]]:
    """Returns squared weights times variances, summed over seats, and the games of each inexact cell."""
    joint = joint_distribution(strategies)
    if joint.shape != table.shape:
        raise ValueError(f"strategies over {joint.shape} members; there are {table.shape}")
    others = [joint.sum(axis=seat, keepdims=True) for seat in range(joint.ndim)]
    weights = [np.broadcast_to(share**2, table.shape) for share in others]
    prior = _pooled_variance(table)
    gains: dict[MemberProfile, tuple[float, int]] = {}
    for index in np.ndindex(table.shape):
        key, order = table.canonical(table.members_at(index))
        cell = table.stored.get(key, empty_cell(len(table.seats)))
        if not cell.exact:
            variance = [(m2 + prior) / max(cell.games, 1) for m2 in cell.m2]
            gain = sum(float(weights[seat][index]) * variance[place] for place, seat in enumerate(order))
            gains[key] = (gains.get(key, (0.0, 0))[0] + gain, cell.games)
    return gains


def _pooled_variance(table: PayoffTable) -> float:
    played = [cell for cell in table.stored.values() if cell.games > 1 and not cell.exact]
    freedom = sum(cell.games - 1 for cell in played) * len(table.seats)
    return (sum(sum(cell.m2) for cell in played) / freedom if freedom else 0.0) or 1.0


def _variance_drop(games: int, more: int) -> float:
    return 1 / (games + 1) - 1 / (games + 1 + more)
