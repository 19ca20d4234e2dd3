"""VMAS's scenarios through the adapter equal VMAS's own, and are determined by the seeds."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

with warnings.catch_warnings(action="ignore"):
    import vmas

    from palestra.envs.adapters.vmas import VmasEnv
    from palestra.envs.batch.sync_vector import combine_seeds
    from palestra.envs.vector_base import Continuous, Discrete
    from palestra.envs.vector_check import check_vector_env, random_actions

pytestmark = pytest.mark.peers


@pytest.mark.parametrize(
    ("scenario", "options"),
    [
        ("simple_spread", {}),
        ("simple_tag", {"continuous_actions": False}),
        ("balance", {"n_agents": 2}),
        ("navigation", {"n_agents": 2}),
    ],
)
def test_scenarios_pass_the_vector_env_check(scenario: str, options: dict[str, Any]) -> None:
    """Without the check of single games: VMAS draws for all its games at once."""
    make = lambda games: VmasEnv(games, scenario=scenario, steps=8, options=options)  # noqa: E731
    check_vector_env(make, num_envs=3, steps=20, check_independence=False)


def test_balance_equals_vmas() -> None:
    """Compared with an env of VMAS with the same first seed, until the first game ends."""
    env = VmasEnv(4, scenario="balance", steps=30)
    theirs = vmas.make_env("balance", num_envs=4, max_steps=30, terminated_truncated=True)
    assert len(env.seats) == theirs.n_agents and all(isinstance(space, Continuous) for space in env.action_spaces)
    rng, frame = np.random.default_rng(0), env.reset(np.arange(4))
    seen = theirs.reset(seed=combine_seeds(combine_seeds(0, 1, 2, 3), 1))
    for step in range(1, 31):
        for n, view in enumerate(seen):
            assert np.array_equal(frame.obs[:, n], view.numpy())
        actions = random_actions(env, frame, rng)
        frame = env.step(actions)
        seen, rewards, terminated, _, _ = theirs.step([actions[:, n] for n in range(len(env.seats))])
        assert np.array_equal(frame.rewards, np.stack([reward.numpy() for reward in rewards], 1))
        assert np.array_equal(frame.terminated, terminated.numpy()) and frame.truncated.any() == (step == 30)
        if frame.done.any():
            over = frame.done
            assert all(np.array_equal(frame.final_obs[over, n], view.numpy()[over]) for n, view in enumerate(seen))
            return
    pytest.fail("no game ended")


def test_only_finished_games_are_reset() -> None:
    """The package of "balance" falls at different times in different games."""
    env = VmasEnv(6, scenario="balance", steps=100)
    rng, frame = np.random.default_rng(0), env.reset(np.arange(6))
    for _ in range(100):
        before = frame.obs.copy()
        frame = env.step(random_actions(env, frame, rng))
        if frame.done.any() and not frame.done.all():
            break
    moved = np.abs(frame.obs - before).max((1, 2))
    assert frame.done.any() and not frame.done.all()
    assert (moved[~frame.done] < 0.5).all() and (moved[frame.done] > 0).all()
    last = np.abs(frame.final_obs - before).max((1, 2))
    assert (last[frame.done] < 0.5).all()


def test_discrete_actions_accelerate() -> None:
    """Agents of simple_spread that choose right (2) accelerate to the right: observations have the velocity after two
    numbers of position."""
    env = VmasEnv(2, scenario="simple_spread", options={"continuous_actions": False})
    assert all(isinstance(space, Discrete) for space in env.action_spaces)
    frame = env.reset(np.arange(2))
    start = frame.obs[:, :, :4].copy()
    for _ in range(5):
        frame = env.step(np.full((2, len(env.seats)), 2, np.int32))
    moved = frame.obs[:, :, :4] - start
    assert (np.abs(moved).max(2) > 0.01).all() and np.isfinite(frame.rewards).all() and (frame.rewards < 0).all()


def test_invalid_options_are_refused() -> None:
    with pytest.raises(ValueError, match='cannot make "no_such"'):
        VmasEnv(1, scenario="no_such")
    with pytest.raises(ValueError, match="steps is 0"):
        VmasEnv(1, steps=0)
