"""Losses and targets of networks: pure functions.

Shapes: `K` critics, `P` members of a stack, `R` rows, `M` transitions, `D` features of a transition, `A` discrete
actions; `...` are rows of any shape. Values are float32, actions int64, masks bool. `weight` [P, R] is the weight of a
row in the mean; a loss is [P], one per member, and the losses of parts of a batch add up. Gradients do not flow through
targets and advantages.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import softplus

from palestra.core.accel.jit import jit
from palestra.core.losses import TensorMetrics
from palestra.vector.nets.heads import mask_illegal


def td_target(reward: Tensor, discount: Tensor, value: Tensor) -> Tensor:
    """One-step TD target [...]: the reward until the seat's next decision plus the discounted value
    of that decision. `discount` is 0 where the game terminated. The value there is not used and may
    be NaN, since the env may leave a terminal observation undefined."""
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
    """Soft value [P, R] of a sampled action: its value minus `alpha_P1` times its log-probability
    (Haarnoja et al., 2018, eq. 3)."""
    return q_PR - alpha_P1 * logp_PR


def expected_soft_value(q_PRA: Tensor, logp_PRA: Tensor, alpha_P1: Tensor) -> Tensor:
    """Expectation of `soft_value` over discrete actions [P, R] (Christodoulou, 2019, eq. 10).
    Illegal actions must have probability 0 and a finite log-probability."""
    return (logp_PRA.exp() * (q_PRA - alpha_P1[..., None] * logp_PRA)).sum(-1)


def actor_loss(value_PR: Tensor, weight_PR: Tensor) -> Tensor:
    """Negative mean value of the policy's actions [P].

    With values of deterministic actions this is the deterministic policy gradient (Silver et al., 2014); with soft
    values it is SAC's policy loss (Haarnoja et al., 2018, eq. 7; Christodoulou, 2019, eq. 12).
    """
    return -(weight_PR * value_PR).sum(-1)


def temperature_loss(log_alpha_P1: Tensor, entropy_PR: Tensor, target_PR: Tensor, weight_PR: Tensor) -> Tensor:
    """Loss [P] that raises the entropy temperature where the entropy is below the target and lowers
    it where it is above (Haarnoja et al., 2018b, eq. 18). It uses the log temperature, so that
    steps do not shrink with the temperature."""
    return (log_alpha_P1 * weight_PR * (entropy_PR - target_PR).detach()).sum(-1)


# ---- offline learning


def expectile_loss(value_PR: Tensor, target_PR: Tensor, weight_PR: Tensor, expectile: float) -> Tensor:
    """Asymmetric mean squared error of state values [P] (Kostrikov et al., 2022, eq. 5): a target
    above the value counts `expectile`, one below counts 1 - `expectile`. Its minimum is that
    expectile of the targets: their mean at 0.5, towards their maximum as it rises to 1."""
    error = target_PR.detach() - value_PR
    return (weight_PR * (expectile - (error < 0).to(error.dtype)).abs() * error.square()).sum(-1)


def advantage_weighted_loss(
    logp_PR: Tensor, advantage_PR: Tensor, weight_PR: Tensor, *, beta: float, max_weight: float
) -> Tensor:
    """Negative log-likelihood of actions [P], each weighted by exp(`beta` times its advantage), at
    most `max_weight` (Kostrikov et al., 2022, eq. 7; Peng et al., 2019)."""
    return -(weight_PR * (beta * advantage_PR.detach()).exp().clamp(max=max_weight) * logp_PR).sum(-1)


def conservative_gap(q: Tensor, taken: Tensor, action_mask: Tensor | None) -> Tensor:
    """Returns how far the soft maximum of action values `q` [..., A] over the legal actions is
    above the value `taken` [...] of the action in the data, at least 0: the term that CQL(H)
    minimises (Kumar et al., 2020, eq. 4). `action_mask` is [..., >= A], None: all are legal."""
    return torch.logsumexp(mask_illegal(q, action_mask), -1) - taken


def sampled_soft_maximum(q_PRS: Tensor, logp_PRS: Tensor) -> Tensor:
    """Returns estimates [..., P, R] of log of the integral of exp(q) over continuous actions, by importance sampling
    (Kumar et al., 2020, appendix F). `q_PRS` [..., P, R, S] are the values of S sampled actions, `logp_PRS` [P, R, S]
    the log-densities they were sampled with. Before the logarithm the estimate is unbiased, also if the actions were
    sampled from several distributions."""
    return torch.logsumexp(q_PRS - logp_PRS.detach(), -1) - math.log(q_PRS.shape[-1])


# ---- adversarial imitation: D = sigmoid(logit) is the probability that a transition is the expert's


ImitationReward = Literal["positive", "logit"]


def discriminator_loss(expert_PM: Tensor, policy_PM: Tensor) -> tuple[Tensor, TensorMetrics]:
    """Binary cross-entropy [P] of the discriminator: -log D of the expert's transitions and -log(1
    - D) of the policy's, each averaged (Ho & Ermon, 2016, eq. 15, with the two classes exchanged).
    It is 2 log 2 if the discriminator cannot separate them. The metric `discriminator_accuracy` is
    the share of correctly classified transitions."""
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
    """Reward of a transition, in the shape of `logit`: "positive" is -log(1 - D), always positive
    (Ho & Ermon, 2016); "logit" is log D - log(1 - D), of either sign (Fu et al., 2018)."""
    return softplus(logit) if kind == "positive" else logit


# ---- Q-learning with discrete actions


def best_action(q: Tensor, action_mask: Tensor | None) -> Tensor:
    """Returns the legal action with the highest value [...], the first of equals (`action_mask`
    [..., >= A]; None: all actions are legal)."""
    return mask_illegal(q, action_mask).argmax(-1)


def gather_values(q: Tensor, action: Tensor) -> Tensor:
    """Returns the values of given actions: [..., A], [...] -> [...]."""
    return q.gather(-1, action[..., None])[..., 0]


def dueling_values(out: Tensor) -> Tensor:
    """Combines a value and advantages [..., 1 + A] into action values [..., A]: the value plus each
    action's advantage over the mean (Wang et al., 2016, eq. 9)."""
    return out[..., :1] + out[..., 1:] - out[..., 1:].mean(-1, keepdim=True)


