"""Losses and rewards of adversarial imitation learning: pure functions of discriminator logits, float32, where D =
sigmoid(logit) is the probability that a transition is the expert's.

Shapes: `P` members of a stack, `M` transitions, `D` features of a transition.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import softplus

from palestra.core.losses import TensorMetrics

ImitationReward = Literal["positive", "logit"]


def discriminator_loss(expert_PM: Tensor, policy_PM: Tensor) -> tuple[Tensor, TensorMetrics]:
    """Binary cross-entropy [P] of the discriminator: -log D of the expert's transitions and -log(1 - D) of the
    policy's, each averaged (Ho & Ermon, 2016, eq. 15, with the two classes exchanged). It is 2 log 2 if the
    discriminator cannot separate them. The metric `discriminator_accuracy` is the share of correctly classified
    transitions."""
    right = (expert_PM > 0).float().mean(1) + (policy_PM < 0).float().mean(1)
    loss = softplus(-expert_PM).mean(1) + softplus(policy_PM).mean(1)
    return loss, {"discriminator_loss": loss.detach(), "discriminator_accuracy": right / 2}


def gradient_penalty(
    discriminator: Callable[[Tensor], Tensor], expert: Tensor, policy: Tensor, mix_PM1: Tensor
) -> Tensor:
    """Mean of (norm of the logit's gradient - 1)^2 [P], at points interpolated between expert and policy transitions
    [P, M, D] (Gulrajani et al., 2017, eq. 3; for imitation discriminators: Kostrikov et al., 2019). `mix_PM1` [P, M, 1]
    in [0, 1] is the expert's share in the interpolation."""
    between = (mix_PM1 * expert + (1 - mix_PM1) * policy).detach().requires_grad_()
    (slope,) = torch.autograd.grad(discriminator(between).sum(), between, create_graph=True)
    return (slope.norm(dim=-1) - 1).square().mean(1)


def imitation_reward(logit: Tensor, kind: ImitationReward) -> Tensor:
    """Reward of a transition, in the shape of `logit`: "positive" is -log(1 - D), always positive (Ho & Ermon, 2016);
    "logit" is log D - log(1 - D), of either sign (Fu et al., 2018)."""
    return softplus(logit) if kind == "positive" else logit
