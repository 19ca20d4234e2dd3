"""Best responses, NashConv and payoffs equal OpenSpiel's."""

from itertools import product

import numpy as np
import pyspiel
import pytest
from populations.tabular.spiel import random_policy, spiel_tree, table, tree, with_player

from palestra.populations.tabular.best_response import (
    best_response,
    best_response_to_joint,
    best_response_values,
    nash_conv,
)
from palestra.populations.tabular.game_tree import GameTree, expected_returns, mixture_policy, uniform_policy
from results.populations.parts.double_oracle import exact_payoffs


def always_fold(found: GameTree) -> np.ndarray:
    """The first legal action: fold, or check if there is no bet."""
    return np.eye(found.action_mask.shape[1])[found.action_mask.argmax(1)]


def test_known_nash_conv() -> None:
    """Values of OpenSpiel's unit tests: uniform and always-fold play."""
    kuhn, leduc = tree("kuhn_poker"), tree("leduc_poker")
    assert nash_conv(kuhn, uniform_policy(kuhn)) == pytest.approx(11 / 12, abs=1e-12)
    assert nash_conv(leduc, uniform_policy(leduc)) == pytest.approx(4.747222222222222, abs=1e-12)
    assert nash_conv(kuhn, always_fold(kuhn)) == pytest.approx(2, abs=1e-12)
    assert nash_conv(leduc, always_fold(leduc)) == pytest.approx(2, abs=1e-12)


@pytest.mark.parametrize("alpha", [0, 0.2, 1 / 3])
def test_kuhn_equilibrium_has_zero_nash_conv(alpha: float) -> None:
    """Kuhn (1950): bet a jack with alpha and a king with 3 alpha, call with a queen at alpha + 1/3. The value is
    -1/18."""
    kuhn = tree("kuhn_poker")
    bets = {  # by moves so far, probabilities of a bet with a jack, a queen, a king
        0: {"none": (alpha, 0, 3 * alpha), "pass bet": (0, alpha + 1 / 3, 1)},
        1: {"pass": (1 / 3, 0, 1), "bet": (0, 1 / 3, 1)},
    }
    policy = np.zeros((12, 2))
    for player, rows in bets.items():
        for moves, by_card in rows.items():
            for card, bet in zip("JQK", by_card, strict=True):
                row = kuhn.info_state_texts.index(f"You are player {player}. You hold {card}. Moves: {moves}.")
                policy[row] = [1 - bet, bet]
    assert expected_returns(kuhn, policy) == pytest.approx([-1 / 18, 1 / 18], abs=1e-12)
    assert nash_conv(kuhn, policy) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(
    "game",
    [
        "kuhn_poker",
        "kuhn_poker(players=3)",
        "leduc_poker",
        "liars_dice(dice_sides=3)",
        "tiny_hanabi",
        "dark_hex(num_rows=2,num_cols=2)",  # its tensors contain less than its strings
    ],
)
def test_nash_conv_and_best_responses_equal_openspiel(game: str) -> None:
    found, loaded = spiel_tree(game), pyspiel.load_game(game)
    two = found.num_players == 2 and loaded.get_type().utility == pyspiel.GameType.Utility.ZERO_SUM
    for seed in range(3):
        policy = random_policy(found, seed)
        theirs = table(found, policy)
        best = [pyspiel.TabularBestResponse(loaded, player, theirs) for player in range(found.num_players)]
        worth = [each.value("") for each in best]
        assert np.allclose(best_response_values(found, policy), worth, atol=1e-9)
        assert nash_conv(found, policy) == pytest.approx(sum(worth) - expected_returns(found, policy).sum(), abs=1e-9)
        if two:
            assert nash_conv(found, policy) == pytest.approx(pyspiel.nash_conv(loaded, theirs), abs=1e-9)


@pytest.mark.slow
def test_nash_conv_equals_openspiel_with_imperfect_recall_strings() -> None:
    """Dark hex of 2 x 3: 7,246 strings, and more states, since a string does not contain everything its player
    observed."""
    game = "dark_hex(num_rows=2,num_cols=3)"
    found = spiel_tree(game)
    strings = list(zip(found.state_player.tolist(), found.info_state_texts, strict=True))
    first = {string: row for row, string in reversed(list(enumerate(strings)))}
    assert len(first) == 7246
    for seed in range(2):
        policy = random_policy(found, seed)[[first[string] for string in strings]]
        theirs = pyspiel.nash_conv(pyspiel.load_game(game), table(found, policy), True)
        assert nash_conv(found, policy) == pytest.approx(theirs, abs=1e-9)


