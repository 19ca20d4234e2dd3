"""Importance sampling for samples from another sampler or from older weights: the config keys that
GRPO, PPO and distillation share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from palestra.core.config import StrictModel, is_changed
from palestra.core.losses import ImportanceMode
from palestra.core.types import Sample
from palestra.text.learners.base import Learner

OldLogprobs = Literal["trainer", "sampler"]


class ImportanceSampling(StrictModel):
    """Config keys of algorithms whose loss has probability ratios."""

    old_logprobs: OldLogprobs = "trainer"
    """Log-probabilities that ratios are relative to: the `trainer`'s own before the update (an update of several
    optimizer steps makes a forward pass for them), or the `sampler`'s, without that pass. `sampler` is for samplers
    that agree closely with the trainer, as the one in this process does in float32."""
    importance_cap: float | None = Field(2.0, gt=0)
    """Upper bound of the importance ratio between the weights before the update and the sampler's, by which advantages
    are multiplied; it corrects stale samples and samplers of another precision. Null applies no correction. Without
    effect with `old_logprobs: sampler`."""
    importance_floor: float = Field(0.0, ge=0)
    """Lower bound of the importance ratio, at most 1 (and `importance_cap` is at least 1)."""
    importance_mode: ImportanceMode = "token_truncate"
    """`token_truncate` bounds each token's ratio (TIS), `token_mask` leaves out tokens out of bounds (IcePop);
    `sequence_truncate` and `sequence_mask` do so with the product over an answer's tokens (MIS)."""

    @model_validator(mode="after")
    def _keeps_fresh_samples(self) -> Self:
        if self.importance_cap is not None and not self.importance_floor <= 1 <= self.importance_cap:
            raise ValueError(
                f"importance_floor: {self.importance_floor:g} and importance_cap: {self.importance_cap:g} exclude the "
                "ratio 1, which tokens sampled by the weights before the update have, so that all advantages would be "
                "scaled or masked: set importance_floor to at most 1, and importance_cap to at least 1"
            )
        return self

    @model_validator(mode="after")
    def _corrects_where_bounds_are_set(self) -> Self:
        if self.old_logprobs == "trainer" and self.importance_cap is not None:
            return self
        for name in ("importance_cap", "importance_floor", "importance_mode"):
            value = getattr(self, name)
            if value is not None and is_changed(self, name):
                reason = "old_logprobs: sampler" if self.old_logprobs == "sampler" else "importance_cap: null"
                raise ValueError(
                    f"{name}: {value} has no effect with {reason}, by which advantages are not corrected: remove it, "
                    "or set old_logprobs: trainer and an importance_cap"
                )
        return self

    @property
    def importance_options(self) -> dict[str, Any]:
        """Options of `correct_mismatch` (core/losses.py), those that differ from its defaults."""
        if self.importance_cap is None or self.old_logprobs == "sampler":
            return {}
        options: dict[str, Any] = {"importance_cap": self.importance_cap}
        if self.importance_floor:
            options["importance_floor"] = self.importance_floor
        return options | ({"importance_mode": self.importance_mode} if self.importance_mode != "token_truncate" else {})

    async def add_old_logprobs(self, samples: list[Sample], learner: Learner) -> list[Sample]:
        """Returns the samples with `old_logprobs`, which clipped ratios are relative to: unless the
        config says `sampler`, the trainer's own before the update, since a sampler's differ by more
        than narrow bounds allow (by 0.01 in bfloat16).

        The first batch uses those of its own pass ("current"), unless there are several epochs. A
        forward pass gives the others theirs first, batch by batch as in training, so that rounding
        is the same.
        """
        if self.old_logprobs == "sampler":
            return samples
        found: dict[int, np.ndarray] = {}
        for batch in learner.batches(samples)[1:]:
            trained = [sample for sample in batch if sample.has_gradient]
            if id(trained[0]) not in found:  # a later epoch has the same batches
                found |= zip(map(id, trained), await learner.logprobs(trained), strict=True)
        return [replace(sample, old_logprobs=found.get(id(sample), "current")) for sample in samples]
