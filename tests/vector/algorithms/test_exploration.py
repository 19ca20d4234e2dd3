"""Exploration with continuous actions: the noise's distribution and memory, random play before training, and resume."""

from typing import Any

import numpy as np
import pytest
import torch
from helpers.remembered import made
from helpers.vector_toys import Countdown

from palestra.envs.vector_base import Continuous
from palestra.vector.algorithms.ddpg import TD3
from palestra.vector.algorithms.sac import SAC
from palestra.vector.nets.exploration_noise import CorrelatedNoise
from palestra.vector.rollouts.rollout import VectorRollout

LINE = Continuous((-2.0,), (2.0,))


def correlation(x: np.ndarray, lag: int) -> float:
    """Correlation of the rows of x [T, B] with those `lag` later."""
    return float(np.corrcoef(x[:-lag].ravel(), x[lag:].ravel())[0, 1])


@pytest.mark.parametrize("rho", [0.0, 0.9])
def test_noise_is_standard_normal_and_forgets_exponentially(rho: float) -> None:
    noise, generator = CorrelatedNoise(rho), torch.Generator().manual_seed(0)
    x = np.stack([noise.draw(torch.zeros(1, 50, 2), generator).numpy() for _ in range(2000)]).reshape(2000, -1)
    assert abs(x.mean()) < 0.03 and abs(x.std() - 1) < 0.02 and abs((x[0] ** 2).mean() - 1) < 0.35
    for lag in (1, 3):
        assert abs(correlation(x, lag) - rho**lag) < 0.02
    assert abs(np.corrcoef(x[:, 0], x[:, 1])[0, 1]) < 0.15  # all numbers are independent


@pytest.mark.parametrize("config", [TD3(), SAC()])
def test_random_play_is_uniform_and_correlated(config: Any) -> None:
    env = Countdown(64, space=LINE, seats=1)
    learner, rollout = made(config, env, seats={"a": [0]}), VectorRollout(env, np.arange(64))
    x = np.concatenate([rollout.collect(learner.rollout_policies(0.0), 50, i).actions[..., 0].copy() for i in range(4)])
    assert np.allclose(np.histogram(x, 4, (-2, 2))[0] / x.size, 0.25, atol=0.03)
    assert correlation(x[:, :, 0], 1) > 0.8  # also from one rollout to the next
    assert correlation(x[49::50, :, 0], 1) < 0.5
    independent = made(config.model_copy(update={"noise_correlation": 0.0}), env, seats={"a": [0]})
    x = VectorRollout(env, np.arange(64)).collect(independent.rollout_policies(0.0), 100, 0).actions[..., 0]
    assert abs(correlation(x[:, :, 0], 1)) < 0.05


def test_training_starts_after_a_tenth_of_a_short_run_or_ten_thousand_steps() -> None:
    assert [SAC().is_warm(*at) for at in [(500, 0.05), (500, 0.1), (9999, 0.0), (10_000, 0.0)]] == [0, 1, 0, 1]
    assert SAC(buffer_size=2000).is_warm(2000, 0.0) and SAC(learning_starts=5).is_warm(5, 0.0)
    assert not SAC(learning_starts=5000).is_warm(4999, 0.9)


@pytest.mark.parametrize("config", [TD3(learning_starts=1), SAC(learning_starts=1)])
def test_noise_continues_after_a_restore(config: Any) -> None:
    env = Countdown(8, space=LINE, seats=1)
    learner, other = (made(config, env, seats={"a": [0]}) for _ in range(2))
    rollout = VectorRollout(env, np.arange(8))
    learner.update(rollout.collect(learner.rollout_policies(0.0), 8, 0), 0.0)
    other.load_arrays(learner.state_arrays())
    actions = [
        VectorRollout(env, np.arange(8)).collect(own.rollout_policies(0.1), 8, 1).actions.copy()
        for own in (learner, other)
    ]
    np.testing.assert_array_equal(*actions)
    assert learner.noises[0].last is not None
