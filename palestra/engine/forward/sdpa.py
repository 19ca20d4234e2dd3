"""Fused attention of grouped queries, without the kernels that materialise all scores.

With a mask and grouped queries together, torch on CUDA falls back to its math kernel, which keeps every score in
float32: FlashAttention takes no mask, and the memory-efficient kernel no grouped queries. With a mask on CUDA, keys and
values are therefore repeated for each query head: that costs memory once per key, not once per pair of query and key.
On CPU nothing is repeated.

Not seen on a GPU: tests check that both ways give the same numbers.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def grouped_attention(
    q_nHQD: Tensor, k_nhKD: Tensor, v_nhKD: Tensor, mask: Tensor | None, scale: float, *, is_causal: bool = False
) -> Tensor:
    """Returns the attention output [n, H, Q, D] of H query heads over h key-value heads. `mask` is bool, broadcast to
    [n, H, Q, K] (None: every key, or with `is_causal` those up to the query's own index)."""
    groups = q_nHQD.shape[1] // k_nhKD.shape[1]
    if groups > 1 and mask is not None and uses_cuda(q_nHQD):
        k_nhKD = repeat_heads(k_nhKD, groups)
        v_nhKD = repeat_heads(v_nhKD, groups)
    grouped = q_nHQD.shape[1] != k_nhKD.shape[1]
    return F.scaled_dot_product_attention(
        q_nHQD, k_nhKD, v_nhKD, mask, is_causal=is_causal, scale=scale, enable_gqa=grouped
    )


def uses_cuda(tensor: Tensor) -> bool:
    """Returns whether CUDA's kernels compute with `tensor`."""
    return tensor.is_cuda


def repeat_heads(x_nhKD: Tensor, times: int) -> Tensor:
    """Returns `x_nhKD` with each head repeated `times` times in a row, as grouped queries count their heads."""
    n, h, keys, width = x_nhKD.shape
    return x_nhKD[:, :, None].expand(n, h, times, keys, width).reshape(n, h * times, keys, width)
