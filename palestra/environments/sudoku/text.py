"""Text formats of sudoku boards and cells, and the parser of answers. Rows and columns count from 1."""

from __future__ import annotations

import re

from palestra.environments.sudoku.solver import BOXES, SudokuBoard
from palestra.envs.support.answers import answer_words

CellDigits = dict[int, int]  # digit by cell, 0 empties the cell

# No text matches in two ways: a failing match of a list would else take time exponential in its length.
_CELL = re.compile(r"r ?([0-9]) ?c ?([0-9])(?: ?[=:])? ?([0-9.]) ?")
_LIST = re.compile(rf"(?:{_CELL.pattern})+")


def read_cells(answer: object, size: int) -> CellDigits | None:
    """Returns the digit by cell in an answer, 0 for "."; None if the answer cannot be parsed.

    An answer is a list "r1 c2 4 r3 c1 2" without duplicate cells, or the whole grid, in which separators (lines, bars)
    are ignored and "_" is an empty cell too.
    """
    words = answer_words(answer)
    text = " ".join(words)
    if _LIST.fullmatch(text):
        found = [tuple(int(part.replace(".", "0")) for part in match) for match in _CELL.findall(text)]
        cells = {(row - 1) * size + column - 1: digit for row, column, digit in found}
        bad = any(not (1 <= r <= size and 1 <= c <= size and digit <= size) for r, c, digit in found)
        return None if bad or len(cells) < len(found) else cells
    digits = re.sub(r"[|/+ -]", "", text).replace(".", "0").replace("_", "0")
    if len(digits) != size * size or not (digits.isascii() and digits.isdecimal()):
        return None
    return None if max(digits) > str(size) else dict(enumerate(map(int, digits)))


def cell_name(size: int, cell: int) -> str:
    """Returns a cell's name, such as "r1 c2"."""
    return f"r{cell // size + 1} c{cell % size + 1}"


def format_cell_digits(size: int, cells: CellDigits) -> str:
    """Returns cells and digits as text: "r1 c2 4 r3 c1 ."."""
    return " ".join(f"{cell_name(size, cell)} {digit or '.'}" for cell, digit in cells.items())


def compact_grid(size: int, board: SudokuBoard) -> str:
    """Returns the rows, each after its name: "r1 1 . . 4 r2 . 2 . ."."""
    rows = [" ".join(str(digit or ".") for digit in board[at : at + size]) for at in range(0, size * size, size)]
    return " ".join(f"r{number + 1} {row}" for number, row in enumerate(rows))


def draw_sudoku_grid(size: int, board: SudokuBoard) -> str:
    """Returns the grid as lines, with row and column names and bars between the boxes."""
    high, wide = BOXES[size]

    def line(name: str, parts: list[str]) -> str:
        groups = [" ".join(f"{part:>2}" for part in parts[at : at + wide]) for at in range(0, size, wide)]
        return f"{name} {' | '.join(groups)}"

    lines = [line("  ", [f"c{column + 1}" for column in range(size)])]
    for row in range(size):
        if row and row % high == 0:
            lines.append("-" * len(lines[0]))
        lines.append(line(f"r{row + 1}", [str(digit or ".") for digit in board[row * size : (row + 1) * size]]))
    return "\n".join(lines)
