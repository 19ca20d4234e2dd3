"""Wrappers of package envs by config: games are those of the env wrapped by hand."""

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.wrappers import FrameStackObservation, TimeLimit
from pettingzoo.utils.wrappers import BaseParallelWrapper

import palestra as pl
from palestra.core.config import validate
from palestra.envs.adapters.gymnasium import GymnasiumEnv
from palestra.envs.adapters.pettingzoo.games import PettingZooEnv
from palestra.envs.vector_check import check_vector_env, random_actions
from palestra.vector.build.envs import make_vector_env
from palestra.vector.config import VectorConfig

SPREAD = "mpe2.simple_spread_v3:parallel_env"
STACKED = [{"type": "TimeLimit", "max_episode_steps": 6}, {"type": "FrameStackObservation", "stack_size": 3}]
SCALED = [{"type": f"{__name__}:Scaled", "factor": 0.5}]


class Scaled(BaseParallelWrapper):
    """A wrapper of one's own: rewards times a factor."""

    def __init__(self, env: Any, factor: float) -> None:
        super().__init__(env)
        self.factor = factor

    def step(self, actions: Any) -> Any:
        seen, rewards, *rest = super().step(actions)
        return seen, {agent: reward * self.factor for agent, reward in rewards.items()}, *rest


class Doubled(gymnasium.RewardWrapper):
    def reward(self, reward: Any) -> Any:
        return 2 * reward


def test_gymnasiums_wrappers_by_name_give_the_games_of_wrapping_by_hand() -> None:
    env = GymnasiumEnv(1, id="CartPole-v1", wrappers=STACKED)
    by_hand = FrameStackObservation(TimeLimit(gymnasium.make("CartPole-v1"), 6), 3)
    frame = env.reset(np.array([3]))
    assert env.observation_shapes == ((12,),)
    np.testing.assert_array_equal(frame.obs[0, 0], by_hand.reset(seed=3)[0].ravel())
    rng = np.random.default_rng(0)
    for step in range(6):
        actions = rng.integers(0, 2, (1, 1), dtype=np.int32)
        frame = env.step(actions)
        seen, _, _, truncated, _ = by_hand.step(int(actions[0, 0]))
        assert truncated == (step == 5) == bool(frame.truncated[0])
        shown = frame.final_obs if truncated else frame.obs
        np.testing.assert_array_equal(shown[0, 0], seen.ravel())


def test_a_wrapper_of_ones_own_changes_the_rewards_of_a_pettingzoo_env() -> None:
    plain, scaled = PettingZooEnv(2, env=SPREAD), PettingZooEnv(2, env=SPREAD, wrappers=SCALED)
    rng = np.random.default_rng(0)
    frame = plain.reset(np.array([1, 2]))
    np.testing.assert_array_equal(scaled.reset(np.array([1, 2])).obs, frame.obs)
    for _ in range(5):
        actions = random_actions(plain, frame, rng)
        frame = plain.step(actions)
        np.testing.assert_allclose(scaled.step(actions).rewards, 0.5 * frame.rewards, rtol=1e-6)
    assert frame.rewards.any()


def test_wrapped_envs_pass_the_vector_env_check() -> None:
    check_vector_env(lambda games: GymnasiumEnv(games, id="Pendulum-v1", wrappers=STACKED), steps=40)


def test_order_is_from_the_inside_outwards() -> None:
    clipped, doubled = {"type": "ClipReward", "max_reward": 0.5}, {"type": f"{__name__}:Doubled"}
    for wrappers, reward in (([clipped, doubled], 1.0), ([doubled, clipped], 0.5)):
        env = GymnasiumEnv(1, wrappers=wrappers)
        env.reset(np.array([0]))
        assert env.step(np.zeros((1, 1), np.int32)).rewards.tolist() == [[reward]]


@pytest.mark.parametrize(
    ("wrappers", "message"),
    [
        ([{"stack_size": 4}], r"wrappers\[0\] has no type: write \{type: TimeLimit"),
        (["TimeLimit"], r"wrappers\[0\] has no type"),
        ([{"type": "FrameStack"}], r'wrappers\[0\] "gymnasium.wrappers:FrameStack" cannot be loaded'),
        ([{"type": "TimeLimit", "steps": 3}], r"cannot wrap .* with \{'steps': 3\}: TypeError"),
        ([{"type": "NormalizeObservation"}], "a resumed run would not have: set normalize_observations of the policy"),
    ],
)
def test_what_cannot_wrap_is_refused_with_the_reason(wrappers: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GymnasiumEnv(1, wrappers=wrappers)


def test_a_run_trains_in_a_wrapped_env(tmp_path: Path) -> None:
    config = {
        "name": "stacked",
        "env": {"type": "gymnasium", "id": "CartPole-v1", "num_envs": 4, "wrappers": STACKED},
        "policies": {"agent": {"type": "net", "hidden": [16]}},
        "algorithm": {"type": "ppo", "rollout_length": 16},
        "env_steps": 256,
    }
    run = pl.train(validate(VectorConfig, config), root=tmp_path)
    assert run.metrics["steps_per_episode"].dropna().tolist() == [6.0] * 4


def test_every_reset_gets_the_options() -> None:
    env = make_vector_env({"type": "gymnasium", "num_envs": 4, "reset_options": {"low": 0.03, "high": 0.04}})
    step = env.reset(np.arange(4))
    assert ((step.obs >= 0.03) & (step.obs <= 0.04)).all()
    while not step.done.any():
        step = env.step(np.zeros((4, 1), np.int32))
    assert ((step.obs[step.done] >= 0.03) & (step.obs[step.done] <= 0.04)).all()
    tug = {"type": "pettingzoo", "env": "helpers.toy_teams:Tug", "num_envs": 2}
    assert make_vector_env(tug).reset(np.arange(2)).obs.max() == 0
    assert make_vector_env(tug | {"reset_options": {"is_shown": True}}).reset(np.arange(2)).obs.max() == 1
