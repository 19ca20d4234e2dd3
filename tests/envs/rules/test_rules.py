"""palestra's rules equal OpenSpiel's state by state, as the games of its vectorised envs do (tests/envs/vector); texts
distinguish the same states as tensors."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from palestra.envs.adapters.openspiel import OpenSpielRules
from palestra.envs.rules.bargaining import BargainingRules, BargainingState
from palestra.envs.rules.base import CHANCE, TERMINAL, Rules
from palestra.envs.rules.kuhn import BET, PASS, KuhnRules
from palestra.envs.rules.leduc import CALL, FOLD, RAISE, LeducRules
from palestra.envs.rules.liars_dice import LiarsDiceRules
from palestra.envs.rules.tic_tac_toe import TicTacToeRules
from palestra.envs.rules_by_env import rules_for_env
from palestra.populations.tabular.game_tree import build_game_tree

OURS: list[tuple[Rules[Any], str]] = [
    (KuhnRules(), "kuhn_poker"),
    (KuhnRules(3), "kuhn_poker(players=3)"),
    (LeducRules(), "leduc_poker"),
    (LiarsDiceRules(faces=3), "liars_dice(dice_sides=3)"),
    (LiarsDiceRules(dice=2, faces=2), "liars_dice(numdice=2,dice_sides=2)"),
    (TicTacToeRules(), "tic_tac_toe"),
]
SLOW: list[tuple[Rules[Any], str]] = [
    (KuhnRules(4), "kuhn_poker(players=4)"),
    (LiarsDiceRules(faces=5), "liars_dice(dice_sides=5)"),
]
GAMES = [pytest.param(*pair, id=pair[1]) for pair in OURS]
GAMES += [pytest.param(*pair, id=pair[1], marks=pytest.mark.slow) for pair in SLOW]


def pairs(rules: Rules[Any], theirs: OpenSpielRules) -> Iterator[tuple[Any, Any]]:
    """Every state of `rules`, with the state of OpenSpiel that the same moves lead to."""
    waiting, known = [(rules.initial_state(), theirs.initial_state())], {rules.initial_state()}
    while waiting:
        state, other = waiting.pop()
        yield state, other
        turn = rules.current_player(state)
        moves = [move for move, _ in rules.chance_outcomes(state)] if turn == CHANCE else rules.legal_actions(state)
        for move in moves if turn != TERMINAL else []:
            after = rules.next_state(state, move)
            if after not in known:
                known.add(after)
                waiting.append((after, theirs.next_state(other, move)))


@pytest.mark.parametrize(("rules", "game"), GAMES)
@pytest.mark.few(3)
def test_states_equal_openspiel(rules: Rules[Any], game: str) -> None:
    theirs = OpenSpielRules(game)
    assert (rules.num_players, len(rules.action_names)) == (theirs.num_players, len(theirs.action_names))
    for state, other in pairs(rules, theirs):
        turn = rules.current_player(state)
        assert turn == theirs.current_player(other)
        for player in range(
            rules.num_players if turn != CHANCE else 0
        ):  # OpenSpiel shows dice in the order of the rolls, before it sorts them
            view = rules.info_state(state, player)
            assert view.dtype == np.float32 and np.array_equal(view, theirs.info_state(other, player))
        if turn == TERMINAL:
            assert rules.returns(state) == theirs.returns(other)
        elif turn == CHANCE:
            assert np.allclose(rules.chance_outcomes(state), theirs.chance_outcomes(other), rtol=1e-15)
        else:
            assert rules.legal_actions(state) == theirs.legal_actions(other)


EVERY = [*(rules for rules, _ in OURS), BargainingRules(), BargainingRules((1, 1, 1), total=2, turns=3)]


def name_of(rules: Rules[Any]) -> str:
    return f"{rules.name}-{rules.num_players}-{len(rules.action_names)}"


@pytest.mark.parametrize("rules", EVERY, ids=name_of)
@pytest.mark.few(4)
def test_texts_are_equal_exactly_where_tensors_are(rules: Rules[Any]) -> None:
    texts: dict[tuple[int, bytes], str] = {}
    waiting, known = [rules.initial_state()], {rules.initial_state()}
    for state in waiting:
        for player in range(rules.num_players):
            key = player, rules.info_state(state, player).tobytes()
            assert texts.setdefault(key, rules.info_state_text(state, player)) == rules.info_state_text(state, player)
        turn = rules.current_player(state)
        moves = [move for move, _ in rules.chance_outcomes(state)] if turn == CHANCE else rules.legal_actions(state)
        new = {rules.next_state(state, move) for move in moves} - known if turn != TERMINAL else set()
        known |= new
        waiting += new
    assert len(set(zip((player for player, _ in texts), texts.values(), strict=True))) == len(texts) > 10


@pytest.mark.parametrize("rules", EVERY, ids=name_of)
def test_action_names_are_distinct_single_words(rules: Rules[Any]) -> None:
    assert len(set(rules.action_names)) == len(rules.action_names)
    assert all(word and not any(letter.isspace() for letter in word) for word in rules.action_names)


def test_info_state_texts_by_hand() -> None:
    kuhn = KuhnRules()
    assert kuhn.info_state_text(after(kuhn, 2, 0, PASS, BET), 0) == "You are player 0. You hold K. Moves: pass bet."
    four = KuhnRules(4)
    assert four.info_state_text(after(four, 0, 4, 1, 2), 1) == "You are player 1. You hold A. Moves: none."
    leduc = LeducRules()
    state = after(leduc, 5, 0, CALL, RAISE, CALL, 2, RAISE)
    assert leduc.info_state_text(state, 1) == (
        "You are player 1. You hold Js. Moves: call raise call. The table shows Qs. Then: raise."
    )
    dice = LiarsDiceRules(dice=2)
    assert dice.info_state_text(after(dice, 4, 1, 0, 0, 7), 0) == "You are player 0. Your dice: 2 5. Bids: 2x2."
    toe = TicTacToeRules()
    assert toe.info_state_text(after(toe, 4, 0), 1) == "You are o. Board: o . . / . x . / . . ."


def after(rules: Rules[Any], *moves: int) -> Any:
    state = rules.initial_state()
    for move in moves:
        state = rules.next_state(state, move)
    return state


def test_folds_end_a_hand_of_leduc_poker() -> None:
    leduc = LeducRules()
    assert leduc.returns(after(leduc, 5, 0, RAISE, RAISE, FOLD)) == (-3, 3)
    assert leduc.returns(after(leduc, 2, 4, CALL, CALL, 5, RAISE, RAISE, FOLD)) == (-5, 5)


# ---- bargaining


@pytest.mark.parametrize(("counts", "total", "turns"), [((1, 2), 6, 4), ((2, 1, 1), 4, 3), ((1, 1, 3), 5, 2)])
def test_bargaining_equals_openspiel(counts: tuple[int, ...], total: int, turns: int, tmp_path: Path) -> None:
    """For its last offer OpenSpiel also accepts a new offer, and takes it as a refusal."""
    rules = BargainingRules(counts, total, turns)
    pool = ",".join(map(str, (*counts, 0)[:3]))
    instances = [" ".join(",".join(map(str, (*worth, 0)[:3])) for worth in deal) for deal in rules.valuations]
    path = tmp_path / "instances.txt"
    path.write_text("".join(f"{pool} {instance}\n" for instance in instances))
    theirs = OpenSpielRules(f"bargaining(instances_file={path},max_turns={turns})")
    initial = theirs.initial_state()
    assert np.allclose(theirs.chance_outcomes(initial), rules.chance_outcomes(rules.initial_state()), rtol=1e-15)
    rng = np.random.default_rng(0)
    deals = range(len(rules.valuations))
    waiting = [(after(rules, deal), theirs.next_state(initial, deal)) for deal in rng.permutation(deals)[:6].tolist()]
    ends = 0
    while waiting:
        state, other = waiting.pop()
        assert rules.current_player(state) == theirs.current_player(other)
        if rules.current_player(state) == TERMINAL:
            assert rules.returns(state) == theirs.returns(other)
            ends += 1
            continue
        legal = rules.legal_actions(state)
        names = {action_name(theirs, other, action): action for action in theirs.legal_actions(other)}
        assert (
            set(names) == {rules.action_names[action] for action in legal} - {"refuse"} or len(state.moves) == turns - 1
        )
        for action in rng.permutation(legal)[:5].tolist():
            word = rules.action_names[action] if action != rules.refuse_action else rules.action_names[0]
            waiting.append((rules.next_state(state, action), theirs.next_state(other, names[word])))
    assert ends > 10


def action_name(theirs: OpenSpielRules, state: Any, action: int) -> str:
    """palestra's name of an OpenSpiel action: "Offer: Book: 1, Hat: 0, Basketball: 0" is "keep-1-0" for two kinds."""
    text = state.state.action_to_string(action)
    if text == "Agree":
        return "agree"
    kinds = int(state.state.information_state_string(0).split("Basketball: ")[1].split("\n")[0]) > 0
    counts = [part.split(": ")[-1] for part in text.split(", ")]
    return "keep-" + "-".join(counts if kinds else counts[:2])


