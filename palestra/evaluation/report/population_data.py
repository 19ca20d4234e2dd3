"""Reports on a population's run, from its directory: payoffs between members, and their ratings."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table

from palestra.core.files import path_inside
from palestra.populations.payoffs import MemberProfile, PayoffCell, PayoffTable
from palestra.populations.population import Member, Mix, Player
from palestra.populations.ratings import SkillRating, cyclicity, fit_elo, openskill_ratings
from palestra.populations.scheduler import MEMBERS_DIR, member_folders
from palestra.populations.task_json import CROSSPLAY_FILE, TaskRecord, read_crossplay, read_members, read_records
from palestra.populations.tasks import PlayTask, TrainTask, played_cells
from palestra.runs import read_lines
from palestra.runs.checkpoints import TASKS_FILE
from palestra.runs.settings import check_run_folder

EXPLOITS_FILE = "exploits.jsonl"  # results of `palestra league exploit`
MAX_OPENSKILL_GAMES = 20  # games of each pair passed to OpenSkill, which updates game by game
CONFIDENCE = 0.95  # of the lower bound on NashConv
MAX_COLUMNS = 16  # maximum number of columns of a table on the screen
JSONLine = dict[str, Any]


@dataclass(frozen=True)
class PopulationRecord:
    """A population's run from its files: frozen `members`, oldest first, and the `payoffs` between them."""

    path: Path
    members: list[Member]
    payoffs: PayoffTable
    tasks: list[TaskRecord]
    metrics: list[JSONLine]
    timings: list[JSONLine]

    @property
    def train_tasks(self) -> list[TrainTask]:
        return [done.task for done in self.tasks if isinstance(done.task, TrainTask)]

    def with_weights(self, names: Iterable[str]) -> tuple[str, ...]:
        """Returns those of the names that are members with weights, without duplicates."""
        stored = {member.name for member in self.members if member.weights}
        return tuple(name for name in dict.fromkeys(names) if name in stored)

    def folders(self, names: Iterable[str]) -> dict[str, Path]:
        """Returns the folders of those that have weights. Raises DamagedFile if files are missing or changed."""
        return member_folders(self.path, self.tasks, self.with_weights(names))


def read_record(path: str | Path, seats: Sequence[Player] = ()) -> PopulationRecord:
    """Reads the run at `path`. `seats` is the player at each seat; without it, it is inferred from members and games,
    and a population that plays every seat of its game is taken to play two until there are games.

    Raises ValueError if the run trains no population or has no finished task.
    """
    path = Path(path)
    if path.is_dir():
        check_run_folder(path)
    tasks = read_records(path / TASKS_FILE)
    if not tasks:
        raise ValueError(f"{path} has no finished task of a population: `palestra runs` lists the runs there are")
    members = read_members(path) or _members_of_tasks(tasks)
    for member in members:
        path_inside(path / MEMBERS_DIR, member.name)
    cells = list(chain.from_iterable(played_cells(done.task, done.result) for done in tasks))
    cells += read_crossplay(path / CROSSPLAY_FILE)
    metrics = read_lines(path / "metrics.jsonl")
    timings = read_lines(path / "timings.jsonl")
    return PopulationRecord(path, members, _table(members, cells, seats), tasks, metrics, timings)


def _members_of_tasks(tasks: list[TaskRecord]) -> list[Member]:
    """Returns the members that appear in tasks, for runs that have not written population.json yet."""
    done = [record.task for record in tasks]
    players = {task.output_member: task.player for task in done if isinstance(task, TrainTask)}
    cells = chain.from_iterable(task.cells for task in done if isinstance(task, PlayTask))
    played = chain.from_iterable(cells)
    weights = {name: f"members/{name}" for name in players}
    return [Member(name, players.get(name, ""), weights.get(name, "")) for name in dict.fromkeys([*played, *players])]


def _table(
    members: list[Member], cells: list[tuple[MemberProfile, PayoffCell]], seats: Sequence[Player]
) -> PayoffTable:
    players = {member.name: member.player for member in members}
    table = PayoffTable(seats or _seats(players, [names for names, _ in cells]))
    for member in members:
        players_of_member = [member.player] if member.player else list(table.members)
        for player in players_of_member:
            table.add_member(player, member.name)
    for names, cell in cells:
        if all(name in players for name in names):  # other cells are of snapshots of policies in training
            table.add_games(names, cell)
    return table


