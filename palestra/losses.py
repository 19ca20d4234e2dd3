"""Losses over trained tokens: pure functions, one signature, one dict by name.

Each takes a `Scored`: what is known about `M` trained tokens, and returns a scalar to minimise with metrics as plain
sums. `weight_M` is a token's share of the mean; the weights of a whole optimizer batch sum to one, so that losses and
metrics of its micro-batches simply add up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Figures = dict[str, Tensor]


class Scored(NamedTuple):
    """Trained tokens `[M]`: log-probability and entropy under the policy in training, log-probability under the policy
    that sampled them and under the reference (or None), advantage, and share of the mean."""

    logp_M: Tensor
    entropy_M: Tensor
    old_logp_M: Tensor
    ref_logp_M: Tensor | None
    advantage_M: Tensor
    weight_M: Tensor


def clipped_policy_loss(
    tokens: Scored, *, clip: float = 0.2, clip_high: float | None = None, kl: float = 0.0, entropy: float = 0.0
) -> tuple[Tensor, Figures]:
    """PPO's clipped surrogate (Schulman et al., 2017, eq. 7), negated, with optional KL penalty and entropy bonus.

    `clip_high` widens the upper side only (DAPO, Yu et al., 2025). `kl` weighs the estimate
    exp(ref - logp) - (ref - logp) - 1 of KL(policy || reference) (Schulman, 2020, k3), which needs `ref_logp_M`.
    `clip_share` counts tokens whose gradient the clip removed.
    """
    ratio = torch.exp(tokens.logp_M - tokens.old_logp_M)
    limited = ratio.clamp(1 - clip, 1 + (clip if clip_high is None else clip_high))
    plain, clipped = ratio * tokens.advantage_M, limited * tokens.advantage_M
    loss = -(tokens.weight_M * torch.minimum(plain, clipped)).sum()
    figures = {"clip_share": (tokens.weight_M * (clipped < plain)).sum(), **_drift(tokens)}
    if kl:
        if tokens.ref_logp_M is None:
            raise ValueError("a KL penalty needs log-probabilities of the reference")
        gap = tokens.ref_logp_M - tokens.logp_M
        penalty = (tokens.weight_M * (torch.exp(gap) - gap - 1)).sum()
        loss, figures["kl_ref"] = loss + kl * penalty, penalty.detach()
    if entropy:
        loss = loss - entropy * (tokens.weight_M * tokens.entropy_M).sum()
    return loss, figures


def cross_entropy_loss(tokens: Scored) -> tuple[Tensor, Figures]:
    """Negative log-likelihood, each token weighted by its advantage (1 for plain imitation)."""
    loss = -(tokens.weight_M * tokens.advantage_M * tokens.logp_M).sum()
    return loss, {"nll": -(tokens.weight_M * tokens.logp_M).sum().detach()}


def _drift(tokens: Scored) -> Figures:
    """How far the policy has moved from the one that sampled (KL by k3 of the inverse ratio), and its entropy."""
    with torch.no_grad():
        gap = tokens.logp_M - tokens.old_logp_M
        return {
            "kl": (tokens.weight_M * (torch.exp(gap) - 1 - gap)).sum(),
            "entropy": (tokens.weight_M * tokens.entropy_M).sum(),
        }


LOSSES: dict[str, Callable[..., tuple[Tensor, Figures]]] = {
    "clipped_policy": clipped_policy_loss,
    "cross_entropy": cross_entropy_loss,
}
