"""Group-relative policy optimisation (Shao et al., 2024), for single agents and for teams.

A group is a set of siblings: answers that share one starting point. With `branch_at: root` it is K whole trajectories
from one first step, scored by their returns (MAS + GRPO for a team). With `branch_at: turn, continue_from: best`
it is the K answers of one seat to one observation, scored by the mixed reward of that step, and the episode continues
from the best: AT-GRPO (Zhao et al., 2025, arXiv:2510.11062). A group never spans two episodes, two seats or two
observations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, Self, cast

import numpy as np
from pydantic import Field, model_validator

from palestra.algorithms.text.base import add_reference_logprobs, build_sample, skip_at_reference
from palestra.algorithms.text.credit import (
    FLAT,
    Array,
    batch_advantages,
    batch_spread,
    counterfactual_credit,
    credit_in_context,
    group_advantages,
    role_advantages,
    shapley_credit,
    total_effect_index,
)
from palestra.algorithms.text.groups import GroupAlgorithm, SiblingGroup
from palestra.algorithms.text.importance import ImportanceSampling, add_old_logprobs
from palestra.algorithms.text.kl_reward import (
    Gaps,
    UncreditedSample,
    earlier_penalties,
    penalty_of,
    reference_gaps,
    uncredited_samples,
    write_penalties,
)
from palestra.learners.base import Learner
from palestra.losses.policy import LOSSES, KLEstimator
from palestra.rollouts.metrics import member_name
from palestra.rollouts.tree_rollout import Branching, Joints
from palestra.types import AlgorithmState, Answer, Episode, Metrics, Node, Sample, Seat

Baseline = Literal["mean", "others", "batch", "role"]
Scale = Literal["std", "none", "batch"]
Credit = Literal["group", "counterfactual", "shapley"]
CREDIT_FUNCTIONS: dict[str, Callable[[Array, int], Array]] = {
    "counterfactual": counterfactual_credit,
    "shapley": shapley_credit,
}
ROLE_BASELINES_KEY = "roles"  # key in `memory`: moving average of returns by env and seat


class GRPO(ImportanceSampling, GroupAlgorithm):
    """GRPO, AT-GRPO and variants. The mean of the loss counts every sampled answer, also those with advantage 0.

    With crossed joint answers an answer's value is its mean over the joint answers that contain it; with `credit:
    counterfactual` or `shapley` it is its credit in the joint answer that the episode continued from, see credit.py.
    """

    type: Literal["grpo"] = "grpo"
    """Selects GRPO."""
    group_size: int = Field(8, ge=1, le=4096)
    """Siblings per group (group size). 1 needs `baseline: batch` or `role`."""
    joints: Joints = "paired"
    """Seats that act at once: `paired` joins first answers with first, second with second; `crossed` evaluates all
    combinations of their answers."""
    credit: Credit = "group"
    """`group` compares values within a group; `counterfactual` and `shapley` split a team's value between its seats
    (implies crossed joint answers)."""
    baseline: Baseline = "mean"
    """Subtracted from a value: the `mean` of its group; the mean of the `others` in it (RLOO, Ahmadian et al., 2024);
    the mean of the policy's whole `batch` (REINFORCE++, Hu, 2025); the moving average of its seat in its env, `role`
    (RAE; SPIRAL, Liu et al., 2025)."""
    scale: Scale = "std"
    """Divisor of advantages: the group's `std`, `none` (Dr. GRPO, Liu et al., 2025), or the deviation over the policy's
    whole `batch` (REINFORCE++)."""
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
    overlong filter). `penalty` subtracts up to 1 from the value of an answer that comes near the limit (its soft
    overlong punishment)."""
    overlong_buffer: int | None = Field(None, ge=1)
    """With `overlong: penalty`, the tokens before the limit over which the penalty rises from 0 to 1; null: a fifth of
    `max_completion_length`, as in DAPO."""
    surrogate: Literal["clipped", "cispo", "gspo"] = "clipped"
    """Objective: `clipped` (PPO); `cispo` clips the weight, not the gradient, from above only; `gspo` uses
    sequence-level ratios and needs bounds about a hundred times closer."""
    clip: float = Field(0.2, gt=0)
    """Lower clipping distance of the probability ratio: it is kept above 1 - clip."""
    clip_high: float | None = Field(None, gt=0)
    """Upper clipping distance (DAPO's clip-higher); null uses `clip`."""
    dual_clip: float | None = Field(None, gt=1)
    """Bounds the loss of a token with negative advantage to this multiple of it; above 1, only with `surrogate:
    clipped`."""
    kl_coef: float = Field(0.0, ge=0)
    """Coefficient of the KL penalty to the reference policy, in the loss or, with `kl_in_reward`, in the reward."""
    kl_in_reward: bool = False
    """Subtracts the penalty from the rewards instead of adding it to the loss: `kl_coef` times log-probability minus
    reference log-probability of every token (k1). A value contains it for the whole answer or trajectory (RLOO); with
    `baseline: batch` or `role` a token's advantage contains it from the token on (REINFORCE++)."""
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
        return replace(super().branching, joints="crossed" if self._crossed else "paired")

    @property
    def _crossed(self) -> bool:
        return self.joints == "crossed" or self.credit != "group"

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.dual_clip and self.surrogate != "clipped":
            raise ValueError(f"dual_clip is of surrogate: clipped, and {self.surrogate} has none: leave it out")
        return self

    @model_validator(mode="after")
    def _estimated(self) -> Self:
        chosen = sorted({"kl_estimator", "kl_importance_weight"} & self.model_fields_set)
        if self.kl_in_reward and (self.kl_importance_weight or self.kl_estimator != "k3"):
            raise ValueError(
                f"{chosen[0]} is of a KL penalty in the loss, and kl_in_reward: true puts it into the reward, as k1: "
                f"leave {chosen[0]} out, or set kl_in_reward: false"
            )
        if self.kl_estimator == "k2" and self.kl_importance_weight:
            raise ValueError(
                "kl_importance_weight: true is for k1 and k3, and the gradient of kl_estimator: k2 is unbiased without "
                "it: leave it out"
            )
        if self.kl_estimator == "k1" and not self.kl_importance_weight:
            raise ValueError(
                "kl_estimator: k1 in the loss has a gradient that averages to 0 and holds nothing: set "
                "kl_importance_weight: true, kl_in_reward: true, or kl_estimator: k2"
            )
        return self

    @model_validator(mode="after")
    def _measured(self) -> Self:
        alone = self.baseline in ("batch", "role")
        if self.group_size < 2 and not alone:
            raise ValueError(
                "group_size: 1 leaves an answer no sibling to compare it with: raise group_size, or set baseline: "
                "batch or role"
            )
        if alone and self.scale == "std":
            raise ValueError(
                f"baseline: {self.baseline} looks beyond the group, and scale: std does not: set scale: batch or none"
            )
        if alone and self.credit != "group":
            raise ValueError(f"credit: {self.credit} is among siblings: set baseline: mean or others")
        return self

    @model_validator(mode="after")
    def _joined(self) -> Self:
        if self._crossed and self.branch_at == "root":
            raise ValueError(
                "crossed joints are of single steps: set branch_at: turn, or joints: paired and credit: group"
            )
        return self

    @model_validator(mode="after")
    def _refilled(self) -> Self:
        if self.flat_groups == "refill" and self.baseline in ("batch", "role"):
            raise ValueError(
                f"flat_groups: refill needs groups of siblings, and baseline: {self.baseline} compares with others: "
                "set baseline: mean or others, or flat_groups: count"
            )
        return self

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

    def has_signal(self, episode: Episode) -> bool:
        """True if the siblings of some group of model answers differ in reward (without the overlong penalty), or the
        episode failed."""
        plain = self.model_copy(update={"overlong": "keep"})
        groups = (group for group in plain.groups(episode) if _has_tokens(group))
        return episode.error is not None or any(np.std(group.values) >= FLAT for group in groups)

    def reward(self, node: Node, seat: Seat) -> float:
        """Returns what a node adds to the value of a seat's answers, minus the penalties of `overlong: penalty` and
        `kl_in_reward`."""
        held = penalty_of(node, seat) if self._penalises else 0.0
        return super().reward(node, seat) - self._length_penalty(node.answers.get(seat)) - held

    @property
    def _penalises(self) -> bool:
        """True if values contain a KL penalty."""
        return self.kl_in_reward and self.kl_coef > 0

    def _length_penalty(self, answer: Answer | None) -> float:
        limit = self.max_completion_length
        if answer is None or self.overlong != "penalty" or limit is None:
            return 0.0
        return overlong_penalty(len(answer.token_ids), limit, self.overlong_buffer or max(1, limit // 5))

    @property
    def loss(self) -> Callable:
        return LOSSES["clipped_policy" if self.surrogate == "clipped" else self.surrogate]

    @property
    def loss_options(self) -> dict[str, Any]:
        high = self.clip if self.clip_high is None else self.clip_high
        bounds: dict[str, dict[str, Any]] = {
            "clipped": {"clip": self.clip, "clip_high": self.clip_high, "dual_clip": self.dual_clip},
            "cispo": {"clip_high_threshold": 1 + high},
            "gspo": {"clip_low_threshold": 1 - self.clip, "clip_high_threshold": 1 + high},
        }
        options = bounds[self.surrogate] | {"entropy": self.entropy_coef}
        if self._kl_in_loss:
            estimator = None if self.kl_estimator == "k3" else self.kl_estimator
            options |= {"kl": self.kl_coef, "kl_importance_weight": self.kl_importance_weight}
            options |= {"kl_estimator": estimator}
        return {name: value for name, value in options.items() if value} | self.importance_options

    def build_samples(
        self, episodes: Sequence[Episode], policy: str, memory: AlgorithmState | None = None
    ) -> tuple[list[Sample], Metrics]:
        """Returns the samples of `policy`, and metrics; writes every answer's advantage to its node.

        An answer with advantage 0 has a gradient only from a KL penalty or an entropy bonus; it counts in the mean
        either way. `groups` counts groups, `zero_std_fraction` is the share of them without advantages. With crossed
        joint answers, each seat's contribution is added (see `contribution_metrics`).
        """
        if self.needs_max_length:
            raise ValueError(
                "overlong: penalty and loss_aggregation: constant need the token limit: set max_completion_length"
            )
        if self._penalises:
            pending: list[Sample] = [*uncredited_samples(self.policy_groups(episodes, policy), episodes, policy)]
            if pending:
                return pending, {}
        return self._credit(episodes, policy, {} if memory is None else memory, {})

    def _credit(
        self, episodes: Sequence[Episode], policy: str, memory: AlgorithmState, gaps: Gaps
    ) -> tuple[list[Sample], Metrics]:
        """Returns samples and metrics, see `build_samples`; `gaps` are the answers' log-ratios to the reference of a
        KL penalty in the rewards, which the nodes already have."""
        groups = [(e.env, group) for e in episodes for group in self.policy_groups([e], policy)]
        flat = self._flat_groups([group for _, group in groups], episodes, policy)
        advantages = self._advantages(groups, flat, memory)
        spread = batch_spread(advantages) if self.scale == "batch" and not all(flat) else 1.0
        samples: list[Sample] = []
        for (_, group), own in zip(groups, advantages, strict=True):
            added = self._annotate(group, [value / spread for value in own], gaps, spread)
            samples += [] if self._is_skipped(own) else added
        without = sum(not any(own) for own in advantages)
        metrics = {"groups": float(len(groups)), "zero_std_fraction": without / len(groups) if groups else 0.0}
        return samples, metrics | (self._contributions(episodes, policy) if self._crossed else {})

    async def finalize_samples(
        self, samples: list[Sample], learner: Learner, memory: AlgorithmState
    ) -> tuple[list[Sample], Metrics]:
        metrics: Metrics = {}
        if self._penalises and samples:
            samples, metrics = await self._penalised(samples, learner, memory)
        elif self.kl_coef and not self.entropy_coef:
            samples = skip_at_reference(samples, learner)
        if not any(sample.has_gradient for sample in samples):
            return samples, metrics
        if self._kl_in_loss:
            samples = await add_reference_logprobs(samples, learner)
        return (await add_old_logprobs(samples, learner) if self.old_logprobs == "trainer" else samples), metrics

    async def _penalised(
        self, samples: list[Sample], learner: Learner, memory: AlgorithmState
    ) -> tuple[list[Sample], Metrics]:
        """Returns the samples with advantages from rewards with a KL penalty, and metrics; `reference_kl` is the mean
        log-ratio to the reference of a token."""
        shared = cast(UncreditedSample, samples[0])
        gaps = await reference_gaps(samples, learner)
        write_penalties(self.policy_groups(shared.episodes, shared.policy), gaps, self.kl_coef)
        credited, metrics = self._credit(shared.episodes, shared.policy, memory, gaps)
        return credited, metrics | {"reference_kl": float(np.concatenate(list(gaps.values())).mean())}

    @property
    def _kl_in_loss(self) -> bool:
        return self.kl_coef > 0 and not self.kl_in_reward

    def _flat_groups(self, groups: Sequence[SiblingGroup], episodes: Sequence[Episode], policy: str) -> list[bool]:
        """Returns whether each group's rewards are equal, without the KL penalty. Its advantages are then the
        penalty's alone, and dividing by their deviation would make them as large as any reward's. With `baseline:
        batch` or `role` the rewards of all groups are compared."""
        if not self._penalises:
            return [False] * len(groups)
        plain = self.model_copy(update={"kl_in_reward": False}).policy_groups(episodes, policy)
        if self.baseline in ("batch", "role"):
            rewards = np.concatenate([np.zeros(0), *(group.values for group in plain)])
            return [bool(len(rewards) and rewards.std() < FLAT)] * len(groups)
        return [bool(np.std(group.values) < FLAT) for group in plain]

    def _is_skipped(self, advantages: Sequence[float]) -> bool:
        """True if a group with these advantages is left out of the mean."""
        return self.flat_groups != "count" and len(advantages) > 1 and not any(advantages)

    def groups(self, episode: Episode) -> Iterator[SiblingGroup]:
        """Yields the groups of an episode, every answer once; none if it failed."""
        for group in super().groups(episode):
            yield credit_group(group, self.credit) if self._crossed else group

    def _advantages(
        self, groups: Sequence[tuple[str, SiblingGroup]], flat: Sequence[bool], memory: AlgorithmState
    ) -> list[list[float]]:
        """Returns the advantages of each (env, group) before scaling by the batch; `flat` groups are not scaled."""
        if self.baseline == "batch":
            return batch_advantages([group.values for _, group in groups])
        if self.baseline == "role":
            roles = memory.setdefault(ROLE_BASELINES_KEY, {})
            return [_beside_role(group, roles.setdefault(env, {})) for env, group in groups]
        scale: Literal["std", "none"] = "std" if self.scale == "std" else "none"
        return [
            group_advantages(group.values, baseline=self.baseline, scale="none" if even else scale)
            for (_, group), even in zip(groups, flat, strict=True)
        ]

    def _annotate(self, group: SiblingGroup, advantages: Sequence[float], gaps: Gaps, spread: float) -> list[Sample]:
        """Writes the advantages to the group's nodes; returns a sample of each answer that has tokens. With `gaps` and
        `baseline: batch` or `role` tokens get back the KL penalty of those before them, divided by `spread`."""
        samples = []
        for nodes, advantage in zip(group.nodes, advantages, strict=True):
            for node in nodes:
                node.advantages[group.seat] = advantage
            answers = {id(node.answers[group.seat]): node.answers[group.seat] for node in nodes}.values()
            answered = [answer for answer in answers if len(answer.token_ids)]
            whole = sum(len(answer.token_ids) for answer in answered)
            added = [self._sample(answer, advantage, whole) for answer in answered]
            if gaps and self.baseline in ("batch", "role"):
                pasts = earlier_penalties(answered, gaps, self.kl_coef)
                added = [
                    self._without_past(sample, answer, past / spread)
                    for sample, answer, past in zip(added, answered, pasts, strict=True)
                ]
            samples += added
        return samples

    def _without_past(self, sample: Sample, answer: Answer, past: np.ndarray) -> Sample:
        """Returns the sample with advantages that do not contain the penalty `past` [T] of earlier tokens."""
        advantages = (sample.advantages + past).astype(np.float32)
        learns = not self._is_masked(answer) and (bool(advantages.any()) or self.entropy_coef != 0)
        return replace(sample, advantages=advantages, has_gradient=learns)

    def _sample(self, answer: Answer, advantage: float, trajectory_tokens: int) -> Sample:
        """Returns the sample of an answer of a trajectory with `trajectory_tokens` tokens of the seat."""
        length = len(answer.token_ids)
        weight = {"sequence": 1 / length, "trajectory": 1 / trajectory_tokens}.get(self.loss_aggregation, 1.0)
        regularised = self._kl_in_loss or self.entropy_coef != 0
        return build_sample(
            answer,
            np.full(length, advantage, np.float32),
            weight=weight,
            denominator=self.max_completion_length if self.loss_aggregation == "constant" else None,
            has_gradient=not self._is_masked(answer) and (advantage != 0 or regularised),
        )

    def _is_masked(self, answer: Answer) -> bool:
        return self.overlong == "drop" and answer.stop_reason == "length"

    def _contributions(self, episodes: Sequence[Episode], policy: str) -> Metrics:
        """Returns the contribution of each seat of `policy`, averaged over the joint steps of several seats."""
        found: dict[str, list[float]] = {}
        for episode in episodes:
            for group in super().groups(episode):
                answers = group.nodes[0][0].answers
                if len(answers) > 1 and member_name(answers[group.seat].policy) == policy:
                    for name, figure in contribution_metrics(group, self.branching.score).items():
                        found.setdefault(f"{name}/{group.seat}", []).append(figure)
        return {name: float(np.mean(metrics)) for name, metrics in found.items()}


def overlong_penalty(length: int, limit: int, buffer: int) -> float:
    """Returns DAPO's soft overlong penalty of an answer of `length` tokens, from 0 to 1 (Yu et al., 2025, eq. 13,
    negated): 0 up to `buffer` tokens before `limit`, then rising in proportion to 1 at `limit`."""
    return min(max((length - (limit - buffer)) / buffer, 0.0), 1.0)


def _has_tokens(group: SiblingGroup) -> bool:
    return any(len(node.answers[group.seat].token_ids) for nodes in group.nodes for node in nodes)


def credit_group(group: SiblingGroup, credit: Credit) -> SiblingGroup:
    """Returns a seat's crossed siblings as a group that contains every answer once. With `credit: group` an answer's
    value is its mean over the joint answers that contain it; otherwise its credit had it been given in the joint
    answers that the episode continued from. Raises ValueError if the siblings are not all combinations."""
    siblings, places, seat = _seated(group)
    q = value_table(places, group.values)
    if credit == "group":
        values = q.mean(axis=tuple(axis for axis in range(q.ndim) if axis != seat))
    else:
        values = credit_in_context(CREDIT_FUNCTIONS[credit](q, seat), seat, places[[node.chosen for node in siblings]])
    nodes = [[siblings[i] for i in np.flatnonzero(places[:, seat] == answer)] for answer in range(len(values))]
    return SiblingGroup(group.seat, values.tolist(), nodes)


def contribution_metrics(group: SiblingGroup, score: Callable[[Node], float]) -> Metrics:
    """Returns `counterfactual` and `shapley`, the credit of a seat's answer in the joint answers that the episode
    continued from, and the seat's `influence`; `score` gives the value of a joint answer to the team. Raises ValueError
    if the siblings are not all combinations."""
    siblings, places, seat = _seated(group)
    q = value_table(places, [score(node) for node in siblings])
    kept = tuple(places[[node.chosen for node in siblings]].T)
    due = {name: float(credit(q, seat)[kept].mean()) for name, credit in CREDIT_FUNCTIONS.items()}
    return due | {"influence": total_effect_index(q, seat)}


def _seated(group: SiblingGroup) -> tuple[list[Node], np.ndarray, int]:
    """Returns the siblings, their answer indices [J, N], and the axis of the group's seat."""
    siblings = [node for (node,) in group.nodes]
    return siblings, answer_indices(siblings), list(siblings[0].answers).index(group.seat)


def answer_indices(siblings: Sequence[Node]) -> np.ndarray:
    """Returns the answer index of each seat in each sibling [J, N] int64, numbered by first appearance. Raises
    ValueError if the siblings are not all combinations of the seats' answers."""
    places = np.zeros((len(siblings), len(siblings[0].answers)), np.int64)
    for axis, seat in enumerate(siblings[0].answers):
        seen: dict[int, int] = {}
        places[:, axis] = [seen.setdefault(id(node.answers[seat]), len(seen)) for node in siblings]
    if len(np.unique(places, axis=0)) != len(siblings) or len(siblings) != np.prod(places.max(axis=0) + 1):
        raise ValueError(
            f"{len(siblings)} siblings are not every combination of what {', '.join(siblings[0].answers)} answered: "
            "credit across seats needs episodes played with joints: crossed"
        )
    return places


def value_table(places: np.ndarray, values: Sequence[float]) -> Array:
    """Returns the value of each joint answer [K, ..., K] float64, from the values of siblings at indices `places` [J,
    N]."""
    q = np.empty(places.max(axis=0) + 1)
    q[tuple(places.T)] = values
    return q


def _beside_role(group: SiblingGroup, averages: dict[str, float]) -> list[float]:
    advantages, averages[group.seat] = role_advantages(group.values, averages.get(group.seat, 0.0))
    return advantages
