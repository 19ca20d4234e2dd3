"""Nash by linear programming: games solved by hand, and the definition of an equilibrium on random games."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.populations.normal_form.equilibria import maximin, nash
from palestra.populations.normal_form.payoff_tensors import member_returns, own_axis_first

RPS = np.array([[0.0, -1, 1], [1, 0, -1], [-1, 1, 0]])


def zero_sum(table):
    return [np.array(table, float), -np.array(table, float)]


def nash_conv(payoffs, strategies):
    earned = member_returns(own_axis_first(payoffs), strategies)
    return sum(value.max() - value @ strategy for value, strategy in zip(earned, strategies, strict=True))


def value_of(table):
    """The value for the row player."""
    payoffs = np.array(table, float)
    return float((maximin(payoffs) @ payoffs).min())


@pytest.mark.parametrize("ties", ["vertex", "entropy"])
@pytest.mark.parametrize(
    ("table", "row", "column", "worth"),
    [
        (RPS, [1 / 3] * 3, [1 / 3] * 3, 0),
        # Rock's win over scissors counts double: with a = 2, b = c = 1 the shares of rock, paper and scissors are (c,
        # a, b) / 4.
        ([[0, -1, 2], [1, 0, -1], [-2, 1, 0]], [1 / 4, 1 / 2, 1 / 4], [1 / 4, 1 / 2, 1 / 4], 0),
        ([[1, -1], [-1, 1]], [0.5, 0.5], [0.5, 0.5], 0),  # matching pennies
        ([[3, -1], [-2, 1]], [3 / 7, 4 / 7], [2 / 7, 5 / 7], 1 / 7),  # 3p - 2(1-p) = -p + (1-p): p = 3/7
        ([[4, 1, 3], [2, 0, 5]], [1, 0], [0, 1, 0], 1),  # a saddle point: the row's worst 1, the column's best 1
        ([[2], [3], [1]], [0, 1, 0], [1], 3),
        ([[2, 3, 1]], [1], [0, 0, 1], 1),
        ([[7]], [1], [1], 7),
    ],
)
def test_games_solved_by_hand(table, row, column, worth, ties):
    found = nash(zero_sum(table), ties=ties)
    assert found[0] == pytest.approx(row, abs=1e-8) and found[1] == pytest.approx(column, abs=1e-8)
    assert value_of(table) == pytest.approx(worth, abs=1e-9)


def test_nash_is_invariant_to_constant_sums_and_scale():
    row, column = zero_sum([[3, -1], [-2, 1]])
    for scale in (1e-6, 1e6):
        assert nash([scale * (row + 5), scale * column])[0] == pytest.approx([3 / 7, 4 / 7])


def test_nash_is_exact_in_the_units_of_each_player():
    """A constant of a billion on one player's payoffs, a billion times any gain, does not change the result."""
    row, column = zero_sum([[3, -1], [-2, 1]])
    for payoffs in ([row + 1e9, column], [row, column - 1e9]):
        for ties in ("vertex", "entropy"):
            found = nash(payoffs, ties=ties)
            assert found[0] == pytest.approx([3 / 7, 4 / 7], abs=1e-6)
            assert found[1] == pytest.approx([2 / 7, 5 / 7], abs=1e-6)


def test_constant_sum_is_relative_to_each_players_range():
    """Matching pennies for one player and always a million for the other: not constant-sum, and maximin strategies are
    not an equilibrium."""
    with pytest.raises(ValueError, match=r"add up to 999999\.9 to 1000000\.1"):
        nash([np.full((2, 2), 1e6), 0.1 * np.array([[-1.0, 1], [1, -1]])])


TABLES = st.tuples(st.integers(0, 10**6), st.integers(1, 7), st.integers(1, 7), st.booleans())


@settings(max_examples=15)
@given(TABLES)
def test_no_player_gains_by_deviating(drawn):
    seed, rows, columns, whole = drawn
    rng = np.random.default_rng(seed)
    table = rng.integers(-2, 3, (rows, columns)) if whole else rng.normal(size=(rows, columns))
    payoffs, worth = zero_sum(table), value_of(table)
    for ties in ("vertex", "entropy"):
        found = nash(payoffs, ties=ties)
        assert all((one >= 0).all() and one.sum() == pytest.approx(1) for one in found)
        assert nash_conv(payoffs, found) < 1e-8
        assert found[0] @ table @ found[1] == pytest.approx(worth, abs=1e-8)


def test_entropy_tie_break_on_degenerate_integer_tables():
    """A table whose equilibria are degenerate."""
    payoffs = zero_sum([[1, -1, -1], [-2, 0, 2], [0, 1, 0], [2, -2, 0], [2, 2, -2], [1, -2, 2]])
    assert nash_conv(payoffs, nash(payoffs, ties="entropy")) < 1e-8


@pytest.mark.parametrize("digits", [6, 7, 8, 9])
def test_near_ties_are_solved(digits):
    for seed in range(5):
        rng = np.random.default_rng(seed)
        payoffs = zero_sum(np.round(rng.random((7, 7)), 1) + 10.0**-digits * rng.normal(size=(7, 7)))
        for ties in ("vertex", "entropy"):
            assert nash_conv(payoffs, nash(payoffs, ties=ties)) < 1e-7


def test_entropy_tie_break_plays_equal_members_equally():
    """With rock twice, the third of rock is split equally: every other solution treats equal members differently."""
    twice = RPS[np.ix_([0, 0, 1, 2], [0, 0, 1, 2])]
    assert nash(zero_sum(twice), ties="entropy")[0] == pytest.approx([1 / 6, 1 / 6, 1 / 3, 1 / 3])
    assert nash(zero_sum(np.zeros((3, 2))), ties="entropy")[0] == pytest.approx([1 / 3] * 3)


def test_maximin_is_deterministic():
    table = np.random.default_rng(0).integers(-1, 2, (6, 5)).astype(float)
    assert np.array_equal(maximin(table), maximin(table.copy()))


def test_games_that_are_not_constant_sum_are_refused():
    with pytest.raises(ValueError, match="two players, this table has 3"):
        nash([np.zeros((1, 1, 1))] * 3)
    with pytest.raises(ValueError, match="add up to 2 to 6: use prd"):
        nash([np.array([[3.0, 0], [5, 1]]), np.array([[3.0, 5], [0, 1]])])
