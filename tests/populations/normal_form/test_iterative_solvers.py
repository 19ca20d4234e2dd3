"""Iterative solvers: cycles and rates known from theory, and OpenSpiel's averages."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.populations.normal_form.iterative_solvers import (
    fictitious_play,
    project_to_simplex,
    projected_replicator,
    regret_matching,
    uniform_strategies,
)
from palestra.populations.normal_form.payoff_tensors import member_returns, own_axis_first

RPS = np.array([[0.0, -1, 1], [1, 0, -1], [-1, 1, 0]])
# Shapley (1964): the row player wants to match, the column player to be one further
SHAPLEY = [np.eye(3), np.roll(np.eye(3), 1, axis=1)]


def tables(seed, shape):
    return list(np.random.default_rng(seed).normal(size=(len(shape), *shape)))


def test_uniform_strategies():
    assert [one.tolist() for one in uniform_strategies(tables(0, (2, 4)))] == [[0.5, 0.5], [0.25] * 4]


def test_fictitious_play_by_hand():
    """Matching pennies: both respond to uniform play with heads, the first of equals. Against heads the column prefers
    tails for two rounds, until its average is (1/3, 2/3) and the row turns."""
    pennies = [np.array([[1.0, -1], [-1, 1]]), np.array([[-1.0, 1], [1, -1]])]
    assert [one.tolist() for one in fictitious_play(pennies, iterations=1)] == [[1, 0], [1, 0]]
    assert [one.tolist() for one in fictitious_play(pennies, iterations=2)] == [[1, 0], [0.5, 0.5]]
    row, column = fictitious_play(pennies, iterations=3)
    assert row.tolist() == [1, 0] and column == pytest.approx([1 / 3, 2 / 3])
    assert fictitious_play(pennies, iterations=4)[0].tolist() == [0.75, 0.25]


def test_fictitious_play_converges_in_zero_sum_games():
    """Robinson (1951)."""
    gaps = []
    for iterations in (100, 3000):
        row, column = fictitious_play([RPS, -RPS], iterations=iterations)
        gaps.append((RPS @ column).max() - (row @ RPS).min())
    assert gaps[1] < 0.04 < gaps[0]


def test_fictitious_play_cycles_in_shapleys_game():
    """The averages do not converge: after twenty times as many rounds they still move as far as before."""
    far = []
    for iterations in (50, 1000):
        path = [fictitious_play(SHAPLEY, iterations=int(iterations * share))[0] for share in (1, 1.3, 1.7, 2.2, 2.8)]
        far.append(np.ptp(path, axis=0).max())
    assert far[1] > 0.2 and far[1] > 0.7 * far[0]


def test_fictitious_play_of_three_players():
    """Every player wants to match the others: the first responses, to uniform play, decide."""
    payoff = np.zeros((2, 2, 2))
    payoff[0, 0, 0], payoff[1, 1, 1] = 1, 2
    assert [one.tolist() for one in fictitious_play([payoff] * 3, iterations=50)] == [[0, 1]] * 3


@pytest.mark.parametrize("solve", [regret_matching, partial(projected_replicator, dt=0.05)])
def test_dominant_member_is_found(solve):
    """The prisoner's dilemma."""
    row, column = solve([np.array([[3.0, 0], [5, 1]]), np.array([[3.0, 5], [0, 1]])], iterations=2000)
    assert row[1] > 0.9 and column[1] > 0.9


def test_regret_matching_converges_in_zero_sum_games():
    table = np.array([[3.0, -1], [-2, 1]])
    row, column = regret_matching([table, -table], iterations=5000)
    assert row == pytest.approx([3 / 7, 4 / 7], abs=0.02) and column == pytest.approx([2 / 7, 5 / 7], abs=0.02)


def test_replicator_step_by_hand():
    """From (1/2, 1/2) with payoffs 3 and 1: the first gains 1/2 * (3 - 2) * dt. The result is averaged with the
    start."""
    row, _ = projected_replicator([np.array([[3.0], [1.0]]), np.zeros((2, 1))], iterations=1, dt=0.1, gamma=0)
    assert row == pytest.approx([0.525, 0.475])


def test_projected_replicator_keeps_members_above_gamma():
    row, _ = projected_replicator([np.array([[9.0], [0.0]]), np.zeros((2, 1))], iterations=500, dt=0.1, gamma=0.1)
    assert row[1] == pytest.approx(0.1, abs=0.01) and row[1] >= 0.1


@pytest.mark.parametrize(("scale", "constant"), [(1.0, 0.0), (1e3, 0.0), (1e6, 0.0), (1e6, 1e9)])
def test_projected_replicator_of_large_payoffs(scale: float, constant: float) -> None:
    """Rock, paper and scissors where scissors lose 1.2 times as much: the equilibrium is (5, 6, 5) / 16 at any scale.
    In larger steps, the averages with payoffs of 1e3 and 1e6 were 0.06 and 0.07 from it."""
    table = scale * np.array([[0, -1, 1.2], [1, 0, -1], [-1.2, 1, 0]])
    for strategy in projected_replicator([constant + table, constant - table], iterations=10_000):
        assert strategy.sum() == pytest.approx(1, abs=1e-12)
        assert strategy == pytest.approx(np.array([5, 6, 5]) / 16, abs=0.005)


