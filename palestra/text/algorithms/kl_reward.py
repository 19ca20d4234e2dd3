"""A KL penalty in the rewards of answers: per token, the coefficient times log-probability minus that of the reference
(Ziegler et al., 2019, eq. 2), the k1 estimate. Of the estimators, only k1 has the gradient of the divergence when it is
part of a reward.

The penalty depends on the weights in training, so credit is assigned in two steps: `uncredited_samples` reads the
episodes; once `reference_gaps` are known, the samples get their advantages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

from palestra.core.types import Answer, Episode, Node, Sample, Seat
from palestra.text.algorithms.base import build_sample
from palestra.text.algorithms.groups import SiblingGroup
from palestra.text.learners.base import Learner

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
