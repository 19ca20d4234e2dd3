"""Results of the arena: scores against each opponent, and the ratings computed from them.

Shapes: `R` reference players.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ConfigDict

from palestra.core.files import atomic_write, read_json, read_lines
from palestra.evaluation.arena.players import GAMES
from palestra.parallel.task_json import from_json
from palestra.populations.normal_form.equilibria import maximin
from palestra.populations.ratings import ELO_PER_LOG_ODDS, fit_elo

REFERENCE_FILE = Path(__file__).parents[2] / "data" / "arena.jsonl"
RATED_GAMES = [name for name, game in GAMES.items() if game.is_zero_sum]
ELO_MEAN = 1200.0  # of the reference players
MAX_ELO_GAP = 2000.0  # of a player from that mean


@dataclass(frozen=True)
class Score:
    """Results of one player against one opponent: the number of games, points (a win 1, a draw 1/2), the sums of the
    returns and of their squares, and how many games were forfeited."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    games: int
    points: float
    total: float
    squares: float
    forfeits: int = 0

    @classmethod
    def of(cls, returns: Sequence[tuple[float, float]], forfeits: int = 0) -> Score:
        """Returns the score of games with these returns, of the player and of the opponent."""
        points = sum((own > other) + (own == other) / 2 for own, other in returns)
        own = [first for first, _ in returns]
        return cls(len(own), points, sum(own), sum(value * value for value in own), forfeits)

    @property
    def mean(self) -> float:
        """The mean return."""
        return self.total / self.games

    @property
    def share(self) -> float:
        """The share of the points."""
        return self.points / self.games

    def __add__(self, other: Score) -> Score:
        return Score(*map(add, astuple(self), astuple(other)))


Scores = Mapping[str, Mapping[str, Score]]  # by game and opponent


@dataclass(frozen=True)
class ArenaResult:
    """A player's scores, its exploitability by game where known, and why games were forfeited (`notes`)."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    player: str
    scores: Scores
    exploitability: Mapping[str, float] = field(default_factory=dict)
    notes: Sequence[str] = ()

    def by_game(self) -> dict[str, Score]:
        """Returns the score in each game against all opponents together."""
        return {game: reduce(add, row.values()) for game, row in self.scores.items()}

    @property
    def rated_games(self) -> tuple[str, ...]:
        """The games that it played and that count for ratings."""
        return tuple(game for game in RATED_GAMES if game in self.scores)

    def by_opponent(self, games: Sequence[str] = RATED_GAMES) -> dict[str, Score]:
        """Returns the score against each opponent in `games` together."""
        met: dict[str, Score] = {}
        for game in games:
            for name, score in self.scores.get(game, {}).items():
                met[name] = met[name] + score if name in met else score
        return met

    def save(self, path: Path) -> None:
        """Writes the result as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, json.dumps(asdict(self), indent=1).encode() + b"\n")

    @classmethod
    def of_json(cls, tree: Mapping[str, Any]) -> ArenaResult:
        """Returns the result whose fields `asdict` returned. Raises ValueError for anything else."""
        try:
            return from_json(cls, tree, "result")
        except ValueError as error:
            raise ValueError(f"this is no result of the arena ({error})") from error


def load_references(path: Path = REFERENCE_FILE) -> list[ArenaResult]:
    """Returns the results of the reference players, one on each line (scripts/arena_references.py)."""
    return [ArenaResult.of_json(line) for line in read_lines(path)]


# ---- standings


@dataclass(frozen=True)
class Standing:
    """A player's line in the table. `elo` and its standard error are relative to the reference players, whose mean is
    1200; `nash_average` is the share of points against their equilibrium (Balduzzi et al., 2018), `worst` the lowest
    share, and `nemesis` who leaves it that. All count `rated_by` only; `returns` is the mean return in each game."""

    player: str
    rated_by: tuple[str, ...]
    elo: float
    stderr: float
    nash_average: float
    worst: float
    nemesis: str
    returns: Mapping[str, float]
    forfeits: int
    games: int

    @property
    def label(self) -> str:
        """The player's name, and what it is rated by if that is not every rated game."""
        if len(self.rated_by) == len(RATED_GAMES):
            return self.player
        return f"{self.player} ({', '.join(self.rated_by)})"


def standings_of(references: Sequence[ArenaResult], results: Sequence[ArenaResult]) -> list[Standing]:
    """Returns the standings of all players, the highest Elo first. A player is compared with what the reference players
    reach in the games that it played. Raises ValueError as `stand` does, or if a player has played no rated game."""
    ratings: dict[tuple[str, ...], ReferenceRatings] = {}
    standings = []
    for result in [*references, *results]:
        games = result.rated_games
        if not games:
            raise ValueError(f"{result.player} has played no game that counts for ratings: {', '.join(RATED_GAMES)}")
        if games not in ratings:
            ratings[games] = ReferenceRatings(references, games)
        standings.append(ratings[games].stand(result))
    return sorted(standings, key=lambda one: -one.elo)


