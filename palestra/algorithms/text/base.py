"""What an algorithm for language agents is: a config, where trees branch, who gets credit, and the name of a loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from palestra.config import Strict
from palestra.learners.base import Learner
from palestra.rollouts.play import Branching
from palestra.types import Answer, Episode, Memory, Metrics, Sample


class TextAlgorithm(Strict):
    """Credit is given in two parts: `samples` reads the episodes and nothing else; `refined` asks the weights in
    training for what credit needs of them, such as values. Both may keep what they learn from step to step in `memory`,
    which is saved with the run. A config finds one of the user's own by `type: "module:Class"`."""

    type: str

    @property
    def branching(self) -> Branching:
        """Where the trees of its episodes branch."""
        return Branching()

    @property
    def loss(self) -> Callable:
        """A pure loss (losses/)."""
        raise TypeError(f"{type(self).__name__} names no loss")

    @property
    def loss_options(self) -> dict[str, Any]:
        """What the loss is called with."""
        return {}

    @property
    def critic(self) -> bool:
        """Whether its policies have a value head."""
        return False

    @property
    def reads_sampler(self) -> bool:
        """Whether its loss reads the log-probabilities of whoever drew the answers."""
        return True

    @property
    def refers(self) -> bool:
        """Whether it asks for log-probabilities of the reference."""
        return False

    def samples(
        self, episodes: Sequence[Episode], policy: str, memory: Memory | None = None
    ) -> tuple[list[Sample], Metrics]:
        """What `policy` learns from, with figures of it; notes every answer's advantage at its node."""
        raise TypeError(f"{type(self).__name__} gives no credit")

    async def refined(self, samples: list[Sample], learner: Learner, memory: Memory) -> tuple[list[Sample], Metrics]:
        """The samples with what `learner` says of them."""
        return samples, {}


def sample_of(answer: Answer, weights: np.ndarray, **more: Any) -> Sample:
    """What is learned from an answer; `weights` [T] are its tokens' advantages."""
    return Sample(answer.prompt_ids, answer.token_ids, answer.logprobs, weights, answer.temperature, **more)


async def with_reference(samples: Sequence[Sample], learner: Learner) -> list[Sample]:
    """The samples with their log-probabilities under the reference, which a penalty holds to."""
    found = await learner.logprobs(samples, reference=True)
    return [replace(sample, reference=logprobs) for sample, logprobs in zip(samples, found, strict=True)]


async def corrected(samples: Sequence[Sample], learner: Learner, most: float) -> tuple[list[Sample], Metrics]:
    """The samples as if the weights in training had drawn them: every token's advantage times its importance ratio, of
    at most `most` (truncated importance sampling, Espeholt et al., 2018, eq. 1; Yao et al., 2025). What the loss then
    clips is the step from here (decoupled PPO, Hilton et al., 2022; Fu et al., 2025, eq. 5), not from whoever drew.

    `sampler_kl` is how far the samplers were from here (the mean of log-ratios, k1), `truncated` the share of tokens
    with a larger ratio.
    """
    now = await learner.logprobs(samples)
    ratios = [np.exp(own - sample.logprobs) for sample, own in zip(samples, now, strict=True)]
    moved = [
        replace(sample, logprobs=own, advantages=(sample.advantages * np.minimum(ratio, most)).astype(np.float32))
        for sample, own, ratio in zip(samples, now, ratios, strict=True)
    ]
    flat = np.concatenate([np.ones(0), *ratios])
    if not len(flat):
        return moved, {}
    return moved, {"sampler_kl": float(-np.log(flat).mean()), "truncated": float((flat > most).mean())}
