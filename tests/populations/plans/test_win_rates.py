"""Win rates compared with game-by-game updates, and mixtures of mixtures."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.populations.plans.matchmaking import WinRates


def test_unknown_win_rate_is_half_and_draws_count_half():
    rates = WinRates(decay=1.0)
    assert rates.rate("a", "b") == 0.5
    rates.add("a", "b", games=4, points=2 + 1 / 2)  # two won, one drawn, one lost
    assert rates.rate("a", "b") == 2.5 / 4 and rates.rate("b", "a") == 1.5 / 4


def test_decay_by_hand():
    """One game lost, then two won, at 0.5: games 1 -> 1.5 -> 1.75, wins 0 -> 1 -> 1.5."""
    rates = WinRates(decay=0.5)
    rates.add("a", "b", games=1, points=0)
    rates.add("a", "b", games=1, points=1)
    assert rates.rate("a", "b") == pytest.approx(1.0 / 1.5)
    rates.add("a", "b", games=1, points=1)
    assert rates.rate("a", "b") == pytest.approx(1.5 / 1.75)


@given(st.lists(st.tuples(st.integers(0, 30), st.booleans()), max_size=5), st.sampled_from([0.9, 0.99, 1.0]))
def test_blocks_of_games_equal_single_games(blocks, decay):
    """Blocks of games with equal results, reported as blocks and one by one as in the pseudocode."""
    rates, games, wins = WinRates(decay), 0.0, 0.0
    for n, won in blocks:
        rates.add("a", "b", games=n, points=n * won)
        for _ in range(n):
            games, wins = games * decay + 1, wins * decay + won
    assert rates.rate("a", "b") == pytest.approx(wins / games if games else 0.5)
    assert rates.rate("a", "b") + rates.rate("b", "a") == pytest.approx(1)


def test_forget_removes_a_name_on_both_sides():
    rates = WinRates()
    for pair in (("a", "b"), ("b", "c"), ("a", "c")):
        rates.add(*pair, games=10, points=10)
    rates.remove("a")
    assert rates.rate("a", "b") == rates.rate("c", "a") == 0.5
    assert rates.rate("b", "c") == 1