class ReferenceRatings:
    """Elo of the reference players in `games`, and their equilibrium, to which players of these games are compared."""

    def __init__(self, references: Sequence[ArenaResult], games: Sequence[str] = RATED_GAMES) -> None:
        self.games = games
        self.names = [result.player for result in references]
        points_RR = np.array([self._points(result) for result in references])
        self.ratings = fit_elo(points_RR, mean=ELO_MEAN)
        games_RR = points_RR + points_RR.T
        share_RR = np.divide(points_RR, games_RR, out=np.full_like(points_RR, 0.5), where=games_RR > 0)
        self.equilibrium_R = maximin(share_RR - 0.5, ties="entropy")

    def _points(self, result: ArenaResult) -> list[float]:
        """Returns a result's points against each reference player."""
        met = {name: score.points for name, score in result.by_opponent(self.games).items()}
        return [met.get(name, 0.0) for name in self.names]

    def stand(self, result: ArenaResult) -> Standing:
        """Returns a player's standing. Raises ValueError if it met others than the reference players."""
        met = result.by_opponent(self.games)
        if unknown := met.keys() - set(self.names):
            other = min(unknown)
            raise ValueError(f"{result.player} met {other}, no reference player of this version: let it play again")
        elo, stderr = self._elo(met)
        share = {name: met[name].share if name in met else 0.5 for name in self.names}  # a reference against itself
        nemesis = min(met, key=lambda name: met[name].share)
        by_game = result.by_game()
        return Standing(
            player=result.player,
            rated_by=result.rated_games,
            elo=elo,
            stderr=stderr,
            nash_average=float(sum(p * share[name] for p, name in zip(self.equilibrium_R, self.names, strict=True))),
            worst=met[nemesis].share,
            nemesis=nemesis,
            returns={game: score.mean for game, score in by_game.items()},
            forfeits=sum(score.forfeits for score in by_game.values()),
            games=sum(score.games for score in by_game.values()),
        )

    def _elo(self, met: Mapping[str, Score]) -> tuple[float, float]:
        """Returns the Elo at which a player is expected to get its points, and its standard error; those of the
        opponents are fixed. One more drawn game against each keeps it finite."""
        worth = np.array([self.ratings.elo_M[self.names.index(name)] for name in met]) / ELO_PER_LOG_ODDS
        games = np.array([score.games + 1 for score in met.values()])
        points = sum(score.points + 0.5 for score in met.values())
        low = (ELO_MEAN - MAX_ELO_GAP) / ELO_PER_LOG_ODDS
        high = (ELO_MEAN + MAX_ELO_GAP) / ELO_PER_LOG_ODDS
        for _ in range(60):
            middle = (low + high) / 2
            if (games / (1 + np.exp(worth - middle))).sum() < points:
                low = middle
            else:
                high = middle
        chance = 1 / (1 + np.exp(worth - low))
        return ELO_PER_LOG_ODDS * low, ELO_PER_LOG_ODDS / math.sqrt((games * chance * (1 - chance)).sum())


# ---- results in a folder


def result_path(folder: Path, player: str) -> Path:
    """Returns the file of a player's result."""
    return folder / f"{re.sub(r'[^A-Za-z0-9.-]+', '_', player).strip('_.')}.json"


def read_results(folder: Path) -> list[ArenaResult]:
    """Returns the results that players left in a folder; [] if there is none. Raises ValueError for another file."""
    results = []
    for path in sorted(folder.glob("*.json")):
        try:
            results.append(ArenaResult.of_json(read_json(path, dict)))
        except ValueError as error:
            raise ValueError(f"{path}: {error}: move it elsewhere") from error
    return results


def write_leaderboard(folder: Path, standings: Sequence[Standing], results: Sequence[ArenaResult]) -> Path:
    """Writes the page leaderboard.md, and returns its path."""
    lines = [
        "# Leaderboard",
        "",
        "Two-player text games against the reference players of `palestra arena`; those in bold are no reference "
        "players. Elo, its standard error, the share of points against the reference players' equilibrium, the lowest "
        "share and against whom, and the mean return in each game. Beside a name: the only games that it is rated by.",
        "",
        f"| player | Elo | equilibrium | worst | against | {' | '.join(GAMES)} |",
        f"|---|---|---|---|---|{'---|' * len(GAMES)}",
    ]
    players = {result.player: result for result in results}
    for one in standings:
        name = f"**{one.label}**" if one.player in players else one.label
        returns = [f"{one.returns[game]:.2f}" if game in one.returns else "–" for game in GAMES]
        lines.append(
            f"| {name} | {one.elo:.0f} ± {one.stderr:.0f} | {one.nash_average:.0%} | {one.worst:.0%} | {one.nemesis} | "
            f"{' | '.join(returns)} |"
        )
    for result in players.values():
        facts = [f"{game}: exploitability {gap:.3f}" for game, gap in result.exploitability.items()]
        if facts or result.notes:
            lines += ["", f"**{result.player}**: {'; '.join([*facts, *result.notes])}."]
    path = folder / "leaderboard.md"
    atomic_write(path, "\n".join([*lines, ""]).encode())
    return path
