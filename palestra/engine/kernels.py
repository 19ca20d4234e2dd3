"""Triton kernels: attention over pages and rotary embeddings of decoding steps (paged_attention.py, rotary.py), and
low-rank products by row (low_rank.py). Imported on CUDA only: Triton comes with torch for CUDA.

A program of `attend_to_share` attends to one share of the pages of a row, for the query heads of one key-value head; a
program of `combine_shares` makes the output of one head of a row; `write_tokens` and `rotate` have one for each head of
a row.

A program of `reduce_rows` and `add_outputs` has a tile of rows. It goes through the adapters that these rows use, one
after another, and leaves rows of another adapter as they are: 0 times a weight that is not finite is NaN. `reduce_rows`
computes 16 columns of `x A'` from a share of the inputs, `add_outputs` adds a block of the outputs of `B`. A program of
`sum_rows` has 16 columns of one adapter: it sums the products of their values and a block of `x` over a share of the
adapter's rows.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def attend_to_share(
    q_ptr, k_ptr, v_ptr, page_ptr, prompt_ptr, answer_ptr, first_ptr, partial_ptr, top_ptr, total_ptr,
    scale, cap, page_stride, shares,
    HAS_CAP: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr, PADDED_GROUPS: tl.constexpr,
    WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    share_id = tl.program_id(2)
    prompt = tl.load(prompt_ptr + row)
    answer = tl.load(answer_ptr + row)
    first = tl.load(first_ptr + row)
    prompt_pages = (prompt + PAGE - 1) // PAGE
    pages = prompt_pages + (answer + PAGE - 1) // PAGE
    each = (pages + shares - 1) // shares
    begin = share_id * each
    end = tl.minimum(begin + each, pages)

    group = tl.arange(0, PADDED_GROUPS)
    width = tl.arange(0, PADDED_WIDTH)
    key = tl.arange(0, PAGE)
    real = (group[:, None] < GROUPS) & (width[None, :] < WIDTH)
    head = kv_head * GROUPS + group
    q = tl.load(q_ptr + (row * HEADS + head[:, None]) * WIDTH + width[None, :], mask=real, other=0.0)
    top = tl.full([PADDED_GROUPS], -1e30, tl.float32)
    total = tl.zeros([PADDED_GROUPS], tl.float32)
    out = tl.zeros([PADDED_GROUPS, PADDED_WIDTH], tl.float32)
    for i in range(begin, end):
        page = tl.load(page_ptr + row * page_stride + i)
        in_answer = i >= prompt_pages
        offset = tl.where(in_answer, (i - prompt_pages) * PAGE, i * PAGE)
        length = tl.where(in_answer, answer, prompt)
        position = tl.where(in_answer, prompt, 0) + offset + key
        seen = (offset + key < length) & (position >= first)
        at = ((page * (HEADS // GROUPS) + kv_head) * PAGE + key)[:, None] * WIDTH + width[None, :]
        is_real = seen[:, None] & (width[None, :] < WIDTH)
        k = tl.load(k_ptr + at, mask=is_real, other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if HAS_CAP:
            score = cap * (2.0 / (1.0 + tl.exp(-2.0 * score / cap)) - 1.0)
        score = tl.where(seen[None, :], score, -1e30)
        higher = tl.maximum(top, tl.max(score, 1))
        weight = tl.where(seen[None, :], tl.exp(score - higher[:, None]), 0.0)
        decay = tl.exp(top - higher)
        v = tl.load(v_ptr + at, mask=is_real, other=0.0)
        out = out * decay[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        total = total * decay + tl.sum(weight, 1)
        top = higher
    place = (row * HEADS + head) * shares + share_id
    tl.store(top_ptr + place, top, mask=group < GROUPS)
    tl.store(total_ptr + place, total, mask=group < GROUPS)
    tl.store(partial_ptr + place[:, None] * WIDTH + width[None, :], out, mask=real)


@triton.jit
def combine_shares(
    partial_ptr, top_ptr, total_ptr, sinks_ptr, out_ptr, shares,
    HAS_SINKS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr,
    PADDED_SHARES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    head = tl.program_id(1)
    share_id = tl.arange(0, PADDED_SHARES)
    width = tl.arange(0, PADDED_WIDTH)
    place = (row * HEADS + head) * shares + share_id
    top = tl.load(top_ptr + place, mask=share_id < shares, other=-1e30)
    total = tl.load(total_ptr + place, mask=share_id < shares, other=0.0)
    highest = tl.max(top, 0)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head)
        highest = tl.maximum(highest, sink)
    share = tl.exp(top - highest)
    norm = tl.sum(total * share, 0)
    if HAS_SINKS:
        norm += tl.exp(sink - highest)
    is_real = (share_id[:, None] < shares) & (width[None, :] < WIDTH)
    values = tl.load(partial_ptr + place[:, None] * WIDTH + width[None, :], mask=is_real, other=0.0)
    out = tl.sum(values * share[:, None], 0) / norm
    tl.store(out_ptr + (row * HEADS + head) * WIDTH + width, out.to(out_ptr.dtype.element_ty), mask=width < WIDTH)


@triton.jit
def write_tokens(
    k_ptr, v_ptr, kept_k_ptr, kept_v_ptr, place_ptr,
    k_head, k_row, k_step, v_head, v_row, v_step,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    head = tl.program_id(1)
    width = tl.arange(0, PADDED_WIDTH)
    is_real = width < WIDTH
    at = tl.load(place_ptr + row * HEADS + head) * WIDTH + width
    k = tl.load(k_ptr + head * k_head + row * k_row + width * k_step, mask=is_real)
    v = tl.load(v_ptr + head * v_head + row * v_row + width * v_step, mask=is_real)
    tl.store(kept_k_ptr + at, k, mask=is_real)
    tl.store(kept_v_ptr + at, v, mask=is_real)


@triton.jit
def rotate(
    q_ptr, k_ptr, cos_ptr, sin_ptr, out_q_ptr, out_k_ptr,
    q_head, q_row, k_head, k_row, cos_row, sin_row,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, PADDED_HALF: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    head = tl.program_id(1)
    half = tl.arange(0, PADDED_HALF)
    is_real = half < HALF
    cos_low = tl.load(cos_ptr + row * cos_row + half, mask=is_real).to(tl.float32)
    cos_high = tl.load(cos_ptr + row * cos_row + HALF + half, mask=is_real).to(tl.float32)
    sin_low = tl.load(sin_ptr + row * sin_row + half, mask=is_real).to(tl.float32)
    sin_high = tl.load(sin_ptr + row * sin_row + HALF + half, mask=is_real).to(tl.float32)
    if head < HEADS:
        at = q_ptr + head * q_head + row * q_row + half
        out = out_q_ptr + (row * HEADS + head) * 2 * HALF + half
    else:
        at = k_ptr + (head - HEADS) * k_head + row * k_row + half
        out = out_k_ptr + (row * KV_HEADS + head - HEADS) * 2 * HALF + half
    low = tl.load(at, mask=is_real).to(tl.float32)
    high = tl.load(at + HALF, mask=is_real).to(tl.float32)
    kind = out_q_ptr.dtype.element_ty
    tl.store(out, (low * cos_low - high * sin_low).to(kind), mask=is_real)
    tl.store(out + HALF, (high * cos_high + low * sin_high).to(kind), mask=is_real)


@triton.jit
def reduce_rows(
    x_ptr, a_ptr, first_ptr, rank_ptr, inner_ptr,
    rows, x_row, all_columns, inputs, each, shares, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    chunks = width // COLUMNS
    layer = tl.program_id(1) // chunks
    chunk = tl.program_id(1) % chunks
    share = tl.program_id(2)
    at = tl.program_id(0) * ROWS
    end = tl.minimum(at + ROWS, rows)
    row = at + tl.arange(0, ROWS).to(tl.int64)
    column = chunk * COLUMNS + tl.arange(0, COLUMNS)
    first_R = tl.load(first_ptr + row, mask=row < rows, other=-2)
    rank_R = tl.load(rank_ptr + row, mask=row < rows, other=0)
    inner = tl.zeros([ROWS, COLUMNS], tl.float32)
    while at < end:
        first = tl.load(first_ptr + at)
        rank = tl.load(rank_ptr + at)
        own = (first_R == first) & (rank_R == rank)  # bare rows have the first column of the next adapter
        if chunk * COLUMNS < rank:
            a_row = layer * all_columns + first + column.to(tl.int64)
            for start in range(share * each, tl.minimum((share + 1) * each, inputs), BLOCK):
                i = start + tl.arange(0, BLOCK)
                x_at = x_ptr + row[:, None] * x_row + i[None, :]
                a_at = a_ptr + a_row[:, None] * inputs + i[None, :]
                x = tl.load(x_at, mask=own[:, None] & (i < inputs)[None, :], other=0.0)
                a = tl.load(a_at, mask=(column < rank)[:, None] & (i < inputs)[None, :], other=0.0)
                inner = tl.where(own[:, None], inner + tl.dot(x, tl.trans(a), input_precision="ieee"), inner)
        at += tl.sum(own.to(tl.int32), 0)
    place = ((layer * shares + share) * rows + row) * width
    tl.store(inner_ptr + place[:, None] + column[None, :], inner, mask=(row < rows)[:, None])


@triton.jit
def add_outputs(
    inner_ptr, b_ptr, block_ptr, first_ptr, rank_ptr, y_ptr,
    rows, y_row, outputs, shares, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = block_ptr + 3 * tl.program_id(1)
    layer = tl.load(block)
    o = tl.load(block + 1) + tl.arange(0, BLOCK)
    is_output = o < tl.load(block + 2)
    at = tl.program_id(0) * ROWS
    end = tl.minimum(at + ROWS, rows)
    row = at + tl.arange(0, ROWS).to(tl.int64)
    first_R = tl.load(first_ptr + row, mask=row < rows, other=-2)
    rank_R = tl.load(rank_ptr + row, mask=row < rows, other=0)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    while at < end:
        first = tl.load(first_ptr + at)
        rank = tl.load(rank_ptr + at)
        own = (first_R == first) & (rank_R == rank)  # bare rows have the first column of the next adapter
        for start in range(0, rank, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            inner = tl.zeros([ROWS, COLUMNS], tl.float32)
            for share in range(0, shares):
                place = ((layer * shares + share) * rows + row) * width
                inner += tl.load(inner_ptr + place[:, None] + column[None, :], mask=own[:, None], other=0.0)
            b_at = b_ptr + (first + column.to(tl.int64))[:, None] * outputs + o[None, :]
            b = tl.load(b_at, mask=(column < rank)[:, None] & is_output[None, :], other=0.0)
            total = tl.where(own[:, None], total + tl.dot(inner.to(b.dtype), b, input_precision="ieee"), total)
        at += tl.sum(own.to(tl.int32), 0)
    y_at = y_ptr + row[:, None] * y_row + o[None, :]
    is_real = (row < rows)[:, None] & is_output[None, :]
    y = tl.load(y_at, mask=is_real, other=0.0)
    tl.store(y_at, (y.to(tl.float32) + total).to(y.dtype), mask=is_real)


@triton.jit
def sum_rows(
    inner_ptr, x_ptr, tile_ptr, total_ptr,
    rows, x_row, all_columns, inputs, shares, row_shares, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tile = tile_ptr + 5 * tl.program_id(0)
    begin = tl.load(tile)
    end = tl.load(tile + 1)
    first = tl.load(tile + 2)
    column = tl.load(tile + 3) + tl.arange(0, COLUMNS)
    is_own = column < tl.load(tile + 4)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    each = tl.cdiv(tl.cdiv(end - begin, ROWS), row_shares) * ROWS
    begin += tl.program_id(2) * each
    total = tl.zeros([COLUMNS, BLOCK], tl.float32)
    for start in range(begin, tl.minimum(begin + each, end), ROWS):
        row = start + tl.arange(0, ROWS).to(tl.int64)
        is_row = (row < end)[:, None]
        inner = tl.zeros([ROWS, COLUMNS], tl.float32)
        for share in range(0, shares):
            place = (share * rows + row) * width
            inner += tl.load(inner_ptr + place[:, None] + column[None, :], mask=is_row & is_own[None, :], other=0.0)
        x_at = x_ptr + row[:, None] * x_row + i[None, :]
        x = tl.load(x_at, mask=is_row & (i < inputs)[None, :], other=0.0)
        total += tl.dot(tl.trans(inner.to(x.dtype)), x, input_precision="ieee")
    place = (tl.program_id(2) * all_columns + first + column.to(tl.int64)) * inputs
    tl.store(total_ptr + place[:, None] + i[None, :], total, mask=is_own[:, None] & (i < inputs)[None, :])
