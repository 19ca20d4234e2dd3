"""Payoff cells, against NumPy's numbers for all games at once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.populations.payoffs import PayoffCell, empty_cell

RETURNS = st.lists(st.tuples(st.floats(-10, 10), st.floats(-10, 10)), max_size=8)


def cell(returns):
    games = np.array(returns, float).reshape(-1, 2)
    mean = games.mean(axis=0) if len(games) else np.zeros(2)
    wins = (games.argmax(axis=1)[:, None] == [0, 1]).sum(axis=0)
    return PayoffCell(
        len(games), tuple(mean), tuple(((games - mean) ** 2).sum(axis=0)), tuple(wins), draws=len(games) // 2
    )


@settings(max_examples=40)
@given(st.lists(RETURNS, max_size=5))
def test_merged_parts_equal_all_games(parts):
    merged = empty_cell(2)
    for part in parts:
        merged = merged.merge(cell(part))
    whole = cell([game for part in parts for game in part])
    assert (merged.games, merged.wins) == (whole.games, whole.wins)
    assert merged.mean == pytest.approx(whole.mean, abs=1e-9) and merged.m2 == pytest.approx(whole.m2, abs=1e-6)


def test_standard_error_by_hand():
    """Returns 1, 2, 3, 6: mean 3, squared deviations 4 + 1 + 0 + 9; sqrt(14 / 3 / 4)."""
    assert cell([(1, 0), (2, 0), (3, 0), (6, 0)]).stderr[0] == pytest.approx(np.sqrt(14 / 12))
    assert cell([(1, 0)]).stderr == (np.inf, np.inf)


def test_exact_payoffs_are_kept_on_merge():
    known = PayoffCell(0, (0.5, -0.5), (0, 0), (0, 0), exact=True)
    after = known.merge(cell([(3, -3), (5, -5)]))
    assert after.mean == (0.5, -0.5) and after.stderr == (0, 0)
    assert after.games == 2 and after.wins == (2, 0)  # ratings still count the games
    assert cell([(3, -3)]).merge(known).mean == (0.5, -0.5)
    assert known.merge(PayoffCell(0, (0.25, -0.25), (0, 0), (0, 0), exact=True)).mean == (0.25, -0.25)


def test_seats_of_one_member_share_the_average():
    """Both seats' returns are a sample of the same member: 1, 2 and 3, 6 have mean 3 and squared deviations 14 in two
    games each."""
    even = cell([(1, 3), (2, 6)]).average_seats([[0, 1]])
    assert even.mean == (3, 3) and even.m2 == (7, 7) and even.wins == (1, 1)


def test_seats_can_be_permuted():
    moved = PayoffCell(5, (1, 2, 3), (4, 5, 6), (0, 1, 2)).permute_seats([2, 0, 1])
    assert (moved.mean, moved.m2, moved.wins) == ((3, 1, 2), (6, 4, 5), (2, 0, 1))
