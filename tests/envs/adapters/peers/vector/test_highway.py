"""Several vehicles of highway-env act, each with its own observation."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

with warnings.catch_warnings(action="ignore"):
    import gymnasium

    from palestra.envs.adapters.highway import HighwayEnv
    from palestra.envs.batch.sync_vector import episode_seed
    from palestra.envs.vector_base import Continuous, Discrete
    from palestra.envs.vector_check import check_vector_env, random_actions

pytestmark = pytest.mark.peers
FEW = {"initial_vehicle_count": 2, "spawn_probability": 0.0, "simulation_frequency": 5}
SHORT = {"vehicles_count": 5, "duration": 4, "simulation_frequency": 5}


@pytest.mark.parametrize(
    ("id", "config"), [("intersection-multi-agent-v2", FEW), ("highway-fast-v0", SHORT), ("merge-v1", {})]
)
def test_envs_pass_the_vector_env_check(id: str, config: dict[str, Any]) -> None:
    check_vector_env(lambda games: HighwayEnv(games, id=id, config=config), num_envs=2, steps=15, expect_end=False)


def test_intersection_equals_highway_env() -> None:
    """Each vehicle is paid its own reward until it crashes or arrives, and a game ends with the last of them."""
    env = HighwayEnv(1, config=FEW)
    theirs = gymnasium.make("intersection-multi-agent-v2", config=FEW)
    assert env.seats == ("agent_0", "agent_1") and env.action_spaces == (Discrete(3),) * 2
    rng, frame, played = np.random.default_rng(0), env.reset(np.array([5])), 0
    seen, _ = theirs.reset(seed=5)
    different, ended = False, np.zeros(2, bool)
    for _ in range(40):
        assert np.allclose(frame.obs[0], [np.reshape(view, -1) for view in seen])
        assert frame.agent_mask[0].tolist() == (~ended).tolist()
        actions = random_actions(env, frame, rng)
        frame = env.step(actions)
        seen, rewards, terminated, truncated, _ = theirs.step(tuple(int(action) for action in actions[0]))
        assert np.allclose(frame.rewards[0], np.where(ended, 0, rewards))
        different, ended = different or rewards[0] != rewards[1], ended | terminated | truncated
        assert frame.done[0] == ended.all() and frame.truncated[0] == truncated
        if ended.all():
            assert np.allclose(frame.final_obs[0], [np.reshape(view, -1) for view in seen])
            played, ended = played + 1, np.zeros(2, bool)
            seen, _ = theirs.reset(seed=episode_seed(5, played))
    assert played > 0 and different


def test_observations_are_relative_to_each_vehicle() -> None:
    env = HighwayEnv(1, id="highway-fast-v0", vehicles=3, config=SHORT)
    frame = env.reset(np.array([0]))
    assert len(env.seats) == 3 and env.action_spaces == (Discrete(5),) * 3 and frame.agent_mask.all()
    assert len({frame.obs[0, n].tobytes() for n in range(3)}) == 3
    frame = env.step(np.array([[1, 1, 1]], np.int32))
    # staying in the lane at speed is rewarded
    assert frame.rewards[0, 0] == frame.rewards[0, 1] == frame.rewards[0, 2] > 0


def test_continuous_actions_are_supported() -> None:
    env = HighwayEnv(1, id="racetrack-v1", config={"duration": 5})
    assert all(isinstance(space, Continuous) for space in env.action_spaces) and len(env.seats) == 2
    frame = env.reset(np.array([0]))
    for _ in range(3):
        frame = env.step(random_actions(env, frame, np.random.default_rng(0)))
        assert np.isfinite(frame.obs).all()


def test_invalid_options_are_refused() -> None:
    with pytest.raises(ValueError, match='cannot make "motorway-v0"'):
        HighwayEnv(1, id="motorway-v0")
    with pytest.raises(ValueError, match="vehicles is 0"):
        HighwayEnv(1, vehicles=0)
