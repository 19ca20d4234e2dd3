"""Preference losses over pairs of a chosen and a rejected side, and over single sides: pure functions of trained
tokens, like those of palestra/core/losses.py.

The tokens of a pair have the same number in `group_M`. The margin of a pair is the sum over its tokens of advantage
times log-ratio to the reference. With advantages of 1 on the chosen and -1 on the rejected side it is the difference of
the two sides' log-ratios, over any number of sequences per side; with 1 / n and -1 / n on sides of n tokens it is the
difference of their means. The weight of a pair in the batch mean is the sum of its tokens' `weight_M`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

from palestra.core.losses import LossInputs, TensorMetrics, uses_dropout

PreferenceKind = Literal["sigmoid", "hinge", "ipo", "simpo", "orpo"]
MEAN_KINDS = ("ipo", "simpo", "orpo")  # kinds whose margin compares means over a side's tokens, not sums
REFERENCE_FREE_KINDS = ("simpo", "orpo")


def preference_loss(
    tokens: LossInputs,
    *,
    kind: PreferenceKind = "sigmoid",
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    target_margin: float = 0.0,
    reference_free: bool = False,
) -> tuple[Tensor, TensorMetrics]:
    """Preference loss of each pair's margin m, averaged over pairs.

    `kind` "sigmoid" is DPO, -log sigmoid(beta m) (Rafailov et al., 2023, eq. 7); "hinge" is max(0, 1 - beta m) (SLiC,
    Zhao et al., 2023, with DPO's margin); "ipo" is (m - 1 / (2 beta))^2 (Azar et al., 2024, eq. 17). `label_smoothing`
    is the assumed probability that a preference label is wrong (conservative DPO, Mitchell, 2023). `reference_free`
    assumes a reference that gives both sides the same probability.

    Two kinds have no reference, and their margins compare means over tokens. "simpo" is -log sigmoid(beta m -
    `target_margin`) (Meng et al., 2024, eq. 6). "orpo" is -log p(chosen) - beta log sigmoid(log odds(chosen) - log
    odds(rejected)), with p the geometric mean of a side's token probabilities and odds p / (1 - p) (Hong et al., 2024,
    eq. 6 and 7).

    Metrics, all means over pairs: `margin` is beta m, the difference of implicit rewards; `accuracy` the share of pairs
    with m > 0; `chosen_logp` and `rejected_logp` the sides' weighted log-probabilities. Raises ValueError for label
    smoothing with `ipo` and `orpo`, for a missing `group_M` or `ref_logp_M`, and for a pair with one side.
    """
    if kind in ("ipo", "orpo") and label_smoothing:
        raise ValueError(f"{kind} takes no label_smoothing: leave it out")
    if tokens.group_M is None:
        raise ValueError("preferences need the number of each token's pair")
    summed = _group_sum(tokens.group_M)
    chosen_M = tokens.advantage_M.clamp(min=0)
    rejected_M = -tokens.advantage_M.clamp(max=0)
    if not (summed(chosen_M) * summed(rejected_M)).all():
        raise ValueError("a pair needs tokens with advantages above and below 0: its chosen and its rejected side")
    reference_free = reference_free or kind in REFERENCE_FREE_KINDS
    share = summed(tokens.weight_M)
    margin = summed(tokens.advantage_M * _log_ratio(tokens, reference_free))
    if kind == "orpo":
        each = _odds_ratio_loss(summed(chosen_M * tokens.logp_M), summed(rejected_M * tokens.logp_M), beta)
    else:
        each = _pair_loss(margin, kind, beta, label_smoothing, target_margin)
    loss = (share * each).sum()
    logp_M = tokens.logp_M.detach()
    return loss, {
        "margin": (share * beta * margin.detach()).sum(),
        "accuracy": (share * (margin > 0)).sum(),
        "chosen_logp": (share * summed(chosen_M * logp_M)).sum(),
        "rejected_logp": (share * summed(rejected_M * logp_M)).sum(),
    }


def _group_sum(group_M: Tensor) -> Callable[[Tensor], Tensor]:
    """Returns the function that sums values [M] by group, to [G] for the `G` distinct numbers in `group_M`, sorted."""
    numbers_G, index_M = torch.unique(group_M, return_inverse=True)
    return lambda values_M: values_M.new_zeros(len(numbers_G)).index_add(0, index_M, values_M)


def _log_ratio(tokens: LossInputs, reference_free: bool) -> Tensor:
    """Returns the log-probability minus that of the reference [M]."""
    if reference_free:
        return tokens.logp_M
    if tokens.ref_logp_M is None:
        raise ValueError("preferences need log-probabilities of the reference, or reference_free: true")
    return tokens.logp_M - tokens.ref_logp_M


@uses_dropout
def bradley_terry_loss(tokens: LossInputs, *, center_coef: float = 0.0) -> tuple[Tensor, TensorMetrics]:
    """Loss of a reward model: -log sigmoid(r(chosen) - r(rejected)), averaged over pairs (Ouyang et al., 2022, eq. 1).
    The rewards are values of a head, with advantage 1 on the chosen and -1 on the rejected side.

    `center_coef` weighs the square of r(chosen) + r(rejected) (Eisenstein et al., 2023, eq. 2). Metrics, means over
    pairs: `accuracy`, the share with the higher reward on the chosen side; `margin`, the difference; `chosen_reward`
    and `rejected_reward`. Raises ValueError for a missing `group_M` or `value_M`.
    """
    if tokens.group_M is None or tokens.value_M is None:
        raise ValueError("a reward model needs the number of each token's pair, and the values of a head")
    summed = _group_sum(tokens.group_M)
    chosen = summed(tokens.advantage_M.clamp(min=0) * tokens.value_M)
    rejected = summed(-tokens.advantage_M.clamp(max=0) * tokens.value_M)
    share = summed(tokens.weight_M)
    margin = chosen - rejected
    loss = (share * (center_coef * (chosen + rejected).square() - logsigmoid(margin))).sum()
    return loss, {
        "accuracy": (share * (margin > 0)).sum(),
        "margin": (share * margin.detach()).sum(),
        "chosen_reward": (share * chosen.detach()).sum(),
        "rejected_reward": (share * rejected.detach()).sum(),
    }


def kto_loss(tokens: LossInputs, *, beta: float = 0.1) -> tuple[Tensor, TensorMetrics]:
    """KTO loss of each side's log-ratio h to the reference, averaged over sides: w (1 - sigmoid(beta h)) of a desirable
    one and w (1 - sigmoid(-beta h)) of an undesirable one (Ethayarajh et al., 2024).

    The tokens of a side have the same number in `group_M`, and the advantage w or -w. Log-ratios are relative to the
    reference point z_0 if `ref_logp_M` contains it, spread over the tokens of a side. Metrics, means over sides:
    `reward` is beta h times the side's sign, `accuracy` the share of sides where it is above 0. Raises ValueError for a
    missing `group_M` or `ref_logp_M`.
    """
    if tokens.group_M is None:
        raise ValueError("kto needs the number of each token's side")
    summed = _group_sum(tokens.group_M)
    weight = summed(tokens.advantage_M) / summed(torch.ones_like(tokens.advantage_M))
    share = summed(tokens.weight_M)
    reward = beta * torch.sign(weight) * summed(_log_ratio(tokens, False))
    loss = (share * weight.abs() * torch.sigmoid(-reward)).sum()
    reward = reward.detach()
    return loss, {"reward": (share * reward).sum(), "accuracy": (share * (reward > 0)).sum()}


def _odds_ratio_loss(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """Returns ORPO's loss of each pair, from the mean log-probabilities of its sides."""
    log_odds = _log_odds(chosen) - _log_odds(rejected)
    return -chosen - beta * logsigmoid(log_odds)


def _log_odds(logp: Tensor) -> Tensor:
    """Returns log(p / (1 - p)), with p at most 1 - 1e-6: the odds of a side with probability 1 are infinite."""
    logp = logp.clamp(max=-1e-6)
    return logp - torch.log(-torch.expm1(logp))


def _pair_loss(
    margin: Tensor, kind: PreferenceKind, beta: float, label_smoothing: float, target_margin: float
) -> Tensor:
    """Returns the loss of each pair's margin."""
    if kind == "ipo":
        return (margin - 1 / (2 * beta)).square()
    reward = beta * margin - (target_margin if kind == "simpo" else 0.0)
    right, wrong = (
        (-logsigmoid(reward), -logsigmoid(-reward)) if kind != "hinge" else (relu(1 - reward), relu(1 + reward))
    )
    return (1 - label_smoothing) * right + label_smoothing * wrong
