"""Connect four: palestra's rules equal OpenSpiel's, and the experts of both board games have the stated strength."""

from __future__ import annotations

import random
from collections.abc import Collection
from functools import cache
from typing import Any

import numpy as np
import pyspiel
import pytest

from palestra.envs import check_env
from palestra.envs.rules.base import TERMINAL
from palestra.envs.rules.connect_four import LINE_MASKS, ConnectFourRules, ConnectFourState, line_heuristic
from palestra.envs.rules.tic_tac_toe import TicTacToeRules
from palestra.envs.text.board_games import TextConnectFour, TextGame, TextTicTacToe, best_actions

RULES = ConnectFourRules()
SPIEL = pyspiel.load_game("connect_four")


def random_games(games: int) -> list[list[tuple[ConnectFourState, Any]]]:
    """States of games with random moves, each with OpenSpiel's state."""
    lines = []
    for seed in range(games):
        rng, ours, theirs = random.Random(seed), RULES.initial_state(), SPIEL.new_initial_state()
        line = [(ours, theirs.clone())]
        while not theirs.is_terminal():
            action = rng.choice(theirs.legal_actions())
            ours = RULES.next_state(ours, action)
            theirs.apply_action(action)
            line.append((ours, theirs.clone()))
        lines.append(line)
    return lines


def test_random_games_equal_openspiel() -> None:
    outcomes = set()
    for line in random_games(300):
        for ours, theirs in line:
            over = theirs.is_terminal()
            assert RULES.current_player(ours) == (TERMINAL if over else theirs.current_player())
            view = RULES.info_state(ours, 0)
            assert view.dtype == np.float32 and view.tolist() == theirs.observation_tensor(0)
            if not over:
                assert RULES.legal_actions(ours) == theirs.legal_actions()
        assert list(RULES.returns(line[-1][0])) == line[-1][1].returns()
        outcomes.add(RULES.returns(line[-1][0]))
    assert {(1.0, -1.0), (-1.0, 1.0)} <= outcomes


def test_a_full_board_is_a_draw() -> None:
    """The position comes from a search for boards without four in a row: OpenSpiel agrees that it is a draw."""
    moves = [0, 1, 0, 1, 0, 1, 1, 0, 1, 0, 1, 0, 2, 3, 2, 3, 2, 3, 3, 2, 3, 2, 3, 2, 4, 5, 4, 5, 4, 5, 5, 4, 5, 4, 5, 4]
    state, theirs = RULES.initial_state(), SPIEL.new_initial_state()
    for move in [*moves, *[6] * 6]:
        assert RULES.current_player(state) != TERMINAL
        state = RULES.next_state(state, move)
        theirs.apply_action(move)
    assert theirs.is_terminal() and RULES.current_player(state) == TERMINAL
    assert RULES.returns(state) == (0.0, 0.0) == tuple(theirs.returns())


def test_info_state_texts_by_hand_and_equal_exactly_where_tensors_are() -> None:
    state = after(3, 3, 0)
    empty = ". . . . . . . / " * 4
    assert RULES.info_state_text(state, 1) == f"You are o. Board: {empty}. . . o . . . / x . . x . . ."
    states: dict[str, bytes] = {}
    for line in random_games(50):
        for ours, _ in line:
            assert (
                states.setdefault(RULES.info_state_text(ours, 0), RULES.info_state(ours, 0).tobytes())
                == RULES.info_state(ours, 0).tobytes()
            )
    assert len(set(states.values())) == len(states) > 500


def after(*moves: int) -> ConnectFourState:
    state = RULES.initial_state()
    for move in moves:
        state = RULES.next_state(state, move)
    return state


def test_there_are_69_lines_of_four() -> None:
    """4 * 6 along, 7 * 3 up, 2 * 4 * 3 across."""
    assert len(LINE_MASKS) == 24 + 21 + 24 == len(set(LINE_MASKS))
    assert all(line.bit_count() == 4 for line in LINE_MASKS)


# ---- search


@cache
def value(rules: Any, state: Any, player: int) -> float:
    """The value of perfect play, by exhaustive search."""
    turn = rules.current_player(state)
    if turn == TERMINAL:
        return float(rules.returns(state)[player])
    values = [value(rules, rules.next_state(state, action), player) for action in rules.legal_actions(state)]
    return max(values) if turn == player else min(values)


