"""Exploration noise for continuous actions that is correlated from decision to decision.

Independent noise averages out over the steps that a slow system needs to move, so the system stays near its initial
state. Noise that keeps its sign for several decisions moves it (Lillicrap et al., 2016, section 3; Eberhard et al.,
2023).

Shapes: `P` members of a stack, `R` = games times seats rows, `O` outputs, `D` numbers of an action.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from palestra.vector.nets.on_device import normal_like


class CorrelatedNoise:
    """Standard normal noise whose correlation over k decisions is `correlation` to the power of k: a first-order
    autoregressive process (an Ornstein-Uhlenbeck process at whole steps), started in its stationary distribution. Each
    decision's noise is standard normal. With `correlation` 0 the noise is independent and no state is stored."""

    def __init__(self, correlation: float) -> None:
        self.correlation = correlation
        self.last: Tensor | None = None

    def draw(self, like: Tensor, generator: torch.Generator) -> Tensor:
        """Returns the noise of the next decisions in the shape of `like` [P, R, D]; restarts if the shape changes."""
        noise = normal_like(like, generator)
        if not self.correlation:
            return noise
        if self.last is not None and self.last.shape == noise.shape:
            noise = self.correlation * self.last.to(noise.device) + math.sqrt(1 - self.correlation**2) * noise
        self.last = noise
        return noise

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns the state."""
        return {} if self.last is None else {"last": self.last.cpu().numpy()}

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Restores a state that `arrays` returned."""
        self.last = torch.from_numpy(np.array(arrays["last"])) if "last" in arrays else None
