"""Losses of offline reinforcement learning: pure functions.

Shapes: `P` members of a stack, `R` rows, `A` discrete actions, `...` rows of any shape; all tensors are float32, action
masks bool. `weight` [P, R] is the weight of a row in the mean; a loss is [P], one per member. Gradients do not flow
through targets and advantages.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from palestra.vector.nets.heads import mask_illegal


def expectile_loss(value_PR: Tensor, target_PR: Tensor, weight_PR: Tensor, expectile: float) -> Tensor:
    """Asymmetric mean squared error of state values [P] (Kostrikov et al., 2022, eq. 5): a target above the value
    counts `expectile`, one below counts 1 - `expectile`. Its minimum is that expectile of the targets: their mean at
    0.5, towards their maximum as it rises to 1."""
    error = target_PR.detach() - value_PR
    return (weight_PR * (expectile - (error < 0).to(error.dtype)).abs() * error.square()).sum(-1)


def advantage_weighted_loss(
    logp_PR: Tensor, advantage_PR: Tensor, weight_PR: Tensor, *, beta: float, max_weight: float
) -> Tensor:
    """Negative log-likelihood of actions [P], each weighted by exp(`beta` times its advantage), at most `max_weight`
    (Kostrikov et al., 2022, eq. 7; Peng et al., 2019)."""
    return -(weight_PR * (beta * advantage_PR.detach()).exp().clamp(max=max_weight) * logp_PR).sum(-1)


def conservative_gap(q: Tensor, taken: Tensor, action_mask: Tensor | None) -> Tensor:
    """Returns how far the soft maximum of action values `q` [..., A] over the legal actions is above the value `taken`
    [...] of the action in the data, at least 0: the term that CQL(H) minimises (Kumar et al., 2020, eq. 4).
    `action_mask` is [..., >= A], None: all are legal."""
    return torch.logsumexp(mask_illegal(q, action_mask), -1) - taken


def sampled_soft_maximum(q_PRS: Tensor, logp_PRS: Tensor) -> Tensor:
    """Returns estimates [..., P, R] of log of the integral of exp(q) over continuous actions, by importance sampling
    (Kumar et al., 2020, appendix F). `q_PRS` [..., P, R, S] are the values of S sampled actions, `logp_PRS` [P, R, S]
    the log-densities they were sampled with. Before the logarithm the estimate is unbiased, also if the actions were
    sampled from several distributions."""
    return torch.logsumexp(q_PRS - logp_PRS.detach(), -1) - math.log(q_PRS.shape[-1])
