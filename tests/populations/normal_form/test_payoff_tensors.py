"""Payoff tables: validation, and gains from deviating from a joint distribution by hand."""

import numpy as np
import pytest

from palestra.populations.normal_form.payoff_tensors import (
    cce_gains,
    ce_gains,
    check_payoffs,
    joint_distribution,
    marginals,
)

CHICKEN = [np.array([[0.0, 7], [2, 6]]), np.array([[0.0, 2], [7, 6]])]  # dare, chicken out


def test_deviation_gains_by_hand():
    """The row player's gain for deviating from dare: +2 against dare, -1 against chicken; from chicken: the reverse."""
    gains = ce_gains(CHICKEN)
    assert sorted(gains.tolist()) == sorted([[0, 0, -2, 1], [2, -1, 0, 0], [0, -2, 0, 1], [2, 0, -1, 0]])
    dare = cce_gains(CHICKEN)[0].tolist()
    assert dare == [0, 0, -2, 1]


def test_joint_distributions():
    joint = joint_distribution([np.array([0.25, 0.75]), np.array([0.5, 0.5]), np.array([1.0])])
    assert joint.shape == (2, 2, 1) and joint[1, 0, 0] == 0.375
    assert [one.tolist() for one in marginals(joint)] == [[0.25, 0.75], [0.5, 0.5], [1.0]]
    assert joint_distribution(joint) is joint


@pytest.mark.parametrize(
    ("payoffs", "why"),
    [
        ([], "n players need n arrays"),
        ([np.zeros((2, 2))], "n players need n arrays"),
        ([np.zeros((2, 2)), np.zeros((2, 3))], "n players need n arrays"),
        ([np.zeros((2, 0)), np.zeros((2, 0))], "no member to choose"),
        ([np.array([[np.nan]]), np.zeros((1, 1))], "without games is NaN"),
    ],
)
def test_invalid_tables_are_refused(payoffs, why):
    with pytest.raises(ValueError, match=why):
        check_payoffs(payoffs)
