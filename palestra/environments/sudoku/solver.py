"""Sudoku solver and generator: rule violations, solutions, forced cells, and puzzles with a unique solution.

A board is a tuple of `size` * `size` digits, row by row, 0 for an empty cell.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

SudokuBoard = tuple[int, ...]
BOXES = {4: (2, 2), 6: (2, 3), 9: (3, 3)}  # rows and columns of a box


@dataclass(frozen=True, eq=False)
class BoardGeometry:
    """The rows, columns and boxes of a board.

    `units`: the cells of each row, then column, then box. `unit_names`: their names. `units_of`: the indices of the
    row, column and box of each cell.
    """

    size: int
    units: tuple[tuple[int, ...], ...]
    unit_names: tuple[str, ...]
    units_of: tuple[tuple[int, int, int], ...]


@cache
def board_geometry(size: int) -> BoardGeometry:
    """Returns the geometry of a board of size 4, 6 or 9."""
    high, wide = BOXES[size]
    lines = range(size)
    box_of = [r // high * (size // wide) + c // wide for r in lines for c in lines]
    cells = range(size * size)
    units_of = tuple((cell // size, size + cell % size, 2 * size + box_of[cell]) for cell in cells)
    units: list[list[int]] = [[] for _ in range(3 * size)]
    for cell, numbers in enumerate(units_of):
        for unit in numbers:
            units[unit].append(cell)
    names = tuple(f"{kind} {line + 1}" for kind in ("row", "column", "box") for line in lines)
    return BoardGeometry(size, tuple(map(tuple, units)), names, units_of)


def violated_units(size: int, board: SudokuBoard) -> list[str]:
    """Returns the names of the rows, columns and boxes that hold a digit twice."""
    form = board_geometry(size)
    violated = []
    for name, unit in zip(form.unit_names, form.units, strict=True):
        digits = [board[cell] for cell in unit if board[cell]]
        if len(set(digits)) < len(digits):
            violated.append(name)
    return violated


def find_solutions(
    size: int, board: SudokuBoard, max_solutions: int = 2, rng: random.Random | None = None
) -> list[SudokuBoard]:
    """Returns at most `max_solutions` solutions of a board; with `rng` in random order."""
    if violated_units(size, board):
        return []
    solutions: list[SudokuBoard] = []
    for solution in _solve(board_geometry(size), list(board), _unit_masks(size, board), rng):
        solutions.append(solution)
        if len(solutions) == max_solutions:
            break
    return solutions


def _unit_masks(size: int, board: SudokuBoard) -> list[int]:
    """Returns the digits present in each unit, as a bit mask."""
    return [sum(1 << board[cell] for cell in unit if board[cell]) for unit in board_geometry(size).units]


def _solve(form: BoardGeometry, board: list[int], masks: list[int], rng: random.Random | None) -> Iterator[SudokuBoard]:
    """Yields all solutions by backtracking; fills the cell with the fewest possible digits first."""
    best = -1
    fewest = form.size + 1
    choices = 0
    every = (2 << form.size) - 2
    for cell, digit in enumerate(board):
        if digit:
            continue
        row, column, box = form.units_of[cell]
        free = every & ~(masks[row] | masks[column] | masks[box])
        if free.bit_count() < fewest:
            best = cell
            fewest = free.bit_count()
            choices = free
            if fewest <= 1:
                break
    if best < 0:
        yield tuple(board)
        return
    digits = [digit for digit in range(1, choices.bit_length()) if choices >> digit & 1]
    if rng:
        rng.shuffle(digits)
    units = form.units_of[best]
    for digit in digits:
        board[best] = digit
        for unit in units:
            masks[unit] |= 1 << digit
        yield from _solve(form, board, masks, rng)
        for unit in units:
            masks[unit] &= ~(1 << digit)
    board[best] = 0


def forced_cells(size: int, board: SudokuBoard) -> list[tuple[int, int]]:
    """Returns forced cells as (cell, digit): naked singles (the cell has one possible digit) and hidden singles (the
    digit has one possible cell in a row, column or box). They are correct if the board has no wrong cells."""
    form = board_geometry(size)
    masks = _unit_masks(size, board)
    every = (2 << size) - 2
    free = {
        cell: every & ~(masks[row] | masks[column] | masks[box])
        for cell, (row, column, box) in enumerate(form.units_of)
        if not board[cell]
    }
    forced = {cell: digits.bit_length() - 1 for cell, digits in free.items() if digits.bit_count() == 1}
    for unit in form.units:
        empty = [cell for cell in unit if cell in free]
        for digit in range(1, size + 1):
            homes = [cell for cell in empty if free[cell] >> digit & 1]
            if len(homes) == 1:
                forced[homes[0]] = digit
    return sorted(forced.items())


def random_grid(size: int, rng: random.Random) -> SudokuBoard:
    """Returns a random complete valid board."""
    return find_solutions(size, (0,) * size**2, 1, rng)[0]


def remove_clues(size: int, solution: SudokuBoard, clues: int, rng: random.Random) -> SudokuBoard | None:
    """Returns a puzzle of `clues` clues with `solution` as its unique solution; None if the random order finds none.

    Cells are emptied in random order, except those that would allow another solution.
    """
    board = solution
    left = size * size
    for cell in rng.sample(range(left), left):
        if left == clues:
            break
        emptied = (*board[:cell], 0, *board[cell + 1 :])
        if not _other(size, emptied, cell, solution[cell]):
            board = emptied
            left = left - 1
    return board if left == clues else None


def _other(size: int, board: SudokuBoard, cell: int, digit: int) -> bool:
    """True if the board has a solution with another digit in the cell."""
    others = (other for other in range(1, size + 1) if other != digit)
    return any(find_solutions(size, (*board[:cell], other, *board[cell + 1 :]), 1) for other in others)
