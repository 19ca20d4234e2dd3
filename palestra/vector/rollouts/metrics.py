"""Metrics of vector envs' episodes, for logs and for evaluations. In evaluations, short and long
episodes have the same weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from palestra.core.types import TEAM, Metrics, Seat
from palestra.runs.headline import TEAM_RETURN, TEAM_SUCCESS
from palestra.runs.loop import PhaseTimer

EndedEpisodes = dict[str, np.ndarray]  # see `EpisodeStats.pop_ended`


@dataclass(frozen=True)
class VectorUpdate:
    """The log of one rollout and the update on it: the episodes that ended, metrics of the rollout,
    its joint steps over all env copies, the learner's metrics by policy, and the times of both."""

    ended: EndedEpisodes
    rollout_metrics: Metrics
    env_steps: int
    learner_metrics: Mapping[str, Metrics]
    timer: PhaseTimer


def training_metrics(
    updates: Sequence[VectorUpdate], policies: Sequence[str], seats: Mapping[Seat, str], teams: Mapping[Seat, str]
) -> dict[str, Metrics]:
    """Returns the metrics of `updates` by policy, and those of all seats together under "team", with the return of each
    team if there are several, and success (`success_metrics`). Returns, lengths and success are left out if no episode
    ended. `seats` maps seats to policies, `teams` to teams."""
    returns = np.concatenate([update.ended["returns"] for update in updates])
    names = list(seats.values())
    success = np.concatenate([update.ended["success"] for update in updates])
    by_policy = success_by_name(success, names) if success.shape[1] > 1 else {}
    result = {}
    for name in policies:
        policy_seats = [i for i, policy in enumerate(names) if policy == name]
        shown = {"return": float(returns[:, policy_seats].mean())} if len(returns) else {}
        if name in by_policy:
            shown["success"] = by_policy[name]
        result[name] = shown | mean_metrics([update.learner_metrics.get(name, {}) for update in updates])
    lengths = np.concatenate([update.ended["lengths"] for update in updates])
    env_steps = sum(update.env_steps for update in updates)
    team: Metrics = {"episodes": float(len(lengths)), "env_steps_here": float(env_steps)}
    if len(lengths):
        team |= {"return": float(returns.mean()), "steps_per_episode": float(lengths.mean())}
        team |= returns_by_team(returns, list(teams.values()))
    team |= success_metrics(success, list(teams.values()))
    return result | {TEAM: team | mean_metrics([update.rollout_metrics for update in updates])}


def returns_by_team(returns: np.ndarray, teams: Sequence[str]) -> Metrics:
    """Returns each team's mean return, `return.TEAM`, from returns [G, N]; none for one team."""
    names = list(dict.fromkeys(teams))
    if len(names) < 2:
        return {}
    team_of = np.array(teams)
    return {f"{TEAM_RETURN}{name}": float(returns[:, team_of == name].mean()) for name in names}


def success_metrics(success: np.ndarray, teams: Sequence[str]) -> Metrics:
    """Returns `success` from an array of `EpisodeStats.pop_ended`; if it is by seat and the seats
    play in several teams, that of each team that reports it, as `success.TEAM`, since no number is
    that of all. Nothing if no episode reports success."""
    if success.shape[1] > 1 and len(set(teams)) > 1:
        return {f"{TEAM_SUCCESS}{name}": value for name, value in success_by_name(success, teams).items()}
    return success_by_name(success, ["success"] * success.shape[1])


def success_by_name(success: np.ndarray, names: Sequence[str]) -> Metrics:
    """Returns the mean success [G, C] of the seats of each name; names of seats that never report
    it are left out. A seat that reports it in some episodes had none in the others."""
    seats_of: dict[str, list[int]] = {}
    for seat, name in enumerate(names):
        if not np.isnan(success[:, seat]).all():
            seats_of.setdefault(name, []).append(seat)
    values = np.nan_to_num(success)
    return {name: float(values[:, seats].mean(dtype=np.float64)) for name, seats in seats_of.items()}


def mean_metrics(lines: Sequence[Metrics]) -> Metrics:
    """Returns the mean of each metric over the dicts that contain it."""
    keys = dict.fromkeys(chain.from_iterable(lines))
    return {key: float(np.mean([line[key] for line in lines if key in line])) for key in keys}


def all_episodes_done(batches: Sequence[EndedEpisodes], places: int, each: int) -> bool:
    """Returns True if each of `places` parallel games has ended at least `each` episodes."""
    ended = np.bincount(np.concatenate([batch["game"] for batch in batches]), minlength=places)
    return bool((ended >= each).all())


def evaluation_metrics(
    batches: Sequence[EndedEpisodes], seats: Sequence[Seat], each: int, max_episodes: int, teams: Sequence[str] = ()
) -> dict[str, Any]:
    """Returns means over the first `each` episodes of every parallel game, `max_episodes` in all:
    return of each seat, of each team if `teams`, those of the seats, are several, and of all;
    length, and success as in `success_metrics`."""
    episodes = {key: np.concatenate([batch[key] for batch in batches]) for key in batches[0]}
    seen: dict[int, int] = {}
    chosen = []
    for i, place in enumerate(episodes["game"]):
        seen[place] = seen.get(place, 0) + 1
        if seen[place] <= each:
            chosen.append((seen[place], int(place), i))
    index = [i for _, _, i in sorted(chosen)[:max_episodes]]
    returns = episodes["returns"][index]
    metrics: dict[str, Any] = {
        "episodes": float(len(index)),
        "return": float(returns.mean()),
        "steps_per_episode": float(episodes["lengths"][index].mean()),
        "returns": {seat: float(value) for seat, value in zip(seats, returns.mean(0), strict=True)},
        "deviation": float(returns.mean(1).std()),
        **returns_by_team(returns, teams),
    }
    return metrics | success_metrics(episodes["success"][index], teams)
