"""Group-relative policy optimisation (Shao et al., 2024), for single agents and for teams.

A group is a set of siblings: answers that share one starting point. With `branch_at: root` it is K whole trajectories
from one first step, scored by their returns (MAS + GRPO for a team). With `branch_at: turn, continue_from: best`
it is the K answers of one seat to one observation, scored by the mixed reward of that step, and the episode continues
from the best: AT-GRPO (Zhao et al., 2025, arXiv:2510.11062). A group never spans two episodes, two seats or two
observations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from palestra.core.plain_values import short_repr
from palestra.core.types import AlgorithmState, Answer, Episode, Metrics, Node, Sample, Seat, is_sampled, num_sampled
from palestra.envs.step_values import number
from palestra.text.algorithms.base import TokenScores, add_reference_logprobs, build_sample, skip_at_reference
from palestra.text.algorithms.groups import Penalty, SiblingGroup
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
    state_advantages,
    turn_advantages,
)
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

    def has_signal(self, episode: Episode) -> bool:
        """True if the siblings of some group of a policy in training differ in reward (without the overlong penalty),
        or have advantages by their turns, or the episode failed."""
        groups = (group for group in self.groups(episode, penalties=()) if _is_trained(group))
        return episode.error is not None or any(self._differs(group) for group in groups)

    def _differs(self, group: SiblingGroup) -> bool:
        if self.supervision == "outcome":
            return bool(np.std(group.values) >= FLAT)
        return any(map(any, self._by_turn(group, group.values)))

    @property
    def penalties(self) -> list[Penalty]:
        """The penalties of `overlong: penalty` and `kl_in_reward`."""
        return [*self._length_penalties, *([penalty_of] if self._penalises else [])]

    @property
    def _length_penalties(self) -> list[Penalty]:
        return [self._length_penalty] if self.overlong == "penalty" else []

    def _length_penalty(self, node: Node, seat: Seat) -> float:
        answer = node.answers.get(seat)
        limit = self.max_completion_length
        if answer is None or limit is None:
            return 0.0
        return overlong_penalty(len(answer.token_ids), limit, self.overlong_buffer or max(1, limit // 5))

    def advantages(self, values: Sequence[float], group: SiblingGroup) -> list[float]:
        """Returns the advantage of each sibling of `group` from their values [K]. A subclass with a credit rule of its
        own overrides this. Not called with `baseline: batch` or `role`, which compare values of all groups, nor for
        another `supervision` than `outcome`, whose advantages come from the rewards of turns."""
        scaled = self.scale == "std" and not group.is_flat
        baseline = cast("GroupBaseline", self.baseline)
        return group_advantages(values, baseline=baseline, scale="std" if scaled else "none")

    async def token_scores(self, episodes: Sequence[Episode], learner: Learner) -> TokenScores:
        """Returns the log-ratios to the reference [T] of the learner's answers, for a KL penalty in the rewards."""
        if not self._penalises:
            return {}
        return await reference_gaps(self.policy_groups(episodes, learner.name, penalties=()), learner)

    def build_samples(
        self,
        episodes: Sequence[Episode],
        policy: str,
        state: AlgorithmState | None = None,
        scores: TokenScores | None = None,
    ) -> tuple[list[Sample], Metrics]:
        """Returns the samples of `policy`, and metrics; writes every answer's advantage to its node. `scores`, see
        `token_scores`, are penalties, which are written to the nodes too.

        An answer with advantage 0 has a gradient only from a KL penalty or an entropy bonus; it counts in the mean
        either way. `groups` counts groups, `zero_std_fraction` is the share of them without advantages. With crossed
        joint answers, each seat's contribution is added (see `contribution_metrics`).
        """
        if self.needs_max_length:
            raise ValueError(
                "overlong: penalty and loss_aggregation: constant need the token limit: set max_completion_length"
            )
        state = {} if state is None else state
        gaps = scores or {}
        if gaps:
            write_penalties(self.policy_groups(episodes, policy, penalties=()), gaps, self.kl_coef)
        groups: list[tuple[str, SiblingGroup]] = []
        for episode in episodes:
            groups += [(episode.env, group) for group in self.policy_groups([episode], policy)]
        if gaps:
            pairs = zip(groups, self._flat_groups(episodes, policy), strict=True)
            groups = [(env, replace(group, is_flat=is_flat)) for (env, group), is_flat in pairs]
        advantages = self._advantages(groups, state)
        is_scaled = self.scale == "batch" and not all(group.is_flat for _, group in groups)
        spread = _spread_of_answers(groups, advantages) if is_scaled else 1.0
        samples: list[Sample] = []
        without = 0
        scaled = [(np.array(values) / spread).tolist() for values in advantages]
        for (_, group), turns in zip(groups, self._turns_of_all(groups, scaled), strict=True):
            added = self._annotate(group, turns, gaps, spread)
            samples += [] if self._is_skipped(turns) else added
            without += not any(map(any, turns))
        metrics = {"groups": float(len(groups)), "zero_std_fraction": without / len(groups) if groups else 0.0}
        if self._is_crossed:
            metrics |= self._contributions(episodes, policy)
        if gaps:
            answers = _answers_by_id([group for _, group in groups])
            sampled = [gap[is_sampled(answers[key])] for key, gap in gaps.items()]
            metrics["reference_kl"] = float(np.concatenate(sampled).mean())
        return samples, metrics

    async def finalize_samples(
        self, samples: list[Sample], learner: Learner, state: AlgorithmState
    ) -> tuple[list[Sample], Metrics]:
        if self._kl_in_loss and not self.entropy_coef:
            samples = skip_at_reference(samples, learner)
        if not any(sample.has_gradient for sample in samples):
            return samples, {}
        if self._kl_in_loss:
            samples = await add_reference_logprobs(samples, learner)
        return await self.add_old_logprobs(samples, learner), {}

    def _flat_groups(self, episodes: Sequence[Episode], policy: str) -> list[bool]:
        """Returns for each group whether its rewards are equal when the KL penalty is left out. Its advantages then
        come from the penalty alone, and dividing by their deviation would make them as large as those from rewards.
        With `baseline: batch` or `role` the rewards of all groups are compared."""
        groups = self.policy_groups(episodes, policy, self._length_penalties)
        if self.baseline in ("batch", "role"):
            rewards = np.concatenate([np.zeros(0), *(group.values for group in groups)])
            return [bool(len(rewards) and rewards.std() < FLAT)] * len(groups)
        return [bool(np.std(group.values) < FLAT) for group in groups]

    def _by_turn(self, group: SiblingGroup, advantages: Sequence[float]) -> list[list[float]]:
        """Returns the advantage of each node of each sibling; `advantages` [K] are those of the siblings' values."""
        if self.supervision == "outcome":
            return [[value] * len(nodes) for value, nodes in zip(advantages, group.nodes, strict=True)]
        estimate = process_advantages if self.supervision == "process" else turn_advantages
        return self._estimate(estimate, group.turn_rewards)

    def _turns_of_all(
        self, groups: Sequence[tuple[str, SiblingGroup]], advantages: Sequence[Sequence[float]]
    ) -> Iterator[list[list[float]]]:
        """Yields what `_by_turn` returns for each (env, group)."""
        if self.supervision != "state":
            yield from (self._by_turn(group, own) for (_, group), own in zip(groups, advantages, strict=True))
            return
        visited: list[list[tuple[str, Seat, str]]] = []
        for env, group in groups:
            for nodes in group.nodes:
                visited.append([(env, group.seat, str(node.observations[group.seat])) for node in nodes])
        rewards = list(chain.from_iterable(group.turn_rewards for _, group in groups))
        found = iter(self._estimate(state_advantages, visited, rewards))
        for _, group in groups:
            yield [next(found) for _ in group.nodes]

    def _estimate(self, estimate: Callable[..., list[list[float]]], *values: Any) -> list[list[float]]:
        """Returns the advantages of turns by an estimator, with the config's options."""
        return estimate(*values, gamma=self.gamma, baseline=self.baseline, scale=self.scale)

    def _is_skipped(self, advantages: Sequence[Sequence[float]]) -> bool:
        """True if a group with these advantages, by sibling and turn, is left out of the mean."""
        return self.flat_groups != "count" and len(advantages) > 1 and not any(map(any, advantages))

    def groups(self, episode: Episode, penalties: Sequence[Penalty] | None = None) -> Iterator[SiblingGroup]:
        """Yields the groups of an episode, every answer once; none if it failed."""
        for group in super().groups(episode, penalties):
            yield credit_group(group, self.credit) if self._is_crossed else group

    def _advantages(self, groups: Sequence[tuple[str, SiblingGroup]], state: AlgorithmState) -> list[list[float]]:
        """Returns the advantages of each (env, group) before scaling by the batch."""
        if self.baseline == "batch":
            return batch_advantages([group.values for _, group in groups])
        if self.baseline == "role":
            roles = state.setdefault(ROLE_BASELINES_KEY, {})
            return [_beside_role(group, roles.setdefault(env, {})) for env, group in groups]
        return [self._checked_advantages(group) for _, group in groups]

    def _checked_advantages(self, group: SiblingGroup) -> list[float]:
        """Returns a group's advantages. Raises ValueError if they are not one finite number for each value."""
        given = self.advantages(group.values, group)
        if isinstance(given, list | tuple | np.ndarray) and len(given) == len(group.values):
            numbers = [own for one in given if (own := number(one)) is not None and math.isfinite(own)]
            if len(numbers) == len(given):
                return numbers
        raise ValueError(
            f"{type(self).__name__}.advantages returned {short_repr(given)}: return a list with a finite number for "
            f"each of the {len(group.values)} values"
        )

    def _annotate(
        self, group: SiblingGroup, by_turn: Sequence[Sequence[float]], gaps: TokenScores, spread: float
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
    return any(len(answer.token_ids) and "@" in answer.policy for answer in group.answers)


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
# depends on the weights in training: `token_scores` asks for it before credit is assigned.

KL_PENALTY_KEY = "kl_penalty"  # key in a node's info: the penalty of each seat's answer, in units of reward


async def reference_gaps(groups: Sequence[SiblingGroup], learner: Learner) -> dict[int, npt.NDArray[np.float64]]:
    """Returns the log-ratios [T] of the tokens of each answer of the groups to the reference, by id of the answer. They
    are exactly 0 while the policy equals the reference: if computed, they would be rounding errors, which dividing by
    their standard deviation would make as large as rewards."""
    answers = _answers_by_id(groups)
    if learner.is_at_reference:
        return {key: np.zeros(len(answer.token_ids)) for key, answer in answers.items()}
    samples = [build_sample(answer, np.zeros(len(answer.token_ids), np.float32)) for answer in answers.values()]
    reference = await learner.logprobs(samples, reference=True)
    pairs = zip(answers.items(), reference, strict=True)
    return {key: answer.logprobs.astype(np.float64) - known for (key, answer), known in pairs}


def write_penalties(groups: Sequence[SiblingGroup], gaps: TokenScores, kl_coef: float) -> None:
    """Writes the penalty of each answer to its nodes: `kl_coef` times the sum of its log-ratios."""
    for group in groups:
        for node, answer in _answers(group):
            penalties = node.info.get(KL_PENALTY_KEY, {}) | {group.seat: kl_coef * float(gaps[id(answer)].sum())}
            node.info = node.info | {KL_PENALTY_KEY: penalties}


def penalty_of(node: Node, seat: Seat) -> float:
    """Returns the penalty that `write_penalties` wrote; 0 without one."""
    return float(node.info.get(KL_PENALTY_KEY, {}).get(seat, 0.0))


def earlier_penalties(answers: Sequence[Answer], gaps: TokenScores, kl_coef: float) -> list[npt.NDArray[np.float64]]:
    """Returns, for each token [T] of each answer of a trajectory, the penalty of all tokens before it. A token did not
    cause this part, so its advantage leaves it out (Hu et al., 2025: the penalty is summed from the token on)."""
    lengths = [len(answer.token_ids) for answer in answers]
    gaps_M = np.concatenate([np.zeros(0), *(gaps[id(answer)] for answer in answers)])
    return np.split(kl_coef * (np.cumsum(gaps_M) - gaps_M), np.cumsum(lengths)[:-1])


def _answers(group: SiblingGroup) -> Iterator[tuple[Node, Answer]]:
    for node in chain.from_iterable(group.nodes):
        if len(node.answers[group.seat].token_ids):
            yield node, node.answers[group.seat]


def _answers_by_id(groups: Sequence[SiblingGroup]) -> dict[int, Answer]:
    return {id(answer): answer for _, answer in chain.from_iterable(map(_answers, groups))}
