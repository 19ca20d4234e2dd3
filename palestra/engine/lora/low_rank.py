"""Low-rank products by row: each row of a pass is multiplied with the matrices of its own adapter.

The matrices of all adapters of a layer lie one after another, `A [T, i]` and `B [T, o]`: an adapter of rank r has r
rows of both, so that ranks may differ and nothing is padded. The rows of one adapter are consecutive, a block. There
are three ways to the same numbers:

- batched products of blocks that are alike (`BatchedProducts`), with which 64 adapters take a CPU little longer than
  one;
- Triton kernels for all blocks together, on CUDA: two for a layer's output (`add_by_kernels`), and a third for the
  gradients of A and B (`KernelProducts`);
- all rows with the matrices of all adapters, where what is not a row's own becomes 0 (`add_by_masks`).

The kernels are used only after they have given the numbers of one of the others. For kernels and masks the place of
each row's adapter is in tensors, so that a CUDA graph can replay the products with other adapters (decode_graphs.py),
and layers of the same input are computed together.

Shapes: `R` rows, `T` columns: the sum of the adapters' ranks; `i` and `o` inputs and outputs of a layer, or of all `L`
layers together.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from palestra.engine.forward.linear import linear, matmul

MIN_BLOCK = 16  # smaller blocks take a CPU as long
MAX_PADDING_RATIO = 1.5  # maximum ratio of computed to needed rows of a batched product

TILE_COLUMNS = 16  # the least that a GPU's matrix units take
FEW_ROWS = 256  # up to which tiles have 16 rows, then 64
BLOCK_INPUTS = 128
BLOCK_OUTPUTS = 64
MIN_PROGRAMS = 256  # sums are shared out until there are as many programs: about two for each multiprocessor
MAX_KERNEL_ROWS = 2048  # of a run, on average, in training (estimated): kernels read rows again for every 16 columns


# -- batched products --------------------------------------------------------------------------------------------------


class Padding(NamedTuple):
    """Indices between the rows of a run and its blocks, padded to one size: the row of each padded index `row_X` int64
    [n * w], the padded index of each row `index_R` int64 [R], and which padded indices are rows, bool [n, w, 1]."""

    row_X: Tensor
    index_R: Tensor
    is_row_nw1: Tensor


class Run(NamedTuple):
    """Consecutive blocks of adapters of one rank, for one batched product: their rows and columns, the number of
    adapters, and the rows of the largest block."""

    rows: slice
    columns: slice
    adapters: int
    width: int
    padding: Padding | None

    def blocks(self, x_Ri: Tensor) -> Tensor:
        """Returns the rows of `x_Ri` by adapter [n, w, i], padded with rows of the same block."""
        x = x_Ri[self.rows]
        if self.padding is not None:
            x = x.index_select(0, self.padding.row_X)
        return x.view(self.adapters, self.width, -1)

    def matrices(self, a_Ti: Tensor) -> Tensor:
        """Returns the rows of `a_Ti` by adapter [n, r, i]."""
        return a_Ti[self.columns].view(self.adapters, -1, a_Ti.shape[1])


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
    """Yields ranges of consecutive blocks of one rank that need little padding; blocks without rows or without an
    adapter are left out."""
    start = width = need = 0
    for i, (count, rank) in enumerate(zip(counts, ranks, strict=True)):
        is_left_out = count == 0 or rank == 0
        rows = max(count, MIN_BLOCK)
        padded = max(width, rows) * (i - start + 1)
        if is_left_out or rank != ranks[start] or padded > MAX_PADDING_RATIO * (need + rows):
            if i > start:
                yield range(start, i)
            start = i
            width = need = 0
        if is_left_out:
            start = i + 1
        else:
            width = max(width, rows)
            need += rows
    if start < len(counts):
        yield range(start, len(counts))


def _padding(counts: Sequence[int], device: torch.device) -> Padding:
    width = max(counts)
    rows = []
    places = []
    start = 0
    for i, count in enumerate(counts):
        rows += [start + min(j, count - 1) for j in range(width)]
        places += [i * width + j for j in range(count)]
        start += count
    is_row = torch.arange(width)[None, :, None] < torch.tensor(counts)[:, None, None]
    return Padding(torch.tensor(rows, device=device), torch.tensor(places, device=device), is_row.to(device))


class BatchedProducts(NamedTuple):
    """Products of the blocks of `runs`: a batch for each run."""

    runs: list[Run]

    def reduce_rows(self, x_Ri: Tensor, a_Ti: Tensor) -> list[Tensor]:
        """Returns `x A'` of each run, by adapter [n, w, r]."""
        return [_multiply_blocks(run.blocks(x_Ri), run.matrices(a_Ti).mT) for run in self.runs]

    def add_outputs(self, inners: Sequence[Tensor], y_Ro: Tensor, b_To: Tensor) -> None:
        """Adds to `y_Ro` the products of `inners`, which `reduce_rows` returned, and B."""
        for inner_nwr, run in zip(inners, self.runs, strict=True):
            y = y_Ro[run.rows]
            b_nro = run.matrices(b_To)
            if run.adapters == 1:
                y.addmm_(inner_nwr[0], b_nro[0])
            elif run.padding is None:
                y.view(run.adapters, run.width, -1).baddbmm_(inner_nwr, b_nro)
            else:
                y += torch.bmm(inner_nwr, b_nro).flatten(0, 1).index_select(0, run.padding.index_R)

    def sum_of_products(self, inners: Sequence[Tensor], x_Ri: Tensor, num_columns: int) -> Tensor:
        """Returns the sums over the rows of each adapter of its columns of `inners` times `x_Ri` [T, i]."""
        total_Ti = x_Ri.new_zeros(num_columns, x_Ri.shape[1])
        for inner_nwr, run in zip(inners, self.runs, strict=True):
            if run.padding is not None:
                inner_nwr = inner_nwr * run.padding.is_row_nw1
            torch.bmm(inner_nwr.mT, run.blocks(x_Ri), out=run.matrices(total_Ti))
        return total_Ti


def _multiply_blocks(left: Tensor, right: Tensor) -> Tensor:
    if len(left) == 1:
        return (left[0] @ right[0])[None]  # takes less time than a batch of one
    return torch.bmm(left, right)


def add_by_runs(x_Ri: Tensor, y_Ro: Tensor, a_Ti: Tensor, b_To: Tensor, runs: list[Run]) -> None:
    """Adds to `y_Ro` the output of each row's adapter at one layer."""
    products = BatchedProducts(runs)
    products.add_outputs(products.reduce_rows(x_Ri, a_Ti), y_Ro, b_To)


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
        broken_T = ~b_Tl.isfinite().all(1)  # 0 times such a weight would be NaN, in the rows of all adapters
        inner_RT = (x_Ri @ a_Ti.T).masked_fill_(broken_T, torch.nan).masked_fill_(~own_RT, 0)
        y_Rl.addmm_(inner_RT, b_Tl.masked_fill(broken_T[:, None], 0))


