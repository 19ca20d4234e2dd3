"""Two-player Atari: preprocessing as in the literature, both seats in one game."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest

with warnings.catch_warnings(action="ignore"):
    from palestra.envs.adapters.atari import AtariEnv, AtariGame, area_resize_weights
    from palestra.envs.vector_base import Discrete
    from palestra.envs.vector_check import check_vector_env, random_actions

pytestmark = pytest.mark.peers


def game(
    name: str = "pong", frame_skip: int = 4, frame_stack: int = 4, noop_max: int = 0, agent_indicator: bool = False
) -> AtariGame:
    return AtariGame(
        name,
        {"max_cycles": 2000},
        frame_skip=frame_skip,
        frame_stack=frame_stack,
        noop_max=noop_max,
        agent_indicator=agent_indicator,
    )


def test_games_pass_the_vector_env_check() -> None:
    check_vector_env(lambda games: AtariEnv(games, options={"max_cycles": 60}), num_envs=2, steps=25)


@pytest.mark.parametrize("name", ["boxing", "space_invaders", "tennis"])
def test_games_of_other_kinds_are_played(name: str) -> None:
    env = AtariEnv(1, game=name, options={"max_cycles": 100})
    rng, frame = np.random.default_rng(0), env.reset(np.array([0]))
    assert env.observation_shapes == ((84, 84, 4),) * 2 and frame.obs.dtype == np.uint8
    ends = 0
    for _ in range(30):
        frame = env.step(random_actions(env, frame, rng))
        ends += int(frame.truncated[0])
    assert ends >= 1 and frame.obs.std() > 1


def test_pong_rewards_are_zero_sum() -> None:
    """A seat that does not move loses the ball; a serve that is not made in time costs only its maker a point."""
    env = AtariEnv(1)
    assert env.seats == ("first_0", "second_0") and env.action_spaces == (Discrete(6),) * 2
    env.reset(np.array([0]))
    rewards = [env.step(np.array([[1, 1]], np.int32)).rewards[0].copy() for _ in range(300)]
    points = [tuple(pair) for pair in rewards if pair.any()]
    assert points and set(points) <= {(1.0, -1.0), (-1.0, 1.0), (-1.0, 0.0), (0.0, -1.0)}
    assert (1.0, -1.0) in points or (-1.0, 1.0) in points


def test_subprocess_games_are_the_same() -> None:
    here, there = (AtariEnv(2, options={"max_cycles": 40}, num_processes=processes) for processes in (0, 2))
    rng, frame = np.random.default_rng(0), here.reset(np.arange(2))
    there.reset(np.arange(2))
    for _ in range(15):
        actions = random_actions(here, frame, rng)
        frame, other = here.step(actions), there.step(actions)
        assert np.array_equal(frame.obs, other.obs) and np.array_equal(frame.done, other.done)
        assert np.array_equal(frame.final_obs[frame.done], other.final_obs[frame.done])
    there.close()


def test_frame_skip_repeats_actions_and_sums_rewards() -> None:
    """Four steps without frame skip equal one step with it."""
    held, single = game(), game(frame_skip=1)
    held.reset(5)
    single.reset(5)
    rng, total = np.random.default_rng(0), np.zeros((2, 2))
    for _ in range(60):
        actions = rng.integers(0, 6, 2)
        total[0] += np.asarray(held.step(actions).rewards)
        for _ in range(4):
            total[1] += np.asarray(single.step(actions).rewards)
        assert np.array_equal(held.pictures[..., -1], single.pictures[..., -1])
    assert np.array_equal(total[0], total[1])


def test_newest_frame_is_last_in_the_stack() -> None:
    env = game()
    first = env.reset(0).observations[0]
    assert first is not None and all(np.array_equal(first[..., 0], first[..., n]) for n in range(4))
    pictures = [env.pictures[..., -1].copy()]
    for _ in range(5):
        env.step(np.array([2, 3]))
        pictures.append(env.pictures[..., -1].copy())
    assert all(np.array_equal(env.pictures[..., n], pictures[n - 4]) for n in range(4))
    assert len({picture.tobytes() for picture in pictures}) > 2


def test_seeds_vary_the_beginning() -> None:
    env = game(noop_max=30)
    begun = [int(env.reset(seed).observations is not None) + int(env.inner.env.unwrapped.frame) for seed in range(10)]
    assert len(set(begun)) > 3 and max(begun) <= 31


def test_seat_indicator_channel() -> None:
    views = game(agent_indicator=True).reset(0).observations
    assert [view is not None and view.shape for view in views] == [(84, 84, 5)] * 2
    assert [int(view[..., 4].mean()) for view in views if view is not None] == [0, 255]


def test_resize_averages_over_equal_areas() -> None:
    assert np.allclose(area_resize_weights(4, 2), [[0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5]])
    assert np.allclose(area_resize_weights(3, 2), [[2 / 3, 1 / 3, 0], [0, 1 / 3, 2 / 3]])
    assert np.allclose(area_resize_weights(210, 84).sum(1), 1)


def test_invalid_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"pettingzoo.atari.pang"):
        AtariEnv(1, game="pang")
    with pytest.raises(ValueError, match='no ROM for "pong"'):
        AtariEnv(1, options={"auto_rom_install_path": str(tmp_path)})
    with pytest.raises(ValueError, match="frame_skip is 0"):
        AtariEnv(1, frame_skip=0)