def _seats(players: dict[str, Player], cells: list[MemberProfile]) -> list[Player]:
    """Returns the player at each seat: the only one, or by the members that played there."""
    named = list(dict.fromkeys(filter(None, players.values())))
    seats = len(cells[0]) if cells else max(2, len(named))
    if len(named) < 2:
        return [*named, "everyone"][:1] * seats
    at_seat = []
    for seat, name in zip(range(seats), named, strict=True):
        known = filter(None, (players.get(cell[seat]) for cell in cells))
        at_seat.append(next(known, name))
    return at_seat


# ---- ratings


class Standing(NamedTuple):
    """A member's rating among those it played: Elo with standard error, OpenSkill (None if not installed), mean win
    rate (a draw is half a win), the lowest win rate and the opponent it is against, and games. Exact payoffs count as
    their expected wins and draws in `games_per_cell` games, and the standard error is that of as many games."""

    name: str
    elo: float
    stderr: float
    skill: SkillRating | None
    win_rate: float
    worst_win_rate: float
    worst_opponent: str
    games: int

    def ratings_as_text(self) -> list[str]:
        """Returns Elo, OpenSkill, the mean and the lowest win rate."""
        skill = f"{self.skill.mu:.1f} ± {1.96 * self.skill.sigma:.1f}" if self.skill else "-"
        elo = f"{self.elo:.0f} ± {1.96 * self.stderr:.0f}"
        return [elo, skill, f"{self.win_rate:.1%}", f"{self.worst_win_rate:.1%}"]


def standings(record: PopulationRecord, *, with_skills: bool = True) -> list[Standing]:
    """Returns the members that have played, best Elo first; OpenSkill only `with_skills`, since it reads game by game.
    Raises ValueError if there are no games, if games do not
    link all members, or if the game does not have two seats."""
    names, points = _pairwise_scores(record)
    elo, stderr = fit_elo(points)
    skills = {}
    if with_skills and find_spec("openskill"):
        skills = openskill_ratings(_some_games(record, names))
    games = points + points.T
    rates = np.where(games > 0, points / np.maximum(games, 1), np.nan)
    rows = []
    for i in np.argsort(-elo, kind="stable"):
        worst = int(np.nanargmin(rates[i]))
        mean = float(np.nanmean(rates[i]))
        fields = (skills.get(names[i]), mean, float(rates[i, worst]), names[worst], int(games[i].sum()))
        rows.append(Standing(names[i], float(elo[i]), float(stderr[i]), *fields))
    return rows


def cyclicity_warning(record: PopulationRecord) -> str:
    """Returns a warning about cycles among members, which ratings cannot express; "" if there are none."""
    names, points = _pairwise_scores(record)
    return cyclicity(names, points).warning


def _pairwise_scores(record: PopulationRecord) -> tuple[list[str], np.ndarray]:
    """Returns the members that have played others, and how often each has beaten each [M, M], a draw counting half."""
    names, points = record.payoffs.pairwise_scores()
    players = np.flatnonzero((points + points.T).sum(1) > 0)
    if not len(players):
        raise ValueError(
            f"the members of {record.path} have played no games that were counted: "
            f"`palestra league crossplay {record.path} --games 200` has them play"
        )
    return [names[i] for i in players], points[np.ix_(players, players)]


def _some_games(record: PopulationRecord, names: list[str]) -> list[tuple[list[str], list[float]]]:
    """Returns at most `MAX_OPENSKILL_GAMES` games of each pair, in proportion, in a fixed random order."""
    games: list[tuple[list[str], list[float]]] = []
    for pair in record.payoffs.cells():
        cell = record.payoffs.cell(pair)
        played = sum(cell.wins) + cell.draws
        share = min(1.0, MAX_OPENSKILL_GAMES / max(played, 1))
        for scores, count in (([1.0, 0.0], cell.wins[0]), ([0.0, 1.0], cell.wins[1]), ([0.0, 0.0], cell.draws)):
            games += [(list(pair), scores)] * round(share * count)
    order = np.random.default_rng(0).permutation(len(games))
    return [games[i] for i in order]


# ---- tables


def standings_table(record: PopulationRecord) -> Table:
    """Returns the standings as a table for the screen."""
    rows = standings(record)
    table = Table(title=f"{record.path}: {len(rows)} members", title_justify="left")
    for heading in ("", "member", "Elo ± 95 %", "OpenSkill ± 95 %", "win rate", "worst", "against", "games"):
        is_name = heading in ("member", "against")
        table.add_column(heading, justify="left" if is_name else "right", no_wrap=is_name, overflow="fold")
    for place, row in enumerate(rows, 1):
        table.add_row(str(place), row.name, *row.ratings_as_text(), row.worst_opponent, str(row.games))
    return table


