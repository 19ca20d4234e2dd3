"""JaxMARL's games through the adapter equal JaxMARL's own."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

with warnings.catch_warnings(action="ignore"):
    import jax
    import jax.numpy as jnp
    import jaxmarl
    from jaxmarl.environments import spaces

    from palestra.envs.adapters import jaxmarl as adapter
    from palestra.envs.adapters.jaxmarl import CompiledEnv, JaxMarlEnv
    from palestra.envs.vector_base import Continuous, Discrete
    from palestra.envs.vector_check import check_vector_env, random_actions

pytestmark = pytest.mark.peers


@pytest.mark.parametrize(
    "options",
    [
        {"id": "MPE_simple_spread_v3"},
        {"id": "MPE_simple_tag_v3"},
        pytest.param(
            {"id": "overcooked", "map": "cramped_room", "options": {"max_steps": 30}},
            marks=pytest.mark.filterwarnings("ignore:OvercookedV2 is now released:DeprecationWarning"),
        ),
        {"id": "HeuristicEnemySMAX", "map": "3m"},
        {"id": "hanabi"},
    ],
)
def test_envs_pass_the_vector_env_check(options: dict[str, Any]) -> None:
    """Two games only: each number of games is compiled separately."""
    check_vector_env(lambda games: JaxMarlEnv(games, **options), num_envs=2, steps=60)


def test_simple_spread_equals_jaxmarl() -> None:
    """Starting from the key of each seed, split as in the adapter: one half for the step, the other for the next
    split."""
    env, theirs = JaxMarlEnv(2), jaxmarl.make("MPE_simple_spread_v3")
    assert (
        env.seats == tuple(theirs.agents)
        and env.action_spaces == (Discrete(5),) * 3
        and env.observation_shapes == ((18,),) * 3
    )
    frame, rng = env.reset(np.array([3, 4])), np.random.default_rng(0)
    games = []
    for b in range(2):
        key, here = jax.random.split(jax.random.PRNGKey(3 + b))
        obs, state = theirs.reset(here)
        assert np.allclose(frame.obs[b], [obs[seat] for seat in env.seats], atol=1e-6)
        games.append((key, state))
    for _ in range(26):
        actions = random_actions(env, frame, rng)
        frame = env.step(actions)
        for b, (key, state) in enumerate(games):
            key, here = jax.random.split(key)
            given = dict(zip(env.seats, actions[b], strict=True))
            obs, state, rewards, done, _ = theirs.step_env(here, state, given)
            shown = frame.final_obs if done["__all__"] else frame.obs
            assert np.allclose(shown[b], [obs[seat] for seat in env.seats], atol=1e-5)
            assert np.allclose(frame.rewards[b], [rewards[seat] for seat in env.seats], atol=1e-5)
            assert frame.truncated[b] == done["__all__"] and not frame.terminated[b]
            games[b] = (key, state)
    assert frame.truncated.all()  # JaxMARL's time limit allows 26 steps


class Parting:
    """Agent "early" dies at its first step, and "late" after `dies` steps; the time limit is 4. All rewards are 0."""

    agents = ("early", "late")
    max_steps = 4

    def __init__(self, dies: int) -> None:
        self.dies = dies

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(2)

    def get_avail_actions(self, state: Any) -> Any:
        raise NotImplementedError

    def reset(self, key: Any) -> Any:
        return self.seen(jnp.int32(0)), jnp.int32(0)

    def seen(self, time: Any) -> Any:
        return {agent: jnp.full(1, time, jnp.float32) for agent in self.agents}

    def step_env(self, key: Any, time: Any, actions: Any) -> Any:
        time = time + 1
        over = time >= jnp.minimum(self.max_steps, self.dies)  # then JaxMARL's envs mark all agents as done
        done = {"early": time >= 1, "late": over, "__all__": over}
        return self.seen(time), time, dict.fromkeys(self.agents, 0.0), done, {}


@pytest.mark.parametrize("dies", [3, 9])
def test_seat_that_died_before_the_time_limit_stays_terminated(dies: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the limit the other seat is truncated; a game in which all are dead is terminated for both."""
    monkeypatch.setattr(adapter, "compiled_env", lambda *_: CompiledEnv("toy", Parting(dies)))
    length = min(4, dies)
    check_vector_env(lambda games: JaxMarlEnv(games, id="toy"), num_envs=2, steps=10)
    env = JaxMarlEnv(2, id="toy")
    env.reset(np.arange(2))
    for time in range(1, 2 * length + 1):
        frame, last = env.step(np.zeros((2, 2), np.int32)), time % length == 0
        assert frame.done.tolist() == [last] * 2
        assert frame.terminated.tolist() == [last and dies < 4] * 2
        assert frame.truncated.tolist() == [last and dies > 4] * 2
        assert frame.seat_terminated is not None
        assert frame.seat_terminated.tolist() == [[True, last and dies < 4]] * 2


