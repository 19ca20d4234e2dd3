"""Attention of a decoding step by page tables: one query per row, over the pages of its prompt and of its answer.

All shapes are known before the step, and what differs between steps is in tensors, so that a CUDA graph can replay it
(decode_graphs.py). On CUDA two Triton kernels compute it: one attends to a share of a row's pages, the other combines
the shares by their softmax sums (Dao et al., 2023, "Flash-Decoding"). Elsewhere it is plain torch, which the kernels
are tested against.

Shapes: `R` rows, `H` query heads, `h` key-value heads, `D` head width, `N` pages of the pool, `P` tokens of a page,
`W` width of the page table, `C` shares of a row's pages.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from palestra.engine.forward.attention_terms import NO_TERMS, AttentionTerms, attention_by_scores

MAX_WIDTH = 256  # heads beyond this width do not fit a processor's registers
MIN_PROGRAMS = 512  # pages are shared out until there are as many programs: a few for each multiprocessor
MAX_SHARES = 16


class PageTable(NamedTuple):
    """The sequences of each row, int64: pages `page_RW` of its prompt and then of its answer (what follows is not
    read), and their lengths `prompt_R` and `answer_R` in tokens, the new token included."""

    page_RW: Tensor
    prompt_R: Tensor
    answer_R: Tensor

    @property
    def length_R(self) -> Tensor:  # noqa: N802 - the suffix is the shape
        return self.prompt_R + self.answer_R

    def pages_of_prompts(self, page_tokens: int) -> Tensor:
        """Returns the number of pages of each prompt [R]."""
        return (self.prompt_R + page_tokens - 1) // page_tokens


def paged_attention(
    q_RHD: Tensor, kv_2NhPD: Tensor, table: PageTable, first_R: Tensor, scale: float, terms: AttentionTerms = NO_TERMS
) -> Tensor:
    """Returns the attention output [R, H, D] of a layer with the keys and values `kv_2NhPD`, over the keys from
    position `first_R` int64 on. The span of `terms` is not read: it is in `first_R`."""
    if q_RHD.is_cuda:
        return attention_by_kernels(q_RHD, kv_2NhPD, table, first_R, scale, terms)
    return attention_by_gathering(q_RHD, kv_2NhPD, table, first_R, scale, terms)


def write_to_pages(kv_2NhPD: Tensor, place_X: Tensor, k_hRD: Tensor, v_hRD: Tensor) -> None:
    """Writes the new keys and values of each row and head to its place among the tokens of all pages and heads
    [N * h * P]; `place_X` int64 [R * h]."""
    h, rows, width = k_hRD.shape
    if k_hRD.is_cuda:
        from palestra.engine.kernels import write_tokens

        write_tokens[rows, h](
            k_hRD, v_hRD, kv_2NhPD[0], kv_2NhPD[1], place_X,
            *k_hRD.stride(), *v_hRD.stride(), HEADS=h, WIDTH=width, PADDED_WIDTH=power_of_2(width),
        )  # fmt: skip
        return
    for kept_NhPD, new_hRD in zip(kv_2NhPD, (k_hRD, v_hRD), strict=True):
        kept_NhPD.view(-1, width).index_copy_(0, place_X, new_hRD.transpose(0, 1).reshape(-1, width))


def attention_by_gathering(
    q_RHD: Tensor, kv_2NhPD: Tensor, table: PageTable, first_R: Tensor, scale: float, terms: AttentionTerms
) -> Tensor:
    """Returns what `paged_attention` returns, in plain torch."""
    (rows, width), (h, page_tokens) = table.page_RW.shape, kv_2NhPD.shape[2:4]
    in_page_P = torch.arange(page_tokens, device=q_RHD.device)
    before_RW1 = torch.arange(width, device=q_RHD.device)[None, :, None] * page_tokens
    of_answer_RW1 = before_RW1 >= table.pages_of_prompts(page_tokens)[:, None, None] * page_tokens
    into_answer = before_RW1 + in_page_P - table.pages_of_prompts(page_tokens)[:, None, None] * page_tokens
    position = torch.where(of_answer_RW1, table.prompt_R[:, None, None] + into_answer, before_RW1 + in_page_P)
    end = torch.where(of_answer_RW1, table.length_R[:, None, None], table.prompt_R[:, None, None])
    seen = ((position < end) & (position >= first_R[:, None, None])).flatten(1)[:, None, None]
    pages = table.page_RW.clamp(0, kv_2NhPD.shape[1] - 1)
    k, v = (kv[pages].transpose(1, 2).reshape(rows, h, width * page_tokens, -1) for kv in kv_2NhPD)
    return attention_by_scores(q_RHD[:, :, None], k, v, seen, scale, terms)[:, :, 0]


def attention_by_kernels(
    q_RHD: Tensor, kv_2NhPD: Tensor, table: PageTable, first_R: Tensor, scale: float, terms: AttentionTerms
) -> Tensor:
    """Returns what `paged_attention` returns, by two kernels."""
    from palestra.engine.kernels import attend_to_share, combine_shares

    (rows, heads, width), (_, _, h, page_tokens, _) = q_RHD.shape, kv_2NhPD.shape
    q_RHD = q_RHD.contiguous()
    shares = min(MAX_SHARES, table.page_RW.shape[1], max(1, -(-MIN_PROGRAMS // (rows * h))))
    partial = q_RHD.new_empty(rows, heads, shares, width, dtype=torch.float32)
    top, total = q_RHD.new_empty(2, rows, heads, shares, dtype=torch.float32)
    out = torch.empty_like(q_RHD)
    groups = heads // h
    padded = max(16, power_of_2(width))
    attend_to_share[rows, h, shares](
        q_RHD, kv_2NhPD[0], kv_2NhPD[1], table.page_RW, table.prompt_R, table.answer_R, first_R,
        partial, top, total,
        scale, terms.softcap or 0.0, table.page_RW.stride(0), shares,
        HAS_CAP=terms.softcap is not None, HEADS=heads, GROUPS=groups, WIDTH=width, PAGE=page_tokens,
        PADDED_GROUPS=max(16, power_of_2(groups)), PADDED_WIDTH=padded,
    )  # fmt: skip
    sinks = top if terms.sinks_H is None else terms.sinks_H.float()
    combine_shares[rows, heads](
        partial, top, total, sinks, out, shares,
        HAS_SINKS=terms.sinks_H is not None, HEADS=heads, WIDTH=width, PADDED_WIDTH=padded,
        PADDED_SHARES=power_of_2(shares),
    )  # fmt: skip
    return out


def power_of_2(least: int) -> int:
    """Returns the first power of 2 that is at least `least`."""
    return 1 << (least - 1).bit_length()
