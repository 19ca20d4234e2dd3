"""Products with the weights of linear layers, by oneDNN where it is faster than PyTorch's own choice.

On an AMD EPYC with AVX-512 MKL, PyTorch's own choice, makes 100 GFLOP/s a core and oneDNN 210, in the shapes of a base
of 135 million parameters. oneDNN is used on CPU, in float32, for weights of more than `MIN_WEIGHTS` numbers and from
`MIN_ROWS` rows on; with fewer its fixed cost counts more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from palestra.onednn import onednn_product

MIN_WEIGHTS = 2**16  # smaller products take about the same time
MIN_ROWS = 4


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns `x weight' + bias` [..., out] of `x` [..., in] and `weight` [out, in], up to rounding as `F.linear`."""
    if not _is_faster(x, weight) or (product := onednn_product()) is None:
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled():
        if weight.requires_grad or (bias is not None and bias.requires_grad):
            return F.linear(x, weight, bias)  # the gradient of a weight would take a transposed copy
        if x.requires_grad:
            return OneDNNLinear.apply(x, weight, bias)
    return product(x, weight, bias)


def matmul(x: Tensor, weight: Tensor) -> Tensor:
    """Returns `x weight` [..., in] of `x` [..., out] and `weight` [out, in], without gradients."""
    if not _is_faster(x, weight) or (product := onednn_product()) is None:
        return x @ weight
    return product(x, weight.T, None)


def _is_faster(x: Tensor, weight: Tensor) -> bool:
    return (
        weight.numel() > MIN_WEIGHTS
        and weight.device.type == "cpu"
        and weight.dtype == x.dtype == torch.float32
        and x.numel() >= MIN_ROWS * x.shape[-1]
        and type(weight) in (Tensor, nn.Parameter)  # not a sharded or quantised one
        and not torch.is_autocast_enabled("cpu")
    )


class OneDNNLinear(torch.autograd.Function):
    """`linear` by oneDNN with frozen weights, and the gradient of its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        product = onednn_product()
        assert product is not None
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        return matmul(grad, weight), None, None
