"""Inputs of central critics and mixers: the global state or all observations, without padding, optionally
normalised."""

from typing import Any

import numpy as np
import pytest
import torch
from helpers.vector_toys import train

from palestra.environments.combat.env import Combat
from palestra.envs.vector.mpe import SimpleAdversary
from palestra.vector.algorithms.ddpg import DDPG
from palestra.vector.algorithms.experimental.coma import COMA
from palestra.vector.algorithms.ppo import PPO
from palestra.vector.algorithms.qmix import QMIX
from palestra.vector.learners.policy_stack import MAX_NORMALISED_INPUT, NetPolicyConfig
from palestra.vector.rollouts.rollout import VectorRollout

ALGORITHMS = [
    PPO(critic="central", rollout_length=8),
    COMA(rollout_length=8),
    QMIX(rollout_length=8, learning_starts=0, batch_size=16),
    DDPG(critic="central", rollout_length=8, learning_starts=1, batch_size=16),
]


def learner(algorithm: Any, env: Any, **policy: Any) -> Any:
    seats = {name: [number] for number, name in enumerate(env.seats)}
    policies = dict.fromkeys(seats, NetPolicyConfig(hidden=[8], **policy))
    return algorithm.build_learner(env, seats, policies, dict.fromkeys(seats, 1))


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda algorithm: algorithm.type)
@pytest.mark.few(2)
def test_global_state_is_normalised_by_running_statistics(algorithm: Any) -> None:
    env = Combat(8, map="3m")
    made = learner(algorithm, env, normalize_observations=True)
    sweeper, states = VectorRollout(env, np.arange(8)), []
    for number in range(3):
        batch = sweeper.collect(made.rollout_policies(0.0), 8, number)
        assert batch.state is not None
        states.append(batch.state[:-1].reshape(-1, env.state_size).copy())
        made.update(batch, 0.0)
    seen = np.concatenate(states)
    assert np.allclose(made.global_norm.mean[0], seen.mean(0), atol=1e-5)
    assert np.allclose(made.global_norm.std()[0], np.maximum(seen.std(0), 1e-4), atol=1e-4)
    found = made.global_features(batch.obs, torch.from_numpy(batch.state) * 1e6, 2)
    assert found.abs().max() == MAX_NORMALISED_INPUT
    assert "world" in made.modules() and not learner(algorithm, env).global_norm


def test_global_features_concatenate_observations_without_padding() -> None:
    """In simple_adversary one seat observes less than the others."""
    env = SimpleAdversary(4)
    made = learner(ALGORITHMS[0], env)
    batch = VectorRollout(env, np.arange(4)).collect(made.rollout_policies(0.0), 3, 0)
    sizes = [view[0] for view in env.observation_shapes]
    assert len(set(sizes)) > 1 and made.global_size == sum(sizes)
    expected = np.concatenate([batch.obs[..., seat, :size] for seat, size in enumerate(sizes)], -1)
    assert np.array_equal(made.global_features(batch.obs, None, 2), expected)


def test_normalised_state_bounds_initial_mixer_values() -> None:
    """SMAX's world state has positions up to 32: with raw positions the mixer's initial values are in the hundreds."""

    class Large(Combat):
        def step(self, actions: np.ndarray) -> Any:
            return self._large(super().step(actions))

        def reset(self, seeds: np.ndarray) -> Any:
            return self._large(super().reset(seeds))

        @staticmethod
        def _large(frame: Any) -> Any:
            copy = frame.copy()
            copy.state *= 1000
            copy.final_state *= 1000
            return copy

    figures = {}
    for normalise in (False, True):
        env = Large(8, map="3m")
        made = learner(ALGORITHMS[2], env, normalize_observations=normalise)
        lines = train(made, VectorRollout(env, np.arange(8)), 8, 3)
        figures[normalise] = max(abs(line["q"]) for line in lines.values())
    assert figures[True] < 5 < figures[False]
