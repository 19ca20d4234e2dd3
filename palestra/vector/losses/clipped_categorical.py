"""PPO's clipped surrogate of a categorical policy from the outputs of its network, compiled with its gradient.

The same loss as `clipped_policy_loss` on the log-probabilities of a `CategoricalHead`. That one runs about 70 small
PyTorch operations, which take half as long as the matrix products of a small network.

Shapes: `P` members, `R` rows, `A` actions.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from palestra.core.accel.jit import jit

LOWEST = np.finfo(np.float32).min  # logit of illegal actions: no legal one has less
METRICS = ("policy_loss", "clip_fraction", "kl", "entropy")


class CategoricalInputs(NamedTuple):
    """Outputs of the policy [P, R, A] (float32, on the CPU); actions [P, R] int64; masks of the legal actions [P, R, A]
    bool (None: all are legal); log-probabilities under the policy before the update, advantages, and weights that sum
    to 1 for each member, [P, R] float32 each."""

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
        gradient, metrics = torch.empty_like(out), np.zeros((len(out), len(METRICS)))
        mask = torch.empty(len(out), 0, 0, dtype=torch.bool) if action_mask is None else action_mask
        arrays = [x.detach().numpy() for x in (out, action, mask, *rest, gradient)]
        _clipped_loss(np.float32(1 - clip), np.float32(1 + clip), np.float32(entropy), metrics, *arrays)
        ctx.save_for_backward(gradient)
        return out.new_tensor((metrics[:, 0] - entropy * metrics[:, 3]).sum()), metrics

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor, _: None) -> tuple[Tensor | None, ...]:
        return None, None, g * ctx.saved_tensors[0], *[None] * 5


@jit
def _clipped_loss(
    low: np.float32,
    high: np.float32,
    bonus: np.float32,
    metrics: np.ndarray,
    out: np.ndarray,
    action: np.ndarray,
    action_mask: np.ndarray,
    old_logp: np.ndarray,
    advantage: np.ndarray,
    weight: np.ndarray,
    gradient: np.ndarray,
) -> None:
    """Writes the gradient of the loss with respect to `out`, and adds the metrics of each member."""
    members, rows, actions = out.shape
    masked = action_mask.shape[1] > 0
    logp, p = np.empty(actions, np.float32), np.empty(actions, np.float32)
    for m in range(members):
        for r in range(rows):
            for a in range(actions):
                logp[a] = out[m, r, a] if not masked or action_mask[m, r, a] else LOWEST
            entropy = _normalise(logp, p)
            taken, share, credit = action[m, r], weight[m, r], advantage[m, r]
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
    largest, total, entropy = logp[0], np.float32(0), np.float32(0)
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
