"""Loss scaling for training in float16."""

from __future__ import annotations

from palestra.core.types import Metrics


class LossScale:
    """Dynamic loss scale for float16 gradients (Micikevicius et al., 2018, section 3.2): halved when one overflows,
    doubled after `growth_interval` consecutive steps without overflow.

    Replaces torch's GradScaler, which checks the gradients of one process: here the norm of the whole gradient, which
    is equal on all ranks, decides.
    """

    def __init__(self, value: float = 2.0**16, growth_interval: int = 2000) -> None:
        self.value, self.growth_interval, self.good_steps = value, growth_interval, 0

    def update(self, finite: bool) -> Metrics:
        """Updates the scale after a step and returns its metrics; `finite` is true if all gradients were finite. Raises
        ValueError if the scale falls below 2**-14, because gradients are never finite."""
        metrics = {"loss_scale": self.value, "skipped": float(not finite)}
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.value /= 2
        elif self.good_steps == self.growth_interval:
            self.value, self.good_steps = 2 * self.value, 0
        if self.value < 2.0**-14:
            raise ValueError("the gradient is not finite in float16, however small the loss: use precision: bfloat16")
        return metrics
