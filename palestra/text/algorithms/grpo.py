"""Group-relative policy optimisation (Shao et al., 2024), for single agents and for teams.

A group is a set of siblings: answers that share one starting point. With `branch_at: root` it is K whole trajectories
from one first step, scored by their returns (MAS + GRPO for a team). With `branch_at: turn, continue_from: best`
it is the K answers of one seat to one observation, scored by the mixed reward of that step, and the episode continues
from the best: AT-GRPO (Zhao et al., 2025, arXiv:2510.11062). A group never spans two episodes, two seats or two
observations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

import numpy as np
import numpy.typing as npt

from palestra.core.types import AlgorithmState, Answer, Episode, Metrics, Node, Sample, Seat, num_sampled
from palestra.text.algorithms.base import add_reference_logprobs, build_sample, skip_at_reference
from palestra.text.algorithms.groups import SiblingGroup
from palestra.text.algorithms.grpo_config import GRPOConfig
from palestra.text.algorithms.joint_credit import contribution_metrics, credit_group
from palestra.text.credit.estimators import (
    FLAT,
    GroupBaseline,
    batch_advantages,
    batch_spread,
    group_advantages,
    process_advantages,
    role_advantages,
    turn_advantages,
)
from palestra.text.credit.importance import add_old_logprobs
from palestra.text.learners.base import Learner
from palestra.text.rollouts.metrics import member_name

ROLE_BASELINES_KEY = "roles"  # key in `state`: moving average of returns by env and seat


class GRPO(GRPOConfig):
    """GRPO, AT-GRPO and variants. The mean of the loss counts every sampled answer, also those with advantage 0.

    With crossed joint answers, the value of an answer is the mean over the joint answers that contain it; with `credit:
    counterfactual` or `shapley` it is the answer's credit in the joint answer that the episode continued from, see
    joint_credit.py.
    """

    type: Literal["grpo"] = "grpo"
    """Selects GRPO."""

    def has_signal(self, episode: Episode) -> bool:
        """True if the siblings of some group of a policy in training differ in reward (without the overlong penalty),
        or have advantages by their turns, or the episode failed."""
        plain = self.model_copy(update={"overlong": "keep"})
        groups = (group for group in plain.groups(episode) if _is_trained(group))
        return episode.error is not None or any(plain._differs(group) for group in groups)

    def _differs(self, group: SiblingGroup) -> bool:
        if self.supervision == "outcome":
            return bool(np.std(group.values) >= FLAT)
        return any(map(any, self._by_turn(group, group.values)))

    def reward(self, node: Node, seat: Seat) -> float:
        """Returns the node's part of the value of a seat's answers, minus the penalties of `overlong: penalty` and
        `kl_in_reward`."""
        penalty = penalty_of(node, seat) if self._penalises else 0.0
        return super().reward(node, seat) - self._length_penalty(node.answers.get(seat)) - penalty

    def _length_penalty(self, answer: Answer | None) -> float:
        limit = self.max_completion_length
        if answer is None or self.overlong != "penalty" or limit is None:
            return 0.0
        return overlong_penalty(len(answer.token_ids), limit, self.overlong_buffer or max(1, limit // 5))

    def build_samples(
        self, episodes: Sequence[Episode], policy: str, state: AlgorithmState | None = None
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
        return self._credit(episodes, policy, {} if state is None else state, {})

    def _credit(
        self, episodes: Sequence[Episode], policy: str, state: AlgorithmState, gaps: Gaps
    ) -> tuple[list[Sample], Metrics]:
        """Returns samples and metrics, see `build_samples`. `gaps` are the answers' log-ratios to the reference for a
        KL penalty in the rewards (which is already written to the nodes); empty without one."""
        groups = [(e.env, group) for e in episodes for group in self.policy_groups([e], policy)]
        flat = self._flat_groups([group for _, group in groups], episodes, policy)
        advantages = self._advantages(groups, flat, state)
        spread = _spread_of_answers(groups, advantages) if self.scale == "batch" and not all(flat) else 1.0
        samples: list[Sample] = []
        by_turn = [
            self._by_turn(group, [value / spread for value in values])
            for (_, group), values in zip(groups, advantages, strict=True)
        ]
        for (_, group), turns in zip(groups, by_turn, strict=True):
            added = self._annotate(group, turns, gaps, spread)
            samples += [] if self._is_skipped(turns) else added
        without = sum(not any(map(any, turns)) for turns in by_turn)
        metrics = {"groups": float(len(groups)), "zero_std_fraction": without / len(groups) if groups else 0.0}
        return samples, metrics | (self._contributions(episodes, policy) if self._is_crossed else {})

    async def finalize_samples(
        self, samples: list[Sample], learner: Learner, state: AlgorithmState
    ) -> tuple[list[Sample], Metrics]:
        metrics: Metrics = {}
        if self._penalises and samples:
            samples, metrics = await self._credit_with_penalty(samples, learner, state)
        elif self.kl_coef and not self.entropy_coef:
            samples = skip_at_reference(samples, learner)
        if not any(sample.has_gradient for sample in samples):
            return samples, metrics
        if self._kl_in_loss:
            samples = await add_reference_logprobs(samples, learner)
        return (await add_old_logprobs(samples, learner) if self.old_logprobs == "trainer" else samples), metrics

    async def _credit_with_penalty(
        self, samples: list[Sample], learner: Learner, state: AlgorithmState
    ) -> tuple[list[Sample], Metrics]:
        """Returns the samples with advantages from rewards that include the KL penalty, and metrics; `reference_kl` is
        the mean over tokens of the log-ratio to the reference."""
        shared = cast(UncreditedSample, samples[0])
        gaps = await reference_gaps(samples, learner)
        write_penalties(self.policy_groups(shared.episodes, shared.policy), gaps, self.kl_coef)
        credited, metrics = self._credit(shared.episodes, shared.policy, state, gaps)
        return credited, metrics | {"reference_kl": float(np.concatenate(list(gaps.values())).mean())}

    def _flat_groups(self, groups: Sequence[SiblingGroup], episodes: Sequence[Episode], policy: str) -> list[bool]:
        """Returns for each group whether its rewards are equal when the KL penalty is left out. Its advantages then
        come from the penalty alone, and dividing by their deviation would make them as large as those from rewards.
        With `baseline: batch` or `role` the rewards of all groups are compared."""
        if not self._penalises:
            return [False] * len(groups)
        plain = self.model_copy(update={"kl_in_reward": False}).policy_groups(episodes, policy)
        if self.baseline in ("batch", "role"):
            rewards = np.concatenate([np.zeros(0), *(group.values for group in plain)])
            return [bool(len(rewards) and rewards.std() < FLAT)] * len(groups)
        return [bool(np.std(group.values) < FLAT) for group in plain]

    def _by_turn(self, group: SiblingGroup, advantages: Sequence[float]) -> list[list[float]]:
        """Returns the advantage of each node of each sibling; `advantages` [K] are those of the siblings' values."""
        if self.supervision == "outcome":
            return [[value] * len(nodes) for value, nodes in zip(advantages, group.nodes, strict=True)]
        estimate = process_advantages if self.supervision == "process" else turn_advantages
        baseline, scale = cast("GroupBaseline", self.baseline), cast('Literal["std", "none"]', self.scale)
        return estimate(group.turn_rewards, gamma=self.gamma, baseline=baseline, scale=scale)

    def _is_skipped(self, advantages: Sequence[Sequence[float]]) -> bool:
        """True if a group with these advantages, by sibling and turn, is left out of the mean."""
        return self.flat_groups != "count" and len(advantages) > 1 and not any(map(any, advantages))

    def groups(self, episode: Episode) -> Iterator[SiblingGroup]:
        """Yields the groups of an episode, every answer once; none if it failed."""
        for group in super().groups(episode):
            yield credit_group(group, self.credit) if self._is_crossed else group

    def _advantages(
        self, groups: Sequence[tuple[str, SiblingGroup]], flat: Sequence[bool], state: AlgorithmState
    ) -> list[list[float]]:
        """Returns the advantages of each (env, group) before scaling by the batch; `flat` groups are not scaled."""
        if self.baseline == "batch":
            return batch_advantages([group.values for _, group in groups])
        if self.baseline == "role":
            roles = state.setdefault(ROLE_BASELINES_KEY, {})
            return [_beside_role(group, roles.setdefault(env, {})) for env, group in groups]
        scale: Literal["std", "none"] = "std" if self.scale == "std" else "none"
        return [
            group_advantages(group.values, baseline=self.baseline, scale="none" if even else scale)
            for (_, group), even in zip(groups, flat, strict=True)
        ]

    def _annotate(
        self, group: SiblingGroup, by_turn: Sequence[Sequence[float]], gaps: Gaps, spread: float
    ) -> list[Sample]:
        """Writes the advantages to the group's nodes; returns a sample of each answer that has tokens. With `gaps` and
        `baseline: batch` or `role`, the KL penalty of the tokens before a token, divided by `spread`, is added back to
        its advantage."""
        samples = []
        for nodes, advantages in zip(group.nodes, by_turn, strict=True):
            credit: dict[int, float] = {}
            for node, advantage in zip(nodes, advantages, strict=True):
                node.advantages[group.seat] = credit[id(node.answers[group.seat])] = advantage
            answers = {id(node.answers[group.seat]): node.answers[group.seat] for node in nodes}.values()
            answered = [answer for answer in answers if len(answer.token_ids)]
            num_tokens = sum(map(num_sampled, answered))
            added = [self._sample(answer, credit[id(answer)], num_tokens) for answer in answered]
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
        """Returns the sample of an answer of a trajectory with `trajectory_tokens` sampled tokens of the seat."""
        length = num_sampled(answer)
        weight = {"sequence": 1 / length, "trajectory": 1 / trajectory_tokens}.get(self.loss_aggregation, 1.0)
        regularised = self._kl_in_loss or self.entropy_coef != 0
        return build_sample(
            answer,
            np.full(len(answer.token_ids), advantage, np.float32),
            weight=weight,
            denominator=self.max_completion_length if self.loss_aggregation == "constant" else None,
            has_gradient=not self._is_masked(answer) and (advantage != 0 or regularised),
        )

    def _is_masked(self, answer: Answer) -> bool:
        return self.overlong == "drop" and answer.stop_reason == "length"

    def _contributions(self, episodes: Sequence[Episode], policy: str) -> Metrics:
        """Returns the contribution of each seat of `policy`, averaged over the joint steps in which several seats
        act."""
        by_name: dict[str, list[float]] = {}
        for episode in episodes:
            for group in super().groups(episode):
                answers = group.nodes[0][0].answers
                if len(answers) > 1 and member_name(answers[group.seat].policy) == policy:
                    for name, figure in contribution_metrics(group, self.branching.score).items():
                        by_name.setdefault(f"{name}/{group.seat}", []).append(figure)
        return {name: float(np.mean(metrics)) for name, metrics in by_name.items()}


