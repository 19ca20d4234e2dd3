"""Correlated equilibria: chicken by hand, JPSRO's three-player games, and the definition on random games."""

from functools import partial
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog, minimize

from palestra.populations.normal_form.equilibria import (
    correlated_equilibrium,
    gain_units,
    nash,
)
from palestra.populations.normal_form.payoff_tensors import cce_gains, ce_gains, joint_distribution

CE = partial(correlated_equilibrium, solver="ce")
CCE = partial(correlated_equilibrium, solver="cce")
GAINS = {CE: ce_gains, CCE: cce_gains}
CHICKEN = [np.array([[0.0, 7], [2, 6]]), np.array([[0.0, 2], [7, 6]])]  # dare, chicken out
BOTH = pytest.mark.parametrize("solve", [CE, CCE])
OBJECTIVES = pytest.mark.parametrize("objective", ["gini", "entropy"])


def most_gained(solve, payoffs, joint):
    return (GAINS[solve](payoffs) @ joint.ravel()).max(initial=-np.inf)


def randomness(joint, objective):
    kept = joint[joint > 0]
    return 1 - (joint**2).sum() if objective == "gini" else -(kept * np.log(kept)).sum()


@BOTH
def test_chicken_by_hand(solve):
    """Probabilities a if both dare, b for each cell in which one does, c if neither does. A player recommended to dare
    must not gain by yielding, 2a <= b, which binds. The minimum of a^2 + 2b^2 + c^2 on b = 2a, c = 1 - 5a is at a =
    5/34; the entropy is largest at c^5 = 16 a^5."""
    assert solve(CHICKEN) == pytest.approx(np.array([[5, 10], [10, 9]]) / 34, abs=1e-9)
    a = 1 / (5 + 16**0.2)
    assert solve(CHICKEN, objective="entropy") == pytest.approx(np.array([[a, 2 * a], [2 * a, 1 - 5 * a]]), abs=1e-8)


@BOTH
@OBJECTIVES
def test_unique_equilibria_are_found(solve, objective):
    """The prisoner's dilemma has only defection; rock paper scissors only thirds among correlated ones."""
    dilemma = [np.array([[3.0, 0], [5, 1]]), np.array([[3.0, 5], [0, 1]])]
    assert solve(dilemma, objective=objective) == pytest.approx(np.array([[0, 0], [0, 1]]), abs=1e-9)
    rps = np.array([[0.0, -1, 1], [1, 0, -1], [-1, 1, 0]])
    assert solve([rps, -rps], objective=objective) == pytest.approx(np.full((3, 3), 1 / 9))


def test_three_player_equilibria_equal_openspiel():
    """`_mgce` and `_mgcce` of OpenSpiel 2.0's jpsro.py (Marris et al., 2021) on these payoffs."""
    payoffs = [
        np.array([[[2.0, -2], [-3, -1], [-1, 2]], [[0, -3], [-1, 1], [2, 2]]]),
        np.array([[[3.0, -2], [3, -3], [0, -2]], [[-2, 1], [-1, 0], [-2, -2]]]),
        np.array([[[2.0, 0], [1, 1], [3, -1]], [[-2, 1], [3, 3], [3, 1]]]),
    ]
    published = [0.12036, 0.08234, 0.09692, 0.06461, 0, 0.07648, 0.10864, 0.15687, 0.14095, 0.07633, 0.07648, 0]
    fixed = [0.11721, 0.08933, 0.09713, 0.06475, 0, 0.06143, 0.10718, 0.14146, 0.13954, 0.07479, 0.10717, 0]
    assert CE(payoffs).ravel() == pytest.approx(published, abs=3e-5)
    assert CCE(payoffs).ravel() == pytest.approx(fixed, abs=3e-5)


GAMES = st.tuples(st.integers(0, 10**6), st.sampled_from([(2, 2), (3, 3), (4, 2), (5, 4), (2, 3, 2)]), st.booleans())


def game(seed, shape, whole):
    rng = np.random.default_rng(seed)
    return [rng.integers(-1, 2, shape).astype(float) if whole else rng.normal(size=shape) for _ in shape]


@BOTH
@OBJECTIVES
@settings(max_examples=12)
@given(drawn=GAMES)
def test_no_player_gains_by_deviating(solve, objective, drawn):
    payoffs = game(*drawn)
    joint = solve(payoffs, objective=objective)
    assert (joint >= 0).all() and joint.sum() == pytest.approx(1)
    assert most_gained(solve, payoffs, joint) < 1e-8


