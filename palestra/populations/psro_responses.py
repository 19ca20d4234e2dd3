"""Responses of PSRO: policies in training, from their start until they become members."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from palestra.populations.meta_strategy import MetaStrategy
from palestra.populations.population import Member, Player, Population
from palestra.populations.psro_config import PSROConfig

MIN_RELATIVE_GAIN = 1e-7  # of an exact response that is added (joint solvers), relative to the largest payoff


@dataclass
class Response:
    """A policy in training: the response of iteration `iteration` for `player`; `name` is that of the future member.

    `recommended` is the member that it deviates from or continues, if an iteration has one response for each of several
    members. `latest` is its newest snapshot; `gain` and `digest`, of an exact response, are its gain and a hash of its
    policy.
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
        """Returns the member that the finished response is."""
        info: dict[str, Any] = {"iteration": self.iteration, "slices": self.slices}
        info |= {"recommended": self.recommended} if self.recommended else {}
        return Member(self.name, self.player, f"members/{self.name}", self.start, info)


def recommended_members(config: PSROConfig, meta: MetaStrategy, player: Player) -> Sequence[str | None]:
    """Returns the members that have a response of their own; [None] if one response covers all."""
    return list(meta.marginal(player)) if config.rectified or config.meta_solver.type == "ce" else [None]


def start_member(
    config: PSROConfig,
    population: Population,
    meta: MetaStrategy,
    payoffs: Sequence[np.ndarray],
    player: Player,
    recommended: str | None,
) -> str | None:
    """Returns the member from whose weights a response starts; None for new weights. `payoffs` are the payoff tensors
    of `meta`."""
    if config.rectified:
        start = recommended
    elif config.start == "fresh":
        return None
    else:
        last = meta.names[meta.seats.index(player)][-1]
        start = last if config.start == "last" else meta.best_member(payoffs, player)
    return start if population.names_with_files([start]) else None


def response_gain(response: Response, value: float, meta: MetaStrategy, payoffs: Sequence[np.ndarray]) -> float:
    """Returns by how much a response to `meta` that earns `value` exceeds its player's value, times the probability of
    its recommendation; 0 if negligible."""
    seat = meta.seats.index(response.player)
    table, joint = payoffs[seat], meta.joint
    if response.recommended:
        place = [meta.names[seat].index(response.recommended)]
        table, joint = table.take(place, axis=seat), joint.take(place, axis=seat)
    gain = float(joint.sum() * value - (joint * table).sum())
    return gain if gain > MIN_RELATIVE_GAIN * max(float(np.abs(table).max()), abs(value)) else 0.0


def newest_snapshots(responses: Iterable[Response], players: Sequence[Player]) -> dict[Player, dict[str, str]]:
    """Returns, by player, the newest snapshot of each response in training that has one."""
    found: dict[Player, dict[str, str]] = {player: {} for player in players}
    for response in responses:
        if response.latest and not response.is_frozen:
            found[response.player][response.name] = response.latest
    return found