def overlong_penalty(length: int, limit: int, buffer: int) -> float:
    """Returns DAPO's soft overlong penalty of an answer of `length` tokens, from 0 to 1 (Yu et al., 2025, eq. 13,
    negated): 0 up to `buffer` tokens before `limit`, then rising in proportion to 1 at `limit`."""
    return min(max((length - (limit - buffer)) / buffer, 0.0), 1.0)


def _is_trained(group: SiblingGroup) -> bool:
    """True if an answer is from a policy in training, whose name has a version (`coder@12`); a fixed policy's has
    none."""
    answers = (node.answers[group.seat] for nodes in group.nodes for node in nodes)
    return any(len(answer.token_ids) and "@" in answer.policy for answer in answers)


def _spread_of_answers(groups: Sequence[tuple[str, SiblingGroup]], advantages: Sequence[Sequence[float]]) -> float:
    """Returns the deviation of the advantages of all siblings in which the group's seat acted."""
    pairs = zip(groups, advantages, strict=True)
    return batch_spread([[a for a, nodes in zip(row, group.nodes, strict=True) if nodes] for (_, group), row in pairs])


def _beside_role(group: SiblingGroup, averages: dict[str, float]) -> list[float]:
    advantages, averages[group.seat] = role_advantages(group.values, averages.get(group.seat, 0.0))
    return advantages


