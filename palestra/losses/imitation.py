"""Losses and rewards of imitation: pure functions over logits of a discriminator, D = sigmoid(logit) being the
probability that a move is the expert's.

Shapes: `P` members of a stack, `M` moves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import softplus

from palestra.losses.policy import Figures

Reward = Literal["positive", "logit"]


def discriminator_loss(expert_PM: Tensor, policy_PM: Tensor) -> tuple[Tensor, Figures]:
    """The cross-entropy of telling two kinds of moves apart [P], -log D of the expert's and -log(1 - D) of the
    policy's, each averaged (Ho & Ermon, 2016, eq. 15, with the names of the kinds exchanged); 2 log 2 where it cannot.
    `told_apart` is the share of moves on the right side."""
    right = (expert_PM > 0).float().mean(1) + (policy_PM < 0).float().mean(1)
    loss = softplus(-expert_PM).mean(1) + softplus(policy_PM).mean(1)
    return loss, {"discriminator_loss": loss.detach(), "told_apart": right / 2}


def gradient_penalty(judge: Callable[[Tensor], Tensor], expert: Tensor, policy: Tensor, mix_PM1: Tensor) -> Tensor:
    """How far slopes of the logit are from one [P], squared, between moves of either kind [P, M, D] (Gulrajani et al.,
    2017, eq. 3; of discriminators of imitation: Kostrikov et al., 2019). `mix_PM1` says where between them."""
    between = (mix_PM1 * expert + (1 - mix_PM1) * policy).detach().requires_grad_()
    (slope,) = torch.autograd.grad(judge(between).sum(), between, create_graph=True)
    return (slope.norm(dim=-1) - 1).square().mean(1)


def imitation_reward(logit: Tensor, kind: Reward) -> Tensor:
    """What a move earns that looks like the expert's: -log(1 - D), always positive (Ho & Ermon, 2016), or the logit,
    log D - log(1 - D), which may be either (Fu et al., 2018)."""
    return softplus(logit) if kind == "positive" else logit
