"""Settings of GRPO and its variants: their bounds, which of them fit together, and the options of the loss."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from palestra.core.losses import LOSSES, KLEstimator, LossFunction
from palestra.text.algorithms.groups import GroupAlgorithm
from palestra.text.algorithms.joint_credit import Credit
from palestra.text.credit.importance import ImportanceSampling
from palestra.text.rollouts.tree_rollout import Branching, Joints

Baseline = Literal["mean", "others", "max", "none", "batch", "role"]
Scale = Literal["std", "none", "batch"]


class GRPOConfig(ImportanceSampling, GroupAlgorithm):
    """Base config of GRPO."""

    group_size: int = Field(8, ge=1, le=4096)
    """Siblings per group (group size). 1 needs `baseline: batch`, `role` or `none`."""
    joints: Joints = "paired"
    """Seats that act at once: `paired` joins first answers with first, second with second; `crossed` evaluates all
    combinations of their answers."""
    credit: Credit = "group"
    """`group` compares values within a group; `counterfactual` and `shapley` split a team's value between its seats
    (implies crossed joint answers)."""
    baseline: Baseline = "mean"
    """Subtracted from a value: the `mean` of its group; the mean of the `others` in it (RLOO, Ahmadian et al., 2024);
    the `max` of its group (MAReMax of CoMLRL); nothing, `none` (REINFORCE); the mean of the policy's whole `batch`
    (REINFORCE++, Hu, 2025); the moving average of its seat in its env, `role` (RAE; SPIRAL, Liu et al., 2025)."""
    scale: Scale = "std"
    """Divisor of advantages: the group's `std`, `none` (Dr. GRPO, Liu et al., 2025), or the deviation over the policy's
    whole `batch` (REINFORCE++)."""
    supervision: Literal["outcome", "process", "turn", "state"] = "outcome"
    """What the rewards of turns are credited to, with `branch_at: root`. `outcome`: a trajectory's return to all its
    turns. `process`: rewards of all turns of a group are normalised together, and a turn's advantage is the sum of its
    own and the later ones (Shao et al., 2024, sec. 4.1.3). `turn`: the return from a turn on is compared with the
    siblings' returns from the same turn on. `state`: with the returns from all turns of the batch in which the seat
    had the same observation (the step level of GiGPO, Feng et al., 2025), for envs whose states recur, as boards do."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount of later rewards per turn of the seat, with any `supervision` but `outcome`."""
    loss_aggregation: Literal["token", "sequence", "trajectory", "constant"] = "token"
    """Loss aggregation: `token` gives every token the same weight (DAPO), `sequence` every answer (Shao et al., 2024),
    `trajectory` every sibling, all turns of a trajectory together; `constant` divides the sum over an answer's tokens
    by `max_completion_length` (Dr. GRPO)."""
    flat_groups: Literal["count", "skip", "refill"] = "count"
    """Groups whose values are all equal: `count` keeps them in the mean (with advantage 0), `skip` leaves them out,
    `refill` also plays another instance in place of an episode that has no other groups (DAPO's dynamic sampling)."""
    refill_attempts: int = Field(10, ge=1, le=15)
    """With `flat_groups: refill`, the largest number of instances played in place of one; the last is kept."""
    max_completion_length: int | None = Field(None, ge=1)
    """Token limit of an answer, L_max, for `overlong: penalty` and `loss_aggregation: constant`; null: the policies'
    `sampling.max_tokens`."""
    overlong: Literal["keep", "drop", "penalty"] = "keep"
    """`drop` does not train on answers cut at the token limit; they still count in the baseline and in the mean (DAPO's
    overlong filter). `penalty` subtracts up to 1 from the value of an answer that comes near the limit (DAPO's soft
    overlong punishment)."""
    overlong_buffer: int | None = Field(None, ge=1)
    """With `overlong: penalty`, the tokens before the limit over which the penalty rises from 0 to 1, at most
    `max_completion_length`; null: a fifth of it, as in DAPO."""
    surrogate: Literal["clipped", "cispo", "gspo"] = "clipped"
    """Objective: `clipped` (PPO); `cispo` clips the weight, not the gradient, from above only; `gspo` uses
    sequence-level ratios and needs bounds about a hundred times closer."""
    clip: float = Field(0.2, gt=0)
    """Lower clipping distance: the probability ratio is clipped at 1 - clip. Without effect with `surrogate:
    cispo`."""
    clip_high: float | None = Field(None, gt=0)
    """Upper clipping distance (DAPO's clip-higher). Null uses `clip`, and with `surrogate: cispo` 3.0 (ScaleRL, Khatri
    et al., 2025)."""
    dual_clip: float | None = Field(None, gt=1)
    """Bounds the loss of a token with negative advantage to this multiple of the advantage; above 1, only with
    `surrogate: clipped`."""
    kl_coef: float = Field(0.0, ge=0)
    """Coefficient of the KL penalty to the reference policy, in the loss or, with `kl_in_reward`, in the reward."""
    kl_in_reward: bool = False
    """Subtracts the penalty from the rewards instead of adding it to the loss: `kl_coef` times log-probability minus
    reference log-probability of every token (k1). A value contains the penalty of the whole answer or trajectory
    (RLOO); with `baseline: batch` or `role` a token's advantage contains it from that token on (REINFORCE++)."""
    kl_estimator: KLEstimator = "k3"
    """Estimator of the penalty in the loss: `k3` (Shao et al., 2024), `k2`, whose gradient is unbiased, or `k1`, which
    needs `kl_importance_weight`."""
    kl_importance_weight: bool = False
    """Multiplies the penalty in the loss by the probability ratio to the policy before the update, which makes the
    gradient of `k1` and `k3` unbiased (DeepSeek-V3.2, 2025)."""
    entropy_coef: float = 0.0
    """Coefficient of the entropy bonus."""

    @property
    def branching(self) -> Branching:
        return replace(super().branching, joints="crossed" if self._is_crossed else "paired")

    @property
    def _is_crossed(self) -> bool:
        return self.joints == "crossed" or self.credit != "group"

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.dual_clip and self.surrogate != "clipped":
            raise ValueError(f"dual_clip applies only to surrogate: clipped, not to {self.surrogate}: leave it out")
        return self

    @model_validator(mode="after")
    def _check_buffer(self) -> Self:
        self.check_overlong_buffer()
        return self

    def check_overlong_buffer(self) -> None:
        """Raises ValueError if the known token limit is shorter than `overlong_buffer`: the penalty would begin below 0
        tokens."""
        limit = self.max_completion_length
        buffer = self.overlong_buffer
        if self.overlong == "penalty" and limit is not None and buffer is not None and buffer > limit:
            raise ValueError(
                f"overlong_buffer: {buffer} is longer than the token limit of {limit} (max_completion_length, or the "
                "policies' sampling.max_tokens), so that even an empty answer would be penalised: lower "
                "overlong_buffer, or leave it out for a fifth of the limit"
            )

    @model_validator(mode="after")
    def _check_kl(self) -> Self:
        chosen = sorted({"kl_estimator", "kl_importance_weight"} & self.model_fields_set)
        if self.kl_in_reward and (self.kl_importance_weight or self.kl_estimator != "k3"):
            raise ValueError(
                f"{chosen[0]} is for a KL penalty in the loss, and kl_in_reward: true puts it into the reward, as k1: "
                f"leave {chosen[0]} out, or set kl_in_reward: false"
            )
        if self.kl_estimator == "k2" and self.kl_importance_weight:
            raise ValueError(
                "kl_importance_weight: true is for k1 and k3, and the gradient of kl_estimator: k2 is unbiased without "
                "it: leave it out"
            )
        if self.kl_estimator == "k1" and not self.kl_importance_weight:
            raise ValueError(
                "kl_estimator: k1 in the loss has a gradient that averages to 0, so it does not hold the policy near "
                "its reference: set kl_importance_weight: true, kl_in_reward: true, or kl_estimator: k2"
            )
        return self

    @model_validator(mode="after")
    def _check_baseline(self) -> Self:
        alone = self.baseline in ("batch", "role")
        compares_beyond = alone or self.supervision == "state" or self.baseline == "none"
        if self.group_size < 2 and not compares_beyond:
            raise ValueError(
                "group_size: 1 leaves an answer no sibling to compare it with: raise group_size, or set baseline: "
                "batch, role or none, or supervision: state"
            )
        if self.baseline in ("max", "none") and self.scale == "std":
            raise ValueError(
                f"scale: std divides differences from the mean, and baseline: {self.baseline} does not subtract a "
                "mean: set scale: batch or none"
            )
        if alone and self.scale == "std":
            raise ValueError(
                f"baseline: {self.baseline} compares values beyond the group, and scale: std divides within the group: "
                "set scale: batch or none"
            )
        if alone and self.credit != "group":
            raise ValueError(f"credit: {self.credit} compares siblings: set baseline: mean or others")
        return self

    @model_validator(mode="after")
    def _check_joints(self) -> Self:
        if self._is_crossed and self.branch_at == "root":
            raise ValueError(
                "crossed joint answers need branching at each step: set branch_at: turn, or joints: paired and "
                "credit: group"
            )
        return self

    @model_validator(mode="after")
    def _check_supervision(self) -> Self:
        if self.supervision == "outcome":
            if self.gamma != 1:
                raise ValueError(
                    "gamma discounts the rewards of turns: set supervision: process, turn or state, or gamma: 1"
                )
            return self
        chosen = f"supervision: {self.supervision}"
        if self.branch_at == "turn":
            raise ValueError(
                f"{chosen} credits the turns of whole trajectories, and branch_at: turn already compares the answers "
                "of one turn: set branch_at: root"
            )
        fitting = ("mean", "none") if self.supervision == "process" else ("mean", "others", "max", "none")
        if self.baseline not in fitting or self.scale == "batch":
            raise ValueError(
                f"{chosen} compares rewards within a group: set baseline: {' or '.join(fitting)}, and scale: std or "
                "none"
            )
        if self.kl_in_reward:
            raise ValueError(
                f"{chosen} uses only the env's rewards: set kl_in_reward: false, for a KL penalty in the loss"
            )
        return self

    @model_validator(mode="after")
    def _check_refill(self) -> Self:
        if self.flat_groups == "refill" and self.supervision == "state":
            raise ValueError(
                "flat_groups: refill looks at one episode, and supervision: state compares the turns of all: set "
                "flat_groups: count or skip"
            )
        if self.flat_groups == "refill" and self.baseline in ("batch", "role", "none"):
            raise ValueError(
                f"flat_groups: refill needs values that are compared with their siblings', and baseline: "
                f"{self.baseline} does not compare with them: set baseline: mean or others, or flat_groups: count"
            )
        return self

    @property
    def compares_trajectories(self) -> bool:
        return self.supervision == "outcome" and self.baseline not in ("batch", "role")

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef > 0

    @property
    def needs_max_length(self) -> bool:
        """True if `max_completion_length` is needed and not set."""
        return self.max_completion_length is None and (
            self.overlong == "penalty" or self.loss_aggregation == "constant"
        )

    @property
    def max_redraws(self) -> int:
        return self.refill_attempts if self.flat_groups == "refill" else 0

    @property
    def _penalises(self) -> bool:
        """True if values contain a KL penalty."""
        return self.kl_in_reward and self.kl_coef > 0

    @property
    def _kl_in_loss(self) -> bool:
        return self.kl_coef > 0 and not self.kl_in_reward

    @property
    def loss(self) -> LossFunction:
        return LOSSES["clipped_policy" if self.surrogate == "clipped" else self.surrogate]

    @property
    def loss_options(self) -> dict[str, Any]:
        high = self.clip if self.clip_high is None else self.clip_high
        bounds: dict[str, dict[str, Any]] = {
            "clipped": {"clip": self.clip, "clip_high": self.clip_high, "dual_clip": self.dual_clip},
            "cispo": {"clip_high_threshold": None if self.clip_high is None else 1 + high},
            "gspo": {"clip_low_threshold": 1 - self.clip, "clip_high_threshold": 1 + high},
        }
        options = bounds[self.surrogate] | {"entropy": self.entropy_coef or None}
        if self._kl_in_loss:
            estimator = None if self.kl_estimator == "k3" else self.kl_estimator
            options |= {"kl": self.kl_coef, "kl_importance_weight": self.kl_importance_weight or None}
            options |= {"kl_estimator": estimator}
        return {name: value for name, value in options.items() if value is not None} | self.importance_options
