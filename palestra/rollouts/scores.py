"""Figures of games that ended: for logs, and for exams that count short and long games alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

from palestra.types import TEAM, Batch, Metrics, Seat

Games = dict[str, np.ndarray]  # see `Scores.take`


class Tally:
    """What happened between two lines of a log."""

    def __init__(self, policies: Sequence[str], seats: Mapping[Seat, str]) -> None:
        self.policies, self.seats = list(policies), dict(seats)
        self.games: list[Games] = []
        self.figures: dict[str, list[Metrics]] = {name: [] for name in policies}
        self.notes: list[Metrics] = []
        self.env_steps = 0

    def add(self, batch: Batch, figures: Mapping[str, Metrics]) -> None:
        self.games.append(batch.games)
        self.notes.append(batch.notes)
        self.env_steps += batch.terminated.size
        for name, line in figures.items():
            if line:
                self.figures[name].append(line)

    @classmethod
    def merged(cls, tallies: Sequence[Self]) -> Self:
        """Those of several processes as one."""
        first = tallies[0]
        for other in tallies[1:]:
            first.games += other.games
            first.notes += other.notes
            first.env_steps += other.env_steps
            for name, lines in other.figures.items():
                first.figures[name] += lines
        return first

    def lines(self) -> dict[str, Metrics]:
        """A line for each policy, and one for all seats together. Nothing is said of games where none ended."""
        returns = np.concatenate([games["returns"] for games in self.games])
        names = list(self.seats.values())
        result = {}
        for name in self.policies:
            own = [i for i, policy in enumerate(names) if policy == name]
            shown = {"return": float(returns[:, own].mean())} if len(returns) else {}
            result[name] = shown | averaged(self.figures[name])
        lengths = np.concatenate([games["lengths"] for games in self.games])
        success = np.concatenate([games["success"] for games in self.games])
        team: Metrics = {"episodes": float(len(lengths)), "env_steps_here": float(self.env_steps)}
        if len(lengths):
            team |= {"return": float(returns.mean()), "steps_per_episode": float(lengths.mean())}
        if len(success):
            team["success"] = float(success.mean())
        return result | {TEAM: team | averaged(self.notes)}


def averaged(lines: Sequence[Metrics]) -> Metrics:
    """The mean of each figure over the lines that have it."""
    keys = dict.fromkeys(key for line in lines for key in line)
    return {key: float(np.mean([line[key] for line in lines if key in line])) for key in keys}


def enough(parts: Sequence[Games], places: int, each: int) -> bool:
    """Whether every place has ended `each` games."""
    ended = np.bincount(np.concatenate([part["game"] for part in parts]), minlength=places)
    return bool((ended >= each).all())


def figures_of(parts: Sequence[Games], seats: Sequence[Seat], each: int, most: int) -> dict[str, Any]:
    """Means over the first `each` games of every place, `most` in all: return of each seat and of all, length, and
    success where the env knows it."""
    whole = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    seen: dict[int, int] = {}
    chosen = []
    for i, place in enumerate(whole["game"]):
        seen[place] = seen.get(place, 0) + 1
        if seen[place] <= each:
            chosen.append((seen[place], int(place), i))
    index = [i for _, _, i in sorted(chosen)[:most]]
    returns = whole["returns"][index]
    figures: dict[str, Any] = {
        "episodes": float(len(index)),
        "return": float(returns.mean()),
        "steps_per_episode": float(whole["lengths"][index].mean()),
        "returns": {seat: float(value) for seat, value in zip(seats, returns.mean(0), strict=True)},
        "deviation": float(returns.mean(1).std()),
    }
    if len(whole["success"]):
        figures["success"] = float(whole["success"][index].mean())
    return figures