@pytest.mark.parametrize("name", ["kuhn_poker", "leduc_poker", "bargaining"])
def test_best_response_earns_its_reported_value(name: str) -> None:
    found = tree(name)
    policy = random_policy(found, 3)
    for player in range(2):
        answer, value = best_response(found, policy, player)
        other = found.player_rows(1 - player)
        assert np.array_equal(answer[other], policy[other])
        assert ((answer[found.player_rows(player)] == 1).sum(1) == 1).all() and not answer[~found.action_mask].any()
        assert expected_returns(found, answer)[player] == pytest.approx(value, abs=1e-12)
        assert value == best_response_values(found, policy)[player] >= expected_returns(found, policy)[player]


def test_ties_go_to_the_first_action() -> None:
    """Against a player that always passes in Kuhn poker, a king wins the ante with either action."""
    kuhn = tree("kuhn_poker")
    passing = np.tile([1.0, 0.0], (12, 1))
    answer, _ = best_response(kuhn, passing, 0)
    assert answer[kuhn.info_state_texts.index("You are player 0. You hold K. Moves: none.")].tolist() == [1, 0]
    assert answer[kuhn.info_state_texts.index("You are player 0. You hold J. Moves: none.")].tolist() == [0, 1]


def test_best_response_respects_the_action_mask() -> None:
    leduc = tree("leduc_poker")
    policy = random_policy(leduc, 5)
    calls = leduc.action_mask & (np.arange(3) == 1)
    answer, value = best_response(leduc, policy, 0, action_mask=calls)
    assert np.array_equal(answer[leduc.player_rows(0)] > 0, calls[leduc.player_rows(0)])
    assert value == pytest.approx(expected_returns(leduc, answer)[0]) and value < best_response(leduc, policy, 0)[1]
    assert best_response_values(leduc, policy, action_mask=calls)[0] == value
    assert nash_conv(leduc, calls.astype(float), action_mask=calls) == pytest.approx(0, abs=1e-12)


# ---- payoffs


@pytest.mark.parametrize(
    ("name", "options", "counts"), [("leduc_poker", {}, (3, 2)), ("kuhn_poker", {"players": 4}, (2, 3, 1, 2))]
)
def test_payoff_tables_hold_the_value_of_every_profile(
    name: str, options: dict[str, int], counts: tuple[int, ...]
) -> None:
    found = tree(name, **options)
    members = {player: [random_policy(found, 10 * player + k) for k in range(m)] for player, m in enumerate(counts)}
    table = exact_payoffs(found, members)
    assert [payoffs.shape for payoffs in table] == [counts] * found.num_players
    for choice in product(*map(range, counts)):
        joined = uniform_policy(found)
        for player, k in enumerate(choice):
            joined = with_player(found, player, members[player][k], joined)
        assert np.allclose([payoffs[choice] for payoffs in table], expected_returns(found, joined), atol=1e-12)


# ---- joint distributions


def test_response_to_independent_mixtures_equals_response_to_the_mixture() -> None:
    leduc = tree("leduc_poker")
    members, weights = [random_policy(leduc, seed) for seed in range(3)], [0.5, 0.2, 0.3]
    answer, value = best_response_to_joint(leduc, members, weights, 1)
    expected, worth = best_response(leduc, mixture_policy(leduc, members, weights), 1)
    assert value == pytest.approx(worth, abs=1e-12)
    assert np.array_equal(answer[leduc.player_rows(1)], expected[leduc.player_rows(1)])


def test_response_to_joint_play_uses_the_correlation() -> None:
    """Three-player Kuhn poker: the best response earns at least as much as any policy against the joint draw, and less
    than a player that observes the draw."""
    kuhn = tree("kuhn_poker", players=3)
    members, weights = [random_policy(kuhn, seed, sharpness=3) for seed in range(4)], np.array([0.1, 0.2, 0.3, 0.4])
    for player in range(3):
        answer, value = best_response_to_joint(kuhn, members, weights, player)
        assert value == pytest.approx(return_against(kuhn, player, answer, members, weights), abs=1e-12)
        tried = [random_policy(kuhn, 50 + seed) for seed in range(30)]
        tried += [best_response(kuhn, member, player)[0] for member in members]
        tried.append(best_response(kuhn, mixture_policy(kuhn, members, weights), player)[0])
        assert all(value >= return_against(kuhn, player, policy, members, weights) - 1e-12 for policy in tried)
        seeing = sum(w * best_response(kuhn, member, player)[1] for w, member in zip(weights, members, strict=True))
        assert value <= seeing + 1e-12


def return_against(
    tree: GameTree, player: int, policy: np.ndarray, members: list[np.ndarray], weights: np.ndarray
) -> float:
    """The return of a policy if the others play by one of `members` together."""
    worth = [expected_returns(tree, with_player(tree, player, policy, member))[player] for member in members]
    return float(np.dot(weights, worth))