@pytest.mark.parametrize("scale", [1e-9, 1e-3, 0.1])
@pytest.mark.few(1)
def test_projected_replicator_of_small_payoffs_is_that_of_larger_ones(scale: float) -> None:
    """With steps of 0.001 at any scale, payoffs of 1e-3 left play where it began, at 1/2."""
    table = np.array([[0.7, 0.2], [0.0, 1.0]])  # differences of 1: the dynamics begin to slow down below that
    found, small = (projected_replicator([k * table, -k * table], iterations=20_000) for k in (1.0, scale))
    for one, other in zip(found, small, strict=True):
        assert one == pytest.approx(other, abs=1e-6) and abs(one[0] - 0.5) > 0.03
    level = np.array([[0.3, np.nextafter(0.3, 1)], [0.3, 0.3]])  # a constant, up to rounding
    assert all(one == pytest.approx([0.5, 0.5]) for one in projected_replicator([level, -level], iterations=100))


def test_replicator_steps_that_leave_the_simplex_are_refused() -> None:
    table = np.array([[0.0, 30.0], [30.0, 0.0]])
    with pytest.raises(ValueError, match=r"dt: 0\.1 is too large for payoffs that differ by up to 30"):
        projected_replicator([table, -table], dt=0.1)


@pytest.mark.parametrize(
    ("point", "gamma", "nearest"),
    [
        ([0.4, 0.7, 0.6], 0.2, [0.2, 0.45, 0.35]),  # OpenSpiel's own example
        ([2.0, 0.0], 0.0, [1.0, 0.0]),
        ([0.2, 0.3, 0.5], 0.0, [0.2, 0.3, 0.5]),
        ([5.0, -3.0], 0.5, [0.5, 0.5]),
    ],
)
def test_projections_by_hand(point, gamma, nearest):
    assert project_to_simplex(np.array(point), gamma) == pytest.approx(nearest)


@settings(max_examples=40)
@given(st.lists(st.floats(-5, 5), min_size=1, max_size=6), st.integers(0, 10**6))
def test_projection_is_the_nearest_distribution(point, seed):
    point, found = np.array(point), project_to_simplex(np.array(point))
    others = np.random.default_rng(seed).dirichlet(np.ones(len(point)), size=20)
    assert found.sum() == pytest.approx(1) and (found >= 0).all()
    assert np.linalg.norm(found - point) <= np.linalg.norm(others - point, axis=1).min() + 1e-9


# ---- against OpenSpiel


@pytest.mark.parametrize("shape", [(3, 3), (4, 2), (2, 3, 2)])
def test_results_equal_openspiel(shape):
    theirs = pytest.importorskip("open_spiel.python.algorithms.regret_matching")
    dynamics = pytest.importorskip("open_spiel.python.algorithms.projected_replicator_dynamics")
    payoffs = tables(len(shape), shape)
    ours = regret_matching(payoffs, iterations=300)
    for one, other in zip(ours, theirs.regret_matching(payoffs, iterations=300), strict=True):
        assert one == pytest.approx(other, abs=1e-9)
    ours = projected_replicator(payoffs, iterations=500, dt=0.05, gamma=0.02)
    reference = dynamics.projected_replicator_dynamics(payoffs, prd_iterations=500, prd_dt=0.05, prd_gamma=0.02)
    for one, other in zip(ours, reference, strict=True):
        assert one == pytest.approx(other, abs=1e-9)


@pytest.mark.parametrize("solve", [fictitious_play, regret_matching, projected_replicator])
def test_results_are_equivariant_to_member_order(solve):
    payoffs = tables(5, (3, 2, 3))
    order = [2, 0, 1]
    moved = [table[order] for table in payoffs]
    found, other = solve(payoffs, iterations=200), solve(moved, iterations=200)
    assert other[0] == pytest.approx(found[0][order]) and other[1] == pytest.approx(found[1])


@pytest.mark.parametrize("solve", [fictitious_play, regret_matching, projected_replicator])
def test_results_are_equivariant_to_player_order(solve):
    payoffs = tables(6, (3, 2, 4))
    turned = [np.moveaxis(payoffs[player], 0, -1) for player in (1, 2, 0)]
    found, other = solve(payoffs, iterations=200), solve(turned, iterations=200)
    for one, same in zip(found[1:] + found[:1], other, strict=True):
        assert one == pytest.approx(same)


def test_member_payoffs_by_hand():
    payoffs = tables(7, (2, 3, 2))
    strategies = [np.array([0.2, 0.8]), np.array([0.5, 0.25, 0.25]), np.array([1.0, 0.0])]
    earned = member_returns(own_axis_first(payoffs), strategies)
    assert earned[1] == pytest.approx(np.einsum("abc,a,c->b", payoffs[1], strategies[0], strategies[2]))


def test_infeasible_gamma_is_refused():
    with pytest.raises(ValueError, match=r"a probability of at least 0\.5"):
        projected_replicator(tables(0, (3, 3)), gamma=0.5)
