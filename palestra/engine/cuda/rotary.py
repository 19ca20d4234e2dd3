"""Rotary position embeddings of recorded decoding steps as one kernel, where `transformers` launches ten.

The modelling code of an architecture calls a function of its own, `apply_rotary_pos_emb(q, k, cos, sin)` (Su et al.,
2021, "RoFormer"). `watched_rotary` replaces that function, once in a process, by a wrapper (`Rotary`). Inside
`watched_rotary` the wrapper compares the kernel with the function; inside `fused_rotary`, on the same thread, it uses
the kernel if the two agreed.

Shapes: `R` rows, `H` query heads, `h` key heads, `D` head width.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from palestra.engine.cuda.paged_attention import power_of_2

NAME = "apply_rotary_pos_emb"
_thread = threading.local()  # mode: "watch", "fuse" or absent


class Rotary:
    """The function `own` of an architecture, or the kernel in its place."""

    def __init__(self, own: Callable[..., tuple[Tensor, Tensor]]) -> None:
        self.own = own
        self.agrees = False

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: Any, **options: Any) -> Any:
        mode = getattr(_thread, "mode", None)
        if mode is None or more or options or not _fits(q, k, cos, sin):
            return self.own(q, k, cos, sin, *more, **options)
        if mode == "fuse" and self.agrees:
            return rotate(q, k, cos, sin)
        expected = self.own(q, k, cos, sin)
        if mode == "watch":
            self.agrees = all(
                torch.allclose(ours, theirs, rtol=0, atol=_tolerance(theirs))
                for ours, theirs in zip(rotate(q, k, cos, sin), expected, strict=True)
            )
        return expected


def _fits(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """True for one flat row of whole heads."""
    same = q.shape[-1] == k.shape[-1] == cos.shape[-1] and cos.shape == sin.shape == (1, q.shape[2], q.shape[3])
    return same and len(q) == 1 and q.dtype == k.dtype == cos.dtype == sin.dtype and not torch.is_grad_enabled()


def _tolerance(values: Tensor) -> float:
    share = 1e-5 if values.dtype == torch.float32 else 1e-2
    return share * float(values.abs().max())


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Returns queries [1, H, R, D] and keys [1, h, R, D] rotated by the angles whose cosines and sines are [1, R, D]:
    the first half of a head is the real part, the second the imaginary one."""
    if not q.is_cuda:
        return rotate_halves(q, cos, sin), rotate_halves(k, cos, sin)
    from palestra.engine.kernels import rotate as kernel

    (_, heads, rows, width), kv_heads = q.shape, k.shape[1]
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    cos = cos.contiguous()
    sin = sin.contiguous()
    out_q = q.new_empty(1, rows, heads, width)
    out_k = q.new_empty(1, rows, kv_heads, width)
    kernel[rows, heads + kv_heads](
        q, k, cos, sin, out_q, out_k, *q.stride()[1:3], *k.stride()[1:3], cos.stride(1), sin.stride(1),
        HEADS=heads, KV_HEADS=kv_heads, HALF=width // 2, PADDED_HALF=power_of_2(width // 2),
    )  # fmt: skip
    return out_q.transpose(1, 2), out_k.transpose(1, 2)


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns `x` [1, H, R, D] rotated: what the kernel computes."""
    low, high = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat([-high, low], -1) * sin[:, None]


@contextlib.contextmanager
def watched_rotary(model: nn.Module) -> Iterator[None]:
    """Context of a pass in which the kernel is compared with the functions of the model's code."""
    for module in model.modules():
        names = getattr(inspect.unwrap(type(module).forward), "__globals__", {})
        if callable(own := names.get(NAME)) and not isinstance(own, Rotary):
            names[NAME] = Rotary(own)
    with _mode("watch"):
        yield


@contextlib.contextmanager
def fused_rotary() -> Iterator[None]:
    """Context in which this thread uses the kernel if it agreed with the model's own function."""
    with _mode("fuse"):
        yield


@contextlib.contextmanager
def _mode(mode: str) -> Iterator[None]:
    _thread.mode = mode
    try:
        yield
    finally:
        _thread.mode = None
