"""Offline learning: from recorded episodes alone. Play in the env only measures the policies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from pydantic import Field

from palestra.core.types import RolloutBatch
from palestra.envs.vector_base import Arrays
from palestra.vector.learners.nets import AlgorithmConfig, NetLearner
from palestra.vector.nets.on_device import RolloutTensors
from palestra.vector.nets.replay import ReplayBuffer
from palestra.vector.rollouts.episodes import EpisodeFiles, digest, read_vector_episodes
from palestra.vector.rollouts.rollout import terminate_truncated


class OfflineConfig(AlgorithmConfig):
    """Base config of offline learning."""

    data: EpisodeFiles
    """Path of a file of episodes (.parquet) that `palestra collect` wrote, or a list of them. Each
    seat learns from the actions recorded at it, whichever policy played them."""
    rollout_length: int = Field(16, ge=1)
    """Env steps between updates, of every parallel game; they measure the policies and are not trained on."""
    gradient_steps: int = Field(64, ge=1)
    """Gradient steps per rollout."""


class DataSet(ReplayBuffer):
    """Replay buffer of the episodes in files. Its state is the digest of the files, so that a run
    resumes on the same data only. `options` are those of `ReplayBuffer`."""

    def __init__(self, paths: Sequence[str], batch: RolloutBatch, **options: Any) -> None:
        super().__init__(len(batch.rewards), **options)
        self.paths = paths
        self.digest = digest(paths)
        self.add(batch)

    def arrays(self) -> Arrays:
        return {"digest": self.digest}

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Raises ValueError if the files are not those of the checkpoint."""
        if not np.array_equal(arrays["digest"], self.digest):
            raise ValueError(
                f"the data in {', '.join(self.paths)} are not those that the checkpoint was trained on, so training "
                "would not continue: restore the files, or start a new run on these"
            )


class OfflineLearner(NetLearner):
    """Base learner of offline learning, to be combined with a base learner that has a replay buffer."""

    config: OfflineConfig
    replay_options: Callable[[], dict[str, Any]]
    is_warm = True  # there are data from the start

    def build_replay(self) -> DataSet:
        """Reads the data and scales observations by them. Raises ValueError if they do not fit the
        env, or hold nothing that a policy can learn from."""
        batch = read_vector_episodes(self.config.data, self.env)
        if self.config.time_limit == "ends":
            batch = terminate_truncated(batch)
        found = DataSet(self.config.data, batch, **self.replay_options())
        acts = found.ring.columns["agent_mask"] & found.ring.columns["known"]
        for stack in self.stacks:
            for name, seats in zip(stack.seat_mapping.names, stack.seat_mapping.seats, strict=True):
                if not acts[:, list(seats)].any():
                    raise ValueError(
                        f"in {', '.join(self.config.data)} no step has an action of policy {name} and what followed: "
                        "record more steps"
                    )
        self.update_norms(RolloutTensors.of(batch, self.device))
        return found

    def remember(self, batch: RolloutBatch) -> None:
        """Does nothing: the data are given."""
