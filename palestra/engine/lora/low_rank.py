"""Low-rank products by row: each row of a pass is multiplied with the matrices of its own adapter.

The matrices of all adapters of a layer lie one after another, `A [T, i]` and `B [T, o]`: an adapter of rank r has r
rows of both, so that ranks may differ and nothing is padded. The rows of one adapter are consecutive, a block. There
are three ways to the same numbers:

- batched products of blocks that are alike (`add_by_runs`), with which 64 adapters take a CPU little longer than one;
- two Triton kernels for all blocks together, on CUDA (`add_by_kernels`);
- all rows with the matrices of all adapters, where what is not a row's own becomes 0 (`add_by_masks`). The kernels are
  used only after they have given its numbers.

For kernels and masks the place of each row's adapter is in tensors, so that a CUDA graph can replay the products with
other adapters (decode_graphs.py), and layers of the same input are computed together.

Shapes: `R` rows, `T` columns: the sum of the adapters' ranks; `i` and `o` inputs and outputs of a layer, or of all `L`
layers together.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

MIN_BLOCK = 16  # smaller blocks take a CPU as long
MAX_PADDING_RATIO = 1.5  # maximum ratio of computed to needed rows of a batched product

TILE_COLUMNS = 16  # the least that a GPU's matrix units take
FEW_ROWS = 256  # up to which tiles have 16 rows, then 64
BLOCK_INPUTS = 128
BLOCK_OUTPUTS = 64
MIN_PROGRAMS = 256  # inputs are shared out until there are as many programs: about two for each multiprocessor


# -- batched products --------------------------------------------------------------------------------------------------


class Run(NamedTuple):
    """Consecutive blocks of adapters of one rank, for one batched product: their rows and columns, the number of
    adapters, the rows of the largest block, and if blocks differ in rows, the row of each padded index and the padded
    index of each row."""

    rows: slice
    columns: slice
    adapters: int
    width: int
    padding: tuple[Tensor, Tensor] | None


def runs_of(counts: Sequence[int], ranks: Sequence[int], device: torch.device) -> list[Run]:
    """Returns the runs of blocks of `counts` rows, whose adapters have the `ranks`."""
    first_row = np.cumsum([0, *counts]).tolist()
    first_column = np.cumsum([0, *ranks]).tolist()
    runs = []
    for blocks in _alike(counts, ranks):
        own = counts[blocks.start : blocks.stop]
        rows = slice(first_row[blocks.start], first_row[blocks.stop])
        columns = slice(first_column[blocks.start], first_column[blocks.stop])
        padding = _padding(own, device) if min(own) < max(own) else None
        runs.append(Run(rows, columns, len(own), max(own), padding))
    return runs


def _alike(counts: Sequence[int], ranks: Sequence[int]) -> Iterator[range]:
    """Yields ranges of consecutive blocks of one rank that need little padding; empty blocks are left out."""
    start = width = need = 0
    for i, (count, rank) in enumerate(zip(counts, ranks, strict=True)):
        rows = max(count, MIN_BLOCK)
        padded = max(width, rows) * (i - start + 1)
        if not count or rank != ranks[start] or padded > MAX_PADDING_RATIO * (need + rows):
            if i > start:
                yield range(start, i)
            start = i + (not count)
            width = need = 0
        if count:
            width = max(width, rows)
            need += rows
    if start < len(counts):
        yield range(start, len(counts))


def _padding(counts: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    width = max(counts)
    rows = []
    places = []
    start = 0
    for i, count in enumerate(counts):
        rows += [start + min(j, count - 1) for j in range(width)]
        places += [i * width + j for j in range(count)]
        start += count
    return torch.tensor(rows, device=device), torch.tensor(places, device=device)


def add_by_runs(x_Ri: Tensor, y_Ro: Tensor, a_Ti: Tensor, b_To: Tensor, runs: Sequence[Run]) -> None:
    """Adds to `y_Ro` the output of each row's adapter at one layer."""
    for run in runs:
        x, y = x_Ri[run.rows], y_Ro[run.rows]
        a, b = a_Ti[run.columns], b_To[run.columns]
        if run.adapters == 1:
            y.addmm_(x @ a.T, b)
            continue
        blocks = x if run.padding is None else x.index_select(0, run.padding[0])
        inner = torch.bmm(blocks.view(run.adapters, run.width, -1), a.view(run.adapters, -1, a.shape[1]).mT)
        b = b.view(run.adapters, -1, b.shape[1])
        if run.padding is None:
            y.view(run.adapters, run.width, -1).baddbmm_(inner, b)
        else:
            y += torch.bmm(inner, b).flatten(0, 1).index_select(0, run.padding[1])


# -- products by the place of each row's adapter -----------------------------------------------------------------------


class RowColumns(NamedTuple):
    """The columns of each row's adapter: the first of them, int [R], and their number, int [R] (0: no adapter). `width`
    is at least the largest number, and a multiple of `TILE_COLUMNS`."""

    first_R: Tensor
    rank_R: Tensor
    width: int


