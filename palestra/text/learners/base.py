"""Protocol of a learner, which the training loop calls and every backend implements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from palestra.core.types import Metrics, Sample
from palestra.text.policies.base import Policy

if TYPE_CHECKING:  # it loads torch
    from palestra.engine.training.train_pass import TrainPass


class Learner(Protocol):
    """Weights in training. `version` is the number of optimizer steps since their initialisation."""

    name: str
    version: int

    @property
    def is_at_reference(self) -> bool:
        """True if no optimizer step was taken since the reference was set, so that both have the same weights."""
        ...

    def batches(self, samples: Sequence[Sample]) -> list[list[Sample]]:
        """Splits `samples` into the batches of one optimizer step each."""
        ...

    async def forward_backward(self, samples: Sequence[Sample], loss: Callable[..., Any], **options: Any) -> Metrics:
        """Adds the gradient of `loss`; returns its metrics."""
        ...

    def passes(self, samples: Sequence[Sample], loss: Callable[..., Any], **options: Any) -> list[TrainPass] | None:
        """Returns the passes that `forward_backward` makes, so that `make_passes` can make them together with those of
        other learners; None if they are not made in this process."""
        ...

    async def make_passes(self, passes: Sequence[TrainPass]) -> None:
        """Makes passes, of this learner and of others on its base, as one."""
        ...

    def metrics_of(self, passes: Sequence[TrainPass]) -> Metrics:
        """Returns the metrics of this learner's passes of a batch, which were made."""
        ...

    async def logprobs(self, samples: Sequence[Sample], *, reference: bool = False) -> list[np.ndarray]:
        """Returns the log-probabilities [T] float32 of each sample's tokens under the current weights, or under the
        reference: the weights at the last call of `start_stage`, else the initial ones."""
        ...

    async def teacher_logprobs(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        """Returns the log-probabilities [T] float32 of each sample's tokens under the teacher, at temperature 1. Raises
        ValueError without a teacher."""
        ...

    async def values(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        """Returns the critic's values [T] float32 of the state before each token of each sample."""
        ...

    def start_stage(self) -> None:
        """Starts a new training stage: a new optimizer, and the current weights become the reference."""
        ...

    async def optim_step(self, progress: float = 0.0) -> Metrics:
        """Takes one optimizer step; returns metrics. `progress` in [0, 1] is the finished share of the stage, for the
        learning-rate schedule."""
        ...

    def policy(self) -> Policy:
        """Returns a policy with the current weights, under a versioned name; further training does not change it."""
        ...

    def save(self, folder: Path) -> None:
        """Writes weights, optimizer state and version."""
        ...

    def load(self, folder: Path) -> None:
        """Restores what `save` wrote; training resumes exactly there."""
        ...
