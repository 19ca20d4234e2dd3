"""RMS norms and gated MLPs with fewer passes over memory than `transformers` makes.

A norm is six calls in `transformers`, which take a large share of a step of a small model. A gated MLP keeps the
activated gate for its backward pass, which is as large as its product and quickly computed again. A module is replaced
only if the fused version gives the same output on a random input; other kinds are left unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CACHED_NUMBERS = 2**18  # elements of a chunk of a gated MLP: its four tensors fit a processor's L2 cache, or nearly

Forward = Callable[[Tensor], Tensor]


class RMSNorm(torch.autograd.Function):
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension (Zhang & Sennrich, 2019), computed in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out, scale = _normalize(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = (grad * x * scale).flatten(0, -2).sum(0).to(weight.dtype)
        if not ctx.needs_input_grad[0]:
            return None, grad_weight, None
        inner = grad * weight
        wide = x.to(inner.dtype)  # float32 weights promote half-precision products
        along = torch.linalg.vecdot(inner, wide).unsqueeze(-1).mul_(scale.pow(3) / x.shape[-1])
        return inner.mul_(scale).addcmul_(wide, along, value=-1).to(x.dtype), grad_weight, None


def _normalize(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns the normalised `x` and the factor [..., 1] of each row."""
    scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
    scale = scale.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (x * scale.to(x.dtype)).mul_(weight), scale


class SwiGLU(torch.autograd.Function):
    """`silu(gate) * up` (Shazeer, 2020, "GLU Variants Improve Transformer"), bit for bit. Keeps only its two arguments
    for the backward pass."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        out = torch.empty_like(up)
        for gate_CF, up_CF, out_CF in _chunks(gate, up, out):
            torch.mul(F.silu(gate_CF), up_CF, out=out_CF)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grads = torch.empty_like(gate), torch.empty_like(up)
        for gate_CF, up_CF, outer_CF, to_gate_CF, to_up_CF in _chunks(gate, up, grad, *grads):
            torch.mul(outer_CF, F.silu(gate_CF), out=to_up_CF)
            torch.ops.aten.silu_backward.grad_input(outer_CF * up_CF, gate_CF, grad_input=to_gate_CF)
        return grads


def _chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yields equal rows of all tensors [..., F]: as many as fit the processor's cache, on a GPU all."""
    width = tensors[0].shape[-1]
    rows = max(1, CACHED_NUMBERS // width) if tensors[0].device.type == "cpu" else max(1, tensors[0].numel() // width)
    yield from zip(*(x.reshape(-1, width).split(rows) for x in tensors), strict=True)


def fuse_layers(model: nn.Module) -> int:
    """Replaces the forward of each plain RMS norm and of each MLP with a SiLU gate in place; returns how many were
    replaced."""
    count = 0
    for module in model.modules():
        fused = _fused_norm(module) if type(module).__name__.endswith("RMSNorm") else _fused_mlp(module)
        if fused is not None:
            module.forward = fused
            count += 1
    return count


def _fused_norm(module: Any) -> Forward | None:
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", None)
    if weight is None or eps is None or weight.dim() != 1:
        return None

    def forward(hidden_states: Tensor) -> Tensor:
        if hidden_states.is_cuda and hidden_states.dtype == module.weight.dtype:
            return F.rms_norm(hidden_states, module.weight.shape, module.weight, eps)  # one kernel
        if not torch.is_grad_enabled():  # a call of a Function takes as long as a norm of a few rows
            return _normalize(hidden_states, module.weight, eps)[0]
        return RMSNorm.apply(hidden_states, module.weight, eps)

    probe = torch.randn(4, len(weight), generator=torch.Generator().manual_seed(0)).to(weight)
    with torch.no_grad():
        same = torch.allclose(module(probe), forward(probe), rtol=1e-5 if weight.dtype == torch.float32 else 2e-2)
    return forward if same else None


def _fused_mlp(module: Any) -> Forward | None:
    if not all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn")):
        return None
    if not _is_gated_by_silu(module):
        return None
    plain_forward = module.forward

    def forward(x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return module.down_proj(SwiGLU.apply(module.gate_proj(x), module.up_proj(x)))
        if x.is_cuda:
            return plain_forward(x)
        return module.down_proj(F.silu(module.gate_proj(x)).mul_(module.up_proj(x)))

    return forward


def _is_gated_by_silu(module: Any) -> bool:
    """Returns whether the code of an MLP computes `down_proj(silu(gate_proj(x)) * up_proj(x))`: it is called with
    random numbers in place of its products, since weights may be quantised, or on other ranks."""
    generator = torch.Generator().manual_seed(0)
    x, gate, up = torch.randn(3, 2, 64, generator=generator).unbind()
    apart = SimpleNamespace(
        gate_proj=lambda inputs: gate + inputs,
        up_proj=lambda inputs: up + inputs,
        down_proj=torch.neg,
        act_fn=module.act_fn,
    )
    try:
        with torch.no_grad():
            output = type(module).forward(apart, x)
    except (AttributeError, TypeError):  # it reads or takes more than these
        return False
    return isinstance(output, Tensor) and torch.equal(output, -(F.silu(gate + x) * (up + x)))