def test_bargaining_by_hand() -> None:
    rules = BargainingRules((1, 2), total=6, turns=3)
    # the book has the value 4 for one player and 2 for the other, a hat 1 and 2
    deal = rules.valuations.index(((4, 1), (2, 2)))
    start = after(rules, deal)
    keep_book, keep_hats = (rules.action_names.index(word) for word in ("keep-1-0", "keep-0-2"))
    assert rules.legal_actions(start) == list(range(6))  # there is no offer to accept yet
    assert rules.returns(after(rules, deal, keep_book, rules.agree_action)) == (4, 4)
    assert rules.returns(after(rules, deal, keep_hats, keep_hats, rules.agree_action)) == (4, 4)
    assert rules.returns(after(rules, deal, keep_hats, keep_hats, rules.refuse_action)) == (0, 0)
    assert rules.legal_actions(after(rules, deal, keep_hats, keep_hats)) == [rules.agree_action, rules.refuse_action]
    assert rules.info_state_text(after(rules, deal, keep_book), 1) == (
        "You are player 1. To divide: 1 book, 2 hats. Worth to you: a book 2, a hat 2. Moves: keep-1-0."
    )


def test_bargaining_deals_allow_gains_from_trade() -> None:
    for first, second in BargainingRules((1, 2, 1), total=5).valuations:
        assert np.dot(first, (1, 2, 1)) == np.dot(second, (1, 2, 1)) == 5
        assert np.all(np.add(first, second) > 0) and np.any(np.multiply(first, second) > 0)
    some, even, other = (0, 2), (1, 1), (2, 0)  # the largest total value of two kinds of one item, 2 in all
    by_hand = [(some, even), (even, some), (even, even), (even, other), (other, even)]
    assert BargainingRules((1, 1), total=2).valuations == by_hand


