"""Kuhn poker: every possible game equals OpenSpiel's, and known values."""

from itertools import permutations
from typing import Any

import numpy as np
import pyspiel
import pytest
from envs.vector.spiel import Mirror, assert_equal_spaces, chi_square, play

from palestra.envs.vector.kuhn import BET, KuhnPoker
from palestra.envs.vector_check import check_vector_env, random_actions

JACK, QUEEN, KING = 0, 1, 2
FIRST = {(JACK, ""): 0, (QUEEN, ""): 0, (KING, ""): 0, (JACK, "pb"): 0, (QUEEN, "pb"): 1 / 3, (KING, "pb"): 1}
SECOND = {
    **{(JACK, "p"): 1 / 3, (QUEEN, "p"): 0, (KING, "p"): 1},
    **{(JACK, "b"): 0, (QUEEN, "b"): 1 / 3, (KING, "b"): 1},
}


def histories(state: Any) -> list[list[int]]:
    """The remaining moves of all games from a state of OpenSpiel."""
    if state.is_terminal():
        return [[]]
    return [[action, *rest] for action in state.legal_actions() for rest in histories(state.child(action))]


def seeds_of_deals(players: int) -> dict[tuple[int, ...], int]:
    """For each deal a seed that gives it."""
    env = KuhnPoker(4000, players=players)
    env.reset(np.arange(env.num_envs))
    deals = {tuple(cards): seed for seed, cards in enumerate(env.internal_state["cards"][:, :players].tolist())}
    assert set(deals) == set(permutations(range(players + 1), players))
    return deals


def every_game(players: int) -> list[tuple[tuple[int, ...], list[int], list[float]]]:
    """Deal, moves and rewards of every game, compared with OpenSpiel at every decision."""
    game, deals = f"kuhn_poker(players={players})", seeds_of_deals(players)
    state = pyspiel.load_game(game).new_initial_state()
    for card in range(players):
        state.apply_action(card)
    lines = histories(state)
    env = KuhnPoker(len(deals) * len(lines), players=players)
    mirror = Mirror(env, game, lambda b: env.internal_state["cards"][b, :players].tolist())
    mirror.reset(np.repeat(list(deals.values()), len(lines)))
    plan = [(deal, moves) for deal in deals for moves in lines]
    rewards: list[list[float]] = [[] for _ in plan]
    for t in range(2 * players - 1):
        actions = np.array([[moves[t] if t < len(moves) else 0] * players for _, moves in plan])
        frame = mirror.step(actions)
        for b, (_, moves) in enumerate(plan):
            assert frame.terminated[b] == (t == len(moves) - 1) or t >= len(moves)
            if t == len(moves) - 1:
                rewards[b] = frame.rewards[b].tolist()
    return [(deal, moves, reward) for (deal, moves), reward in zip(plan, rewards, strict=True)]


@pytest.mark.parametrize(("players", "games"), [(2, 6 * 5), (3, 24 * 13), (4, 120 * 33)])
def test_every_game_equals_openspiel(players: int, games: int) -> None:
    assert_equal_spaces(KuhnPoker(1, players=players), f"kuhn_poker(players={players})")
    assert len(every_game(players)) == games  # 1 + players * 2 ** (players - 1) ways to play each deal


@pytest.mark.parametrize("players", [2, 3, 4])
def test_consecutive_games_equal_openspiel(players: int) -> None:
    env, rng = KuhnPoker(50, players=players), np.random.default_rng(0)
    mirror = Mirror(env, f"kuhn_poker(players={players})", lambda b: env.internal_state["cards"][b, :players].tolist())
    play(mirror, 500, lambda frame: random_actions(env, frame, rng))


def value(first: dict[tuple[int, str], float], second: dict[tuple[int, str], float]) -> float:
    """The mean return of player_0, given each player's probability of a bet by its card and the moves so far."""
    total = 0.0
    for deal, moves, rewards in every_game(2):
        chance, before = 1 / 6, ""
        for turn, action in enumerate(moves):
            bet = (first, second)[turn % 2][deal[turn % 2], before]
            chance *= bet if action == BET else 1 - bet
            before += "pb"[action]
        total += chance * rewards[0]
    return total


def test_known_game_values() -> None:
    half = dict.fromkeys([*FIRST, *SECOND], 0.5)
    assert value(half, half) == pytest.approx(1 / 8)  # bet and fold 1/4; pass, bet and fold 1/8; showdowns cancel
    assert value(FIRST, SECOND) == pytest.approx(-1 / 18)  # in equilibrium (Kuhn, 1950)


def test_game_by_hand() -> None:
    env = KuhnPoker(1)
    frame = env.reset(np.array([seeds_of_deals(2)[KING, QUEEN]]))
    assert frame.obs[0].tolist() == [[1, 0, 0, 0, 1, *[0] * 6], [0, 1, 0, 1, 0, *[0] * 6]]
    assert frame.state is not None and frame.state[0].tolist() == [0, 0, 1, 0, 1, 0, *[0] * 6]
    assert frame.agent_mask[0].tolist() == [True, False]
    frame = env.step(np.array([[0, 1]]))  # the second seat's action is ignored
    assert frame.obs[0, 1].tolist() == [0, 1, 0, 1, 0, 1, 0, 0, 0, 0, 0] and frame.agent_mask[0].tolist() == [
        False,
        True,
    ]
    env.step(np.array([[0, 1]]))
    frame = env.step(np.array([[1, 0]]))
    assert frame.rewards[0].tolist() == [2, -2] and frame.terminated[0]
    assert frame.final_state is not None and frame.state is not None
    assert frame.final_state[0].tolist() == [0, 0, 1, 0, 1, 0, 1, 0, 0, 1, 0, 1]
    assert frame.state[0, 6:].tolist() == [0] * 6 and frame.agent_mask[0].tolist() == [True, False]


def test_out_of_range_action_is_a_pass() -> None:
    env, passing = KuhnPoker(5), KuhnPoker(5)
    env.reset(np.arange(5)), passing.reset(np.arange(5))
    for action in (-1, 2, 99, -(2**31)):
        frame, expected = env.step(np.full((5, 2), action)), passing.step(np.zeros((5, 2), int))
        assert np.array_equal(frame.obs, expected.obs) and np.array_equal(frame.rewards, expected.rewards)


def test_deals_are_uniform() -> None:
    env, counts = KuhnPoker(200), np.zeros(27)
    env.reset(np.arange(200))
    for _ in range(100):
        cards = env.internal_state["cards"].astype(int)
        counts += np.bincount(cards @ [9, 3, 1], minlength=27)
        env.step(np.zeros((200, 2), int))
        env.step(np.zeros((200, 2), int))  # two passes end it
    assert np.count_nonzero(counts) == 6 and chi_square(counts[counts > 0]) < 20.5  # 1 in 1000 at 5 degrees of freedom


@pytest.mark.parametrize("players", [2, 4])
def test_env_passes_the_vector_env_check(players: int) -> None:
    check_vector_env(lambda games: KuhnPoker(games, players=players))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_envs": 0}, "num_envs: 0 is too small"),
        ({"players": 1}, "players: 1 cannot play.*use 2 to 4"),
        ({"players": 5}, "players: 5 cannot play.*use 2 to 4"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KuhnPoker(**options)
