"""Samples a learner's opponents as its task says, and counts its results against each of them.

Shapes: `F` finished games, `N` seats, `S` seats of opponents.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from palestra.core.types import Metrics, RolloutBatch
from palestra.populations.population import Player
from palestra.populations.tasks import Opponents, TrainResult
from palestra.populations.workers.game_results import mean_return, opponent_results
from palestra.vector.policies.frozen import FrozenMember
from palestra.vector.policies.mixture import IndependentSampler, JointSampler, OpponentSampler
from palestra.vector.rollouts.metrics import mean_metrics


class MemberRegistry:
    """Frozen members by key (`player/name`), numbered in the order in which they are added; `load` loads one."""

    def __init__(self, load: Callable[[Player, str], FrozenMember]) -> None:
        self.load = load
        self.members: dict[str, FrozenMember] = {}
        self.names: list[str] = []

    def index(self, player: Player, name: str) -> int:
        """Returns a member's number; loads the member first if needed."""
        key = self.key(player, name)
        return list(self.members).index(key)

    def key(self, player: Player, name: str) -> str:
        """Returns a member's key, `player/name`; loads the member first if needed."""
        key = f"{player}/{name}"
        if key not in self.members:
            self.add(key, name, self.load(player, name))
        return key

    def add(self, key: str, name: str, member: FrozenMember) -> int:
        """Adds a loaded member and returns its number."""
        self.members[key] = member
        self.names.append(name)
        return len(self.names) - 1


def opponent_sampler(opponents: Opponents, registry: MemberRegistry, players: Sequence[Player]) -> OpponentSampler:
    """Returns the sampler of opponents for seats with these `players`."""
    if opponents.joint:
        lineups = [[registry.index(player, one.members[player]) for player in players] for one in opponents.joint]
        return JointSampler(lineups, [lineup.probability for lineup in opponents.joint])
    mixes = [opponents.mixes[player] for player in players]
    return IndependentSampler(
        [
            {registry.index(player, name): p for name, p in mix.items() if p > 0}
            for player, mix in zip(players, mixes, strict=True)
        ]
    )


class OpponentStats:
    """Counts results of the learner at `seat` against the members at seats `opponent_seats`."""

    def __init__(self, seat: int, others: Sequence[int], names: Sequence[str]) -> None:
        self.seat, self.opponent_seats, self.names = seat, list(others), names
        self.returns: list[np.ndarray] = []
        self.members: list[np.ndarray] = []
        self.metrics: list[Metrics] = []

    def add(self, batch: RolloutBatch, members: np.ndarray, metrics: Metrics) -> None:
        """Adds a rollout's finished games, the members int [F, S] that played them, and the update's metrics."""
        self.returns.append(batch.episode_stats["returns"])
        self.members.append(members)
        if metrics:
            self.metrics.append(metrics)

    def result(self, env_steps: int) -> TrainResult:
        """Returns the result of training that took `env_steps`, with the mean of the updates' metrics."""
        returns, members = np.concatenate(self.returns), np.concatenate(self.members)
        own, theirs = returns[:, self.seat], returns[:, self.opponent_seats]
        return TrainResult(
            env_steps=env_steps,
            mean_return=mean_return(own),
            opponents=opponent_results(own, theirs, members, self.names),
            metrics=dict(mean_metrics(self.metrics)),
        )
