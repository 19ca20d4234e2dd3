"""Preference losses over pairs of a chosen and a rejected side: a pure function of trained tokens, like those of
policy.py.

The tokens of a pair have the same number in `group_M`. The margin of a pair is the sum over its tokens of advantage
times log-ratio to the reference. With advantages of 1 on the chosen and -1 on the rejected side it is the difference of
the two sides' log-ratios, over any number of sequences per side; with 1 / n and -1 / n on sides of n tokens it is the
difference of their means. The weight of a pair in the batch mean is the sum of its tokens' `weight_M`.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

from palestra.losses.policy import LossInputs, TensorMetrics

PreferenceKind = Literal["sigmoid", "hinge", "ipo"]


def preference_loss(
    tokens: LossInputs,
    *,
    kind: PreferenceKind = "sigmoid",
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    reference_free: bool = False,
) -> tuple[Tensor, TensorMetrics]:
    """Preference loss of each pair's margin m, averaged over pairs.

    `kind` "sigmoid" is DPO, -log sigmoid(beta m) (Rafailov et al., 2023, eq. 7); "hinge" is max(0, 1 - beta m) (SLiC,
    Zhao et al., 2023, with DPO's margin); "ipo" is (m - 1 / (2 beta))^2 (Azar et al., 2024, eq. 17). `label_smoothing`
    is the assumed probability that a preference label is wrong (conservative DPO, Mitchell, 2023). `reference_free`
    assumes a reference that gives both sides the same probability.

    Metrics, all means over pairs: `margin` is beta m, the difference of implicit rewards; `accuracy` the share of pairs
    with m > 0; `chosen_logp` and `rejected_logp` the sides' weighted log-probabilities. Raises ValueError for label
    smoothing with `ipo`, for a missing `group_M` or `ref_logp_M`, and for a pair with one side.
    """
    if kind == "ipo" and label_smoothing:
        raise ValueError("ipo bounds its margin by itself and takes no label_smoothing: leave it out")
    if tokens.group_M is None:
        raise ValueError("preferences need the number of each token's pair")
    _, pair_M = torch.unique(tokens.group_M, return_inverse=True)
    count = int(pair_M.max()) + 1 if len(pair_M) else 0

    def summed(values_M: Tensor) -> Tensor:
        return values_M.new_zeros(count).index_add(0, pair_M, values_M)

    chosen_M, rejected_M = tokens.advantage_M.clamp(min=0), -tokens.advantage_M.clamp(max=0)
    if not (summed(chosen_M) * summed(rejected_M)).all():
        raise ValueError("a pair needs tokens with advantages above and below 0: its chosen and its rejected side")
    share, margin = summed(tokens.weight_M), summed(tokens.advantage_M * _log_ratio(tokens, reference_free))
    loss = (share * _pair_loss(margin, kind, beta, label_smoothing)).sum()
    logp_M = tokens.logp_M.detach()
    return loss, {
        "margin": (share * beta * margin.detach()).sum(),
        "accuracy": (share * (margin > 0)).sum(),
        "chosen_logp": (share * summed(chosen_M * logp_M)).sum(),
        "rejected_logp": (share * summed(rejected_M * logp_M)).sum(),
    }


def _log_ratio(tokens: LossInputs, reference_free: bool) -> Tensor:
    """Returns the log-probability minus that of the reference [M]."""
    if reference_free:
        return tokens.logp_M
    if tokens.ref_logp_M is None:
        raise ValueError("preferences need log-probabilities of the reference, or reference_free: true")
    return tokens.logp_M - tokens.ref_logp_M


def _pair_loss(margin: Tensor, kind: PreferenceKind, beta: float, label_smoothing: float) -> Tensor:
    """Returns the loss of each pair's margin."""
    if kind == "ipo":
        return (margin - 1 / (2 * beta)).square()
    reward = beta * margin
    right, wrong = (
        (-logsigmoid(reward), -logsigmoid(-reward)) if kind == "sigmoid" else (relu(1 - reward), relu(1 + reward))
    )
    return (1 - label_smoothing) * right + label_smoothing * wrong