# ---- a KL penalty in the rewards of answers
#
# Per token it is the coefficient times log-probability minus that of the reference (Ziegler et al., 2019, eq. 2), the
# k1 estimate. Of the estimators, only k1 has the gradient of the divergence when it is part of a reward. The penalty
# depends on the weights in training, so credit is assigned in two steps: `uncredited_samples` reads the episodes; once
# `reference_gaps` are known, the samples get their advantages.

KL_PENALTY_KEY = "kl_penalty"  # key in a node's info: the penalty of each seat's answer, in units of reward
Gaps = Mapping[int, npt.NDArray[np.float64]]  # by id of the answer: log-ratios [T] to the reference


@dataclass(kw_only=True)
class UncreditedSample(Sample):
    """A sample without advantages yet, with its answer; all samples of a policy and step share `episodes`."""

    answer: Answer
    policy: str
    episodes: Sequence[Episode]


def uncredited_samples(
    groups: Sequence[SiblingGroup], episodes: Sequence[Episode], policy: str
) -> list[UncreditedSample]:
    """Returns a sample of every answer of the groups that has tokens, once."""
    answers = {id(answer): answer for group in groups for _, answer in _answers(group)}
    return [
        UncreditedSample(
            **vars(build_sample(answer, np.zeros(len(answer.token_ids), np.float32))),
            answer=answer,
            policy=policy,
            episodes=episodes,
        )
        for answer in answers.values()
    ]