@pytest.mark.slow
def test_full_search_finds_perfect_play() -> None:
    """The last 7 moves of connect four, and all of tic-tac-toe: the chosen actions are those that exhaustive search
    calls best."""
    ends = [line[35][0] for line in random_games(300) if len(line) > 37][:6]
    toe = TicTacToeRules()
    cases: list[tuple[Any, Any]] = [(RULES, state) for state in ends]
    cases += [(toe, state) for state in random_boards(toe, 60)]
    assert len(ends) == 6
    for rules, state in cases:
        player = rules.current_player(state)
        best = best_actions(rules, state, 42, lambda *_: pytest.fail("looked too short"))
        after = {action: rules.next_state(state, action) for action in rules.legal_actions(state)}
        values = {action: value(rules, then, player) for action, then in after.items()}
        assert best and {values[action] for action in best} == {max(values.values())}


def random_boards(rules: TicTacToeRules, games: int) -> list[Any]:
    """The distinct boards in games with random moves."""
    boards = set()
    for seed in range(games):
        rng, state = random.Random(seed), rules.initial_state()
        while rules.current_player(state) != TERMINAL:
            boards.add(state)
            state = rules.next_state(state, rng.choice(rules.legal_actions(state)))
    return sorted(boards)


@pytest.mark.parametrize(
    ("moves", "best"),
    [
        ((0, 1, 0, 1, 0, 1), [0]),  # x has three in column 1: win
        ((0, 1, 0, 1, 0), [0]),  # o must stop it
        ((3, 0, 4, 0), [2, 5]),  # x has 4 and 5: 3 or 6 makes three with both ends open
        ((3, 3, 4), [2, 5]),  # and o must take one of those ends now
    ],
)
def test_tactics_by_hand(moves: tuple[int, ...], best: list[int]) -> None:
    found = best_actions(RULES, after(*moves), 5, lambda *_: 0.0)
    assert set(found) <= set(best) and found


def test_evaluation_is_symmetric() -> None:
    """One stone in the middle of the bottom row lies on 7 of the 69 lines, 1 in the corner on 3."""
    assert line_heuristic(after(3), 0) == pytest.approx(7 / (16 * 69))
    assert line_heuristic(after(3, 0), 0) == pytest.approx((7 - 3) / (16 * 69)) == -line_heuristic(after(3, 0), 1)


# ---- the envs


def play(env: TextGame, seed: int, experts: Collection[str]) -> dict[str, float]:
    """The returns of seats of which some are played by experts and the others at random."""
    rng, step = random.Random(seed), env.reset(seed)
    while not step.done:
        ((seat, _),) = step.observations.items()
        step = env.step({seat: env.expert(seat, rng) if seat in experts else rng.choice(step.legal_actions[seat])})
        assert step.info["invalid"] == {seat: False}
    return step.rewards


@pytest.mark.parametrize("rendering", ["compact", "full"])
@pytest.mark.parametrize("reward", ["dense", "outcome"])
@pytest.mark.parametrize("game", [TextConnectFour, TextTicTacToe])
def test_env_passes_the_env_check(game: Any, reward: Any, rendering: Any) -> None:
    check_env(lambda: game(reward=reward, rendering=rendering), seeds=range(3))


@pytest.mark.parametrize("rendering", ["compact", "full"])
def test_perfect_play_at_tic_tac_toe_never_loses(rendering: Any) -> None:
    env, won = TextTicTacToe(rendering=rendering), 0.0
    for seed in range(60):
        assert play(env, seed, env.seats)["player_0"] == 0
        for seat in env.seats:
            paid = play(env, seed, [seat])[seat]
            assert paid >= 0
            won += paid / 120
    assert won > 0.8


def test_the_expert_beats_random_play_at_connect_four() -> None:
    env = TextConnectFour()
    assert [play(env, seed, [seat])[seat] for seed in range(6) for seat in env.seats] == [1.0] * 12


def test_expert_does_not_change_the_env() -> None:
    env = TextConnectFour()
    step, state = env.reset(0), env.rng.getstate()
    assert env.expert("player_0", random.Random(0)) in step.legal_actions["player_0"]
    assert env.state == RULES.initial_state() and env.rng.getstate() == state


def test_full_rendering_states_the_rules_and_parses_the_last_words() -> None:
    full, compact = TextConnectFour(rendering="full"), TextConnectFour()
    assert "Four of your stones" in full.roles["player_0"] and compact.roles["player_0"] == "connect four"
    assert full.reset(3).observations == compact.reset(3).observations
    answer = {"player_0": "I take the middle.\n#### 4"}
    assert full.step(answer).info == {"invalid": {"player_0": False}, "action": "4"}
    step = compact.step(answer)
    assert step.info["invalid"] == {"player_0": True} and step.rewards == {"player_0": -0.5}


def test_outcome_reward_pays_at_the_end_only() -> None:
    env = TextConnectFour(reward="outcome")
    env.reset(0)
    step = env.step({"player_0": "fly"})
    assert step.info["invalid"] == {"player_0": True} and step.rewards.get("player_0", 0.0) == 0.0