class Numbered:
    """Agents 0 and 1, as in the storm envs, observe named parts and get rewards in a list: agent 0 its action, agent 1
    twice its own. A game is truncated after `episode_length` steps, as in MABrax."""

    agents = (0, 1)
    episode_length = 3

    def action_space(self, agent: int) -> Any:
        return spaces.Discrete(2)

    def get_avail_actions(self, state: Any) -> Any:
        raise NotImplementedError

    def reset(self, key: Any) -> Any:
        return self.seen(jnp.int32(0)), jnp.int32(0)

    def seen(self, time: Any) -> Any:
        return [{"time": jnp.full((1, 1), time), "agent": jnp.array([agent, 7])} for agent in self.agents]

    def step_env(self, key: Any, time: Any, actions: Any) -> Any:
        rewards = [actions[0], 2 * actions[1]]
        return self.seen(time + 1), time + 1, rewards, {"__all__": time + 1 >= self.episode_length}, {}


def test_numbered_agents_that_see_several_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "compiled_env", lambda *_: CompiledEnv("toy", Numbered()))
    check_vector_env(lambda games: JaxMarlEnv(games, id="toy"), num_envs=2, steps=10)
    env = JaxMarlEnv(1, id="toy")
    assert env.seats == ("0", "1") and env.reset(np.array([0])).obs.tolist() == [[[0, 7, 0], [1, 7, 0]]]
    for time in range(1, 4):
        frame = env.step(np.array([[1, time % 2]], np.int32))
        assert frame.rewards.tolist() == [[1, 2 * (time % 2)]]
        assert frame.truncated.tolist() == [time == 3] and not frame.terminated.any()
    assert frame.final_obs.tolist() == [[[0, 7, 3], [1, 7, 3]]]


def test_marines_win_by_shooting_first_and_lose_by_standing() -> None:
    """Allies that shoot whenever possible (actions from 5 on) win many games; allies that only stop (4) win none, and
    die. Won games are successes; returns stay between 0 and 2."""
    env = JaxMarlEnv(16, id="HeuristicEnemySMAX", map="3m")
    assert env.seats == ("ally_0", "ally_1", "ally_2") and env.state_size > 0
    wins = {}
    for shoots in (True, False):
        frame, ended, won, paid = env.reset(np.arange(16)), 0, 0, np.zeros(16)
        for _ in range(100):
            assert frame.action_mask is not None and frame.success is not None
            attack = frame.action_mask[..., 5:]
            first = np.where(attack.any(2), 5 + attack.argmax(2), np.where(frame.action_mask[..., 1], 1, 4))
            frame = env.step((first if shoots else np.full((16, 3), 4)).astype(np.int32))
            paid += frame.rewards[:, 0]
            assert (frame.agent_mask == frame.action_mask[..., :4].any(2)).all()  # dead units may only stop
            assert not (frame.success & ~frame.terminated).any() and (paid >= 0).all() and (paid <= 2.001).all()
            ended, won = ended + int(frame.done.sum()), won + int(frame.success.sum())
            paid[frame.done] = 0
        wins[shoots] = won / ended
        assert ended >= 16
    assert wins[True] > 0.3 and wins[False] == 0


def test_hanabi_is_turn_based_with_shared_rewards() -> None:
    """Exactly one seat acts; every point is paid to all seats; the maximum is 25."""
    env = JaxMarlEnv(8, id="hanabi")
    rng, frame, paid, ended = np.random.default_rng(0), env.reset(np.arange(8)), np.zeros(8), 0
    for step in range(120):
        assert (frame.agent_mask.sum(1) == 1).all()
        if step == 0:
            assert frame.agent_mask[:, 0].all() or frame.agent_mask[:, 1].all()
        before = frame.agent_mask.copy()
        frame = env.step(random_actions(env, frame, rng))
        over = frame.done
        assert (frame.agent_mask[~over] != before[~over]).all()
        assert (frame.rewards[:, 0] == frame.rewards[:, 1]).all()
        paid += frame.rewards[:, 0]
        assert (paid <= 25).all() and frame.terminated[over].all()
        paid[over], ended = 0, ended + int(over.sum())
    assert ended > 8


def test_continuous_actions_are_clipped() -> None:
    env = JaxMarlEnv(1, id="MPE_simple_facmac_v1")
    space = env.action_spaces[0]
    assert isinstance(space, Continuous)
    shape = (1, len(env.seats), len(space.low))
    frames = []
    for number in (9.0, space.high[0]):
        env.reset(np.array([0]))
        frames.append(env.step(np.full(shape, number, np.float32)).obs.copy())
    assert np.array_equal(*frames) and np.isfinite(frames[0]).all()


def test_invalid_options_are_refused() -> None:
    with pytest.raises(ValueError, match=r'cannot make "MPE_simple_spred_v3".*not in registered'):
        JaxMarlEnv(1, id="MPE_simple_spred_v3")
    with pytest.raises(ValueError, match=r'no map "4m"'):
        JaxMarlEnv(1, id="HeuristicEnemySMAX", map="4m")
    with pytest.raises(ValueError, match="takes no map"):
        JaxMarlEnv(1, id="hanabi", map="3m")
