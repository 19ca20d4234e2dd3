"""Losses and targets of critics, and policy losses that ascend a critic: pure functions.

Shapes: `K` critics, `P` members of a stack, `R` rows, `A` discrete actions; all tensors are float32. `weight` [P, R] is
the weight of a row in the mean; a loss is [P], one per member, and the losses of parts of a batch add up. Gradients do
not flow through targets.
"""

from __future__ import annotations

import torch
from torch import Tensor


def td_target(reward: Tensor, discount: Tensor, value: Tensor) -> Tensor:
    """One-step TD target [...]: the reward until the seat's next decision plus the discounted value of that decision.
    `discount` is 0 where the game terminated. The value there is not used and may be NaN, since the env may leave a
    terminal observation undefined."""
    return reward + torch.where(discount > 0, discount * value, 0.0)


def value_loss(
    value: Tensor, target: Tensor, weight: Tensor, old_value: Tensor | None = None, clip: float | None = None
) -> Tensor:
    """Half the weighted mean squared error of state values, a scalar; all tensors have the same shape.

    With `clip`, the error of a value clipped to within `clip` of `old_value` (the value before the update) is computed
    too, and the larger of the two counts: a value that has moved further has no gradient if it moved towards its
    target (OpenAI Baselines' PPO; Yu et al., 2022, appendix A). Raises ValueError for `clip` without `old_value`.
    """
    error = (value - target).square()
    if clip is not None:
        if old_value is None:
            raise ValueError("value clipping needs the values from before the update")
        error = torch.maximum(error, (old_value + (value - old_value).clamp(-clip, clip) - target).square())
    return 0.5 * (weight * error).sum()


def critic_loss(q_KPR: Tensor, target_PR: Tensor, weight_PR: Tensor) -> Tensor:
    """Half the mean squared error of action values [P], summed over the critics."""
    return 0.5 * (weight_PR * (q_KPR - target_PR.detach()).square()).sum((0, 2))


def soft_value(q_PR: Tensor, logp_PR: Tensor, alpha_P1: Tensor) -> Tensor:
    """Soft value [P, R] of a sampled action: its value minus `alpha_P1` times its log-probability (Haarnoja et al.,
    2018, eq. 3)."""
    return q_PR - alpha_P1 * logp_PR


def expected_soft_value(q_PRA: Tensor, logp_PRA: Tensor, alpha_P1: Tensor) -> Tensor:
    """Expectation of `soft_value` over discrete actions [P, R] (Christodoulou, 2019, eq. 10). Illegal actions must have
    probability 0 and a finite log-probability."""
    return (logp_PRA.exp() * (q_PRA - alpha_P1[..., None] * logp_PRA)).sum(-1)


def actor_loss(value_PR: Tensor, weight_PR: Tensor) -> Tensor:
    """Negative mean value of the policy's actions [P].

    With values of deterministic actions this is the deterministic policy gradient (Silver et al., 2014); with soft
    values it is SAC's policy loss (Haarnoja et al., 2018, eq. 7; Christodoulou, 2019, eq. 12).
    """
    return -(weight_PR * value_PR).sum(-1)


def temperature_loss(log_alpha_P1: Tensor, entropy_PR: Tensor, target_PR: Tensor, weight_PR: Tensor) -> Tensor:
    """Loss [P] that raises the entropy temperature where the entropy is below the target and lowers it where it is
    above (Haarnoja et al., 2018b, eq. 18). It uses the log temperature, so that steps do not shrink with the
    temperature."""
    return (log_alpha_P1 * weight_PR * (entropy_PR - target_PR).detach()).sum(-1)
