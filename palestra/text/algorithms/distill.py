"""On-policy distillation: the student answers, and a teacher's log-probabilities of its tokens are the reward (Agarwal
et al., 2024, generalised knowledge distillation with the reverse KL divergence; Lu, 2025, "On-Policy Distillation",
Thinking Machines Lab).

The advantage of a token is the teacher's log-probability minus the student's. In expectation over the student's tokens
its policy gradient is the gradient of -KL(student || teacher) at each prefix, with the prefixes held fixed. The
student's log-probability is computed with the weights in training, at every optimizer step: with the log-probability of
an older sampler the gradient would differ, and would not be 0 where student and teacher agree. The env's rewards are
not used.

The teacher may read another seat's prompt of the same joint step, for example one with a hint or more context
(self-distillation). The two seats may have one policy or two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, cast

import numpy as np
from pydantic import Field
from torch import Tensor

from palestra.core.losses import LossFunction, LossInputs, TensorMetrics, correct_mismatch, importance_sampling_loss
from palestra.core.types import AlgorithmState, Episode, Metrics, Node, Sample, Seat
from palestra.text.algorithms.base import TextAlgorithm, build_sample
from palestra.text.credit.importance import ImportanceSampling
from palestra.text.learners.base import Learner
from palestra.text.rollouts.metrics import member_name
from palestra.text.rollouts.tree_rollout import Branching


@dataclass(kw_only=True)
class DistillSample(Sample):
    """A sample with the node and seat of its answer, and the prompt [P] int32 that the teacher reads."""

    node: Node
    seat: Seat
    teacher_prompt_ids: np.ndarray


class Distill(ImportanceSampling, TextAlgorithm):
    """Trains each policy towards its `teacher` on its own answers, by a policy gradient with importance sampling.

    Every token of a step counts the same. The teacher is read at temperature 1. For the loss see `distillation_loss`.
    """

    type: Literal["distill"] = "distill"
    needs_teacher: ClassVar[bool] = True
    group_size: int = Field(4, ge=1, le=4096)
    """Trajectories per start."""
    teacher_seats: dict[Seat, Seat] = {}
    """For each seat that learns, the seat whose prompt of the same joint step the teacher reads: one with a hint or
    more context. Empty: all seats learn, and the teacher reads their own prompts."""

    @property
    def branching(self) -> Branching:
        return Branching("root", self.group_size)

    @property
    def loss(self) -> LossFunction:
        return distillation_loss

    @property
    def loss_options(self) -> dict[str, Any]:
        return self.importance_options

    def build_samples(
        self, episodes: Sequence[Episode], policy: str, state: AlgorithmState | None = None
    ) -> tuple[list[Sample], Metrics]:
        """Returns one sample of each answer of `policy` at the seats that learn; `finalize_samples` adds the
        advantages. Raises ValueError if the seat whose prompt the teacher reads does not act in the same joint step, or
        its policy has no tokens."""
        by_answer: dict[int, Sample] = {}
        for episode in episodes:
            for node in episode.valid_nodes if episode.error is None else []:
                for seat, answer in node.answers.items():
                    if member_name(answer.policy) == policy and len(answer.token_ids) and self._learns(seat):
                        plain = build_sample(answer, np.zeros(len(answer.token_ids), np.float32))
                        more: dict[str, Any] = {
                            "node": node,
                            "seat": seat,
                            "teacher_prompt_ids": self._teacher_prompt(node, seat),
                        }
                        by_answer.setdefault(id(answer), DistillSample(**vars(plain), **more))
        return list(by_answer.values()), {}

    def _learns(self, seat: Seat) -> bool:
        return not self.teacher_seats or seat in self.teacher_seats

    def _teacher_prompt(self, node: Node, seat: Seat) -> np.ndarray:
        read = self.teacher_seats.get(seat, seat)
        if read not in node.answers:
            raise ValueError(
                f'teacher_seats has the teacher of seat "{seat}" read what seat "{read}" reads in the same joint step, '
                f"in which {', '.join(node.answers)} act: name a seat that acts at the same time"
            )
        prompt = node.answers[read].prompt_ids
        if not len(prompt):
            raise ValueError(
                f'teacher_seats has the teacher of seat "{seat}" read the prompt of seat "{read}", whose policy has no '
                "tokens: seat a language model there"
            )
        return prompt

    async def finalize_samples(
        self, samples: list[Sample], learner: Learner, state: AlgorithmState
    ) -> tuple[list[Sample], Metrics]:
        """Returns the samples with the teacher's log-probabilities as `reference_logprobs`. Their advantages (teacher
        minus sampler) are only for the record, and an answer's mean is written to its node: the loss computes its own
        with the weights in training."""
        if not samples:
            return samples, {}
        credited: list[Sample] = []
        students = cast("list[DistillSample]", samples)
        read: list[Sample] = [replace(row, prompt_ids=row.teacher_prompt_ids, routed_experts=None) for row in students]
        for row, logp in zip(students, await learner.teacher_logprobs(read), strict=True):
            advantages = (logp - row.logprobs).astype(np.float32)
            row.node.advantages[row.seat] = float(advantages.mean())
            credited.append(replace(row, advantages=advantages, reference_logprobs=logp))
        return await self.add_old_logprobs(credited, learner), {}


def distillation_loss(tokens: LossInputs, **importance: Any) -> tuple[Tensor, TensorMetrics]:
    """Policy gradient loss with importance sampling, whose advantage is the teacher's log-probability (`ref_logp_M`)
    minus the log-probability under the weights in training. Its gradient is the gradient of KL(student || teacher), and
    0 where the two agree, whichever policy sampled. `importance` (see `correct_mismatch`) bounds the ratio of the
    weights before the update to the sampler; tokens beyond the bounds bias the gradient, except where student and
    teacher agree.

    The metric `teacher_kl` is the mean log-ratio of student to teacher, reweighted by these ratios: an estimate of the
    divergence, in nats. Raises ValueError without `ref_logp_M`.
    """
    if tokens.ref_logp_M is None:
        raise ValueError("distillation needs the teacher's log-probabilities")
    taught = tokens._replace(advantage_M=tokens.ref_logp_M - tokens.logp_M.detach())
    taught, mismatch = correct_mismatch(taught, **importance)
    loss, metrics = importance_sampling_loss(taught)
    return loss, metrics | mismatch | {"teacher_kl": loss.detach()}
