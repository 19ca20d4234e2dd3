"""Losses of small networks over rows: pure functions; `share` says how much a row counts, and sums to one for each of
the members of a stack, whose losses simply add up."""

from __future__ import annotations

from torch import Tensor

from palestra.losses import Figures, Scored


def value_loss(value: Tensor, target: Tensor, share: Tensor) -> Tensor:
    """Half the mean squared error of values, all of one shape."""
    return 0.5 * (share * (value - target).square()).sum()


def policy_gradient_loss(rows: Scored) -> tuple[Tensor, Figures]:
    """The plain policy gradient (Williams, 1992; Sutton et al., 2000), negated: log-probability times advantage."""
    loss = -(rows.weight_M * rows.logp_M * rows.advantage_M).sum()
    return loss, {"entropy": (rows.weight_M * rows.entropy_M).sum().detach()}
