"""What makes gradients fit into half precision."""

from __future__ import annotations

from palestra.types import Metrics


class LossScale:
    """What a loss is multiplied by so that small gradients can be written in fp16 (Micikevicius et al., 2018, section
    3.2): halved when a gradient did not fit, doubled after `patience` steps that went well.

    In place of torch's GradScaler, which looks at the gradients of one process: here the norm of the whole gradient,
    the same on every rank, says whether all fitted.
    """

    def __init__(self, value: float = 2.0**16, patience: int = 2000) -> None:
        self.value, self.patience, self.well = value, patience, 0

    def note(self, fits: bool) -> Metrics:
        """Figures of a step, of which `fits` says whether its gradients were finite. Raises ValueError where none ever
        is."""
        figures = {"loss_scale": self.value, "skipped": float(not fits)}
        self.well = self.well + 1 if fits else 0
        if not fits:
            self.value /= 2
        elif self.well == self.patience:
            self.value, self.well = 2 * self.value, 0
        if self.value < 2.0**-14:
            raise ValueError("the gradient is not finite in fp16, however small the loss: use precision: bf16")
        return figures