async def reference_gaps(samples: Sequence[Sample], learner: Learner) -> dict[int, npt.NDArray[np.float64]]:
    """Returns the log-ratios [T] of each uncredited sample's tokens to the reference, by id of its answer. They are
    exactly 0 while the policy equals the reference: if computed, they would be rounding errors, which dividing by their
    standard deviation would make as large as rewards."""
    pending = cast("Sequence[UncreditedSample]", samples)
    if learner.is_at_reference:
        return {id(sample.answer): np.zeros(len(sample.token_ids)) for sample in pending}
    reference = await learner.logprobs(pending, reference=True)
    return {
        id(sample.answer): sample.logprobs.astype(np.float64) - known
        for sample, known in zip(pending, reference, strict=True)
    }


def write_penalties(groups: Sequence[SiblingGroup], gaps: Gaps, kl_coef: float) -> None:
    """Writes the penalty of each answer to its nodes: `kl_coef` times the sum of its log-ratios."""
    for group in groups:
        for node, answer in _answers(group):
            penalties = node.info.get(KL_PENALTY_KEY, {}) | {group.seat: kl_coef * float(gaps[id(answer)].sum())}
            node.info = node.info | {KL_PENALTY_KEY: penalties}


def penalty_of(node: Node, seat: Seat) -> float:
    """Returns the penalty that `write_penalties` wrote; 0 without one."""
    return float(node.info.get(KL_PENALTY_KEY, {}).get(seat, 0.0))


def earlier_penalties(answers: Sequence[Answer], gaps: Gaps, kl_coef: float) -> list[npt.NDArray[np.float64]]:
    """Returns, for each token [T] of each answer of a trajectory, the penalty of all tokens before it. A token did not
    cause this part, so its advantage leaves it out (Hu et al., 2025: the penalty is summed from the token on)."""
    lengths = [len(answer.token_ids) for answer in answers]
    gaps_M = np.concatenate([np.zeros(0), *(gaps[id(answer)] for answer in answers)])
    return np.split(kl_coef * (np.cumsum(gaps_M) - gaps_M), np.cumsum(lengths)[:-1])


def _answers(group: SiblingGroup) -> Iterator[tuple[Node, Answer]]:
    for nodes in group.nodes:
        for node in nodes:
            if len(node.answers[group.seat].token_ids):
                yield node, node.answers[group.seat]
