"""Pong: pictures show the game, its physics are as documented, and its tracker is neither weak nor perfect."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from palestra.environments.pong.env import Pong
from palestra.envs.vector_base import Discrete
from palestra.envs.vector_check import check_vector_env

STAY, UP, DOWN = 0, 1, 2
Player = Callable[[Pong, int], np.ndarray]


@pytest.mark.parametrize("options", [{"points": 1}, {"max_steps": 9, "minimal": False, "mirror": False}])
def test_env_passes_the_vector_env_check(options: dict[str, Any]) -> None:
    check_vector_env(lambda games: Pong(games, **options), num_envs=2, steps=40)


def picture(env: Pong, b: int, mirrored: bool) -> np.ndarray:
    """The current picture, drawn again."""
    ball, paddles = env.internal_state["ball"][b], env.internal_state["paddles"][b]
    picture = np.zeros((84, 84), np.uint8)
    picture[:2] = picture[-2:] = 128
    left, top = np.floor(ball[:2] - 0.5).astype(int)
    left = np.clip(left, 0, 82)
    picture[top : top + 2, left : left + 2] = 255
    for column, y in zip((78, 4), paddles, strict=True):
        top = int(np.floor(y - 4.5))
        picture[top : top + 10, column : column + 2] = 255
    return picture[:, ::-1] if mirrored else picture


@pytest.mark.parametrize("mirror", [True, False])
def test_observations_stack_the_last_four_frames(mirror: bool) -> None:
    env, rng, ends = Pong(3, points=2, max_steps=60, mirror=mirror), np.random.default_rng(0), 0
    frame = env.reset(np.arange(3))
    pictures = [[[picture(env, b, mirror and seat == 1)] * 4 for seat in range(2)] for b in range(3)]
    for _ in range(300):
        frame = env.step(rng.integers(0, 3, (3, 2)).astype(np.int32))
        for b in range(3):
            for seat in range(2):
                now = picture(env, b, mirror and seat == 1)
                pictures[b][seat] = [now] * 4 if frame.done[b] else [*pictures[b][seat][1:], now]
                assert np.array_equal(frame.obs[b, seat], np.stack(pictures[b][seat], axis=-1))
        ends += frame.done.sum()
    assert ends > 10


def test_final_observation_is_kept() -> None:
    env = Pong(1, max_steps=2)
    env.reset(np.array([0]))
    before = env.step(np.array([[UP, DOWN]])).obs.copy()
    frame = env.step(np.array([[STAY, STAY]]))
    assert frame.truncated[0] and np.array_equal(frame.final_obs[..., :3], before[..., 1:])
    # The paddles (the only objects in these columns) have left the middle; in the next game they are back in it.
    assert not frame.final_obs[0, 0, 38:41, 4, 3].all() or not frame.final_obs[0, 0, 43:46, 4, 3].all()
    assert frame.obs[0, 0, 37:47, 4].all() and frame.state is not None and frame.state[0, 8] == 0


def env_with(ball: list[float], right: float = 42, left: float = 42, **options: Any) -> Pong:
    env = Pong(1, **options)
    env.reset(np.array([0]))
    env.internal_state["ball"][0], env.internal_state["paddles"][0] = ball, (right, left)
    return env


def test_ball_moves_and_bounces_off_walls() -> None:
    env = env_with([40, 4, 1, -0.5])
    env.step(np.array([[STAY, STAY]]))  # 4, 3.5, 3, then 2.5 and 2 beyond the border: 3.5, 4
    assert env.internal_state["ball"][0].tolist() == [44, 4, 1, 0.5]
    env = env_with([40, 80, -1, 0.75])
    env.step(np.array([[STAY, STAY]]))  # 80.75, 81.5 beyond it: 80.5, 79.75, 79
    assert env.internal_state["ball"][0].tolist() == [36, 79, -1, -0.75]


@pytest.mark.parametrize(("offset", "speed"), [(0.0, 0.0), (3.0, 0.5), (-6.0, -1.0)])
def test_paddles_accelerate_and_deflect_the_ball(offset: float, speed: float) -> None:
    env = env_with([75.5, 42 + offset, 1, 0])
    env.step(np.array([[STAY, STAY]]))
    # After 1.5 pixels it hits the paddle; half a pixel of its second frame is left, then two at speed 1.05.
    assert np.allclose(
        env.internal_state["ball"][0], [76.5 - 2.1, 42 + offset + 2 * 1.05 * 0.75 * speed, -1.05, 1.05 * 0.75 * speed]
    )
    env = env_with([8.5, 42 + offset, -1, 0])
    env.step(np.array([[STAY, STAY]]))
    assert np.allclose(
        env.internal_state["ball"][0], [7.5 + 2.1, 42 + offset + 2 * 1.05 * 0.75 * speed, 1.05, 1.05 * 0.75 * speed]
    )


def test_ball_speed_is_limited() -> None:
    env = env_with([75.5, 42, 2, 0])
    env.internal_state["hits"][0] = 19
    for hits in (20, 21):
        while env.internal_state["hits"][0] < hits:
            env.step(np.array([[STAY, STAY]]))
        assert abs(env.internal_state["ball"][0, 2]) == 2


def test_missed_ball_scores_and_serves_again() -> None:
    env = env_with([82, 42, 1, 0], right=70)
    frame = env.step(np.array([[STAY, STAY]]))
    assert (
        frame.rewards[0].tolist() == [-1, 1]
        and env.internal_state["scores"][0].tolist() == [0, 1]
        and not frame.done[0]
    )
    x, y, speed_x, speed_y = env.internal_state["ball"][0]
    assert abs(x - 42) == 3 and abs(speed_x) == 1 and abs(speed_y) <= 0.5 and 21 - 1.5 <= y <= 63 + 1.5
    assert frame.state is not None
    state = [x / 42 - 1, y / 42 - 1, speed_x / 2, speed_y / 2, 70 / 42 - 1, 0, 0, 1 / 5, 1 / 1000]
    assert np.allclose(frame.state[0], state)


@pytest.mark.parametrize(("ball", "won"), [([2.0, 42, -1, 0], True), ([82.0, 42, 1, 0], False)])
def test_last_point_ends_the_game(ball: list[float], won: bool) -> None:
    env = env_with(ball, right=70, left=70, points=3)
    env.internal_state["scores"][0] = 2
    frame = env.step(np.array([[STAY, STAY]]))
    assert frame.terminated[0] and not frame.truncated[0] and frame.success is not None
    assert frame.success[0].tolist() == [won, not won]
    assert frame.rewards[0].tolist() == ([1, -1] if won else [-1, 1])
    assert env.internal_state["scores"][0].tolist() == [0, 0] and env.internal_state["paddles"][0].tolist() == [42, 42]
    assert frame.final_state is not None and np.allclose(frame.final_state[0, 6:8], [1, 2 / 3] if won else [2 / 3, 1])


def test_paddles_move_four_pixels_and_stay_inside() -> None:
    env = env_with([40, 42, 1, 0], right=10)
    env.step(np.array([[UP, DOWN]]))
    assert env.internal_state["paddles"][0].tolist() == [7, 46]
    env.step(np.array([[-3, 3]]))  # out of range: no movement
    assert env.internal_state["paddles"][0].tolist() == [7, 46]


def test_atari_action_set() -> None:
    env = env_with([40, 42, 1, 0], minimal=False)
    assert env.action_spaces == (Discrete(6), Discrete(6)) and Pong(1).action_spaces[0] == Discrete(3)
    places = []
    for action in range(6):
        env.internal_state["paddles"][0], env.internal_state["ball"][0] = 42, (40, 42, 1, 0)
        env.step(np.array([[action, STAY]]))
        places.append(env.internal_state["paddles"][0, 0] - 42)
    assert places == [0, 0, -4, 4, -4, 4]


def point_share(first: Player, second: Player, *, steps: int) -> float:
    """The share of points won by `first_0`."""
    env, made = Pong(32), np.zeros(2)
    env.reset(np.arange(32))
    for _ in range(steps):
        rewards = env.step(np.stack([first(env, 0), second(env, 1)], axis=1).astype(np.int32)).rewards
        made += (rewards > 0).sum(axis=0)
    assert made.sum() > 100
    return float(made[0] / made.sum())


def tracker(env: Pong, seat: int) -> np.ndarray:
    return env.scripted_actions("tracker", seat)


def predictive_script(env: Pong, seat: int) -> np.ndarray:
    """Moves to where the ball will arrive, to hit it with the end of the paddle and away from the opponent."""
    ball, paddles = env.internal_state["ball"], env.internal_state["paddles"]
    frames = ((77.0, 7.0)[seat] - ball[:, 0]) / ball[:, 2]
    folded = np.mod(ball[:, 1] + ball[:, 3] * frames - 3, 156)
    to = 3 + np.where(folded > 78, 156 - folded, folded) + 4 * np.sign(paddles[:, 1 - seat] - 42)
    gap = np.where(frames > 0, to, 42) - paddles[:, seat]
    return np.select([gap < -2, gap > 2], [UP, DOWN], STAY)


def test_scripts_rank_foresight_tracker_random() -> None:
    rng = np.random.default_rng(0)

    def chance(env: Pong, seat: int) -> np.ndarray:
        return rng.integers(0, 3, env.num_envs)

    assert point_share(tracker, chance, steps=400) >= 0.9
    assert point_share(chance, tracker, steps=400) <= 0.1
    assert point_share(predictive_script, tracker, steps=800) >= 0.7
    assert 0.4 < point_share(chance, chance, steps=400) < 0.6


def test_tracker_supports_the_atari_action_set() -> None:
    env = env_with([40, 42, 1, 0], right=60, left=20, minimal=False)
    env.internal_state["drawn"][:, :, 1] = 41
    assert env.scripted_actions("tracker", 0).tolist() == [2] and env.scripted_actions("tracker", 1).tolist() == [3]


def test_unknown_options_and_scripts_are_refused() -> None:
    options: list[dict[str, Any]] = [{"points": 0}, {"max_steps": 0}, {"num_envs": 0}]
    for option in options:
        with pytest.raises(ValueError, match=f"{next(iter(option))}: 0 is too small"):
            Pong(**option)
    with pytest.raises(ValueError, match='no scripted player "wall"; it has: tracker'):
        Pong(1).scripted_actions("wall", 0)
