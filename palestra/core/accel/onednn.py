"""Products of oneDNN in float32, compared with float64 before their first use.

Every product copies its weight into oneDNN's own layout. A weight that is used often may be packed: copied only once.

On x86 PyTorch computes float32 products with MKL, which runs at half of the speed of oneDNN on AMD processors, and
hyperbolic tangents one by one, at a sixth of the speed of oneDNN's.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from functools import cache
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "256")  # products; oneDNN's 1,024 take up to 600 MB
MAX_ERROR = 1e-4  # of a sum of 256 products of standard normals: rounding gives about 1e-5
MAX_TANH_ERROR = 1e-6  # of numbers up to 1: rounding gives about 1e-7


class Product(Protocol):
    """`x weight' + bias` [..., out] of `x` [..., in], `weight` [out, in] and `bias` [out], without gradients; with
    "tanh" its hyperbolic tangent. (oneDNN's relu is not used: it turns NaN to 0.)"""

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: Literal["none", "tanh"] = "none"
    ) -> Tensor: ...


@cache
def onednn_product() -> Product | None:
    """Returns oneDNN's product; None if this machine or this PyTorch has none, or if its result is wrong."""
    operator: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    if operator is None or not torch.backends.mkldnn.is_available() or platform.machine() not in ("x86_64", "AMD64"):
        return None

    def product(x: Tensor, weight: Tensor, bias: Tensor | None, activation: Literal["none", "tanh"] = "none") -> Tensor:
        found: Tensor = operator(x, weight, bias, activation, [], "")
        return found

    return product if is_right(product) else None


def is_right(product: Product) -> bool:
    """Returns whether a product agrees with float64 up to rounding, also with a transposed weight and with "tanh"."""
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((1, 33, 256), (300, 256), (300,)))
    with torch.no_grad():
        exact = F.linear(x.double(), weight.double(), bias.double())
        errors = (
            product(x, weight, bias) - exact,
            product(x, weight[:256].T, None) - x.double() @ weight[:256].double(),
        )
        curve = product(x / 16, weight, bias, "tanh") - torch.tanh(product(x / 16, weight, bias).double())
        close = all(bool(error.abs().max() < MAX_ERROR) for error in errors)
        return close and bool(curve.abs().max() < MAX_TANH_ERROR)


@cache
def onednn_packing() -> Callable[[Tensor], Tensor] | None:
    """Returns the function that copies a weight [out, in] into oneDNN's own layout, which only its product reads; None
    if this machine or this PyTorch has none, or if products with packed weights are wrong."""
    operator: Any = getattr(torch.ops.mkldnn, "_reorder_linear_weight", None)
    product = onednn_product()
    if operator is None or product is None:
        return None

    def packing(weight: Tensor) -> Tensor:
        packed: Tensor = operator(weight.detach())
        return packed

    def packed_product(
        x: Tensor, weight: Tensor, bias: Tensor | None, activation: Literal["none", "tanh"] = "none"
    ) -> Tensor:
        return product(x, packing(weight), bias, activation)

    return packing if is_right(packed_product) else None
