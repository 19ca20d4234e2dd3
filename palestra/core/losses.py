"""Token losses: pure functions with one signature, collected by name in `LOSSES`.

Each takes a `LossInputs` with the data of `M` trained tokens; it returns a scalar to minimise, and metrics as plain
sums. `weight_M` is a token's share of the mean; the weights of a whole optimizer batch sum to one, so that losses and
metrics of its micro-batches add up. With weights of one the losses are sums over tokens, as in a training service
(Tinker documentation, Thinking Machines Lab, 2025, "Loss functions").

Ratio means exp(logp - old_logp). A clipping bound is a number, or a tensor [M] with one bound per token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

TensorMetrics = dict[str, Tensor]
LossFunction = Callable[..., tuple[Tensor, TensorMetrics]]
# Keys that a run logs itself, which a metric of a loss would replace.
LOGGED_KEYS = frozenset(
    {"return", "success", "team_return", "episodes", "env_steps", "loss", "policy_loss", "grad_norm", "lr"}
)
ImportanceMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
KLEstimator = Literal["k1", "k2", "k3"]
Bound = float | Tensor


def check_loss(result: Any, label: str, *, has_gradient: bool) -> tuple[Tensor, TensorMetrics]:
    """Returns what a loss returned. Raises ValueError, with the name of what computed it, unless it is a scalar, with a
    gradient if its inputs have one, and metrics that are numbers under names that the run does not log itself."""
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], dict):
        raise ValueError(f"{label} returned {_describe(result)}: return a scalar tensor and a dictionary of metrics")
    loss, metrics = result
    if not isinstance(loss, Tensor) or loss.dim() > 0 or (has_gradient and not loss.requires_grad):
        raise ValueError(f"{label} returned {_describe(loss)} as loss: return a scalar tensor with a gradient")
    if taken := LOGGED_KEYS & metrics.keys():
        raise ValueError(f"{label} returned a metric {min(taken)}, which the run logs itself: give it another name")
    for name, value in metrics.items():
        if not isinstance(value, Tensor | float | int) or torch.as_tensor(value).numel() != 1:
            raise ValueError(f"{label} returned {_describe(value)} as metric {name}: return a number")
    return loss, metrics


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}{'' if value.requires_grad else ' without gradient'}"
    return f"{value!r:.80}"


class LossInputs(NamedTuple):
    """Loss inputs of the trained tokens, each [M] (float32; `sequence_M` and `group_M` int64).

    Log-probability and entropy under the trained policy; log-probability under the policy before the update, which
    ratios are relative to, and under the reference (or None); advantage; share of the mean; index of each token's
    sequence and of its group of sequences (or None). With a critic: the value of the state before each token, the same
    value before the update, and the return (the value target). If the sampler is not the policy before the update, also
    the sampler's log-probability.
    """

    logp_M: Tensor
    entropy_M: Tensor
    old_logp_M: Tensor
    ref_logp_M: Tensor | None
    advantage_M: Tensor
    weight_M: Tensor
    sequence_M: Tensor | None = None
    group_M: Tensor | None = None
    value_M: Tensor | None = None
    old_value_M: Tensor | None = None
    return_M: Tensor | None = None
    sampler_logp_M: Tensor | None = None


def clipped_policy_loss(
    tokens: LossInputs,
    *,
    clip: Bound = 0.2,
    clip_high: Bound | None = None,
    dual_clip: float | None = None,
    kl: float = 0.0,
    kl_estimator: KLEstimator = "k3",
    kl_importance_weight: bool = False,
    entropy: float = 0.0,
    **importance: Any,
) -> tuple[Tensor, TensorMetrics]:
    """PPO's clipped surrogate (Schulman et al., 2017, eq. 7), negated, with optional KL penalty and entropy bonus.

    `clip_high` widens the upper bound only (DAPO, Yu et al., 2025). `dual_clip`, above 1, limits the loss of a token
    with negative advantage to that many times its advantage (Ye et al., 2020, eq. 5). For `kl` and `entropy` see
    `add_kl_and_entropy`, for `importance` `correct_mismatch`. The metric `clip_fraction` is the share of tokens whose
    gradient is removed by clipping.

    Raises ValueError for a KL penalty without `ref_logp_M`.
    """
    high = 1 + (clip if clip_high is None else clip_high)
    tokens, mismatch = correct_mismatch(tokens, **importance)
    loss, metrics = _clipped_surrogate(tokens, _ratio(tokens), 1 - clip, high, dual_clip)
    return add_kl_and_entropy(tokens, loss, metrics | mismatch, kl, entropy, kl_estimator, kl_importance_weight)


def add_kl_and_entropy(
    tokens: LossInputs,
    loss: Tensor,
    metrics: TensorMetrics,
    kl: float,
    entropy: float,
    kl_estimator: KLEstimator = "k3",
    kl_importance_weight: bool = False,
) -> tuple[Tensor, TensorMetrics]:
    """Adds a KL penalty and an entropy bonus to a loss.

    `kl` weights `kl_estimates` of KL(policy || reference), `entropy` the bonus for the policy's entropy.
    `kl_importance_weight` multiplies each estimate by the token's ratio, with its gradient (DeepSeek-V3.2, 2025): with
    k1 and k3 the gradient is then, like the value, an unbiased estimate. Without it, only the gradient of k2 is
    unbiased; k3 has the gradient of the forward KL, and the gradient of k1 averages to 0. Raises ValueError for a KL
    penalty without `ref_logp_M`.
    """
    if kl:
        if tokens.ref_logp_M is None:
            raise ValueError("a KL penalty needs log-probabilities of the reference")
        estimate_M = kl_estimates(tokens.logp_M, tokens.ref_logp_M, kl_estimator)
        if kl_importance_weight:
            estimate_M = estimate_M * _ratio(tokens)
        penalty = (tokens.weight_M * estimate_M).sum()
        loss = loss + kl * penalty
        metrics = metrics | {"reference_kl": penalty.detach()}
    if entropy:
        loss = loss - entropy * (tokens.weight_M * tokens.entropy_M).sum()
    return loss, metrics


def kl_estimates(logp_M: Tensor, ref_logp_M: Tensor, estimator: KLEstimator) -> Tensor:
    """Returns the estimate of KL(policy || reference) of each token [M], in nats (Schulman, 2020).

    With d = logp - ref: k1 is d, k2 is d^2 / 2, and k3 is exp(-d) - 1 + d. In expectation over the policy's own tokens
    k1 and k3 are the KL divergence; k2 is biased, but its gradient is the gradient of the divergence.
    """
    gap_M = logp_M - ref_logp_M
    if estimator == "k1":
        return gap_M
    if estimator == "k2":
        return 0.5 * gap_M.square()
    return torch.exp(-gap_M) - 1 + gap_M


def correct_mismatch(
    tokens: LossInputs,
    *,
    importance_cap: float | None = None,
    importance_floor: float = 0.0,
    importance_mode: ImportanceMode = "token_truncate",
) -> tuple[LossInputs, TensorMetrics]:
    """Returns the tokens with advantages reweighted as if the policy before the update had sampled them, and metrics.

    Each advantage is multiplied by `importance_weight` of its token, if there is an `importance_cap`. The loss then
    clips the step from the policy before the update, not from the sampler (decoupled PPO, Hilton et al., 2022; Fu et
    al., 2025, eq. 5). Without `sampler_logp_M` the two are the same, and nothing changes.

    `sampler_kl` is the mean log-ratio of sampler to policy (the k1 estimate of their KL divergence, nats),
    `importance_cap_fraction` the share of tokens whose ratio is out of bounds.
    """
    if tokens.sampler_logp_M is None:
        return tokens, {}
    gap_M = tokens.old_logp_M - tokens.sampler_logp_M
    metrics = {"sampler_kl": -(tokens.weight_M * gap_M).sum()}
    if importance_cap is None:
        return tokens, metrics
    factor_M, outside_M = importance_weight(
        gap_M, tokens.sequence_M, cap=importance_cap, floor=importance_floor, mode=importance_mode
    )
    metrics["importance_cap_fraction"] = (tokens.weight_M * outside_M).sum()
    return tokens._replace(advantage_M=tokens.advantage_M * factor_M), metrics


def importance_weight(
    gap_M: Tensor, sequence_M: Tensor | None, *, cap: float, floor: float = 0.0, mode: ImportanceMode = "token_truncate"
) -> tuple[Tensor, Tensor]:
    """Returns the bounded importance ratio of each token [M], and whether it was out of bounds (bool [M]), from the
    log-ratios `gap_M`.

    `token_truncate` gives min(max(r, floor), cap), r the token's ratio (truncated importance sampling, Espeholt et al.,
    2018, eq. 1; Yao et al., 2025); `token_mask` gives r within the bounds and 0 outside (IcePop, Ling team, 2025,
    arXiv:2510.18855). `sequence_truncate` and `sequence_mask` do the same with the ratio of the token's sequence, the
    product over its tokens (masked importance sampling, Liu et al., 2025). They raise ValueError without `sequence_M`.
    """
    if mode in ("sequence_truncate", "sequence_mask"):
        if sequence_M is None:
            raise ValueError(f"importance_mode: {mode} needs the number of each token's sequence")
        gap_M = sequence_sum(gap_M, sequence_M)
    ratio_M = torch.exp(gap_M)
    outside_M = (ratio_M > cap) | (ratio_M < floor)
    if mode in ("token_truncate", "sequence_truncate"):
        return ratio_M.clamp(min=floor, max=cap), outside_M
    return torch.where(outside_M, 0.0, ratio_M), outside_M


def actor_critic_loss(
    tokens: LossInputs,
    *,
    surrogate: Literal["clipped", "policy_gradient"] = "clipped",
    value_coef: float = 0.5,
    value_clip: float | None = None,
    value_per_answer: bool = False,
    **options: Any,
) -> tuple[Tensor, TensorMetrics]:
    """PPO's clipped surrogate plus `value_coef` times half the squared error of values against returns (Schulman et
    al., 2017, eq. 9), or the plain policy gradient (advantage actor-critic, Mnih et al., 2016) in place of the
    surrogate; `options` are those of `clipped_policy_loss` or `policy_gradient_loss`. For the error see
    `value_function_loss`. Raises ValueError without values and returns."""
    policy_loss = clipped_policy_loss if surrogate == "clipped" else policy_gradient_loss
    value_loss, value_metrics = value_function_loss(
        tokens, value_coef=value_coef, value_clip=value_clip, value_per_answer=value_per_answer
    )
    loss, metrics = policy_loss(tokens, **options)
    return loss + value_loss, metrics | value_metrics


def value_function_loss(
    tokens: LossInputs, *, value_coef: float = 0.5, value_clip: float | None = None, value_per_answer: bool = False
) -> tuple[Tensor, TensorMetrics]:
    """`value_coef` times half the squared error of values against returns.

    With `value_clip`, the error of a value clipped to within `value_clip` of the old value is computed too, and the
    larger of the two counts (as in PPO2 of OpenAI's baselines): a value that has already moved that far towards its
    return gets no gradient. The metric `value_clip_fraction` is the share of such tokens.

    `value_per_answer` counts only the error at the first token of each sequence, the error of the value before the
    answer; in the metrics, all tokens of the sequence have that error. Raises ValueError without values and returns,
    and for `value_clip` without `old_value_M`.
    """
    if tokens.value_M is None or tokens.return_M is None:
        raise ValueError("an actor-critic loss needs values and returns: the policy was built without a critic")
    share_M = tokens.weight_M
    if value_per_answer:
        tokens, share_M = _of_answers(tokens)
    error_M, clipped_M = _value_errors(tokens, value_clip)
    metrics = {"value_loss": 0.5 * (tokens.weight_M * error_M).sum().detach()}
    if clipped_M is not None:
        metrics |= {"value_clip_fraction": (tokens.weight_M * clipped_M).sum()}
    return value_coef * 0.5 * (share_M * error_M).sum(), metrics


def _value_errors(tokens: LossInputs, value_clip: float | None) -> tuple[Tensor, Tensor | None]:
    """Returns squared errors [M] of values against returns, and with `value_clip` a mask [M] of the errors of clipped
    values."""
    assert tokens.value_M is not None and tokens.return_M is not None
    error_M = (tokens.value_M - tokens.return_M).square()
    if value_clip is None:
        return error_M, None
    if tokens.old_value_M is None:
        raise ValueError("value_clip needs the values from before the update")
    near_M = tokens.old_value_M + (tokens.value_M - tokens.old_value_M).clamp(-value_clip, value_clip)
    near_error_M = (near_M - tokens.return_M).square()
    return torch.maximum(error_M, near_error_M), near_error_M > error_M


def _of_answers(tokens: LossInputs) -> tuple[LossInputs, Tensor]:
    """Returns the tokens, each with the value and return of the first token of its sequence, and weights [M] that are 0
    for all but the first tokens."""
    assert tokens.sequence_M is not None and tokens.value_M is not None and tokens.return_M is not None
    is_first_M = torch.ones_like(tokens.sequence_M, dtype=torch.bool)
    is_first_M[1:] = tokens.sequence_M[1:] != tokens.sequence_M[:-1]
    first_M = is_first_M.nonzero()[:, 0][is_first_M.cumsum(0) - 1]
    old_M = None if tokens.old_value_M is None else tokens.old_value_M[first_M]
    same = tokens._replace(value_M=tokens.value_M[first_M], return_M=tokens.return_M[first_M], old_value_M=old_M)
    return same, torch.where(is_first_M, tokens.weight_M, 0.0)


def policy_gradient_loss(
    tokens: LossInputs, *, entropy: float = 0.0, **importance: Any
) -> tuple[Tensor, TensorMetrics]:
    """Plain policy gradient loss, -logp * advantage (Williams, 1992; Sutton et al., 2000), with an optional entropy
    bonus; for `importance` see `correct_mismatch`."""
    tokens, mismatch = correct_mismatch(tokens, **importance)
    loss = -(tokens.weight_M * tokens.logp_M * tokens.advantage_M).sum()
    metrics = {"entropy": (tokens.weight_M * tokens.entropy_M).sum().detach()}
    return add_kl_and_entropy(tokens, loss, metrics | mismatch, 0.0, entropy)


L = TypeVar("L", bound=Callable[..., Any])


def uses_dropout(loss: L) -> L:
    """Marks a loss whose forward pass has dropout (decorator).

    Other losses compare log-probabilities with those of the sampler or of passes without gradients, which have no
    dropout: it would be noise in their ratios.
    """
    loss.has_dropout = True  # type: ignore[attr-defined]
    return loss


def has_dropout(loss: Callable[..., Any]) -> bool:
    """Returns whether the forward pass of `loss` has dropout."""
    return getattr(loss, "has_dropout", False)


@uses_dropout
def cross_entropy_loss(tokens: LossInputs) -> tuple[Tensor, TensorMetrics]:
    """Negative log-likelihood, each token weighted by its advantage: any real number, 1 for plain imitation."""
    loss = -(tokens.weight_M * tokens.advantage_M * tokens.logp_M).sum()
    return loss, {"nll": -(tokens.weight_M * tokens.logp_M).sum().detach()}


def importance_sampling_loss(tokens: LossInputs) -> tuple[Tensor, TensorMetrics]:
    """Policy gradient loss with importance sampling, -ratio * advantage (as in Schulman et al., 2017, eq. 6): unbiased
    for tokens sampled by another policy, but the ratio has no bound."""
    loss = -(tokens.weight_M * _ratio(tokens) * tokens.advantage_M).sum()
    return loss, _policy_drift(tokens)


def cispo_loss(
    tokens: LossInputs,
    *,
    clip_low_threshold: Bound = 0.0,
    clip_high_threshold: Bound = 4.0,
    kl: float = 0.0,
    kl_estimator: KLEstimator = "k3",
    kl_importance_weight: bool = False,
    entropy: float = 0.0,
    **importance: Any,
) -> tuple[Tensor, TensorMetrics]:
    """CISPO (MiniMax-M1, Chen et al., 2025, eq. 4), negated: logp * advantage * clipped ratio, without a gradient
    through the ratio.

    Unlike a clipped surrogate it removes no token's gradient. The bounds apply to the ratio itself; by default only the
    upper one is active, as in Chen et al., with the value of ScaleRL (Khatri et al., 2025). The metric `clip_fraction`
    is the share of tokens whose ratio is out of bounds. Raises ValueError for a KL penalty without `ref_logp_M`.
    """
    tokens, mismatch = correct_mismatch(tokens, **importance)
    ratio = _ratio(tokens).detach()
    limited = _between(ratio, clip_low_threshold, clip_high_threshold)
    loss = -(tokens.weight_M * limited * tokens.logp_M * tokens.advantage_M).sum()
    metrics = {"clip_fraction": (tokens.weight_M * (limited != ratio)).sum(), **_policy_drift(tokens)}
    return add_kl_and_entropy(tokens, loss, metrics | mismatch, kl, entropy, kl_estimator, kl_importance_weight)


def dro_loss(tokens: LossInputs, *, beta: float = 0.05) -> tuple[Tensor, TensorMetrics]:
    """Direct reward optimisation (Richemond et al., 2024; token by token as in Kimi k1.5, 2025), negated: logp *
    advantage - beta / 2 * (logp - old_logp)^2. The second term keeps the policy near the sampling policy.

    `advantage_M` must be the soft advantage, reward minus soft value. The metric `penalty` is the subtracted term.
    """
    penalty = 0.5 * beta * (tokens.weight_M * (tokens.logp_M - tokens.old_logp_M).square()).sum()
    loss = penalty - (tokens.weight_M * tokens.logp_M * tokens.advantage_M).sum()
    return loss, {"penalty": penalty.detach(), **_policy_drift(tokens)}


def gspo_loss(
    tokens: LossInputs,
    *,
    clip_low_threshold: Bound = 0.8,
    clip_high_threshold: Bound = 1.2,
    sequence_ratio_mask: Tensor | None = None,
    kl: float = 0.0,
    kl_estimator: KLEstimator = "k3",
    kl_importance_weight: bool = False,
    entropy: float = 0.0,
    **importance: Any,
) -> tuple[Tensor, TensorMetrics]:
    """GSPO-token (Zheng et al., 2025, eq. 13 and 14), negated: PPO's clipped surrogate in which each token's ratio has
    the value of its sequence's ratio (the geometric mean over tokens) and the gradient of the token's own ratio.

    `sequence_ratio_mask` [M] is nonzero for the tokens that enter that mean (None: all with a weight; a sequence
    without any has ratio 1). The bounds apply to the ratio itself; Zheng et al. used much narrower ones, 0.9997 and
    1.0004. A sequence must not be split over micro-batches. Raises ValueError without `sequence_M`, and for a KL
    penalty without `ref_logp_M`.
    """
    if (sequence_M := tokens.sequence_M) is None:
        raise ValueError("gspo needs the number of each token's sequence")
    tokens, mismatch = correct_mismatch(tokens, **importance)
    own = tokens.logp_M - tokens.logp_M.detach()  # zero, with the gradient of logp
    ratio = torch.exp(_sequence_gap(tokens, sequence_M, sequence_ratio_mask) + own)
    loss, metrics = _clipped_surrogate(tokens, ratio, clip_low_threshold, clip_high_threshold)
    return add_kl_and_entropy(tokens, loss, metrics | mismatch, kl, entropy, kl_estimator, kl_importance_weight)


def _sequence_gap(tokens: LossInputs, sequence_M: Tensor, mask_M: Tensor | None) -> Tensor:
    """Returns the mean of logp - old_logp over the masked tokens of each token's sequence [M], without gradients."""
    gap_M = (tokens.logp_M - tokens.old_logp_M).detach()
    if mask_M is None:
        mask_M = tokens.weight_M
    # not a product with the mask: an infinite gap of an unmarked token would give NaN
    sum_M = sequence_sum(torch.where(mask_M != 0, gap_M, 0.0), sequence_M)
    return sum_M / sequence_sum((mask_M != 0).to(gap_M.dtype), sequence_M).clamp(min=1)


def sequence_sum(value_M: Tensor, sequence_M: Tensor) -> Tensor:
    """Returns the sum of the values of each token's sequence [M]."""
    count = int(sequence_M.max()) + 1 if len(sequence_M) else 0
    return value_M.new_zeros(count).index_add_(0, sequence_M, value_M)[sequence_M]


def _ratio(tokens: LossInputs) -> Tensor:
    return torch.exp(tokens.logp_M - tokens.old_logp_M)


def _between(ratio: Tensor, low: Bound, high: Bound) -> Tensor:
    """Clamps `ratio`. One bound at a time, since `clamp` does not accept a number and a tensor together."""
    return ratio.clamp(min=low).clamp(max=high)


def _clipped_surrogate(
    tokens: LossInputs, ratio: Tensor, low: Bound, high: Bound, dual_clip: float | None = None
) -> tuple[Tensor, TensorMetrics]:
    """Returns the loss -min(ratio * advantage, clipped ratio * advantage) and its metrics. `dual_clip` limits the loss
    of a token with negative advantage to that many times its advantage."""
    worth = ratio * tokens.advantage_M
    with torch.no_grad():  # a token whose value a bound changes has no gradient, so autograd need not see the bounds
        bounded = torch.minimum(worth, _between(ratio, low, high) * tokens.advantage_M)
        if dual_clip is not None:
            least = torch.where(tokens.advantage_M < 0, dual_clip * tokens.advantage_M, -torch.inf)
            bounded = torch.maximum(bounded, least)
        silenced = bounded != worth
    worth = torch.where(silenced, bounded, worth)
    loss = -(tokens.weight_M * worth).sum()
    return loss, {"clip_fraction": (tokens.weight_M * silenced).sum(), **_policy_drift(tokens)}


def _policy_drift(tokens: LossInputs) -> TensorMetrics:
    """Returns the KL divergence from the policy before the update (k3 of the inverse ratio), and the entropy."""
    with torch.no_grad():
        gap = tokens.logp_M - tokens.old_logp_M
        return {
            "kl": (tokens.weight_M * (torch.exp(gap) - 1 - gap)).sum(),
            "entropy": (tokens.weight_M * tokens.entropy_M).sum(),
        }


LOSSES: dict[str, Callable[..., tuple[Tensor, TensorMetrics]]] = {
    "clipped_policy": clipped_policy_loss,
    "actor_critic": actor_critic_loss,
    "cross_entropy": cross_entropy_loss,
    "importance_sampling": importance_sampling_loss,
    "cispo": cispo_loss,
    "dro": dro_loss,
    "gspo": gspo_loss,
}