def columns_of(counts: Sequence[int], ranks: Sequence[int]) -> np.ndarray:
    """Returns the first column and the rank of each row's adapter, int64 [2, R], for blocks of `counts` rows whose
    adapters have the `ranks`."""
    first = np.cumsum([0, *ranks])[:-1]
    return np.repeat([first, ranks], counts, axis=1)


def padded_rank(ranks: Sequence[int]) -> int:
    """Returns the largest rank, rounded up to whole tiles."""
    return -(-max(ranks) // TILE_COLUMNS) * TILE_COLUMNS


def add_products(
    x_Ri: Tensor, y_Ro: Tensor, a_LTi: Tensor, b_To: Tensor, sizes: Sequence[int], columns: RowColumns
) -> None:
    """Adds to `y_Ro` the outputs of each row's adapter in L layers, which have `sizes` outputs each."""
    if uses_kernels(x_Ri):
        add_by_kernels(x_Ri, y_Ro, a_LTi, b_To, sizes, columns)
    else:
        add_by_masks(x_Ri, y_Ro, a_LTi, b_To, sizes, columns)


def add_by_masks(
    x_Ri: Tensor, y_Ro: Tensor, a_LTi: Tensor, b_To: Tensor, sizes: Sequence[int], columns: RowColumns
) -> None:
    """Does what `add_products` does, in plain torch."""
    column_T = torch.arange(len(b_To), device=x_Ri.device)
    first_R1 = columns.first_R[:, None]
    own_RT = (column_T >= first_R1) & (column_T < first_R1 + columns.rank_R[:, None])
    for a_Ti, y_Rl, b_Tl in zip(a_LTi, y_Ro.split(list(sizes), 1), b_To.split(list(sizes), 1), strict=True):
        y_Rl.addmm_((x_Ri @ a_Ti.T) * own_RT, b_Tl)


def add_by_kernels(
    x_Ri: Tensor, y_Ro: Tensor, a_LTi: Tensor, b_To: Tensor, sizes: Sequence[int], columns: RowColumns
) -> None:
    """Does what `add_products` does, by two kernels."""
    from palestra.engine.kernels import add_outputs, reduce_rows

    (rows, inputs), (layers, all_columns, _) = x_Ri.shape, a_LTi.shape
    tile = 16 if rows <= FEW_ROWS else 64
    tiles = -(-rows // tile)
    chunks = layers * columns.width // TILE_COLUMNS
    blocks_of_inputs = -(-inputs // BLOCK_INPUTS)
    shares = min(blocks_of_inputs, max(1, MIN_PROGRAMS // (tiles * chunks)))
    each = -(-blocks_of_inputs // shares) * BLOCK_INPUTS
    inner = x_Ri.new_empty(layers * shares, rows, columns.width, dtype=torch.float32)
    tiling = {"ROWS": tile, "COLUMNS": TILE_COLUMNS}
    reduce_rows[tiles, chunks, shares](
        x_Ri, a_LTi, columns.first_R, columns.rank_R, inner,
        rows, x_Ri.stride(0), all_columns, inputs, each, shares, columns.width, BLOCK=BLOCK_INPUTS, **tiling,
    )  # fmt: skip
    block_X3 = _blocks_of_outputs(tuple(sizes), x_Ri.device)
    add_outputs[tiles, len(block_X3)](
        inner, b_To, block_X3, columns.first_R, columns.rank_R, y_Ro,
        rows, y_Ro.stride(0), sum(sizes), shares, columns.width, BLOCK=BLOCK_OUTPUTS, **tiling,
    )  # fmt: skip


@cache
def _blocks_of_outputs(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Returns for each block of outputs its layer, its first output and the end of the layer's outputs, int32."""
    blocks = []
    start = 0
    for layer, size in enumerate(sizes):
        blocks += [(layer, first, start + size) for first in range(start, start + size, BLOCK_OUTPUTS)]
        start += size
    return torch.tensor(blocks, dtype=torch.int32, device=device)


def uses_kernels(x: Tensor) -> bool:
    """Returns whether the products of `x` are computed by kernels."""
    return x.is_cuda and kernels_agree(x.device, x.dtype)


@cache
def kernels_agree(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether the kernels give the numbers of plain torch for random matrices in `dtype`; warns if not."""
    generator = torch.Generator().manual_seed(0)
    ranks = [4, 40, 16, 0]
    sizes = [96, 32]
    shapes = [(25, 160), (25, sum(sizes)), (2, sum(ranks), 160), (sum(ranks), sum(sizes))]
    x, y, a, b = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    first_R, rank_R = torch.tensor(columns_of([3, 1, 20, 1], ranks), device=device)
    columns = RowColumns(first_R, rank_R, padded_rank(ranks))
    expected = y.clone()
    add_by_masks(x, expected, a, b, sizes, columns)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    try:
        add_by_kernels(x, y, a, b, sizes, columns)
        torch.testing.assert_close(y, expected, rtol=0, atol=tolerance * float(expected.abs().max()))
    except Exception as error:  # a compiler's and a driver's errors have many types
        reason = f"{type(error).__name__}: {error!s:.300}"
        warnings.warn(f"adapters are applied by plain products, which takes longer: {reason}", stacklevel=2)
        return False
    return True
