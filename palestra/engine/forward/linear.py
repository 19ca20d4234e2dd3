"""Products with the weights of linear layers, by oneDNN where it is faster than PyTorch's own choice.

On an AMD EPYC with AVX-512 MKL, PyTorch's own choice, makes 100 GFLOP/s a core and oneDNN 210, in the shapes of a base
of 135 million parameters. oneDNN is used on CPU, in float32, for weights of more than `MIN_WEIGHTS` numbers and from
`MIN_ROWS` rows on; with fewer its fixed cost counts more.

oneDNN compiles kernels for each number of rows and keeps them until the process ends: 0.3 MB for each shape of a
weight, and as much again in its cache of products. So rows of zeros are added up to a multiple of 4, 8, 32,
and so on (`padded_rows`); a large pass in training has tokens added instead, so that its products copy nothing.

Frozen weights of bases of at most `MAX_PACKED_BYTES` are packed for sampling (`pack_weights`): products of 8 to 32 rows
then take 25 to 45 % less time, for a second copy of the weights in memory. The results stay the same up to rounding
(on AVX-512, bit for bit).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from palestra.core.accel.onednn import Product, onednn_packing, onednn_product

MIN_WEIGHTS = 2**16  # smaller products take about the same time
MIN_ROWS = 4
MIN_ACTIVATIONS = 2**19  # of a training pass: with fewer, products with low-rank matrices take longer by oneDNN
MAX_PACKED_BYTES = 640 * 2**20  # of all weights of a base: larger ones have no second copy


class PackedWeight:
    """A frozen weight in oneDNN's own layout. It is packed at its first product, and again if it has changed."""

    def __init__(self) -> None:
        self._of: tuple[int, int] | None = None
        self._packed: Tensor | None = None

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return PackedWeight, ()  # copies of a model pack their own weights

    def of(self, weight: Tensor) -> Tensor:
        """Returns the packed `weight`; the weight itself if it is trained, since it would be packed again and again."""
        packing = onednn_packing()
        if weight.requires_grad or weight.is_inference() or packing is None:
            return weight
        version = weight.data_ptr(), weight._version
        if self._packed is None or self._of != version:
            self._packed = packing(weight)
            self._of = version
        return self._packed


def pack_weights(layers: Iterable[nn.Module]) -> None:
    """Lets `layers` use packed weights in passes without gradients, unless all together are too large."""
    large = [layer for layer in layers if type(layer) is nn.Linear and layer.weight.numel() > MIN_WEIGHTS]
    if packed_bytes(layer.weight.numel() for layer in large):
        for layer in large:
            layer.__dict__.setdefault("packed_weight", PackedWeight())  # not a parameter of the model


def packed_bytes(sizes: Iterable[int]) -> int:
    """Returns the bytes of the packed copies of weights of `sizes` numbers each in float32; 0 if they are too large."""
    total = sum(4 * size for size in sizes if size > MIN_WEIGHTS)
    return total if total <= MAX_PACKED_BYTES and onednn_packing() is not None else 0


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, packed: PackedWeight | None = None) -> Tensor:
    """Returns `x weight' + bias` [..., out] of `x` [..., in] and `weight` [out, in], up to rounding as `F.linear`.
    `packed` is the packed weight of a pass without gradients."""
    if not _is_faster(x, weight) or (product := onednn_product()) is None:
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled():
        if weight.requires_grad or (bias is not None and bias.requires_grad):
            return F.linear(x, weight, bias)  # the gradient of a weight would take a transposed copy
        if x.requires_grad:
            return OneDNNLinear.apply(x, weight, bias)
    return _multiply_padded(product, x, weight if packed is None else packed.of(weight), bias)


def matmul(x: Tensor, weight: Tensor) -> Tensor:
    """Returns `x weight` [..., in] of `x` [..., out] and `weight` [out, in], without gradients."""
    if not _is_faster(x, weight) or (product := onednn_product()) is None:
        return x @ weight
    return _multiply_padded(product, x, weight.T, None)


def low_rank_grads(x: Tensor, grad: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradients of `a` [r, in] and `b` [out, r] in `x a' b'`, from `x` [R, in] and the gradient of the
    product [R, out], without gradients of their own."""
    large = min(x.numel(), grad.numel()) > MIN_ACTIVATIONS and x.dtype == a.dtype == b.dtype
    if not (large and _is_faster(x, grad)) or (product := onednn_product()) is None:
        # transposed so that the long side is last: products with few columns run at a third of the speed
        return (b.T @ grad.T) @ x, ((a @ x.T) @ grad).T
    inner_rR, grad_rR = (_multiply_padded(product, rows, w, None).T.contiguous() for rows, w in ((x, a), (grad, b.T)))
    return _multiply_padded(product, grad_rR, x.T, None), _multiply_padded(product, inner_rR, grad.T, None).T


def padded_rows(rows: int) -> int:
    """Returns `rows` rounded up to one of a few numbers of rows, with which the product is computed."""
    if rows <= 16:
        step = 4
    elif rows <= 256:
        step = 8
    else:
        step = max(32, 2 ** (rows.bit_length() - 6))  # about a 32nd
    return -(-rows // step) * step


def _multiply_padded(product: Product, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns `product(x, weight, bias)`, computed with `padded_rows` rows."""
    rows = x.numel() // x.shape[-1]
    if (padding := padded_rows(rows) - rows) == 0:
        return product(x, weight, bias)
    wide = F.pad(x.reshape(rows, -1), (0, 0, 0, padding))
    return product(wide, weight, bias)[:rows].view(*x.shape[:-1], -1)


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
        return _multiply_padded(product, x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        return matmul(grad, weight), None, None
