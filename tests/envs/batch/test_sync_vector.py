"""A loop over single envs satisfies the contract of `VectorEnv`."""

import numpy as np
import pytest
from helpers.toy_games import Counting

from palestra.envs.batch.sync_vector import SyncVectorEnv, VectorEnvSpec, clip_actions, episode_seed
from palestra.envs.vector_base import Continuous, Discrete, MultiDiscrete
from palestra.envs.vector_check import check_vector_env


def test_sync_env_passes_the_vector_env_check() -> None:
    check_vector_env(lambda games: SyncVectorEnv(Counting, games))


def test_sync_env_equals_single_games() -> None:
    """Seeds 6 and 7: games of 6 steps (terminated) and 7 (truncated)."""
    env = SyncVectorEnv(Counting, 2)
    frame = env.reset(np.array([6, 7]))
    assert frame.obs.tolist() == [[[6, 0, 0], [6, 0, 0]], [[7, 0, 0], [7, 0, 0]]]
    assert frame.agent_mask.all() and not frame.rewards.any()
    for time in range(1, 6):
        frame = env.step(np.array([[1, 2], [0, 1]], np.int32))
        assert frame.obs[0].tolist() == [[6, time, 3 * time], [6, time, 0]]
        assert frame.agent_mask.tolist() == [[True, time < 3]] * 2
        assert frame.rewards.tolist() == ([[1, 2], [0, 1]] if time <= 3 else [[1, 0], [0, 0]])
        assert frame.seat_terminated is not None
        assert frame.seat_terminated.tolist() == [[False, time >= 3]] * 2
        assert frame.state is not None and frame.state.tolist() == [[3 * time], [time]]
        assert not frame.done.any()
    frame = env.step(np.array([[1, 2], [0, 1]], np.int32))
    assert frame.terminated.tolist() == [True, False] and not frame.truncated.any()
    assert frame.success is not None and frame.success.tolist() == [True, False]  # 18 is even
    assert frame.final_obs[0].tolist() == [[6, 6, 18], [6, 6, 0]]
    assert frame.final_state is not None and frame.final_state[0] == 18
    second = episode_seed(6, 1) % 2**20
    assert frame.obs[0].tolist() == [[second, 0, 0], [second, 0, 0]] and frame.agent_mask[0].all()
    frame = env.step(np.array([[0, 0], [0, 1]], np.int32))
    assert frame.truncated.tolist() == [False, True] and not frame.terminated.any()
    assert frame.final_obs[1].tolist() == [[7, 7, 7], [7, 7, 0]]


def test_episode_resets_in_the_step_of_its_end() -> None:
    env = SyncVectorEnv(Counting, 1)
    env.reset(np.array([5]))
    lengths, since = [], 0
    for _ in range(200):
        since += 1
        if env.step(np.zeros((1, 2), np.int32)).done[0]:
            lengths.append(since)
            since = 0
    assert lengths == [5 + episode_seed(5, number) % 5 for number in range(len(lengths))]
    assert len(set(lengths)) > 2


def test_games_are_saved_by_their_actions() -> None:
    """Two games of 6 and 7 steps, the first in its second game after eight steps; restored games continue like the
    saved ones."""
    env, other = SyncVectorEnv(Counting, 2), SyncVectorEnv(Counting, 2)
    env.reset(np.array([6, 7]))
    for number in range(8):
        env.step(np.array([[number % 3, 1], [2, 2]], np.int32))
    saved = env.save()
    assert saved is not None and saved["played"].tolist() == [1, 1] and saved["made"].tolist() == [2, 1]
    assert saved["moves"].tolist() == [[0, 1], [1, 1], [2, 2]]
    frame = other.load(saved)
    assert frame.obs.tolist() == env.vector_step.obs.tolist() and frame.rewards.tolist() == [[1, 1], [2, 2]]
    for _ in range(200):
        one, two = env.step(np.ones((2, 2), np.int32)), other.step(np.ones((2, 2), np.int32))
        assert one.obs.tolist() == two.obs.tolist() and one.done.tolist() == two.done.tolist()


def test_long_games_are_not_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Games of more than 5 steps here: a game of 5 ends with its fifth, one of 7 continues."""
    monkeypatch.setattr("palestra.envs.batch.sync_vector.MAX_REPLAY_STEPS", 5)
    short, long = SyncVectorEnv(Counting, 1), SyncVectorEnv(Counting, 1)
    short.reset(np.array([5]))
    long.reset(np.array([7]))
    for number in range(6):
        assert short.save() is not None and long.save() is not None, number
        short.step(np.zeros((1, 2), np.int32))
        long.step(np.zeros((1, 2), np.int32))
    assert short.save() is not None and long.save() is None
    long.step(np.zeros((1, 2), np.int32))
    assert long.save() is not None  # the next game has started


def test_illegal_actions_become_the_first_legal_one() -> None:
    env = SyncVectorEnv(Counting, 1)
    frame = env.reset(np.array([0]))
    assert frame.action_mask is not None and frame.action_mask[0].tolist() == [[True] * 4, [True] * 3 + [False]]
    assert env.step(np.array([[3, 3]], np.int32)).rewards.tolist() == [[3, 2]]  # the second seat has three actions
    assert env.step(np.array([[3, -9]], np.int32)).rewards.tolist() == [[0, 0]]  # 3 is illegal at odd times
    assert env.step(np.array([[99, 1]], np.int32)).rewards.tolist() == [[3, 1]]


def test_actions_are_clipped_to_their_spaces() -> None:
    picks = clip_actions((MultiDiscrete((2, 3)), MultiDiscrete((5,))), np.array([[[2, -1], [9, 9]]], np.int32))
    assert picks.tolist() == [[[1, 0], [4, 0]]] and picks.dtype == np.int32
    spaces = (Continuous((-1.0, 0.0), (1.0, 2.0)), Continuous((1.0,), (3.0,)))
    numbers = clip_actions(spaces, np.array([[[-5, np.nan], [np.nan, 7]], [[0.5, np.inf], [2, 0]]], np.float32))
    assert numbers.tolist() == [[[-1, 0], [1, 0]], [[0.5, 2], [2, 0]]] and numbers.dtype == np.float32


def test_seeds_of_later_games_follow_from_the_first() -> None:
    assert episode_seed(12, 0) == 12
    later = {episode_seed(stream, number) for stream in range(20) for number in range(1, 20)}
    assert len(later) == 20 * 19 and max(later) < 2**31
    assert episode_seed(2**40, 0) < 2**31


def test_observations_that_do_not_fit_in_one_array_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit in one array"):
        VectorEnvSpec(("a", "b"), ((1,), (40, 40, 3)), (Discrete(2), Discrete(2)))
    with pytest.raises(ValueError, match="num_envs: 0 is too small"):
        SyncVectorEnv(Counting, 0)
