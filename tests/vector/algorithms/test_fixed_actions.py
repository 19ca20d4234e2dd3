"""Continuous actions with a component of a single value: training continues, and the env gets that value."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.vector_toys import Countdown, ppo

from palestra.envs.batch.sync_vector import clip_actions
from palestra.envs.vector_base import Continuous, VectorStep
from palestra.vector.algorithms.ddpg import DDPG, TD3
from palestra.vector.algorithms.experimental.cql_sac import CQLSAC
from palestra.vector.algorithms.experimental.imitation import BC, GAIL
from palestra.vector.algorithms.experimental.iql import IQL
from palestra.vector.algorithms.experimental.trpo import TRPO
from palestra.vector.algorithms.sac import SAC
from palestra.vector.learners.policy_stack import NetPolicyConfig
from palestra.vector.policies.base import UniformVectorPolicy
from palestra.vector.rollouts.episodes import record_vector_episodes
from palestra.vector.rollouts.rollout import VectorRollout

FILE = "moves.parquet"
ON: dict[str, Any] = {"rollout_length": 8}
OFF: dict[str, Any] = {"rollout_length": 8, "gradient_steps": 4, "batch_size": 32}
LEARNERS = {
    "ppo": ppo(**ON),
    "trpo": TRPO(**ON),
    "sac": SAC(**OFF, learning_starts=40),
    "ddpg": DDPG(**OFF, learning_starts=40),
    "td3": TD3(**OFF, learning_starts=40),
    "iql": IQL(**OFF, data=[FILE]),
    "cql_sac": CQLSAC(**OFF, data=[FILE]),
    "bc": BC(**OFF, demonstrations=[FILE]),
    "gail": GAIL(**ON, demonstrations=[FILE]),
}


class Fixed(Countdown):
    """Countdown with actions of two numbers, of which the second is always 0.5; records the actions."""

    def __init__(self) -> None:
        super().__init__(4, space=Continuous((-1.0, 0.5), (1.0, 0.5)))
        self.got: list[np.ndarray] = []

    def step(self, actions: np.ndarray) -> VectorStep:
        self.got.append(clip_actions(self.action_spaces, actions))
        return super().step(self.got[-1])


@pytest.mark.parametrize("kind", LEARNERS)
@pytest.mark.few(3)
def test_number_with_a_single_value_does_not_stop_training(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    env, config = Fixed(), LEARNERS[kind]
    record_vector_episodes(env, [UniformVectorPolicy(env, [0, 1])], 20, FILE, seed=3)
    policy = NetPolicyConfig(hidden=[8])
    learner = config.build_learner(env, {"one": [0, 1]}, {"one": policy}, {"one": 1})
    before, rollout = learner.stacks[0].optimizer.flat.clone(), VectorRollout(env, np.arange(4))
    for i in range(4):
        batch = rollout.collect(learner.rollout_policies(0.0), config.rollout_length, i)
        metrics = learner.update(batch, 0.0)
        assert np.isfinite(list(metrics["one"].values())).all()
    assert not (learner.stacks[0].optimizer.flat == before).all()
    rollout.collect(learner.greedy_policies(), 8, 0)
    got = np.stack(env.got)
    assert (got[..., 1] == 0.5).all() and np.ptp(got[..., 0]) > 0
