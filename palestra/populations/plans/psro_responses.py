"""Responses of PSRO: policies in training, before they become members."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from palestra.core.types import Metrics
from palestra.populations.plans.meta_strategy import MetaStrategy
from palestra.populations.population import Member, Player
from palestra.populations.tasks import TrainResult

MIN_RELATIVE_GAIN = 1e-7  # smaller gains count as 0 (joint solvers); relative to the largest payoff


@dataclass
class Response:
    """A policy in training: the response of iteration `iteration` for `player`. `name` is its name as a member.

    `recommended` is the member that it deviates from or continues, if an iteration has one response for each of several
    members. `latest` is its newest snapshot. With joint solvers, `gain` is its gain (minus the standard error if it is
    learned), infinite if unknown; `digest` identifies its policy and is equal for equal exact responses.
    """

    name: str
    player: Player
    iteration: int
    recommended: str | None = None
    start: str | None = None
    slices: int = 0
    latest: str = ""
    gain: float = math.inf
    digest: str = ""

    @property
    def is_frozen(self) -> bool:
        """True once its last slice is done."""
        return self.latest == self.name

    def to_member(self) -> Member:
        """Returns the finished response as a member."""
        info: dict[str, Any] = {"iteration": self.iteration, "slices": self.slices}
        if self.recommended:
            info["recommended"] = self.recommended
        return Member(self.name, self.player, f"members/{self.name}", self.start, info)


def most_recommended(members: Sequence[str | None], meta: MetaStrategy, player: Player, count: int) -> list[str | None]:
    """Returns the `count` members that `meta` recommends most often (of equals, the oldest), in order."""
    if len(members) <= count:
        return list(members)
    mix = meta.marginal(player)
    chosen = sorted(members, key=lambda name: -mix.get(name or "", 0.0))[:count]
    return [name for name in members if name in chosen]


def response_gain(response: Response, value: float, meta: MetaStrategy, payoffs: Sequence[np.ndarray]) -> float:
    """Returns the gain of a response to `meta` with return `value` over its player's value, times the probability of
    the recommendation that it deviates from; 0 if negligible."""
    joint, table = _recommended_part(response, meta, payoffs)
    gain = float(joint.sum() * value - (joint * table).sum())
    return gain if gain > MIN_RELATIVE_GAIN * max(float(np.abs(table).max()), abs(value)) else 0.0


def _recommended_part(
    response: Response, meta: MetaStrategy, tables: Sequence[np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the joint distribution and the player's table where the response's member is recommended."""
    seat = meta.seats.index(response.player)
    if not response.recommended:
        return meta.joint, tables[seat]
    place = [meta.names[seat].index(response.recommended)]
    return meta.joint.take(place, axis=seat), tables[seat].take(place, axis=seat)


def gain_error(
    response: Response, result: TrainResult, meta: MetaStrategy, stderr: Sequence[np.ndarray]
) -> float | None:
    """Returns the standard error of `response_gain` for a learned response, from the spread of its returns and the
    standard errors `stderr` of the payoffs of `meta`; None if its games are not known."""
    opponents = list(result.opponents.values())
    games = sum(own.games for own in opponents)
    if games < 2:
        return None
    mean = sum(own.games * own.mean_return for own in opponents) / games
    square = sum(own.games * own.mean_squared_return for own in opponents) / games
    joint, error = _recommended_part(response, meta, stderr)
    played = games / (len(meta.seats) - 1)  # `games` counts each game once per opponent
    own = joint.sum() ** 2 * max(square - mean**2, 0.0) / played
    return math.sqrt(own + float((joint[joint > 0] ** 2 * error[joint > 0] ** 2).sum()))


def warn_full(solver: str, meta: MetaStrategy, metrics: Metrics) -> None:
    """Warns that a run ends because the solver takes no larger table than that of `meta`."""
    members = " x ".join(map(str, meta.joint.shape))
    gap = f", whose newest responses gained {metrics['gap']:.3g} in all" if "gap" in metrics else ""
    fix = "; a lower max_responses or meta_solver cce adds fewer members" if solver == "ce" else ""
    warnings.warn(
        f"the run ends after iteration {metrics['iteration']:.0f} with {members} members{gap}, since solver {solver} "
        f"takes no larger table{fix}",
        stacklevel=2,
    )