# ---- refused games


def test_invalid_games_are_refused() -> None:
    with pytest.raises(ValueError, match="players: 5"):
        KuhnRules(5)
    with pytest.raises(ValueError, match="dice: 0"):
        LiarsDiceRules(dice=0)
    with pytest.raises(ValueError, match="faces: 1"):
        LiarsDiceRules(faces=1)
    with pytest.raises(ValueError, match="cannot be worth 1 to both"):
        BargainingRules((2, 2), total=1)
    with pytest.raises(ValueError, match="not a pool of items"):
        BargainingRules((1, 0))
    with pytest.raises(ValueError, match="turns: 1"):
        BargainingRules(turns=1)


def test_rules_are_found_by_env_name() -> None:
    assert isinstance(rules_for_env("leduc_poker"), LeducRules)
    three = rules_for_env("kuhn_poker", players=3, processes=2)
    assert isinstance(three, KuhnRules) and three.num_players == 3
    spiel = rules_for_env("openspiel", game="tic_tac_toe")
    assert isinstance(spiel, OpenSpielRules) and spiel.name == "tic_tac_toe"
    seen = rules_for_env("openspiel", game="kuhn_poker", view="observation")
    assert isinstance(seen, OpenSpielRules) and seen.tensor_kind == "observation"
    assert rules_for_env("openspiel", game="matrix_pd") is None and rules_for_env("simple_spread") is None
    with pytest.raises(ValueError, match="did you mean leduc_poker"):
        rules_for_env("openspiel", game="leduc_pocker")


def test_unsupported_openspiel_games_are_refused() -> None:
    with pytest.raises(ValueError, match="players move at once"):
        OpenSpielRules("goofspiel")
    with pytest.raises(ValueError, match="draws chance outcomes itself"):
        OpenSpielRules("negotiation")
    with pytest.raises(ValueError, match="no information_state tensor"):
        OpenSpielRules("tic_tac_toe", "information_state")


def test_observations_do_not_change_information_states() -> None:
    """In liar's dice of 3 faces both tensors have 12 numbers."""
    game = "liars_dice(dice_sides=3)"
    trees = [build_game_tree(OpenSpielRules(game, view)) for view in ("information_state", "observation")]
    first, second = ((tree.state_player.tolist(), tree.info_state_texts) for tree in trees)
    assert first == second and trees[0].info_state_tensors.shape == trees[1].info_state_tensors.shape
    assert not np.array_equal(trees[0].info_state_tensors, trees[1].info_state_tensors)


def test_information_states_follow_strings_if_tensors_are_ambiguous() -> None:
    """In dark hex a tensor does not tell when a stone was placed."""
    found = build_game_tree(OpenSpielRules("dark_hex(num_rows=2,num_cols=2)"))
    rows = zip(found.state_player.tolist(), found.info_state_texts, found.info_state_tensors, strict=True)
    strings, tensors = zip(*(((player, text), (player, view.tobytes())) for player, text, view in rows), strict=True)
    assert len(set(tensors)) < len(set(strings)) == len(found.state_player)
    assert found.has_ambiguous_tensors
    goofspiel = OpenSpielRules("turn_based_simultaneous_game(game=goofspiel(num_cards=3,imp_info=True))")
    assert not build_game_tree(goofspiel).has_ambiguous_tensors


def test_states_are_immutable_and_equal_by_value() -> None:
    rules = BargainingRules()
    assert rules.initial_state() == BargainingState() and hash(after(rules, 3, 1)) == hash(BargainingState(3, (1,)))
    spiel = OpenSpielRules("kuhn_poker")
    start = spiel.initial_state()
    assert spiel.next_state(start, 1) == spiel.next_state(start, 1) != spiel.next_state(start, 2)
    assert spiel.current_player(start) == CHANCE and start == spiel.initial_state()
