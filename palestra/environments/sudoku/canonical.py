"""Canonical forms of sudokus under their symmetries, and puzzles drawn from a seed.

Two sudokus are equivalent if one becomes the other by relabelling the digits, permuting the rows of a band, the columns
of a stack, the bands or the stacks, or (if boxes are square) transposing. At 4x4 and 6x6 the canonical form of a puzzle
is the smallest of its 128 or 3,456 images, with the digits relabelled by first appearance. At 9x9 the 3,359,232 images
are too many; but equivalent puzzles have equivalent solutions, and the smallest image of a full grid is determined from
its first two rows. There the canonical form of the solution is used, so even different puzzles with the same solution
are always in the same split.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import chain, permutations, product

import numpy as np

from palestra.environments.sudoku.solver import BOXES, SudokuBoard, random_grid, remove_clues
from palestra.envs.support.splits import Split, split_of_text

MAX_GRIDS = 2000


@dataclass(frozen=True)
class Puzzle:
    """A puzzle: its clues and its unique solution."""

    clues: SudokuBoard
    solution: SudokuBoard


@lru_cache(maxsize=4096)  # tree search resets the same seed many times
def draw_puzzle(seed: int, size: int, clues: int, split: Split) -> Puzzle:
    """Returns the puzzle of `split` for `seed`.

    Raises ValueError if 2,000 random grids give none: `clues` is too low, or the split has no such puzzle.
    """
    rng = random.Random(seed)
    for _ in range(MAX_GRIDS):
        solution = random_grid(size, rng)
        if size == 9 and split_of_text(canonical_text(size, solution)) != split:
            continue
        board = remove_clues(size, solution, clues, rng)
        if board and (size == 9 or split_of_text(canonical_text(size, board)) == split):
            return Puzzle(board, solution)
    raise ValueError(
        f'clues={clues}: no puzzle of size {size} in split "{split}" among {MAX_GRIDS} grids; give more clues, which '
        "makes "
        "puzzles easier to find"
    )


def canonical_text(size: int, board: SudokuBoard) -> str:
    """Returns the canonical form as text. Raises ValueError at 9x9 if the board has empty cells."""
    form = _least_grid(board) if size == 9 else _least_image(size, board)
    return f"sudoku {size} {' '.join(map(str, form))}"


# ---- 4x4 and 6x6: all images


@cache
def cell_permutations(size: int) -> np.ndarray:
    """Returns the symmetries as cell permutations [I, size * size], int64: `board[cell_permutations[i]]` is image i."""
    high, wide = BOXES[size]
    cells = np.arange(size * size).reshape(size, size)
    rows = line_orders(size, high)
    columns = line_orders(size, wide)
    images = [cells[np.ix_(row, column)] for row, column in product(rows, columns)]
    if high == wide:
        images += [image.T for image in images]
    return np.array(images).reshape(len(images), -1)


def line_orders(size: int, group: int) -> list[list[int]]:
    """Returns the permutations of the rows (or columns) that keep each band (stack) of `group` lines together."""
    bands = [list(permutations(range(first, first + group))) for first in range(0, size, group)]
    return [list(chain.from_iterable(order)) for chosen in product(*bands) for order in permutations(chosen)]


def _least_image(size: int, board: SudokuBoard) -> bytes:
    boards = np.array(board, np.uint8)[cell_permutations(size)]
    first = np.full((len(boards), size + 1), size * size)  # first position of each digit; absent ones come last
    for digit in range(1, size + 1):
        is_there = boards == digit
        first[:, digit] = np.where(is_there.any(1), is_there.argmax(1), size * size)
    first[:, 0] = -1
    label = first.argsort(1, kind="stable").argsort(1, kind="stable").astype(np.uint8)
    return min(row.tobytes() for row in np.take_along_axis(label, boards, 1))


# ---- 9x9: full grids


def _least_grid(board: SudokuBoard) -> bytes:
    """Returns the smallest image of a full 9x9 grid whose first row is 1 to 9, as 81 bytes."""
    grid = np.array(board, np.uint8).reshape(9, 9)
    if not grid.all():
        raise ValueError("only a full grid has a canonical form at 9x9: give the puzzle's solution")
    tops = [
        (turned, first, second)
        for turned in (grid, grid.T)
        for first in range(9)
        for second in range(first // 3 * 3, first // 3 * 3 + 3)
        if second != first
    ]
    least = b"\xff"
    ties: list[tuple[np.ndarray, int, int, np.ndarray]] = []
    for turned, first, second in tops:
        for row, columns in _least_second_rows(turned[first], turned[second]):
            if row < least:
                least = row
                ties = []
            if row == least:
                ties.append((turned, first, second, columns))
    return min(_complete_grid(*tie) for tie in ties)


@cache
def _column_orders() -> np.ndarray:
    return np.array(line_orders(9, 3))


def _least_second_rows(top: np.ndarray, second: np.ndarray) -> list[tuple[bytes, np.ndarray]]:
    """Returns the smallest second row over all column orders with first row 1 to 9, with each order that gives it."""
    orders = _column_orders()
    label = np.zeros((len(orders), 10), np.uint8)
    np.put_along_axis(label, top[orders], np.arange(1, 10, dtype=np.uint8)[None], 1)
    rows = np.take_along_axis(label, second[orders], 1)
    numbers = rows.astype(np.int64) @ 10 ** np.arange(8, -1, -1)
    least = np.flatnonzero(numbers == numbers.min())
    return [(rows[order].tobytes(), orders[order]) for order in least]


def _complete_grid(grid: np.ndarray, first: int, second: int, columns: np.ndarray) -> bytes:
    """Returns the smallest grid with these two rows on top and the columns in this order."""
    label = np.zeros(10, np.uint8)
    label[grid[first, columns]] = np.arange(1, 10)
    rows = [label[row[columns]].tobytes() for row in grid]
    band = first // 3
    third = next(row for row in range(3 * band, 3 * band + 3) if row not in (first, second))
    rest = sorted(sorted(rows[3 * other : 3 * other + 3]) for other in range(3) if other != band)
    return b"".join([rows[first], rows[second], rows[third], *rest[0], *rest[1]])
