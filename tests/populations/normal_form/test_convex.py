"""Convex programs: both methods, and infeasible constraints."""

import numpy as np
import pytest

from palestra.populations.normal_form import convex
from palestra.populations.normal_form.convex import most_random_distribution
from palestra.populations.normal_form.linear_programs import linear_program


def test_projection_onto_a_constraint_by_hand():
    """x1 >= 3 x0: the nearest to uniform has x0 : x1 = 1 : 3 and the rest between, 1/10, 3/10 and twice 2/5 - that is,
    the ones' projection (2/5, 6/5, 1, 1) up to its sum of 18/5."""
    found = most_random_distribution(np.array([[3.0, -1, 0, 0]]), "gini")
    assert found == pytest.approx(np.array([2, 6, 5, 5]) / 18)


def test_maximum_entropy_by_hand():
    """x1 >= 3 x0: x = (e^-3l, e^l, 1, 1) up to its sum, with e^4l = 3."""
    weight = 3**0.25
    want = np.array([weight**-3, weight, 1, 1])
    assert most_random_distribution(np.array([[3.0, -1, 0, 0]]), "entropy") == pytest.approx(want / want.sum())


@pytest.mark.parametrize("objective", ["gini", "entropy"])
def test_newton_and_corner_average_agree(objective):
    rows = np.random.default_rng(0).normal(size=(8, 30))
    rows /= np.abs(rows).max()
    found = convex._by_corners(rows, None, objective)
    assert found == pytest.approx(convex._by_prices(rows, objective), abs=1e-4)
    assert convex.constraint_violation(rows, found) <= convex.CONSTRAINT_TOLERANCE


@pytest.mark.parametrize("objective", ["gini", "entropy"])
def test_forbidden_entries_are_zero(objective):
    """x0 <= 0, then x1 <= x0: the others are uniform. x0 <= 2 x0 is always satisfied."""
    assert most_random_distribution(np.array([[1.0, 0, 0, 0], [-1, 1, 0, 0]]), objective).tolist() == [0, 0, 0.5, 0.5]
    assert most_random_distribution(np.array([[-1.0, 0]]), objective).tolist() == [0.5, 0.5]
    assert most_random_distribution(np.zeros((0, 4)), objective).tolist() == [0.25] * 4


def test_cyclic_constraints_force_equality():
    """x0 <= x1 <= x2 <= x0 has only the solution of equality, but is feasible."""
    rows = np.array([[1.0, -1, 0, 0], [0, 1, -1, 0], [-1, 0, 1, 0], [0, 0, 3, -1]])
    assert most_random_distribution(rows, "gini") == pytest.approx(np.array([1, 1, 1, 3]) / 6)
    assert most_random_distribution(rows, "entropy") == pytest.approx(np.array([1, 1, 1, 3]) / 6)


def test_infeasible_constraints_are_refused():
    with pytest.raises(ValueError, match="was not solved"):
        most_random_distribution(np.array([[1.0, 2.0]]), "gini")
    with pytest.raises(ValueError, match="was not solved"):
        linear_program(np.array([1.0]), A_ub=[[1.0]], b_ub=[-1.0], bounds=[(0, None)])


@pytest.mark.parametrize("objective", ["gini", "entropy"])
def test_fallback_solves_what_newton_does_not(monkeypatch, objective):
    rows = np.array([[3.0, -1, 0, 0]])
    want = most_random_distribution(rows, objective)
    monkeypatch.setattr(convex, "MAX_NEWTON_STEPS", 1)
    assert most_random_distribution(rows, objective) == pytest.approx(want, abs=1e-4)


def test_constraint_violation_by_hand():
    rows = np.array([[3.0, -1.0], [-1.0, 0.0]])
    assert convex.constraint_violation(rows, np.array([0.25, 0.75])) == 0
    assert convex.constraint_violation(rows, np.array([0.5, 0.5])) == 1
    for none in ([0.5, 0.4], [1.5, -0.5], [np.nan, 1]):
        assert convex.constraint_violation(rows, np.array(none)) == np.inf


def test_infeasible_corner_average_is_moved_inside():
    """HiGHS's corners may violate a row by slightly more than the constraints allow."""
    rows, inside = np.array([[1.0, -1.0]]), np.array([0.4, 0.6])
    moved = convex._moved_inside(rows, np.array([0.5 + 1e-8, 0.5 - 1e-8]), inside)
    assert 0 < convex.constraint_violation(rows, moved) < convex.CONSTRAINT_TOLERANCE
    assert moved == pytest.approx([0.5, 0.5], abs=1e-7)
    assert convex._moved_inside(rows, inside, inside) is inside
