"""Leduc poker: games, observations and masks equal OpenSpiel's; its state and its deals."""

import numpy as np
import pytest
from envs.vector.spiel import Mirror, assert_equal_spaces, chi_square, play

from palestra.envs.vector.leduc import CALL, FOLD, RAISE, LeducPoker
from palestra.envs.vector_base import VectorStep
from palestra.envs.vector_check import check_vector_env, random_actions


def test_ten_thousand_games_equal_openspiel() -> None:
    env, rng = LeducPoker(500), np.random.default_rng(0)
    assert_equal_spaces(env, "leduc_poker")
    mirror = Mirror(env, "leduc_poker", lambda b: env.internal_state["cards"][b, :3].tolist())
    ends: set[tuple[float, ...]] = set()

    def choose(frame: VectorStep) -> np.ndarray:
        ends.update(tuple(pair) for pair in frame.rewards[frame.terminated].tolist())
        actions = random_actions(env, frame, rng)
        patient = rng.random(actions.shape) < 0.5  # otherwise half of the games end in an early fold
        return np.where(patient & (actions == FOLD), CALL, actions)

    play(mirror, 10_000, choose)
    assert {abs(first) for first, _ in ends} == {0, 1, 3, 5, 7, 9, 11, 13}  # 1, up to two bets of 2, up to two of 4


def test_observations_and_state_by_hand() -> None:
    env = LeducPoker(1)
    seed = next(seed for seed in range(1000) if cards_of(env, seed) == [3, 0, 4])
    env.reset(np.array([seed]))
    for action in (CALL, RAISE, CALL):
        env.step(np.full((1, 2), action))
    cards = [[0, 0, 0, 1, 0, 0], [1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 1, 0]]
    first_round = [1, 0, 0, 1, 1, 0, 0, 0]
    assert env.vector_step.obs[0, 0].tolist() == [1, 0, *cards[0], *cards[2], *first_round, *[0] * 8]
    assert env.vector_step.obs[0, 1].tolist() == [0, 1, *cards[1], *cards[2], *first_round, *[0] * 8]
    assert env.vector_step.state is not None and env.vector_step.final_state is not None
    state = [*cards[0], *cards[1], *cards[2], *first_round]
    assert env.vector_step.state[0].tolist() == [*state, *[0] * 8]
    env.step(np.full((1, 2), RAISE))
    env.step(np.full((1, 2), FOLD))
    assert env.vector_step.final_state[0].tolist() == [*state, 0, 1, *[0] * 6]
    assert env.vector_step.state[0, 12:].tolist() == [0] * 22  # no public card, no moves


def cards_of(env: LeducPoker, seed: int) -> list[int]:
    env.reset(np.array([seed]))
    cards: list[int] = env.internal_state["cards"][0, :3].tolist()
    return cards


def test_illegal_action_is_a_call() -> None:
    env, calling = LeducPoker(5), LeducPoker(5)
    env.reset(np.arange(5)), calling.reset(np.arange(5))
    for action in (FOLD, -1, 3, -(2**31), 2**31 - 1):
        frame, expected = env.step(np.full((5, 2), action)), calling.step(np.full((5, 2), CALL))
        assert np.array_equal(frame.obs, expected.obs) and np.array_equal(frame.rewards, expected.rewards)


def test_deals_are_uniform() -> None:
    env, counts = LeducPoker(500), np.zeros(216)
    env.reset(np.arange(500))
    for _ in range(40):
        counts += np.bincount(env.internal_state["cards"][:, :3].astype(int) @ [36, 6, 1], minlength=216)
        for action in (RAISE, FOLD):
            env.step(np.full((500, 2), action))
    assert np.count_nonzero(counts) == 6 * 5 * 4
    assert chi_square(counts[counts > 0]) < 172.5  # 1 in 1000 at 119 degrees of freedom


def test_env_passes_the_vector_env_check() -> None:
    check_vector_env(LeducPoker)


def test_zero_num_envs_is_refused() -> None:
    with pytest.raises(ValueError, match="num_envs: 0 is too small"):
        LeducPoker(0)
