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
from typing import Literal, Self

import numpy as np
from pydantic import Field, model_validator

from palestra.algorithms.text.base import add_reference_logprobs, apply_importance_weights, build_sample
from palestra.algorithms.text.credit import (
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
from palestra.learners.base import Learner
from palestra.losses.policy import LOSSES
from palestra.rollouts.metrics import member_name
from palestra.rollouts.tree_rollout import Branching, Joints
from palestra.types import AlgorithmState, Answer, Episode, Metrics, Node, Sample

Baseline = Literal["mean", "others", "batch", "role"]
Scale = Literal["std", "none", "batch"]
Credit = Literal["group", "counterfactual", "shapley"]
CREDIT_FUNCTIONS: dict[str, Callable[[Array, int], Array]] = {
    "counterfactual": counterfactual_credit,
    "shapley": shapley_credit,
}
ROLE_BASELINES_KEY = "roles"  # key in `memory`: moving average of returns by env and seat


class GRPO(GroupAlgorithm):
    """GRPO, AT-GRPO and variants. A group whose advantages are all zero is skipped (DAPO's filter, Yu et al., 2025).

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
    loss_aggregation: Literal["token", "sequence"] = "token"
    """Loss aggregation: `token` gives every token the same weight (DAPO), `sequence` every answer (Shao et al.,
    2024)."""
    overlong: Literal["keep", "drop"] = "keep"
    """`drop` does not train on answers cut at the token limit; they still count in the baseline (DAPO's overlong
    filter)."""
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
    importance_cap: float | None = Field(None, gt=0)
    """Cap of the importance ratio between current weights and sampling policy, for stale samples; null applies no
    correction."""
    kl_coef: float = Field(0.0, ge=0)
    """Coefficient of the KL penalty to the reference policy, in the loss."""
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

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef > 0

    @property
    def loss(self) -> Callable:
        return LOSSES["clipped_policy" if self.surrogate == "clipped" else self.surrogate]

    @property
    def loss_options(self) -> dict[str, float | None]:
        high = self.clip if self.clip_high is None else self.clip_high
        bounds: dict[str, dict[str, float | None]] = {
            "clipped": {"clip": self.clip, "clip_high": self.clip_high, "dual_clip": self.dual_clip},
            "cispo": {"clip_high_threshold": 1 + high},
            "gspo": {"clip_low_threshold": 1 - self.clip, "clip_high_threshold": 1 + high},
        }
        options = bounds[self.surrogate] | {"kl": self.kl_coef, "entropy": self.entropy_coef}
        return {name: value for name, value in options.items() if value}

    def build_samples(
        self, episodes: Sequence[Episode], policy: str, memory: AlgorithmState | None = None
    ) -> tuple[list[Sample], Metrics]:
        """Returns the samples of `policy` with nonzero advantages, and metrics; writes every answer's advantage to its
        node.

        `groups` counts groups, `zero_std_fraction` is the share of them without advantages. With crossed joint answers,
        each seat's contribution is added (see `contribution_metrics`).
        """
        groups = [(e.env, group) for e in episodes for group in self.policy_groups([e], policy)]
        advantages = self._advantages(groups, {} if memory is None else memory)
        spread = batch_spread(advantages) if self.scale == "batch" else 1.0
        samples: list[Sample] = []
        for (_, group), own in zip(groups, advantages, strict=True):
            samples += self._annotate(group, [value / spread for value in own])
        flat = sum(not any(own) for own in advantages)
        metrics = {"groups": float(len(groups)), "zero_std_fraction": flat / len(groups) if groups else 0.0}
        return samples, metrics | (self._contributions(episodes, policy) if self._crossed else {})

    async def finalize_samples(
        self, samples: list[Sample], learner: Learner, memory: AlgorithmState
    ) -> tuple[list[Sample], Metrics]:
        metrics: Metrics = {}
        if self.importance_cap and samples:
            samples, metrics = await apply_importance_weights(samples, learner, self.importance_cap)
        return (await add_reference_logprobs(samples, learner) if self.kl_coef and samples else samples), metrics

    def groups(self, episode: Episode) -> Iterator[SiblingGroup]:
        """Yields the groups of an episode, every answer once; none if it failed."""
        for group in super().groups(episode):
            yield credit_group(group, self.credit) if self._crossed else group

    def _advantages(self, groups: Sequence[tuple[str, SiblingGroup]], memory: AlgorithmState) -> list[list[float]]:
        """Returns the advantages of each (env, group) before scaling by the batch."""
        if self.baseline == "batch":
            return batch_advantages([group.values for _, group in groups])
        if self.baseline == "role":
            roles = memory.setdefault(ROLE_BASELINES_KEY, {})
            return [_beside_role(group, roles.setdefault(env, {})) for env, group in groups]
        scale: Literal["std", "none"] = "std" if self.scale == "std" else "none"
        return [group_advantages(group.values, baseline=self.baseline, scale=scale) for _, group in groups]

    def _annotate(self, group: SiblingGroup, advantages: Sequence[float]) -> list[Sample]:
        """Writes the advantages to the group's nodes; returns a sample of each answer that is trained on."""
        samples = []
        for nodes, advantage in zip(group.nodes, advantages, strict=True):
            for node in nodes:
                node.advantages[group.seat] = advantage
            for answer in {id(node.answers[group.seat]): node.answers[group.seat] for node in nodes}.values():
                if advantage and self._teaches(answer):
                    length = len(answer.token_ids)
                    weight = 1.0 if self.loss_aggregation == "token" else 1 / length
                    samples.append(build_sample(answer, np.full(length, advantage, np.float32), weight=weight))
        return samples

    def _teaches(self, answer: Answer) -> bool:
        return len(answer.token_ids) > 0 and not (self.overlong == "drop" and answer.stop_reason == "length")

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