@BOTH
@OBJECTIVES
@pytest.mark.parametrize("seed", range(3))
def test_no_equilibrium_has_a_higher_objective(solve, objective, seed):
    """A general optimiser, started from the solution, finds nothing better, nor does it from a start of its own."""
    payoffs = game(seed, (3, 2), whole=False)
    gains, joint = GAINS[solve](payoffs), solve(payoffs, objective=objective)

    def lack(x):
        return (x**2).sum() if objective == "gini" else (x * np.log(np.maximum(x, 1e-12))).sum()

    found = minimize(
        lack,
        np.full(6, 1 / 6),
        method="SLSQP",
        bounds=[(0, 1)] * 6,
        constraints=[{"type": "eq", "fun": lambda x: x.sum() - 1}, {"type": "ineq", "fun": lambda x: -gains @ x}],
        options={"maxiter": 100, "ftol": 1e-9},
    )
    assert lack(joint.ravel()) == pytest.approx(found.fun, abs=1e-5)


@BOTH
@OBJECTIVES
@pytest.mark.parametrize("seed", range(4))
def test_degenerate_tables_are_solved(solve, objective, seed):
    """In zero-sum games few cells may be positive, and the product of Nash strategies is one of the equilibria."""
    table = np.random.default_rng(seed).normal(size=(6, 6)).round(seed % 2)
    payoffs = [table - table.T, table.T - table]
    joint = solve(payoffs, objective=objective)
    assert most_gained(solve, payoffs, joint) < 1e-8
    assert (
        randomness(joint, objective) >= randomness(joint_distribution(nash(payoffs, ties="entropy")), objective) - 1e-7
    )


@OBJECTIVES
def test_rounded_win_rate_tables_are_solved(objective):
    """A regression: for this table the solver once returned a distribution from which a player gains 0.15."""
    wins = np.round(np.random.default_rng(130).random((8, 8)), 2)
    payoffs = [wins, 1 - wins]
    assert most_gained(CE, payoffs, CE(payoffs, objective=objective)) < 1e-8


def degenerate_table(seed):
    """Ordinary and degenerate tables: win rates of two decimals, integers, near ties, three players."""
    rng = np.random.default_rng(seed)
    kind, (m, k) = seed % 5, rng.integers(2, 11, 2)
    if kind == 0:
        wins = np.round(rng.random((m, k)), 2)
        return [wins, 1 - wins]
    if kind == 1:
        table = rng.integers(-2, 3, (m, k)).astype(float)
        return [table, -table]
    if kind == 2:
        return [np.round(rng.random((m, k)), 2) for _ in range(2)]
    if kind == 3:
        shape = tuple(rng.integers(2, 6, 3))
        return [np.round(rng.random(shape), 2) for _ in range(3)]
    wins = np.round(rng.random((m, m)), 1) + rng.normal(size=(m, m)) * 10.0 ** -rng.integers(6, 10)
    return [wins, 1 - wins]


def agrees_with_linear_programming(seed):
    """Asserts that no player gains more than the tolerance, and that HiGHS finds no distribution within the constraints
    that is better along the objective's gradient.

    HiGHS uses its smallest tolerance, 1e-10: with the default of 1e-7 it violates the constraints of near ties (payoffs
    that differ by 1e-7), and finds distributions that are not equilibria. Status 4: it gave up."""
    payoffs = degenerate_table(seed)
    for solve, objective in product((CE, CCE), ("gini", "entropy")):
        joint, gains = solve(payoffs, objective=objective).ravel(), GAINS[solve](payoffs)
        size = np.abs(gains).max()
        assert (joint >= 0).all() and joint.sum() == pytest.approx(1, abs=1e-9)
        assert (gains @ joint).max() <= 1e-8 * size
        slope = 2 * joint if objective == "gini" else np.log(np.maximum(joint, 1e-9))
        ones, zeros = np.ones((1, joint.size)), np.full(len(gains), 1e-9)
        best = linprog(slope, gains / size, zeros, ones, [1], options={"primal_feasibility_tolerance": 1e-10})
        assert best.status == 4 or slope @ joint - best.fun <= 1e-3, (objective, solve)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.few(4)
def test_ill_conditioned_tables_agree_with_linear_programming(seed):
    agrees_with_linear_programming(seed)


@pytest.mark.slow
def test_hundreds_of_ill_conditioned_tables_agree_with_linear_programming():
    for seed in range(10, 400):
        agrees_with_linear_programming(seed)


def one_large(seed, size, shape=(5, 5)):
    """Payoffs from 0 to 1, except one of a player's: `size`."""
    rng = np.random.default_rng(seed)
    payoffs = [rng.random(shape) for _ in shape]
    payoffs[rng.integers(len(shape))][tuple(rng.integers(members) for members in shape)] = size
    return payoffs


