"""Products with the weights of linear layers, by oneDNN where it is faster than PyTorch's own choice.

On x86 PyTorch computes float32 products with MKL, which runs at half of the speed of oneDNN on AMD processors: 100
against 210 GFLOP/s a core on an EPYC with AVX-512, in the shapes of a base of 135 million parameters. oneDNN is used on
CPU, in float32, for weights of more than `MIN_WEIGHTS` numbers and from `MIN_ROWS` rows on; with fewer its fixed cost
counts more. Before its first use it is compared with a product in float64.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

MIN_WEIGHTS = 2**16  # smaller products take about the same time
MIN_ROWS = 4
MAX_ERROR = 1e-4  # of a sum of 256 products of standard normals: rounding gives about 1e-5

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


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


@cache
def onednn_product() -> Product | None:
    """Returns the function (x, weight, bias) of oneDNN's product; None if this machine or this PyTorch has none, or if
    its result is wrong."""
    operator: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    if operator is None or not torch.backends.mkldnn.is_available() or platform.machine() not in ("x86_64", "AMD64"):
        return None

    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        found: Tensor = operator(x, weight, bias, "none", [], "")
        return found

    return product if _is_right(product) else None


def _is_right(product: Product) -> bool:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((1, 33, 256), (300, 256), (300,)))
    with torch.no_grad():
        errors = (
            product(x, weight, bias) - F.linear(x.double(), weight.double(), bias.double()),
            product(x, weight[:256].T, None) - x.double() @ weight[:256].double(),
        )
        return all(bool(error.abs().max() < MAX_ERROR) for error in errors)


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
