"""Foraging is lbforaging's game: the same seed and actions give that package's numbers."""

from typing import Any

import numpy as np
import pytest
from lbforaging.foraging.environment import ForagingEnv  # type: ignore[import-untyped]

from palestra.environments.foraging.env import Foraging
from palestra.envs.vector_check import check_vector_env, random_actions

VARIANTS: list[dict[str, Any]] = [
    {},
    {"size": 5, "agents": 3, "sight": 1, "penalty": 0.1},
    {"size": 6, "agents": 4, "sight": 2, "cooperative": True, "max_level": 3},
    {"size": 10, "agents": 3, "sight": 3, "normalize": False, "min_food_level": 2, "max_food_level": 3},
    {"size": 5, "agents": 7, "food": 4, "max_steps": 20, "min_level": 2},
    {
        "size": 4,
        "food": 4,
        "max_steps": 16,
        "cooperative": True,
        "max_food_level": 3,
    },  # only one or two pieces fit
]


DEFAULTS: dict[str, Any] = {
    "size": 8,
    "agents": 2,
    "food": 3,
    "sight": None,
    "cooperative": False,
    "max_steps": 50,
    "min_level": 1,
    "max_level": 2,
    "min_food_level": 1,
    "max_food_level": None,
    "normalize": True,
    "penalty": 0.0,
}


def make_lbforaging(options: dict[str, Any]) -> ForagingEnv:
    setting = DEFAULTS | options
    return ForagingEnv(
        players=setting["agents"],
        min_player_level=setting["min_level"],
        max_player_level=setting["max_level"],
        min_food_level=setting["min_food_level"],
        max_food_level=setting["max_food_level"],
        field_size=(setting["size"], setting["size"]),
        max_num_food=setting["food"],
        sight=setting["size"] if setting["sight"] is None else setting["sight"],
        max_episode_steps=setting["max_steps"],
        force_coop=setting["cooperative"],
        normalize_reward=setting["normalize"],
        penalty=setting["penalty"],
    )


def mask(env: ForagingEnv) -> np.ndarray:
    action_mask = np.zeros((len(env.players), 6), bool)
    for player, row in zip(env.players, action_mask, strict=True):
        row[[action.value for action in env._valid_actions[player]]] = True
    return action_mask


def cooperative_actions(env: ForagingEnv, share: float, rng: np.random.Generator) -> np.ndarray:
    """Actions, a `share` of which move all agents to one piece of food and load it: random play eats too rarely. Some
    are illegal."""
    actions = rng.integers(0, 6, len(env.players))
    food = np.argwhere(env.field)[0]
    for n, player in enumerate(env.players):
        down, right = food - player.position
        if rng.random() < share:
            rows = right == 0 or (down != 0 and rng.random() < 0.5)
            actions[n] = 5 if abs(down) + abs(right) == 1 else (1 + (down > 0) if rows else 3 + (right > 0))
    return actions


# The package creates float32 boxes with float64 bounds.
@pytest.mark.filterwarnings("ignore:.*precision lowered by casting.*:UserWarning")
@pytest.mark.parametrize("options", VARIANTS)
@pytest.mark.few(1)
def test_games_equal_the_lbforaging_package(options: dict[str, Any]) -> None:
    rng, eaten, cut = np.random.default_rng(1), 0, 0
    for seed in range(6):
        env, other = Foraging(1, **options), make_lbforaging(options)
        frame, (obs, _) = env.reset(np.array([seed])), other.reset(seed=seed)
        for _ in range(250):
            assert np.array_equal(frame.obs[0], np.stack(obs))
            assert frame.action_mask is not None and np.array_equal(frame.action_mask[0], mask(other))
            actions = cooperative_actions(other, 0.8 if seed % 2 else 0.05, rng)
            frame = env.step(actions[None].astype(np.int32))
            obs, rewards, done, _, _ = other.step(actions.tolist())
            assert np.array_equal(frame.rewards[0], np.array(rewards, np.float32))
            assert frame.done[0] == done and frame.success is not None
            assert frame.terminated[0] == frame.success[0] == (other.field.sum() == 0)
            if done:
                assert np.array_equal(frame.final_obs[0], np.stack(obs))
                eaten, cut = eaten + frame.terminated[0], cut + frame.truncated[0]
                obs, _ = other.reset()
    assert eaten >= 5 and cut >= 5


@pytest.mark.parametrize("options", VARIANTS)
def test_env_passes_the_vector_env_check(options: dict[str, Any]) -> None:
    check_vector_env(lambda games: Foraging(games, **options), num_envs=4, steps=180)


