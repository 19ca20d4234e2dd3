"""EnvPool games equal EnvPool's own, and reset in the step of their end."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

with warnings.catch_warnings(action="ignore"):
    import envpool

    from palestra.envs.adapters.envpool import EnvPoolEnv
    from palestra.envs.vector_base import Continuous, Discrete
    from palestra.envs.vector_check import check_vector_env, random_actions

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore:.*precision lowered by casting:UserWarning")]


@pytest.mark.parametrize(
    ("id", "options", "steps"),
    [
        ("LevelBasedForaging-v0", {}, 110),
        ("RobotWarehouse-v0", {"max_episode_steps": 30}, 40),
        ("IntersectionMultiAgent-v0", {}, 40),
        ("LeducHoldem-v1", {}, 60),
        ("ConnectFour-v1", {}, 60),
        ("Pong-v5", {"max_episode_steps": 20}, 45),
        ("Pendulum-v1", {"max_episode_steps": 20}, 45),
    ],
)
def test_envs_pass_the_vector_env_check(id: str, options: dict[str, Any], steps: int) -> None:
    check_vector_env(lambda games: EnvPoolEnv(games, id=id, options=options), num_envs=3, steps=steps)


def test_foraging_rewards_equal_envpool() -> None:
    """Compared with a pool of EnvPool, whose next game starts one step later. Only food is rewarded, at most 1 per
    game."""
    env, theirs = EnvPoolEnv(2, id="LevelBasedForaging-v0"), pool("LevelBasedForaging-v0", 2)
    assert (
        env.seats == ("agent_0", "agent_1")
        and env.action_spaces == (Discrete(6),) * 2
        and env.observation_shapes == ((12,),) * 2
    )
    frame, (seen, _), rng = env.reset(np.arange(2)), theirs.reset(), np.random.default_rng(0)
    paid = 0.0
    for _ in range(100):
        assert np.array_equal(frame.obs, np.float32(seen["agents_view"]))
        assert frame.action_mask is not None and np.array_equal(frame.action_mask, seen["action_mask"])
        actions = random_actions(env, frame, rng)
        frame = env.step(actions)
        seen, rewards, terminated, truncated, _ = theirs.step(actions)
        assert np.array_equal(frame.rewards, np.repeat(rewards[:, None], 2, 1))
        assert np.array_equal(frame.terminated, terminated) and np.array_equal(frame.truncated, truncated)
        paid += rewards[0]
        if frame.done.any():
            assert np.array_equal(frame.final_obs[frame.done], np.float32(seen["agents_view"])[frame.done])
            break
    assert 0 <= paid <= 1 and frame.done.any()


def pool(id: str, games: int) -> Any:
    return envpool.make_gymnasium(id, num_envs=games, env_seed=list(range(games)))


def test_multi_agent_rewards_equal_envpool() -> None:
    env, theirs = EnvPoolEnv(3, id="IntersectionMultiAgent-v0"), pool("IntersectionMultiAgent-v0", 3)
    frame, (seen, info), rng = env.reset(np.arange(3)), theirs.reset(), np.random.default_rng(0)
    assert env.seats == ("player_0", "player_1") and frame.agent_mask.all()
    for _ in range(13):
        # games of several players return in the order in which they are done
        rows = info["players"]["env_id"].argsort(kind="stable")
        assert np.array_equal(frame.obs.reshape(6, -1), seen[rows].reshape(6, -1))
        actions = random_actions(env, frame, rng)
        frame = env.step(actions)
        seen, rewards, *_, info = theirs.step(actions.reshape(-1))
        assert np.array_equal(frame.rewards.reshape(-1), rewards[info["players"]["env_id"].argsort(kind="stable")])
        if frame.done.any():
            return
    pytest.fail("no game ended in its 13 seconds")


@pytest.mark.parametrize("id", ["LeducHoldem-v1", "ConnectFour-v1"])
def test_turn_based_games_are_zero_sum(id: str) -> None:
    """Exactly one seat acts and has legal actions; returns of every game sum to zero and are paid at its end."""
    env = EnvPoolEnv(16, id=id)
    rng, frame, ended = np.random.default_rng(0), env.reset(np.arange(16)), 0
    for _ in range(80):
        assert (frame.agent_mask.sum(1) == 1).all() and frame.action_mask is not None
        frame = env.step(random_actions(env, frame, rng))
        assert (frame.rewards.sum(1) == 0).all() and (frame.rewards[~frame.done] == 0).all()
        ended += int(frame.done.sum())
    assert ended > 16


def test_connect_four_win_by_hand() -> None:
    env = EnvPoolEnv(1, id="ConnectFour-v1")
    frame = env.reset(np.array([0]))
    first = int(frame.agent_mask[0].argmax())
    for turn in range(7):
        assert frame.agent_mask[0].argmax() == (first + turn) % 2 and not frame.done[0]
        frame = env.step(np.full((1, 2), turn % 2, np.int32))
    assert frame.terminated[0] and frame.rewards[0, first] == 1 and frame.rewards[0, 1 - first] == -1


def test_images_have_channels_last() -> None:
    env, theirs = EnvPoolEnv(1, id="Pong-v5"), pool("Pong-v5", 1)
    frame, (seen, _) = env.reset(np.array([0])), theirs.reset()
    assert (
        env.observation_shapes == ((84, 84, 4),) and frame.obs.dtype == np.uint8 and env.action_spaces == (Discrete(6),)
    )
    for _ in range(20):
        frame, (seen, *_) = env.step(np.array([[2]], np.int32)), theirs.step(np.array([2]))
    assert np.array_equal(frame.obs[0, 0], seen[0].transpose(1, 2, 0)) and frame.obs.std() > 1


def test_continuous_actions_are_clipped() -> None:
    env = EnvPoolEnv(1, id="Pendulum-v1")
    assert env.action_spaces == (Continuous((-2.0,), (2.0,)),)
    env.reset(np.array([1]))
    one = env.step(np.full((1, 1, 1), 9, np.float32)).obs.copy()
    env.reset(np.array([1]))
    assert np.array_equal(one, env.step(np.full((1, 1, 1), 2, np.float32)).obs)


@pytest.mark.parametrize("id", ["Minesweeper-v0", "Tetris-v0"])
def test_masks_of_several_integers_together_are_refused(id: str) -> None:
    with pytest.raises(ValueError, match=r"has an action_mask .*, which is only used for one integer of each seat"):
        EnvPoolEnv(1, id=id)


def test_invalid_options_are_refused() -> None:
    with pytest.raises(ValueError, match='cannot make "Pang-v5"'):
        EnvPoolEnv(1, id="Pang-v5")
    with pytest.raises(ValueError, match=r'cannot make "Pong-v5" with {.stacks.: 2}'):
        EnvPoolEnv(1, id="Pong-v5", options={"stacks": 2})
