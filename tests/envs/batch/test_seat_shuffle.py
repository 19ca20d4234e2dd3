"""Seats that swap positions in each game."""

import numpy as np
import pytest

from palestra.environments.pong.env import Pong
from palestra.envs import check_env
from palestra.envs.adapters.pettingzoo.games import PettingZooEnv
from palestra.envs.batch.seat_shuffle import SeatShuffledEnv
from palestra.envs.vector.kuhn import KuhnPoker
from palestra.envs.vector.leduc import LeducPoker
from palestra.envs.vector.mpe import SimpleAdversary
from palestra.envs.vector_base import Entities
from palestra.vector.policies.base import UniformVectorPolicy
from palestra.vector.rollouts.rollout import VectorRollout


def test_env_passes_the_env_check() -> None:
    check_env(lambda games: SeatShuffledEnv(KuhnPoker(games, players=3)))
    check_env(lambda games: SeatShuffledEnv(LeducPoker(games)))


def test_seat_gets_observations_and_rewards_of_its_position() -> None:
    """Games in step with the plain env: an action of a seat is played at its position."""
    inner, rotated = LeducPoker(40), SeatShuffledEnv(LeducPoker(40))
    rng, rows = np.random.default_rng(0), np.arange(40)[:, None]
    plain, seen = inner.reset(np.arange(40)), rotated.reset(np.arange(40))
    for _ in range(30):
        places = rotated.env_seats.copy()
        assert (np.sort(places, 1) == [0, 1]).all()
        for mine, theirs in (
            (seen.obs, plain.obs),
            (seen.agent_mask, plain.agent_mask),
            (seen.action_mask, plain.action_mask),
        ):
            assert mine is not None and theirs is not None
            np.testing.assert_array_equal(mine, theirs[rows, places])
        actions = rng.integers(0, 3, (40, 2)).astype(np.int32)
        placed = np.empty_like(actions)
        np.put_along_axis(placed, places, actions, 1)
        plain, seen = inner.step(placed), rotated.step(actions)
        np.testing.assert_array_equal(seen.rewards, plain.rewards[rows, places])
        over = plain.done
        np.testing.assert_array_equal(seen.final_obs[over], plain.final_obs[rows, places][over])
        np.testing.assert_array_equal(rotated.env_seats[~over], places[~over])


def test_sides_are_permuted_as_a_whole() -> None:
    """Each seat keeps its place within its side."""
    env = SeatShuffledEnv(PettingZooEnv(40, env="helpers.toy_teams:Tug"), [[0, 2], [1, 3]])
    env.reset(np.arange(40))
    assert set(map(tuple, env.env_seats)) == {(0, 1, 2, 3), (1, 0, 3, 2)}
    pulls = np.tile(np.array([1, 0, 1, 0], np.int32), (40, 1))  # of the side that has seats 0 and 2
    np.testing.assert_array_equal(env.step(pulls).rewards, np.tile([2.0, -2.0, 2.0, -2.0], (40, 1)))
    check_env(lambda games: SeatShuffledEnv(PettingZooEnv(games, env="helpers.toy_teams:Tug"), [[2, 0], [3, 1]]))


def test_entities_that_seats_see_in_other_columns_are_unknown() -> None:
    env = KuhnPoker(2)
    env.observation_entities = ((Entities.in_a_row(0, 1, 2),), (Entities.in_a_row(2, 1, 2),))
    assert SeatShuffledEnv(env).observation_entities == ()
    env.observation_entities = env.observation_entities[:1] * 2
    assert SeatShuffledEnv(env).observation_entities == env.observation_entities


def test_seat_terminates_as_its_position() -> None:
    inner, rotated = (PettingZooEnv(8, env="helpers.mortal_games:parting") for _ in range(2))
    rotated = SeatShuffledEnv(rotated)
    rows = np.arange(8)[:, None]
    inner.reset(np.arange(8))
    rotated.reset(np.arange(8))
    orders = set()
    for _ in range(30):
        places = rotated.env_seats.copy()
        orders.update(map(tuple, places))
        plain, seen = inner.step(np.zeros((8, 2), np.int32)), rotated.step(np.zeros((8, 2), np.int32))
        assert plain.seat_terminated is not None and seen.seat_terminated is not None
        np.testing.assert_array_equal(seen.seat_terminated, plain.seat_terminated[rows, places])
    assert orders == {(0, 1), (1, 0)}


def test_seat_orders_are_uniform() -> None:
    env = SeatShuffledEnv(KuhnPoker(50, players=3))
    sweeper, found = VectorRollout(env, np.arange(50)), []
    for number in range(100):
        batch = sweeper.collect([UniformVectorPolicy(env, [0, 1, 2])], 5, number)
        found.append(env.env_seats[batch.terminated[-1]].copy())
    orders, counts = np.unique(np.concatenate(found), axis=0, return_counts=True)
    assert len(orders) == 6
    share = counts / counts.sum()
    np.testing.assert_allclose(share, 1 / 6, atol=4 * np.sqrt(5 / 36 / counts.sum()))


def test_scripts_play_the_position_of_their_seat() -> None:
    env, plain = SeatShuffledEnv(Pong(6)), Pong(6)
    env.reset(np.arange(6))
    plain.reset(np.arange(6))
    name = env.scripted_policies[0]
    moves = np.stack([plain.scripted_actions(name, place) for place in (0, 1)], 1)
    for seat in (0, 1):
        np.testing.assert_array_equal(env.scripted_actions(name, seat), moves[np.arange(6), env.env_seats[:, seat]])


def test_seats_of_different_spaces_cannot_be_shuffled() -> None:
    with pytest.raises(ValueError, match="cannot be permuted: give each a population"):
        SeatShuffledEnv(SimpleAdversary(2))
