"""Frozen linear layers of 4 or 8 bits, on which adapters of full precision are trained (QLoRA, Dettmers et al., 2023).

Only the weights are quantised, in blocks with one float32 scale: NF4 has 16 levels, the quantiles of a normal
distribution, in blocks of 64 values; int8 has 255 equal steps in each row. Every pass dequantises a layer's weights
again, so no copy is kept for the backward pass. It is plain torch on any device; fast kernels are not used.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from palestra.engine.forward.decoder import decoder_of

Quantization = Literal["nf4", "int8"]
NF4_BLOCK = 64
NF4_LEVELS = (  # Dettmers et al., 2023, appendix E
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


class QuantizedLinear(nn.Linear):
    """A frozen linear layer. `weight` holds codes, uint8 (two codes of 4 bits each in NF4); `scales`, float32, are the
    scales of the blocks."""

    def __init__(self, layer: nn.Linear, kind: Quantization) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        codes, scales = quantize(layer.weight.detach(), kind)
        self.kind = kind
        self.bias = layer.bias
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.register_buffer("scales", scales, persistent=True)

    def dequantize(self) -> Tensor:
        """Returns the weight [out, in] float32."""
        scales: Any = self.scales
        return dequantize(self.weight, scales, (self.out_features, self.in_features), self.kind)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _DequantizedProduct.apply(x, self)
        if self.bias is not None:
            y = y + self.bias
        return y


class _DequantizedProduct(torch.autograd.Function):
    """`x W'` with a weight that is computed anew in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: QuantizedLinear) -> Tensor:
        ctx.layer = layer
        return F.linear(x, layer.dequantize().to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad @ ctx.layer.dequantize().to(grad.dtype), None


def quantize(weight: Tensor, kind: Quantization) -> tuple[Tensor, Tensor]:
    """Returns codes uint8 and scales float32 of a weight [out, in]."""
    if kind == "int8":
        scales = weight.float().abs().amax(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        return (weight.float() / scales * 127).round().to(torch.int8).view(torch.uint8), scales
    flat = weight.float().flatten()
    blocks = F.pad(flat, (0, -len(flat) % NF4_BLOCK)).view(-1, NF4_BLOCK)
    scales = blocks.abs().amax(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    levels = torch.tensor(NF4_LEVELS, device=weight.device)
    codes = torch.bucketize(blocks / scales, (levels[1:] + levels[:-1]) / 2, out_int32=True).to(torch.uint8).view(-1, 2)
    return codes[:, 0] << 4 | codes[:, 1], scales


def dequantize(codes: Tensor, scales: Tensor, shape: tuple[int, int], kind: Quantization) -> Tensor:
    """Returns the weight [out, in] float32 of `quantize`'s codes and scales."""
    if kind == "int8":
        return codes.view(torch.int8).float() * (scales / 127)
    levels = torch.tensor(NF4_LEVELS, device=codes.device)
    pairs = torch.stack([levels.repeat_interleave(16), levels.repeat(16)], 1)  # the two levels of each byte
    blocks = pairs.index_select(0, codes.int()).view(-1, NF4_BLOCK) * scales
    return blocks.flatten()[: shape[0] * shape[1]].view(shape)


def quantize_model(model: PreTrainedModel, kind: Quantization) -> None:
    """Replaces the linear layers of a model's decoder, in place, one at a time; embeddings, norms, stacked experts and
    the head stay as they are. Raises ValueError if there are none."""
    linears = [(name, m) for name, m in decoder_of(model).named_modules() if type(m) is nn.Linear]
    for name, layer in linears:
        parent, _, short = name.rpartition(".")
        setattr(decoder_of(model).get_submodule(parent), short, QuantizedLinear(layer, kind))
    if not linears:
        raise ValueError(
            f"quantize: {kind} quantises linear layers, of which {type(model).__name__} has none of the common kind: "
            "set quantize: null"
        )


@torch.no_grad()
def round_to_quantized(model: PreTrainedModel, kind: Quantization) -> None:
    """Replaces the weights that `quantize_model` quantises by their dequantised values, in place."""
    for layer in decoder_of(model).modules():
        if type(layer) is nn.Linear:
            codes, scales = quantize(layer.weight, kind)
            layer.weight.copy_(dequantize(codes, scales, (layer.out_features, layer.in_features), kind))


def quantized_bytes(num_weights: int, kind: Quantization) -> int:
    """Returns the bytes of quantised weights, with NF4's scales; int8's few scales are not counted."""
    return num_weights // 2 + 4 * num_weights // NF4_BLOCK if kind == "nf4" else num_weights