def env_with(agents: list[list[int]], food: list[list[int]], **options: Any) -> Foraging:
    """A game with these agents and food, each (row, column, level)."""
    env = Foraging(1, agents=len(agents), food=len(food), **options)
    env.reset(np.array([0]))
    env.internal_state["agents"][0], env.internal_state["food"][0] = agents, food
    env.internal_state["total"][0] = sum(level for _, _, level in food)
    env.vector_step.action_mask[:] = True  # type: ignore[index]
    return env


def test_move_conflicts_block_and_swaps_are_allowed() -> None:
    env = env_with([[0, 0, 1], [0, 2, 1], [4, 4, 1], [4, 5, 1]], [[6, 1, 1]])
    env.step(np.array([[4, 3, 4, 3]]))
    assert env.internal_state["agents"][0, :, :2].tolist() == [[0, 0], [0, 2], [4, 5], [4, 4]]


def test_food_is_shared_by_level_and_a_failed_attempt_costs() -> None:
    env = env_with([[2, 1, 1], [2, 3, 2], [5, 4, 1]], [[2, 2, 3], [5, 5, 2]], penalty=0.1)
    frame = env.step(np.array([[5, 5, 5]]))
    assert np.allclose(frame.rewards[0], [3 / 15, 6 / 15, -0.1])  # 1 * 3 and 2 * 3, over (1 + 2) * (3 + 2)
    assert env.internal_state["food"][0].tolist() == [[0, 0, 0], [5, 5, 2]] and not frame.done[0]
    assert frame.state is not None and frame.action_mask is not None
    assert frame.action_mask[0, :, 5].tolist() == [False, False, True] and not frame.action_mask[0, 2, 4]
    food = [0, 0, 0, 5 / 7, 5 / 7, 2 / 6]
    assert np.allclose(frame.state[0], [2 / 7, 1 / 7, 0.5, 2 / 7, 3 / 7, 1, 5 / 7, 4 / 7, 0.5, *food, 1 / 50])


def test_eating_all_food_is_success_and_resets() -> None:
    env = env_with([[2, 1, 2]], [[2, 2, 2]])
    frame = env.step(np.array([[5]]))
    assert frame.rewards[0, 0] == 1 and frame.terminated[0] and frame.success is not None and frame.success[0]
    assert frame.final_obs[0, 0].tolist() == [-1, -1, 0, 2, 1, 2]
    assert frame.obs[0, 0, 2] > 0 and env.internal_state["steps"][0] == 0


def test_game_is_truncated_at_the_step_limit() -> None:
    env = env_with([[0, 0, 1]], [[2, 2, 2]], max_steps=2)
    assert not env.step(np.array([[0]])).done[0]
    frame = env.step(np.array([[0]]))
    assert frame.truncated[0] and not frame.terminated[0] and frame.success is not None and not frame.success[0]


def test_out_of_range_actions_do_nothing() -> None:
    env = env_with([[3, 3, 1], [5, 5, 1]], [[1, 1, 2]])
    env.step(np.array([[-7, 99]]))
    assert env.internal_state["agents"][0].tolist() == [[3, 3, 1], [5, 5, 1]]


def test_random_play_of_many_games_earns_at_most_one_a_game() -> None:
    env, rng = Foraging(64), np.random.default_rng(0)
    frame, earned, most = env.reset(np.arange(64)), np.zeros(64), 0.0
    for _ in range(200):
        frame = env.step(random_actions(env, frame, rng))
        earned += frame.rewards.sum(axis=1)
        most = max(most, earned.max())
        earned[frame.done] = 0
    assert 0.3 < most <= 1 + 1e-6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_envs": 0}, "num_envs: 0 is too small"),
        ({"size": 2}, "size: 2 is too small"),
        ({"agents": 0}, "agents: 0 is too small"),
        ({"agents": 33}, "33 on 8 x 8 cells find no room"),
        ({"food": 0}, "food: 0 is too small"),
        ({"max_steps": 0}, "max_steps: 0 is too small"),
        ({"sight": 0}, "sight: 0 is too small"),
        ({"min_level": 0}, "min_level: 0 is too small"),
        ({"min_level": 3}, "max_level: 2 is too small.*use 3 or more"),
        ({"min_food_level": 0}, "min_food_level: 0 is too small"),
        ({"min_food_level": 3}, "max_food_level: 2 is too small"),
        ({"min_food_level": 3, "max_food_level": 2}, "max_food_level: 2 is too small"),
        ({"penalty": -0.1}, "penalty: -0.1 would be a reward"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Foraging(**options)
