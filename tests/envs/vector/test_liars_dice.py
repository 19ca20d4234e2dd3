"""Liar's dice: games, observations and masks equal OpenSpiel's; its state and its dice."""

from typing import Any

import numpy as np
import pytest
from envs.vector.spiel import Mirror, assert_equal_spaces, chi_square, play

from palestra.envs.vector.liars_dice import LiarsDice
from palestra.envs.vector_base import VectorStep
from palestra.envs.vector_check import check_vector_env, random_actions


def mirrored(games: int, dice: int, faces: int) -> Mirror:
    env = LiarsDice(games, dice=dice, faces=faces)
    game = f"liars_dice(numdice={dice},dice_sides={faces})"
    assert_equal_spaces(env, game)
    return Mirror(env, game, lambda b: env.internal_state["dice"][b].ravel().tolist())


def careful(frame: VectorStep, rng: np.random.Generator) -> np.ndarray:
    """Raises the bid by little, so that games are long, and calls every sixth bid a lie."""
    assert frame.action_mask is not None
    lowest = frame.action_mask.argmax(axis=2)
    liar = frame.action_mask.shape[2] - 1
    higher = np.minimum(lowest + rng.integers(0, 3, lowest.shape), np.maximum(lowest, liar - 1))
    return np.where(frame.action_mask[..., liar] & (rng.random(lowest.shape) < 1 / 6), liar, higher)


@pytest.mark.parametrize(
    ("dice", "faces", "games"), [(1, 6, 10_000), (2, 3, 3000), (1, 2, 500), (2, 6, 1500), (3, 4, 500)]
)
@pytest.mark.few(1)
def test_random_games_equal_openspiel(dice: int, faces: int, games: int) -> None:
    mirror, rng = mirrored(250, dice, faces), np.random.default_rng(0)
    play(mirror, games, lambda frame: random_actions(mirror.env, frame, rng))


@pytest.mark.parametrize(("dice", "faces", "games"), [(1, 6, 2000), (2, 3, 1000), (1, 2, 500), (2, 6, 500)])
def test_long_games_equal_openspiel(dice: int, faces: int, games: int) -> None:
    mirror, rng = mirrored(250, dice, faces), np.random.default_rng(0)
    play(mirror, games, lambda frame: careful(frame, rng))


def test_observations_and_state_by_hand() -> None:
    env = LiarsDice(1, dice=2, faces=3)
    seed = next(seed for seed in range(1000) if rolled(env, seed) == [[0, 2], [1, 1]])
    env.reset(np.array([seed]))
    for action in (0, 7):
        env.step(np.full((1, 2), action))
    own, bids = [[1, 0, 0, 0, 0, 1], [0, 1, 0, 0, 1, 0]], [1, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0]
    assert env.vector_step.obs[0].tolist() == [[1, 0, *own[0], *bids, 0], [0, 1, *own[1], *bids, 0]]
    assert env.vector_step.state is not None and env.vector_step.final_state is not None
    assert env.vector_step.state[0].tolist() == [*own[0], *own[1], *bids, 0]
    env.step(np.full((1, 2), 12))
    assert env.vector_step.final_state[0].tolist() == [*own[0], *own[1], *bids, 1]
    assert env.vector_step.state[0, 12:].tolist() == [0] * 13


def rolled(env: LiarsDice, seed: int) -> list[list[int]]:
    env.reset(np.array([seed]))
    dice: list[list[int]] = env.internal_state["dice"][0].tolist()
    return dice


def test_illegal_action_is_the_lowest_legal_one() -> None:
    env, lowest = LiarsDice(5), LiarsDice(5)
    env.reset(np.arange(5)), lowest.reset(np.arange(5))
    for step, action in enumerate([12, 0, -1, 13, -(2**31), 2**31 - 1]):
        frame, expected = env.step(np.full((5, 2), action)), lowest.step(np.full((5, 2), step))
        assert np.array_equal(frame.obs, expected.obs) and not frame.done.any()
    env.step(np.full((5, 2), 11))
    assert env.step(np.full((5, 2), 3)).terminated.all()  # after the highest bid only the call is left


def test_dice_are_uniform() -> None:
    env, counts = LiarsDice(500), np.zeros(36)
    env.reset(np.arange(500))
    for _ in range(40):
        counts += np.bincount(env.internal_state["dice"][:, :, 0] @ [6, 1], minlength=36)
        for action in (0, 12):
            env.step(np.full((500, 2), action))
    assert chi_square(counts) < 66.7  # 1 in 1000 at 35 degrees of freedom


def test_dice_of_one_player_are_independent() -> None:
    env = LiarsDice(9000, dice=2, faces=3)
    env.reset(np.arange(9000))
    pairs = np.bincount(env.internal_state["dice"][:, 0] @ [3, 1], minlength=9)
    assert pairs[[3, 6, 7]].tolist() == [0, 0, 0]  # in order
    assert chi_square(pairs[[0, 4, 8]] * 2.0) < 30 and abs(pairs[[0, 4, 8]].sum() - 3000) < 150  # doubles: 1 in 3


@pytest.mark.parametrize(("dice", "faces"), [(1, 6), (3, 2)])
def test_env_passes_the_vector_env_check(dice: int, faces: int) -> None:
    check_vector_env(lambda games: LiarsDice(games, dice=dice, faces=faces))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_envs": 0}, "num_envs: 0 is too small"),
        ({"dice": 0}, "dice: 0 is too small"),
        ({"faces": 1}, "faces: 1 is too small"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LiarsDice(**options)
