"""SuperSuit's wrappers, by name, around PettingZoo's envs."""

import warnings

import numpy as np
import pytest

with warnings.catch_warnings(action="ignore"):
    import supersuit
    from mpe2 import simple_spread_v3

    from palestra.envs.adapters.pettingzoo.games import PettingZooEnv
    from palestra.envs.vector_check import check_vector_env

pytestmark = pytest.mark.peers

STACKED = [{"type": "clip_reward_v0"}, {"type": "frame_stack_v1", "stack_size": 4}]
STICKY = [{"type": "sticky_actions_v0", "repeat_action_probability": 0.5}, {"type": "agent_indicator_v0"}]


@pytest.mark.parametrize("wrappers", [STACKED, STICKY])
def test_wrapped_envs_pass_the_vector_env_check(wrappers: list[dict[str, object]]) -> None:
    env = "mpe2.simple_spread_v3:parallel_env"
    check_vector_env(lambda games: PettingZooEnv(games, env=env, wrappers=wrappers), steps=60)


def test_games_are_those_of_wrapping_by_hand() -> None:
    env = PettingZooEnv(1, env="mpe2.simple_spread_v3:parallel_env", wrappers=STACKED)
    by_hand = supersuit.frame_stack_v1(supersuit.clip_reward_v0(simple_spread_v3.parallel_env()), stack_size=4)
    seen, _ = by_hand.reset(seed=5)
    frame = env.reset(np.array([5]))
    for _ in range(8):
        np.testing.assert_array_equal(frame.obs[0], np.stack(list(seen.values())))
        seen, rewards, *_ = by_hand.step(dict.fromkeys(by_hand.agents, 2))
        frame = env.step(np.full((1, 3), 2, np.int32))
        np.testing.assert_allclose(frame.rewards[0], list(rewards.values()))
        assert np.abs(frame.rewards).max() <= 1