def next_value(target_q: Tensor, online_q: Tensor, action_mask: Tensor | None) -> Tensor:
    """Returns the value in `target_q` [..., A] of the best legal action by `online_q` [..., A].

    If both come from one network, this is Q-learning's maximum (Watkins, 1989). If the online network chooses the
    action and the target network evaluates it, it is double Q-learning (van Hasselt et al., 2016, eq. 4).
    """
    return gather_values(target_q, best_action(online_q, action_mask))


def q_loss(q: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns half the squared error, weighted and summed over all rows (scalar), and the TD errors
    [...], target minus value."""
    error = target.detach() - q
    return 0.5 * (weight * error.square()).sum(), error.detach()


def sequence_priority(error: Tensor, mask: Tensor, eta: float = 0.9) -> Tensor:
    """Returns the replay priority of sequences, [T, M] -> [M]: `eta` times the largest absolute
    error plus 1 - `eta` times the mean over known steps (Kapturowski et al., 2019, section 2.3)."""
    size = error.abs() * mask
    mean = size.sum(0) / mask.sum(0).clamp(min=1)
    return eta * size.amax(0) + (1 - eta) * mean


# ---- PPO's clipped surrogate of a categorical policy, compiled with its gradient: the same loss as
# `clipped_policy_loss` on the log-probabilities of a `CategoricalHead`, which runs about 70 small PyTorch operations
# that take half as long as the matrix products of a small network


LOWEST = np.finfo(np.float32).min  # logit of illegal actions: no legal one has less
METRICS = ("policy_loss", "clip_fraction", "kl", "entropy")


class CategoricalInputs(NamedTuple):
    """Outputs of the policy [P, R, A] (float32, on the CPU); actions [P, R] int64; masks of the
    legal actions [P, R, A] bool (None: all are legal); log-probabilities under the policy before
    the update, advantages, and weights that sum to 1 for each member, [P, R] float32 each."""

    outputs: Tensor
    actions: Tensor
    action_mask: Tensor | None
    old_logp: Tensor
    advantage: Tensor
    weight: Tensor


def clipped_categorical_loss(
    inputs: CategoricalInputs, *, clip: float, entropy: float
) -> tuple[Tensor, list[dict[str, float]]]:
    """Returns the loss and the `METRICS` of each member. The loss is PPO's clipped surrogate (Schulman et al., 2017,
    eq. 7), negated, minus `entropy` times the entropy, summed over the members: a scalar with first derivatives with
    respect to the outputs. The metric `policy_loss` does not contain the entropy."""
    loss, metrics = _ClippedLoss.apply(clip, entropy, *inputs)
    return loss, [dict(zip(METRICS, line, strict=True)) for line in metrics.tolist()]


class _ClippedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, clip: float, entropy: float, out: Tensor, action: Tensor, action_mask: Tensor | None, *rest: Tensor
    ) -> tuple[Tensor, np.ndarray]:
        gradient = torch.empty_like(out)
        metrics = np.zeros((len(out), len(METRICS)))
        mask = torch.empty(len(out), 0, 0, dtype=torch.bool) if action_mask is None else action_mask
        arrays = tuple(x.detach().numpy() for x in (action, mask, *rest))
        options = (np.float32(1 - clip), np.float32(1 + clip), np.float32(entropy))
        _clipped_loss(options, arrays, out.detach().numpy(), metrics, gradient.numpy())
        ctx.save_for_backward(gradient)
        return out.new_tensor((metrics[:, 0] - entropy * metrics[:, 3]).sum()), metrics

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor, _: None) -> tuple[Tensor | None, ...]:
        return None, None, g * ctx.saved_tensors[0], *[None] * 5


@jit
def _clipped_loss(
    options: tuple[np.float32, np.float32, np.float32],
    arrays: tuple[np.ndarray, ...],
    out: np.ndarray,
    metrics: np.ndarray,
    gradient: np.ndarray,
) -> None:
    """Writes the gradient of the loss with respect to `out`, and adds the metrics of each member.
    `options` are the bounds of the ratio and the weight of the entropy, `arrays` the
    `CategoricalInputs` without the outputs; an empty mask: all actions are legal."""
    low, high, bonus = options
    action, action_mask, old_logp, advantage, weight = arrays
    members, rows, actions = out.shape
    masked = action_mask.shape[1] > 0
    logp = np.empty(actions, np.float32)
    p = np.empty(actions, np.float32)
    for m in range(members):
        for r in range(rows):
            for a in range(actions):
                logp[a] = out[m, r, a] if not masked or action_mask[m, r, a] else LOWEST
            entropy = _normalise(logp, p)
            taken = action[m, r]
            share = weight[m, r]
            credit = advantage[m, r]
            gap = np.float64(logp[taken] - old_logp[m, r])  # in float32 its divergence below would be lost in rounding
            ratio = math.exp(gap)
            worth = ratio * credit
            bounded = min(max(ratio, low), high) * credit
            silenced = bounded < worth  # false where a number is NaN, which then reaches the gradient
            metrics[m, 0] -= share * (bounded if silenced else worth)
            metrics[m, 1] += share * silenced
            metrics[m, 2] += share * (ratio - 1 - gap)
            metrics[m, 3] += share * entropy
            slope = np.float32(0) if silenced else -share * worth  # of the loss, by the action's log-probability
            for a in range(actions):
                legal = not masked or action_mask[m, r, a]
                gradient[m, r, a] = p[a] * (bonus * share * (logp[a] + entropy) - slope) if legal else 0
            gradient[m, r, taken] += slope


@jit
def _normalise(logp: np.ndarray, p: np.ndarray) -> np.float32:
    """Turns logits [A] into log-probabilities in place, writes their probabilities to `p`; returns the entropy."""
    largest = logp[0]
    total = np.float32(0)
    entropy = np.float32(0)
    for a in range(1, len(logp)):
        largest = max(largest, logp[a])
    for a in range(len(logp)):
        p[a] = math.exp(logp[a] - largest)
        total += p[a]
    log_total = math.log(total)
    for a in range(len(logp)):
        logp[a] = logp[a] - largest - log_total
        p[a] /= total
        entropy -= p[a] * logp[a]
    return entropy
