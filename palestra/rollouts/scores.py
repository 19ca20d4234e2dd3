"""Metrics of vector envs' episodes: for logs, and for evaluations in which short and long episodes count alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

from palestra.types import TEAM, Batch, Metrics, Seat

Games = dict[str, np.ndarray]  # see `Scores.take`


class Tally:
    """Accumulates the metrics of vector training between two log lines."""

    def __init__(self, policies: Sequence[str], seats: Mapping[Seat, str]) -> None:
        self.policies, self.seats = list(policies), dict(seats)
        self.games: list[Games] = []
        self.figures: dict[str, list[Metrics]] = {name: [] for name in policies}
        self.notes: list[Metrics] = []
        self.env_steps = 0

    def add(self, batch: Batch, figures: Mapping[str, Metrics]) -> None:
        """Adds a batch's episodes and the learner's metrics by policy."""
        self.games.append(batch.games)
        self.notes.append(batch.notes)
        self.env_steps += batch.terminated.size
        for name, line in figures.items():
            if line:
                self.figures[name].append(line)

    @classmethod
    def merged(cls, tallies: Sequence[Self]) -> Self:
        """Returns the tallies of several processes merged into one. Modifies the first."""
        first = tallies[0]
        for other in tallies[1:]:
            first.games += other.games
            first.notes += other.notes
            first.env_steps += other.env_steps
            for name, lines in other.figures.items():
                first.figures[name] += lines
        return first

    def lines(self) -> dict[str, Metrics]:
        """Returns metrics by policy, and those of all seats together under "team". Returns and lengths are left out if
        no episode ended."""
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
    """Returns the mean of each metric over the dicts that contain it."""
    keys = dict.fromkeys(key for line in lines for key in line)
    return {key: float(np.mean([line[key] for line in lines if key in line])) for key in keys}


def enough(parts: Sequence[Games], places: int, each: int) -> bool:
    """Returns True if each of `places` parallel games has ended at least `each` episodes."""
    ended = np.bincount(np.concatenate([part["game"] for part in parts]), minlength=places)
    return bool((ended >= each).all())


def figures_of(parts: Sequence[Games], seats: Sequence[Seat], each: int, most: int) -> dict[str, Any]:
    """Returns means over the first `each` episodes of every parallel game, `most` in all: return of each seat and of
    all, length, and success if the env reports it."""
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