def standings_csv(record: PopulationRecord) -> str:
    """Returns the standings as CSV: a header, and one line for each member."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["member", "elo", "elo_stderr", "mu", "sigma", "win_rate", "worst", "against", "games"])
    for row in standings(record):
        rows.writerow([*row[:3], *(row.skill or ("", "")), *row[4:]])
    return text.getvalue()


def crossplay_table(record: PopulationRecord) -> Table:
    """Returns mean returns of the first seat's members (rows) against the second's, for the screen: the newest
    `MAX_COLUMNS` columns.

    Raises ValueError if the game does not have two seats.
    """
    seats = record.payoffs.seats
    members = record.payoffs.members
    if len(seats) != 2:
        raise ValueError(
            f"a table of rows and columns needs a game with two seats; this one has {len(seats)}: use --csv"
        )
    rows = members[seats[0]]
    columns = members[seats[1]]
    first = max(0, len(columns) - MAX_COLUMNS)
    table = Table(title=_caption(record, rows, columns, first), title_justify="left")
    table.add_column("")
    table.add_column("member", no_wrap=True)
    for number in range(first, len(columns)):
        table.add_column(str(number + 1), justify="right", no_wrap=True)
    for number, name in enumerate(rows, 1):
        cells = [record.payoffs.cell((name, column)) for column in columns[first:]]
        table.add_row(str(number), name, *map(_cell_text, cells))
    return table


def _caption(record: PopulationRecord, rows: list[str], columns: list[str], first: int) -> str:
    what = f"{record.path}: what each row's member earns from each column's"
    if first:
        what += f", the newest {MAX_COLUMNS} of {len(columns)}"
    if rows != columns:
        what += f" ({', '.join(columns[first:])})"
    return what


def _cell_text(cell: PayoffCell) -> str:
    if not cell.games and not cell.exact:
        return "-"
    return f"{cell.mean[0]:+.2f}"


# ---- exploitability


class ExploitResult(NamedTuple):
    """Result of a learned response of one player, which has `seats` seats of the game, to the others' mixtures.

    `response_return` is the response's mean return per game, `mixture_return` that of the mixture that it replaces
    (None if the run never measured it), `stderr` the standard error of their difference. `mixtures` are the mixtures of
    all players.
    """

    player: Player
    seats: int
    response_return: float
    stderr: float
    mixture_return: float | None
    mixtures: dict[Player, Mix]

    @property
    def gain(self) -> float | None:
        """By how much the response's return exceeds the mixture's; None if that is unknown."""
        if self.mixture_return is None:
            return None
        return self.response_return - self.mixture_return


def exploits_table(path: Path, exploits: list[ExploitResult]) -> Table:
    """Returns the responses' returns beside those of the mixtures they replace, for the screen."""
    table = Table(title=f"{path}: return per game of trained best responses", title_justify="left")
    for heading in ("player", "response", "the mixture itself", "gain"):
        table.add_column(heading, justify="left" if heading == "player" else "right")
    for one in exploits:
        response = f"{one.response_return:+.3f}"
        error = f" ± {1.96 * one.stderr:.3f}"
        if one.gain is None:
            table.add_row(one.player, response + error, "unknown", "unknown")
        else:
            table.add_row(one.player, response, f"{one.mixture_return:+.3f}", f"{one.gain:+.3f}{error}")
    return table


def nash_conv_lower_bound(exploits: list[ExploitResult]) -> float | None:
    """Returns a lower bound on NashConv that holds with a probability of at least 95 %, from the gains at all seats;
    None if a gain is unknown.

    Each player's gain is taken at its own one-sided bound, at 95 % for all together (Bonferroni), and as 0 if that is
    negative: a best response gains at least 0. The sum of the positive measured gains would exceed NashConv by noise.
    """
    z = NormalDist().inv_cdf(1 - (1 - CONFIDENCE) / len(exploits))
    if any(one.gain is None for one in exploits):
        return None
    return sum(one.seats * max(0.0, one.gain - z * one.stderr) for one in exploits if one.gain is not None)


def describe_lower_bound(exploits: list[ExploitResult]) -> str:
    """Formats `nash_conv_lower_bound` beside the measured gains; "" if a gain is unknown."""
    bound = nash_conv_lower_bound(exploits)
    if bound is None:
        return ""
    gain = sum(one.seats * (one.gain or 0.0) for one in exploits)
    percent = f"{100 * CONFIDENCE:.0f} %"
    return f"NashConv is at least {bound:.3f} (at {percent} confidence; the responses gain {gain:+.3f} in all)"
