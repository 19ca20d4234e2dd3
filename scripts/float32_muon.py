"""Muon in float32, for CPUs that have no instructions for bfloat16."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.775, 2.0315)  # of the quintic iteration (Jordan et al., 2024)
ITERATIONS = 5


class Float32Muon(torch.optim.Optimizer):
    """Muon (Jordan et al., 2024) like torch.optim.Muon, which multiplies in bfloat16: on a CPU that computes this by
    software, the optimizer takes ten times as long as forward and backward pass together."""

    def __init__(self, matrices: Iterable[Tensor], lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            lr = group["lr"]
            for matrix in group["params"]:
                average = self.state[matrix].setdefault("average", torch.zeros_like(matrix))
                average.lerp_(matrix.grad, 1 - group["momentum"])
                update = orthogonalise(matrix.grad.lerp(average, group["momentum"]))
                matrix.mul_(1 - lr * group["weight_decay"])
                matrix.add_(update, alpha=-lr * math.sqrt(max(1.0, matrix.shape[0] / matrix.shape[1])))


def orthogonalise(gradient: Tensor) -> Tensor:
    """Returns a matrix with the singular vectors of `gradient` and singular values near 1, by Newton-Schulz steps."""
    a, b, c = COEFFICIENTS
    is_tall = gradient.shape[0] > gradient.shape[1]
    matrix = gradient.T if is_tall else gradient
    matrix = matrix / matrix.norm().clamp(min=1e-7)
    for _ in range(ITERATIONS):
        square = matrix @ matrix.T
        matrix = torch.addmm(matrix, torch.addmm(square, square, square, beta=b, alpha=c), matrix, beta=a)
    return matrix.T if is_tall else matrix
