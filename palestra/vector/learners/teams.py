"""Several learners as one: policies with algorithms of their own, and the teams of an algorithm
that combines seats.

Each learner is that of a run which trains its seats alone: it sees the others as a part of the env.
So opponents never share a mixer, a latent or a factor, whatever algorithm combines the seats of a
team.

Shapes: `T` steps, `B` games, `N` seats, `S` seats of a team.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from palestra.core.types import Metrics, RolloutBatch
from palestra.envs.vector_base import VectorEnv
from palestra.vector.learners.nets import NetLearner
from palestra.vector.policies.base import VectorPolicy

SAME_REWARD = 1e-5  # rewards of one step that differ by less, in proportion to their size, are the same


@dataclass(frozen=True)
class TeamSeats:
    """The trained seats of a team: `policies` maps the policies of the config to the numbers of the
    seats that each plays. A policy with a network for each seat is one of them."""

    name: str
    policies: Mapping[str, Sequence[int]]

    @property
    def seats(self) -> list[int]:
        """The seat numbers of all policies."""
        return list(chain.from_iterable(self.policies.values()))


class JointLearner:
    """Learners of one env as one: all train on the same rollouts. Each has a `folder` of its own in a checkpoint."""

    def __init__(self, folders: Sequence[str], learners: Sequence[NetLearner | JointLearner]) -> None:
        self.folders = list(folders)
        self.learners = list(learners)

    @property
    def env(self) -> VectorEnv:
        return self.learners[0].env

    @property
    def device(self) -> torch.device:
        return self.learners[0].device

    @property
    def names(self) -> list[str]:
        return list(chain.from_iterable(learner.names for learner in self.learners))

    def rollout_policies(self, progress: float) -> list[VectorPolicy]:
        return self._all(lambda learner: learner.rollout_policies(progress))

    def sampling_policies(self) -> list[VectorPolicy]:
        return self._all(lambda learner: learner.sampling_policies())

    def greedy_policies(self) -> list[VectorPolicy]:
        return self._all(lambda learner: learner.greedy_policies())

    def _all(self, policies: Callable[[NetLearner | JointLearner], Sequence[VectorPolicy]]) -> list[VectorPolicy]:
        return list(chain.from_iterable(policies(learner) for learner in self.learners))

    def acting_tensors(self) -> list[Tensor]:
        return list(chain.from_iterable(learner.acting_tensors() for learner in self.learners))

    def update(self, batch: RolloutBatch, progress: float) -> dict[str, Metrics]:
        """Trains every learner on the rollout; returns metrics by policy."""
        metrics: dict[str, Metrics] = {}
        for learner in self.learners:
            metrics |= learner.update(batch, progress)
        return metrics

    def check_finite(self) -> None:
        for learner in self.learners:
            learner.check_finite()

    def member_writers(self) -> dict[str, Callable[[Path], None]]:
        return dict(chain.from_iterable(learner.member_writers().items() for learner in self.learners))

    def write_state(self, folder: Path) -> None:
        for name, learner in zip(self.folders, self.learners, strict=True):
            learner.write_state(folder / name)

    def start_from(self, folder: Path) -> None:
        for name, learner in zip(self.folders, self.learners, strict=True):
            learner.start_from(folder / name)

    def read_state(self, folder: Path) -> None:
        for name, learner in zip(self.folders, self.learners, strict=True):
            learner.read_state(folder / name)


class TeamLearners(JointLearner):
    """Learners of the teams of one `algorithm`; they refuse a team whose seats are opponents."""

    def __init__(self, algorithm: str, teams: Sequence[TeamSeats], learners: Sequence[NetLearner]) -> None:
        super().__init__([team.name for team in teams], learners)
        self.algorithm = algorithm
        self.teams = list(teams)
        self.unpaid = {team.name for team in teams}  # teams that have not been paid yet

    def update(self, batch: RolloutBatch, progress: float) -> dict[str, Metrics]:
        """Trains every team on the rollout. Raises ValueError as `check_rewards` does."""
        self.check_rewards(batch)
        return super().update(batch, progress)

    def check_rewards(self, batch: RolloutBatch) -> None:
        """Raises ValueError if two policies of a team earn different rewards in a step, or if the
        seats of a team only take rewards from each other: in all that it was paid first, their sum
        is 0."""
        for team in self.teams:
            if len(team.policies) > 1:
                self._check_equal(team, batch)
            elif team.name in self.unpaid and batch.rewards[..., team.seats].any():
                self._check_sum(team, batch)
                self.unpaid.remove(team.name)

    def _check_equal(self, team: TeamSeats, batch: RolloutBatch) -> None:
        alive = ~batch.seats_terminated | batch.terminated[..., None]  # one that has terminated earns nothing further
        rewards = [_mean_reward(batch.rewards, alive, own) for own in team.policies.values()]
        names = list(team.policies)
        first = rewards[0]
        for name, other in zip(names[1:], rewards[1:], strict=True):
            apart = np.abs(first - other) > SAME_REWARD * (1 + np.abs(first))  # false where one is NaN: nobody alive
            if apart.any():
                t, game = np.argwhere(apart)[0]
                raise ValueError(
                    f"{self.algorithm} trains team {team.name} on one reward, and its policies earn different ones in "
                    f'env "{self.env.label}" ({names[0]} {first[t, game]:g}, {name} {other[t, game]:g} in one step): '
                    "give opponents teams of their own in teams:, or let one policy with share_network: false play "
                    "the seats of this team, which is then trained on the mean of their rewards"
                )

    def _check_sum(self, team: TeamSeats, batch: RolloutBatch) -> None:
        rewards = batch.rewards[..., team.seats].astype(np.float64)
        if (np.abs(rewards.sum(-1)) <= SAME_REWARD * np.abs(rewards).sum(-1)).all():
            seats = ", ".join(self.env.seats[seat] for seat in team.seats)
            raise ValueError(
                f'{self.algorithm} trains {seats} as one team, and in env "{self.env.label}" what one of them earns '
                "the others lose, so that the team always earns 0: give opponents policies of their own, or use an "
                "algorithm that trains each seat on its own reward (ppo, dqn)"
            )


def _mean_reward(rewards: np.ndarray, alive: np.ndarray, seats: Sequence[int]) -> np.ndarray:
    """Returns the mean reward [T, B] of `seats` that are `alive` [T, B, N]; NaN where none is."""
    mask = alive[..., list(seats)]
    total = np.where(mask, rewards[..., list(seats)], 0.0).sum(-1)
    count = mask.sum(-1)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)
