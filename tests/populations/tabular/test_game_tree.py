"""Game trees: known counts, and values of policies equal to OpenSpiel's."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pyspiel
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from populations.tabular.spiel import random_policy, spiel_tree, table, tree, with_player

from palestra.envs.rules.base import TERMINAL, Rules
from palestra.envs.rules.kuhn import KuhnRules
from palestra.populations.tabular.best_response import nash_conv
from palestra.populations.tabular.game_tree import (
    GameTree,
    build_game_tree,
    end_probabilities,
    expected_returns,
    mixture_policy,
    policy_from_plan,
    realization_plan,
    uniform_policy,
)


@pytest.mark.parametrize(
    ("env_type", "options", "states", "nodes", "ends"),
    [
        ("kuhn_poker", {}, 12, 58, 30),  # 6 deals with 5 terminal states
        ("leduc_poker", {}, 936, 9457, 5520),
        ("kuhn_poker", {"players": 3}, 48, 617, 312),  # 24 deals with 13 terminal states
        ("liars_dice", {"faces": 3}, 192, 1147, 567),  # 9 rolls; 63 terminal states: a set of bids, then the call
    ],
)
def test_tree_sizes_match_known_counts(
    env_type: str, options: dict[str, int], states: int, nodes: int, ends: int
) -> None:
    found = tree(env_type, **options)
    assert (len(found.state_player), found.num_nodes, len(found.end_sequences)) == (states, nodes, ends)
    assert (
        found.info_state_tensors.shape[0] == found.action_mask.shape[0] == len(found.info_state_texts) == states
        and not found.has_ambiguous_tensors
    )


def test_information_state_rows_of_kuhn_poker() -> None:
    kuhn = tree("kuhn_poker")
    at = kuhn.info_state_texts.index("You are player 0. You hold Q. Moves: pass bet.")
    assert kuhn.state_player[at] == 0 and kuhn.action_mask[at].all() and kuhn.action_names == ("pass", "bet")
    before = kuhn.info_state_texts.index("You are player 0. You hold Q. Moves: none.")
    assert kuhn.parent_sequence[at] == kuhn.num_players + 2 * before + 0 and kuhn.parent_sequence[before] == 0
    assert kuhn.info_state_tensors[at].tolist() == [1, 0, 0, 1, 0, 1, 0, 0, 1, 0, 0]
    assert [kuhn.player_rows(player) for player in (0, 1)] == [slice(0, 6), slice(6, 12)]
    assert kuhn.levels[0] == [slice(0, 3), slice(3, 6)] and kuhn.levels[1] == [slice(6, 12)]


def test_equivalent_dice_rolls_are_merged() -> None:
    """Two dice of two faces each: 9 pairs of throws, not 16; a throw of two different faces is twice as likely as a
    double."""
    dice = tree("liars_dice", dice=2, faces=2)
    assert len(dice.end_sequences) == 9 * 255 and len(dice.end_sequences) < len(
        spiel_tree("liars_dice(numdice=2,dice_sides=2)").end_sequences
    )
    assert sorted(set(dice.chance_probs.tolist())) == [1 / 16, 1 / 8, 1 / 4]


def test_terminal_probabilities_sum_to_one() -> None:
    for found in (tree("kuhn_poker", players=3), tree("leduc_poker"), tree("bargaining")):
        assert end_probabilities(found, realization_plan(found, random_policy(found, 0))).sum() == pytest.approx(
            1, abs=1e-12
        )


def test_expected_returns_by_hand() -> None:
    """Uniform Kuhn poker: showdowns cancel over the deals, the first seat wins 1 by a fold with probability 1/4, and
    loses 1 with 1/8."""
    kuhn = tree("kuhn_poker")
    assert expected_returns(kuhn, uniform_policy(kuhn)) == pytest.approx([0.125, -0.125], abs=1e-15)


@pytest.mark.parametrize("game", ["kuhn_poker(players=3)", "leduc_poker", "liars_dice(dice_sides=3)"])
def test_expected_returns_equal_openspiel(game: str) -> None:
    found = spiel_tree(game)
    for seed in range(3):
        policy = random_policy(found, seed)
        start = pyspiel.load_game(game).new_initial_state()
        theirs = pyspiel.expected_returns(start, table(found, policy), -1, False)
        assert np.allclose(expected_returns(found, policy), theirs, atol=1e-12)


@pytest.mark.parametrize(("env_type", "game"), [("kuhn_poker", "kuhn_poker"), ("leduc_poker", "leduc_poker")])
def test_own_and_openspiel_rules_give_equal_trees(env_type: str, game: str) -> None:
    ours, theirs = tree(env_type), spiel_tree(game)
    rows = {(int(owner), view.tobytes()): row for row, (owner, view) in enumerate(_views(theirs))}
    at = np.array([rows[int(owner), view.tobytes()] for owner, view in _views(ours)])
    assert np.array_equal(theirs.info_state_tensors[at], ours.info_state_tensors) and np.array_equal(
        theirs.action_mask[at], ours.action_mask
    )
    policy = random_policy(theirs, 1)
    assert np.allclose(expected_returns(ours, policy[at]), expected_returns(theirs, policy), atol=1e-12)
    assert nash_conv(ours, policy[at]) == pytest.approx(nash_conv(theirs, policy), abs=1e-12)


def _views(tree: GameTree) -> Iterator[tuple[np.int64, np.ndarray]]:
    """Yields player and tensor of each information state."""
    return zip(tree.state_player, tree.info_state_tensors, strict=True)


# ---- plans and mixtures


@given(seed=st.integers(0, 10_000))
@settings(max_examples=20, deadline=None)
def test_policy_is_recovered_from_its_realization_plan(seed: int) -> None:
    leduc = tree("leduc_poker")
    policy, other = random_policy(leduc, seed), random_policy(leduc, seed + 1)
    likely = realization_plan(leduc, policy)
    rebuilt = policy_from_plan(leduc, likely, other)
    came = likely[leduc.parent_sequence] > 0
    assert np.allclose(rebuilt[came], policy[came], atol=1e-12) and np.array_equal(rebuilt[~came], other[~came])


@given(seed=st.integers(0, 10_000), count=st.integers(1, 4))
@settings(max_examples=20, deadline=None)
def test_mixture_earns_the_mean_of_its_members(seed: int, count: int) -> None:
    """Against any policy: this defines the mixture of policies as one policy."""
    for found in (tree("kuhn_poker", players=3), tree("leduc_poker")):
        rng = np.random.default_rng(seed)
        members = [random_policy(found, seed + k, sharpness=3) for k in range(count)]
        weights = rng.dirichlet(np.ones(count))
        rest = random_policy(found, seed + 100)
        mixed = mixture_policy(found, members, weights)
        for player in range(found.num_players):
            worth = [expected_returns(found, with_player(found, player, member, rest)) for member in members]
            assert np.allclose(
                expected_returns(found, with_player(found, player, mixed, rest)), weights @ worth, atol=1e-12
            )


def test_mixture_of_two_policies_by_hand() -> None:
    """One policy always bets; the other passes first, and bets after a bet. The equal mixture first bets with
    probability 1/2; after a pass it can only be the second policy."""
    kuhn = tree("kuhn_poker")
    bet, sly = np.tile([0.0, 1.0], (12, 1)), np.tile([0.0, 1.0], (12, 1))
    sly[kuhn.levels[0][0]] = [1, 0]
    passive = np.tile([1.0, 0.0], (12, 1))
    assert np.allclose(mixture_policy(kuhn, [bet, sly], [0.5, 0.5])[:6], [[0.5, 0.5]] * 3 + [[0, 1]] * 3)
    assert np.allclose(mixture_policy(kuhn, [bet, passive], [0.25, 0.75])[:6], [[0.75, 0.25]] * 3 + [[1, 0]] * 3)
    assert np.allclose(mixture_policy(kuhn, [bet, bet, passive], [0.5, 0.0, 0.5])[:3], [[0.5, 0.5]] * 3)


def test_players_may_have_different_mixtures() -> None:
    leduc = tree("leduc_poker")
    members = [random_policy(leduc, seed) for seed in (1, 2)]
    mixed = mixture_policy(leduc, members, np.array([[1.0, 0.0], [0.0, 1.0]]))
    own = leduc.player_rows(0)
    assert np.allclose(mixed[own], members[0][own]) and np.allclose(
        mixed[leduc.player_rows(1)], members[1][leduc.player_rows(1)]
    )


# ---- refused games, and perfect recall


class Guess(NamedTuple):
    moves: tuple[int, ...] = ()


class Forgetting(Rules[Guess]):
    """One player chooses 0 or 1 twice, and wins if both are chosen; it observes nothing."""

    name = "forgetting"
    num_players = 1
    action_names = ("no", "yes")
    tells = True

    def initial_state(self) -> Guess:
        return Guess()

    def current_player(self, state: Guess) -> int:
        return TERMINAL if len(state.moves) == 2 else 0

    def legal_actions(self, state: Guess) -> list[int]:
        return [0, 1] if self.tells or not state.moves else [1]

    def next_state(self, state: Guess, action: int) -> Guess:
        return Guess((*state.moves, action))

    def returns(self, state: Guess) -> tuple[float, ...]:
        return (float(len(set(state.moves)) == 2),)

    def info_state(self, state: Guess, player: int) -> np.ndarray:
        return np.zeros(1, np.float32)

    def info_state_text(self, state: Guess, player: int) -> str:
        return "Guess."


def test_tree_has_perfect_recall() -> None:
    found = build_game_tree(Forgetting())
    assert found.has_ambiguous_tensors and len(found.state_player) == 3 and not found.info_state_tensors.any()
    assert nash_conv(found, uniform_policy(found)) == 0.5  # always right; uniform play is right half of the time


def test_ambiguous_legal_actions_are_refused() -> None:
    rules = Forgetting()
    rules.tells = False
    with pytest.raises(ValueError, match="cannot tell what is legal"):
        build_game_tree(rules)


def test_too_large_game_is_refused() -> None:
    for most in (20, 40):  # too many states; few enough states, but too many histories
        with pytest.raises(ValueError, match=rf"kuhn_poker has more than {most} nodes"):
            build_game_tree(KuhnRules(), max_nodes=most)


@pytest.mark.slow
def test_tic_tac_toe_matches_known_counts_and_openspiel() -> None:
    """255,168 games, a known count; the uniform players' value equals OpenSpiel's."""
    found = tree("tic_tac_toe")
    assert (found.num_nodes, len(found.end_sequences), len(found.state_player)) == (
        549_946,
        255_168,
        294_778,
    ) and found.has_ambiguous_tensors
    game = pyspiel.load_game("tic_tac_toe")
    theirs = pyspiel.nash_conv(game, pyspiel.UniformRandomPolicy(game))
    assert nash_conv(found, uniform_policy(found)) == pytest.approx(theirs, abs=1e-9)
