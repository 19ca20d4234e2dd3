"""Losses of offline learning, worked by hand."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import expectile as scipy_expectile

from palestra.vector.losses import advantage_weighted_loss, conservative_gap, expectile_loss


def test_expectile_loss_by_hand() -> None:
    value = torch.tensor([[1.0, 1.0], [1.0, 1.0]], requires_grad=True)
    target = torch.tensor([[3.0, 0.0], [1.0, -1.0]], requires_grad=True)
    loss = expectile_loss(value, target, torch.tensor([[0.5, 0.5], [0.25, 0.75]]), 0.9)
    assert loss.tolist() == pytest.approx([0.5 * 0.9 * 4 + 0.5 * 0.1 * 1, 0.75 * 0.1 * 4])
    loss.sum().backward()
    assert value.grad is not None and target.grad is None
    assert value.grad.tolist() == [pytest.approx([-0.5 * 0.9 * 4, 0.5 * 0.1 * 2]), pytest.approx([0, 0.75 * 0.1 * 4])]


@pytest.mark.parametrize("level", [0.1, 0.5, 0.7, 0.99])
def test_minimum_of_the_expectile_loss_is_the_expectile(level: float) -> None:
    """Of 0 and 1 with equal probability it is the level itself; of other numbers it equals SciPy's."""
    numbers = torch.tensor([0.3, -2.0, 5.0, 1.5, 1.5, 0.0], dtype=torch.float64)
    for targets, known in ((torch.tensor([0.0, 1.0]).double(), level), (numbers, scipy_expectile(numbers, level))):
        value = torch.full((1, len(targets)), float(known), dtype=torch.float64, requires_grad=True)
        expectile_loss(value, targets[None], torch.ones(1, len(targets)).double(), level).sum().backward()
        assert value.grad is not None and value.grad.sum().item() == pytest.approx(0, abs=1e-9)


def test_advantage_weighted_loss_by_hand() -> None:
    logp = torch.tensor([[-1.0, -2.0, -3.0]], requires_grad=True)
    advantage = torch.tensor([[math.log(2), -math.log(2), 50.0]], requires_grad=True)
    share = torch.tensor([[0.5, 0.25, 0.25]])
    loss = advantage_weighted_loss(logp, advantage, share, beta=2.0, max_weight=10.0)
    assert loss.tolist() == pytest.approx([0.5 * 4 * 1 + 0.25 * 0.25 * 2 + 0.25 * 10 * 3])
    loss.sum().backward()
    assert logp.grad is not None and advantage.grad is None
    assert logp.grad[0].tolist() == pytest.approx([-0.5 * 4, -0.25 * 0.25, -0.25 * 10])


def test_without_temperature_imitation_is_behaviour_cloning() -> None:
    logp, share = torch.tensor([[-1.0, -2.0]]), torch.tensor([[0.75, 0.25]])
    loss = advantage_weighted_loss(logp, torch.tensor([[9.0, -9.0]]), share, beta=0.0, max_weight=100.0)
    assert loss.tolist() == pytest.approx([0.75 + 0.5])


def test_conservative_gap_by_hand() -> None:
    """The gap is the negative log-probability of the action under a softmax of the values."""
    q = torch.tensor([[0.0, math.log(3), math.log(4)], [5.0, 5.0, 5.0]], requires_grad=True)
    assert conservative_gap(q, q[:, 0], None).tolist() == pytest.approx([math.log(8), math.log(3)])
    gap = conservative_gap(q, q[:, 0], torch.tensor([[True, True, False, False], [True, False, False, True]]))
    assert gap.tolist() == pytest.approx([math.log(4), 0.0], abs=1e-6)
    gap.sum().backward()
    assert q.grad is not None
    assert q.grad.tolist() == [pytest.approx([-0.75, 0.75, 0.0]), pytest.approx([0.0] * 3, abs=1e-6)]