def best_by_linear_programming(gains, slope):
    """The minimum of slope @ x over distributions x without gains, by HiGHS, in units in which no coefficient is far
    above 1: rows are divided by their medians, then columns by their largest entries."""
    rows = np.array([row / np.median(np.abs(row[row != 0])) for row in gains if row.any()])
    units = 1 / np.maximum(np.abs(rows).max(axis=0), 1)
    found = linprog(
        slope * units,
        rows * units,
        np.full(len(rows), 1e-9),
        units[None],
        [1],
        options={"primal_feasibility_tolerance": 1e-10},
    )
    return found.fun if found.success else np.inf


@BOTH
@OBJECTIVES
@pytest.mark.parametrize("size", [-1e3, -1e5, -1e7, 1e4, 1e7])
@pytest.mark.few(6)
def test_one_large_payoff_does_not_hide_gains(solve, objective, size):
    """A gain is relative to the other payoffs, not to the largest: 1e-8 of the largest would allow gains of up to 0.1
    here. No distribution without gains has a much better objective."""
    for seed in range(3):
        payoffs = one_large(seed, size)
        joint, gains = solve(payoffs, objective=objective).ravel(), GAINS[solve](payoffs)
        assert (joint >= 0).all() and joint.sum() == pytest.approx(1, abs=1e-9)
        assert (gains @ joint).max() <= 1e-6
        slope = 2 * joint if objective == "gini" else np.log(np.maximum(joint, 1e-9))
        assert slope @ joint - best_by_linear_programming(gains, slope) <= 1e-3


@BOTH
@OBJECTIVES
@pytest.mark.parametrize("shape", [(2, 2), (3, 2), (3, 3, 3)])
@pytest.mark.few(4)
def test_one_large_payoff_of_a_small_table_does_not_hide_gains(solve, objective, shape):
    for seed, size in product(range(3), (-1e4, -1e6)):
        payoffs = one_large(seed, size, shape)
        assert most_gained(solve, payoffs, solve(payoffs, objective=objective)) <= 1e-6


@BOTH
def test_gains_are_relative_to_the_players_own_payoffs(solve):
    rng = np.random.default_rng(0)
    payoffs = [1e6 * rng.random((4, 5)), rng.random((4, 5))]
    joint = solve(payoffs).ravel()
    gains = np.split(GAINS[solve](payoffs), [4 * 3 if solve is CE else 4])
    assert (gains[0] @ joint).max() <= 1e-2 and (gains[1] @ joint).max() <= 1e-6


def test_gain_units_by_hand():
    """The row player's differences are 1, 3 and 1000, the median 3; the column player's are 1e-9 and 2e-9, so the
    smallest unit applies. No unit is above the largest difference."""
    row, column = np.array([[0.0, 0, 0], [1, 3, 1000]]), np.array([[0.0, 1e-9, 2e-9], [0, 1e-9, 2e-9]])
    assert gain_units([row, column]) == pytest.approx([300, 1])
    assert gain_units([row / 1000, column]) == pytest.approx([1, 1])
    assert gain_units([row * 0, column]) == pytest.approx([2e-9, 2e-9])
    assert gain_units([row * 0, row * 0]).tolist() == [1, 1]


@BOTH
def test_payoffs_too_far_apart_are_refused_where_they_cannot_be_solved(solve):
    refused = 0
    for seed in range(4):
        payoffs = one_large(seed, -1e11)
        try:
            assert most_gained(solve, payoffs, solve(payoffs)) <= 1e-6
        except ValueError as error:
            assert "differ by up to 1e+11: if a few are far larger than the others, clip them" in str(error)
            refused += 1
    assert refused or solve is CCE


@BOTH
def test_too_large_table_is_refused(solve):
    payoffs = [np.zeros((3000, 3000))] * 2
    with pytest.raises(ValueError, match=r"on a table of 3000 x 3000 members .* the limit is 1 GB"):
        solve(payoffs)


@BOTH
@OBJECTIVES
def test_result_is_equivariant_to_permutations(solve, objective):
    payoffs, order = game(1, (3, 2, 2), whole=False), [2, 0, 1]
    joint = solve(payoffs, objective=objective)
    assert solve([table[order] for table in payoffs], objective=objective) == pytest.approx(joint[order], abs=1e-6)
    turned = [np.moveaxis(payoffs[player], 0, -1) for player in (1, 2, 0)]
    assert solve(turned, objective=objective) == pytest.approx(np.moveaxis(joint, 0, -1), abs=1e-6)


@BOTH
def test_epsilon_allows_a_bounded_gain(solve):
    """Chicken again, with 2a - b <= e: at uniform play it is 1/4."""
    assert solve(CHICKEN, epsilon=0.3) == pytest.approx(np.full((2, 2), 0.25))
    assert most_gained(solve, CHICKEN, solve(CHICKEN, epsilon=0.1)) == pytest.approx(0.1)