def add_by_kernels(
    x_Ri: Tensor, y_Ro: Tensor, a_LTi: Tensor, b_To: Tensor, sizes: Sequence[int], columns: RowColumns
) -> None:
    """Does what `add_products` does, by two kernels."""
    _add_outputs_by_kernel(_reduce_rows_by_kernel(x_Ri, a_LTi, columns), y_Ro, b_To, sizes, columns)


def _tile_rows(rows: int) -> int:
    return 16 if rows <= FEW_ROWS else 64


def _reduce_rows_by_kernel(x_Ri: Tensor, a_LTi: Tensor, columns: RowColumns) -> Tensor:
    """Returns shares of `x A'` in each layer, whose sum it is, float32 [shares of all layers, R, width]: the columns of
    each row's own adapter, from 0 on."""
    from palestra.engine import kernels

    (rows, inputs), (layers, all_columns, _) = x_Ri.shape, a_LTi.shape
    tile = _tile_rows(rows)
    tiles = -(-rows // tile)
    chunks = layers * columns.width // TILE_COLUMNS
    blocks_of_inputs = -(-inputs // BLOCK_INPUTS)
    shares = min(blocks_of_inputs, max(1, MIN_PROGRAMS // (tiles * chunks)))
    each = -(-blocks_of_inputs // shares) * BLOCK_INPUTS
    inner = x_Ri.new_empty(layers * shares, rows, columns.width, dtype=torch.float32)
    kernels.reduce_rows[tiles, chunks, shares](
        x_Ri, a_LTi, columns.first_R, columns.rank_R, inner,
        rows, x_Ri.stride(0), all_columns, inputs, each, shares, columns.width,
        ROWS=tile, COLUMNS=TILE_COLUMNS, BLOCK=BLOCK_INPUTS,
    )  # fmt: skip
    return inner


def _add_outputs_by_kernel(
    inner: Tensor, y_Ro: Tensor, b_To: Tensor, sizes: Sequence[int], columns: RowColumns
) -> None:
    """Adds to `y_Ro` the products of `inner`, which `_reduce_rows_by_kernel` returned, and B."""
    from palestra.engine import kernels

    rows = len(y_Ro)
    tile = _tile_rows(rows)
    block_X3 = _blocks_of_outputs(tuple(sizes), y_Ro.device)
    kernels.add_outputs[-(-rows // tile), len(block_X3)](
        inner, b_To, block_X3, columns.first_R, columns.rank_R, y_Ro,
        rows, y_Ro.stride(0), sum(sizes), len(inner) // len(sizes), columns.width,
        ROWS=tile, COLUMNS=TILE_COLUMNS, BLOCK=BLOCK_OUTPUTS,
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
    ranks = [4, 40, 16, 0]
    sizes = [96, 32]
    shapes = [(25, 160), (25, sum(sizes)), (2, sum(ranks), 160), (sum(ranks), sum(sizes))]
    x, y, a, b = _random_matrices(shapes, device, dtype)
    first_R, rank_R = torch.tensor(columns_of([3, 1, 20, 1], ranks), device=device)
    columns = RowColumns(first_R, rank_R, padded_rank(ranks))

    def output(add: Callable[..., None]) -> list[Tensor]:
        total = y.clone()
        add(x, total, a, b, sizes, columns)
        return [total]

    return _agree(lambda: output(add_by_kernels), output(add_by_masks), "applied")


def _random_matrices(shapes: Sequence[tuple[int, ...]], device: torch.device, dtype: torch.dtype) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)


def _agree(compute: Callable[[], Sequence[Tensor]], expected: Sequence[Tensor], verb: str) -> bool:
    try:
        for found, wanted in zip(compute(), expected, strict=True):
            tolerance = (1e-5 if wanted.dtype == torch.float32 else 2e-2) * float(wanted.abs().max())
            torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance, check_dtype=False)
    except Exception as error:  # a compiler's and a driver's errors have many types
        reason = f"{type(error).__name__}: {error!s:.300}"
        warnings.warn(f"adapters are {verb} by plain products, which takes longer: {reason}", stacklevel=3)
        return False
    return True


# -- products with gradients -------------------------------------------------------------------------------------------


class Products(Protocol):
    """Protocol of the products of a layer and of its gradients, with the meaning that `BatchedProducts` gives them."""

    def reduce_rows(self, x_Ri: Tensor, a_Ti: Tensor) -> list[Tensor]: ...
    def add_outputs(self, inners: Sequence[Tensor], y_Ro: Tensor, b_To: Tensor) -> None: ...
    def sum_of_products(self, inners: Sequence[Tensor], x_Ri: Tensor, num_columns: int) -> Tensor: ...


class KernelProducts(NamedTuple):
    """Products by one kernel each, for blocks of any sizes and ranks. `tile_X5` has for every 16 columns of an adapter
    the first row and the end of its block, its first column, the first of the 16 among its own, and its rank, int32."""

    columns: RowColumns
    tile_X5: Tensor

    def reduce_rows(self, x_Ri: Tensor, a_Ti: Tensor) -> list[Tensor]:
        """Returns shares of `x A'`, whose sum it is, float32 [shares, R, width]."""
        return [_reduce_rows_by_kernel(x_Ri, a_Ti[None], self.columns)]

    def add_outputs(self, inners: Sequence[Tensor], y_Ro: Tensor, b_To: Tensor) -> None:
        """Adds to `y_Ro` the products of `inners`, which `reduce_rows` returned, and B."""
        _add_outputs_by_kernel(inners[0], y_Ro, b_To, [b_To.shape[1]], self.columns)

    def sum_of_products(self, inners: Sequence[Tensor], x_Ri: Tensor, num_columns: int) -> Tensor:
        """Returns the sums over the rows of each adapter of its columns of `inners` times `x_Ri`, float32 [T, i]. Rows
        are shared out until there are enough programs; the sums of the shares are added in their order."""
        from palestra.engine import kernels

        rows, inputs = x_Ri.shape
        tile = _tile_rows(rows)
        programs = len(self.tile_X5) * -(-inputs // BLOCK_OUTPUTS)
        shares = min(-(-rows // tile), max(1, MIN_PROGRAMS // programs))
        total = x_Ri.new_empty(shares, num_columns, inputs, dtype=torch.float32)
        kernels.sum_rows[len(self.tile_X5), -(-inputs // BLOCK_OUTPUTS), shares](
            inners[0], x_Ri, self.tile_X5, total,
            rows, x_Ri.stride(0), num_columns, inputs, len(inners[0]), shares, self.columns.width,
            ROWS=tile, COLUMNS=TILE_COLUMNS, BLOCK=BLOCK_OUTPUTS,
        )  # fmt: skip
        return total[0] if shares == 1 else total.sum(0)


def kernel_products(counts: Sequence[int], ranks: Sequence[int], device: torch.device) -> KernelProducts:
    """Returns the products by kernels for blocks of `counts` rows, whose adapters have the `ranks`."""
    first_R, rank_R = torch.tensor(columns_of(counts, ranks), device=device)
    tiles = []
    row = column = 0
    for count, rank in zip(counts, ranks, strict=True):
        tiles += [(row, row + count, column, start, rank) for start in range(0, rank, TILE_COLUMNS)]
        row += count
        column += rank
    tile_X5 = torch.tensor(tiles, dtype=torch.int32, device=device)
    return KernelProducts(RowColumns(first_R, rank_R, padded_rank(ranks)), tile_X5)


def choose_products(x: Tensor, counts: Sequence[int], ranks: Sequence[int]) -> Products:
    """Returns how a training pass computes the products of `x`: on CUDA by kernels, if there are several runs with few
    rows, whose launches would take longer than their products."""
    num_runs = sum(1 for _ in _alike(counts, ranks))
    if num_runs > 1 and sum(counts) <= MAX_KERNEL_ROWS * num_runs and trains_by_kernels(x):
        return kernel_products(counts, ranks, x.device)
    return BatchedProducts(runs_of(counts, ranks, x.device))


def trains_by_kernels(x: Tensor) -> bool:
    """Returns whether a training pass may compute the products of `x` by kernels."""
    return x.is_cuda and training_kernels_agree(x.device, x.dtype)


@cache
def training_kernels_agree(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether the kernels of a training pass give the numbers of batched products for random matrices in
    `dtype`; warns if not."""
    ranks = [4, 40, 16, 0, 5]
    shapes = [(FEW_ROWS + 1, 160), (FEW_ROWS + 1, 112), (sum(ranks), 160), (sum(ranks), 112)]
    x_Ri, y_Ro, a_Ti, b_To = _random_matrices(shapes, device, dtype)

    def results(products_of: Callable[[Sequence[int]], Products]) -> list[Tensor]:
        found = []
        for rows in (FEW_ROWS, FEW_ROWS + 1):  # tiles of both sizes
            products = products_of([3, 1, 0, 2, rows - 6])
            inners = products.reduce_rows(x_Ri[:rows], a_Ti)
            total = y_Ro[:rows].clone()
            products.add_outputs(inners, total, b_To)
            found += [total, products.sum_of_products(inners, y_Ro[:rows], len(b_To))]
        return found

    with torch.no_grad():
        expected = results(lambda counts: BatchedProducts(runs_of(counts, ranks, device)))
        return _agree(lambda: results(lambda counts: kernel_products(counts, ranks, device)), expected, "trained")


class GroupedLinear(torch.autograd.Function):
    """`x W' + bias + (x A') B` with a frozen `W` (None: `(x A') B` alone), in the dtype of `x`: each row has the A
    and B of its own adapter; the gradients of A and B have the dtypes of A and B."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, a_Ti: Tensor, b_To: Tensor, products: Products
    ) -> Tensor:
        a_Ti = a_Ti.to(x.dtype)
        b_To = b_To.to(x.dtype)
        rows = x.flatten(0, -2).contiguous()
        inners = products.reduce_rows(rows, a_Ti)
        out = rows.new_zeros(len(rows), b_To.shape[1]) if weight is None else linear(rows, weight, bias)
        products.add_outputs(inners, out, b_To)
        ctx.save_for_backward(x, weight, a_Ti, b_To, *inners)
        ctx.products = products
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, a_Ti, b_To, *inners = ctx.saved_tensors
        products: Products = ctx.products
        rows = x.flatten(0, -2).contiguous()
        grad_rows = grad.flatten(0, -2).contiguous()
        grad_inners = products.reduce_rows(grad_rows, b_To)
        grad_a = products.sum_of_products(grad_inners, rows, len(a_Ti))
        grad_b = products.sum_of_products(inners, grad_rows, len(b_To))
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.zeros_like(rows) if weight is None else matmul(grad_rows, weight)
            products.add_outputs(grad_inners, grad_x, a_Ti)
            grad_x = grad_x.view_as(x)
        return grad_x, None, None, grad_a, grad_b, None
