"""Base class of the algorithms for language agents: a config with branching, credit assignment and a loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from palestra.core.config import StrictModel
from palestra.core.losses import LossFunction
from palestra.core.types import AlgorithmState, Answer, Episode, Metrics, Sample
from palestra.text.learners.base import Learner
from palestra.text.rollouts.tree_rollout import Branching

TokenScores = Mapping[int, npt.NDArray[np.float64]]  # a number for each token [T] of answers, by id of the answer


class TextAlgorithm(StrictModel):
    """Base config of an algorithm for language agents.

    Credit assignment has two steps: `build_samples` reads only the episodes; `finalize_samples` may query the weights
    in training, for example for values. Credit that needs them earlier has a step before both: what `token_scores`
    returns is passed to `build_samples` as `scores`. Both may keep values from step to step in `state`, which is
    saved with the run. A config selects a user's own subclass with `type: "module:Class"`.
    """

    type: str
    """Name of the algorithm; "module:Class" selects one of your own."""

    @property
    def branching(self) -> Branching:
        """Settings of the branching of episode trees."""
        return Branching()

    @property
    def loss(self) -> LossFunction:
        """The pure loss function (losses/) of the algorithm. Raises TypeError if the subclass names none."""
        raise TypeError(f"{type(self).__name__} names no loss")

    @property
    def loss_options(self) -> dict[str, Any]:
        return {}

    @property
    def needs_critic(self) -> bool:
        """True if the policies need a value head."""
        return False

    @property
    def has_separate_critic(self) -> bool:
        """True if the critic has an adapter of its own, and no value head on the policy's features."""
        return False

    @property
    def reads_joint_prompts(self) -> bool:
        """True if a critic reads the prompts of all seats, whose policies must then share one vocabulary."""
        return False

    @property
    def needs_old_logprobs(self) -> bool:
        """True if the loss reads the log-probabilities under the policy that sampled the answers."""
        return True

    @property
    def needs_reference(self) -> bool:
        """True if the algorithm needs log-probabilities under the reference policy."""
        return False

    @property
    def needs_teacher(self) -> bool:
        """True if a policy's `teacher` scores the policy's answers instead of playing in its place."""
        return False

    @property
    def max_redraws(self) -> int:
        """Largest number of instances played in place of an episode without signal; 0 keeps every episode."""
        return 0

    def has_signal(self, episode: Episode) -> bool:
        """True if an episode is kept: it gives some policy a gradient, or it failed."""
        return True

    async def token_scores(self, episodes: Sequence[Episode], learner: Learner) -> TokenScores:
        """Returns what credit needs of `learner`'s answers in the weights in training; nothing by default."""
        return {}

    def build_samples(
        self, episodes: Sequence[Episode], policy: str, state: AlgorithmState | None = None
    ) -> tuple[list[Sample], Metrics]:
        """Returns the samples that `policy` trains on, and metrics; writes every answer's advantage to its node."""
        raise TypeError(f"{type(self).__name__} gives no credit")

    async def finalize_samples(
        self, samples: list[Sample], learner: Learner, state: AlgorithmState
    ) -> tuple[list[Sample], Metrics]:
        """Returns the samples completed with what `learner` computes (values, reference log-probabilities), and
        metrics."""
        return samples, {}


def build_sample(answer: Answer, weights: np.ndarray, **more: Any) -> Sample:
    """Returns the training sample of an answer; `weights` [T] float32 are the advantages of its tokens."""
    more = {"sampling_mask": answer.sampling_mask, "routed_experts": answer.routed_experts, **more}
    return Sample(answer.prompt_ids, answer.token_ids, answer.logprobs, weights, answer.temperature, **more)


async def add_reference_logprobs(samples: Sequence[Sample], learner: Learner) -> list[Sample]:
    """Returns the samples with `reference_logprobs` [T] (log-probabilities under the reference policy, for a KL penalty
    or a preference loss) added to those that have a gradient."""
    trained = [sample for sample in samples if sample.has_gradient]
    logprobs = iter(await learner.logprobs(trained, reference=True) if trained else [])
    return [replace(s, reference_logprobs=next(logprobs)) if s.has_gradient else s for s in samples]


def skip_at_reference(samples: Sequence[Sample], learner: Learner) -> list[Sample]:
    """Returns the samples for a loss with a KL penalty. While the policy equals its reference, the batches before the
    first one with a nonzero advantage lose their gradient.

    In these the penalty's gradient is 0. If computed, it would be a rounding error, which Adam's first step would scale
    to a full step.
    """
    if not learner.is_at_reference:
        return list(samples)
    skipped: set[int] = set()
    for batch in learner.batches(samples):
        if any(sample.has_gradient and sample.advantages.any() for sample in batch):
            break
        skipped |= set(map(id, batch))
    return [replace(sample, has_gradient=False) if id(sample) in skipped else sample for sample in samples]
