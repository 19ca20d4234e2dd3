"""On-policy distillation: the student answers, and a teacher's log-probabilities of its tokens are the reward (Agarwal
et al., 2024, generalised knowledge distillation with the reverse KL divergence; Lu, 2025, "On-Policy Distillation",
Thinking Machines Lab).

The advantage of a token is the teacher's log-probability minus the student's: in expectation over the student's tokens
its policy gradient is that of -KL(student || teacher) at each prefix, with the prefixes held fixed. Rewards of the env
are not used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

import numpy as np
from pydantic import Field

from palestra.algorithms.text.base import TextAlgorithm, build_sample
from palestra.learners.base import Learner
from palestra.losses.policy import LOSSES
from palestra.rollouts.metrics import member_name
from palestra.rollouts.tree_rollout import Branching
from palestra.types import AlgorithmState, Episode, Metrics, Node, Sample, Seat


@dataclass(kw_only=True)
class DistillSample(Sample):
    """A sample with the node and seat of its answer."""

    node: Node
    seat: Seat


class Distill(TextAlgorithm):
    """Trains each policy towards its `teacher` on its own answers, by a policy gradient with importance sampling.

    Every token of a step counts the same. The teacher is read at temperature 1.
    """

    type: Literal["distill"] = "distill"
    """Selects on-policy distillation."""
    group_size: int = Field(4, ge=1, le=4096)
    """Trajectories per start."""

    @property
    def branching(self) -> Branching:
        return Branching("root", self.group_size)

    @property
    def needs_teacher(self) -> bool:
        return True

    @property
    def loss(self) -> Callable:
        return LOSSES["importance_sampling"]

    def build_samples(
        self, episodes: Sequence[Episode], policy: str, memory: AlgorithmState | None = None
    ) -> tuple[list[Sample], Metrics]:
        """Returns every answer of `policy` once, without advantages, which `finalize_samples` adds."""
        found: dict[int, Sample] = {}
        for episode in episodes:
            for node in episode.nodes if episode.error is None else []:
                for seat, answer in node.answers.items():
                    if member_name(answer.policy) == policy and len(answer.token_ids):
                        plain = build_sample(answer, np.zeros(len(answer.token_ids), np.float32))
                        found.setdefault(id(answer), DistillSample(**vars(plain), node=node, seat=seat))
        return list(found.values()), {}

    async def finalize_samples(
        self, samples: list[Sample], learner: Learner, memory: AlgorithmState
    ) -> tuple[list[Sample], Metrics]:
        """Returns the samples with advantages, and `teacher_kl`: the mean log-ratio of student to teacher of a token,
        an estimate of KL(student || teacher) in nats. Writes an answer's mean advantage to its node."""
        if not samples:
            return samples, {}
        credited: list[Sample] = []
        for sample, logp in zip(samples, await learner.teacher_logprobs(samples), strict=True):
            own = cast(DistillSample, sample)
            advantages = (logp - sample.logprobs).astype(np.float32)
            own.node.advantages[own.seat] = float(advantages.mean())
            credited.append(replace(sample, advantages=advantages))
        return credited, {"teacher_kl": -float(np.concatenate([s.advantages for s in credited]).mean())}
