"""Natural gradients of stacked networks by conjugate gradients, without building a Fisher matrix.

Shapes: `P` members of a stack, `D` parameters of a member. Members are independent. Floats are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

Product = Callable[[Tensor], Tensor]


def flat_gradient(
    of: Tensor, parameters: Sequence[nn.Parameter], *, create_graph: bool = False, retain_graph: bool = False
) -> Tensor:
    """Returns the gradient [P, D] of a sum over members with respect to stacked parameters [P, ...]."""
    found = torch.autograd.grad(
        of, parameters, create_graph=create_graph, retain_graph=create_graph or retain_graph, materialize_grads=True
    )
    return torch.cat([part.flatten(1) for part in found], 1)


def fisher_product(divergence_P: Tensor, parameters: Sequence[nn.Parameter]) -> Product:
    """Returns the function that multiplies vectors [P, D] by the Fisher matrix of each member.

    `divergence_P` [P] is the mean Kullback-Leibler divergence of the policy from itself, differentiable in the
    parameters of its second argument only. Its value and its gradient are 0, and the Fisher matrix is its second
    derivative (Schulman et al., 2015, appendix C).
    """
    slope = flat_gradient(divergence_P.sum(), parameters, create_graph=True)

    def multiply(vector: Tensor) -> Tensor:
        return flat_gradient((slope * vector).sum(), parameters, retain_graph=True)

    return multiply


def conjugate_gradient(product: Product, b: Tensor, steps: int, tolerance: float = 1e-10) -> Tensor:
    """Returns approximate solutions x [P, D] of A x = `b` [P, D], one for each member; `product` multiplies by the
    positive definite matrices A (Hestenes & Stiefel, 1952). A member stops after `steps` iterations, or once its
    squared residual is at most `tolerance` times the squared norm of its `b`."""
    x, residual = torch.zeros_like(b), b.clone()
    direction, size = residual.clone(), dot(residual, residual)
    enough = tolerance * size
    for _ in range(steps):
        going = size > enough
        if not going.any():
            break
        image = product(direction)
        rate = torch.where(going, size / dot(direction, image), 0.0)
        x, residual = x + rate * direction, residual - rate * image
        smaller = dot(residual, residual)
        direction = torch.where(going, residual + smaller / size * direction, direction)
        size = torch.where(going, smaller, size)
    return x


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Returns the inner product of each member's vectors: [P, D], [P, D] -> [P, 1]."""
    return (a * b).sum(1, keepdim=True)
