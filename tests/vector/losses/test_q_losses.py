"""Value losses and targets by hand."""

from __future__ import annotations

import pytest
import torch

from palestra.vector.losses import (
    best_action,
    conservative_gap,
    dueling_values,
    gather_values,
    next_value,
    q_loss,
    sequence_priority,
)


def test_best_action_is_legal() -> None:
    q = torch.tensor([[3.0, 1.0, 2.0], [-5.0, -7.0, -6.0]])
    assert best_action(q, None).tolist() == [0, 0]
    assert best_action(q, torch.tensor([[False, True, True], [False, True, True]])).tolist() == [2, 2]
    wider = torch.tensor([[True, True, False, True], [False, True, False, True]])  # of a seat with more actions
    assert best_action(q, wider).tolist() == [0, 1]


@pytest.mark.parametrize("size", [1e9, 1e20, 3e38])
def test_no_legal_value_is_below_that_of_an_illegal_action(size: float) -> None:
    """Legal values below -1e9 made an illegal action the best."""
    q, mask = torch.tensor([-size / 2, -size, 0.0]), torch.tensor([True, True, False])
    assert best_action(q, mask).item() == 0 and next_value(q, q, mask).item() == pytest.approx(-size / 2)
    assert torch.isfinite(conservative_gap(q, torch.tensor(0.0), mask))
    nothing_legal = conservative_gap(q, torch.tensor(0.0), torch.zeros(3, dtype=torch.bool))
    assert (nothing_legal * 0).item() == 0  # a seat that does not act has weight 0


def test_dueling_values_by_hand() -> None:
    # value 10; advantages 1, 2, 6, of mean 3
    assert dueling_values(torch.tensor([[10.0, 1.0, 2.0, 6.0]])).tolist() == [[8, 9, 13]]


def test_double_q_selects_and_evaluates_with_different_networks() -> None:
    slow, fast = torch.tensor([[1.0, 5.0, 3.0]]), torch.tensor([[2.0, 0.0, 4.0]])
    assert next_value(slow, slow, None).tolist() == [5]
    assert next_value(slow, fast, None).tolist() == [3]
    assert next_value(slow, fast, torch.tensor([[True, True, False]])).tolist() == [1]


def test_q_loss_by_hand() -> None:
    # errors 2 and -1: half of .75 * 4 + .25 * 1
    q = torch.tensor([1.0, 3.0], requires_grad=True)
    loss, error = q_loss(q, torch.tensor([3.0, 2.0]), torch.tensor([0.75, 0.25]))
    assert loss.item() == pytest.approx(1.625)
    assert error.tolist() == [2, -1]
    loss.backward()
    assert q.grad is not None and q.grad.tolist() == pytest.approx([-1.5, 0.25])


def test_gather_values_by_hand() -> None:
    assert gather_values(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([1, 0])).tolist() == [2, 3]


def test_sequence_priority_by_hand() -> None:
    # errors 1, 3 and (unknown) 50: .9 * 3 + .1 * 2; a sequence without known errors has priority 0
    error = torch.tensor([[1.0, 7.0], [-3.0, 7.0], [50.0, 7.0]])
    known = torch.tensor([[True, False], [True, False], [False, False]])
    assert sequence_priority(error, known).tolist() == pytest.approx([2.9, 0])
