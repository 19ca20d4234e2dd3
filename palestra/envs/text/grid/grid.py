"""Grid geometry, text formats of cells, and parsers of moves, shared by Plan-Path and Sokoban.

A cell is one int, `row * size + column`; a direction is an index into `DIRECTIONS`. In the compact rendering a cell is
two tokens, "r2 c3": small models learn such factorised coordinates far faster than one token per cell or a drawn board.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cache
from itertools import chain

from palestra.envs.support.answers import answer_words

DIRECTIONS = ("up", "down", "left", "right")
OPPOSITE = (1, 0, 3, 2)

_INDEX = {word: index for index, word in enumerate(DIRECTIONS)}


@dataclass(frozen=True, eq=False)
class Grid:
    """A square grid with walls. `neighbors[cell][direction]` is the neighbouring cell, or -1 at a wall or the border.

    Grid(size=2, walls=frozenset({3}), neighbors=((-1, 2, -1, 1), (-1, -1, 0, -1), (0, -1, -1, -1), (1, -1, 2, -1)))
    """

    size: int
    walls: frozenset[int]
    neighbors: tuple[tuple[int, int, int, int], ...]


def make_grid(size: int, walls: Iterable[int] = ()) -> Grid:
    """Builds a grid of `size` rows and columns with walls at the given cells."""
    blocked = frozenset(walls)

    def beside(cell: int, down: int, right: int) -> int:
        row = cell // size + down
        column = cell % size + right
        target = row * size + column
        if 0 <= row < size and 0 <= column < size and target not in blocked:
            return target
        return -1

    def around(cell: int) -> tuple[int, int, int, int]:
        return beside(cell, -1, 0), beside(cell, 1, 0), beside(cell, 0, -1), beside(cell, 0, 1)

    return Grid(size, blocked, tuple(around(cell) for cell in range(size * size)))


def manhattan(size: int, a: int, b: int) -> int:
    """Returns the Manhattan distance between cells `a` and `b`."""
    return abs(a // size - b // size) + abs(a % size - b % size)


def distances(board: Grid, start: int, blocked: Collection[int] = ()) -> dict[int, int]:
    """Returns the shortest-path length, in moves, from `start` to each reachable cell, without entering `blocked`."""
    far = {start: 0}
    queue = deque([start])
    while queue:
        at = queue.popleft()
        for cell in board.neighbors[at]:
            if cell >= 0 and cell not in far and cell not in blocked:
                far[cell] = far[at] + 1
                queue.append(cell)
    return far


def walk(board: Grid, start: int, to: int, blocked: Collection[int] = ()) -> list[int] | None:
    """Returns the directions of a shortest walk that does not enter `blocked`, straight on where it
    can be; None if there is no walk."""
    far = distances(board, to, blocked)
    if start not in far:
        return None
    directions: list[int] = []
    at = start
    while at != to:
        nearer = [d for d in range(4) if far.get(board.neighbors[at][d], far[at]) < far[at]]
        if not directions or directions[-1] not in nearer:
            directions.append(nearer[0])
        else:
            directions.append(directions[-1])
        at = board.neighbors[at][directions[-1]]
    return directions


@cache
def cell_names(size: int) -> tuple[str, ...]:
    """Returns the name of each cell, such as "r2 c3"."""
    return tuple(f"r{cell // size} c{cell % size}" for cell in range(size * size))


def format_cells(size: int, cells: Iterable[int]) -> str:
    """Returns the cells as text in the given order: "r0 c1 r2 c2"."""
    names = cell_names(size)
    return " ".join([names[cell] for cell in cells])


def draw_grid(size: int, glyphs: dict[int, str]) -> str:
    """Returns the board as lines of characters inside a border of '#'; cells without a glyph are '.'."""
    border = "#" * (size + 2)
    rows = ("".join(glyphs.get(row * size + column, ".") for column in range(size)) for row in range(size))
    return "\n".join([border, *(f"#{row}#" for row in rows), border])


def describe_cell(size: int, cell: int) -> str:
    """Returns "row 2, column 3"."""
    return f"row {cell // size}, column {cell % size}"


def parse_moves(answer: object, max_moves: int) -> tuple[int, ...] | None:
    """Returns the 1 to `max_moves` directions in an answer, None if it holds anything else."""
    words = answer_words(answer)
    if not 0 < len(words) <= max_moves:
        return None
    moves = [_INDEX.get(word, -1) for word in words]
    if -1 in moves:
        return None
    return tuple(moves)


def parse_cells(answer: object, size: int, max_cells: int) -> tuple[int, ...] | None:
    """Returns the 1 to `max_cells` cells in an answer ("r2 c3 r4 c3"), None if it holds anything else."""
    words = answer_words(answer)
    if not 0 < len(words) <= 2 * max_cells or len(words) % 2:
        return None
    rows = [_number(word, "r", size) for word in words[::2]]
    columns = [_number(word, "c", size) for word in words[1::2]]
    if -1 in rows + columns:
        return None
    return tuple(r * size + c for r, c in zip(rows, columns, strict=True))


def parse_pushes(answer: object, boxes: int, max_pushes: int) -> tuple[tuple[int, int], ...] | None:
    """Returns the 1 to `max_pushes` pushes (box, direction) in an answer ("left up" with one box,
    "1 left 2 up" with several), None if it holds anything else."""
    words = answer_words(answer)
    if boxes == 1:
        words = list(chain.from_iterable(("1", word) for word in words))
    if not 0 < len(words) <= 2 * max_pushes or len(words) % 2:
        return None
    numbers = [_number(f"b{word}", "b", boxes + 1) for word in words[::2]]
    moves = [_INDEX.get(word, -1) for word in words[1::2]]
    if min(numbers) < 1 or -1 in moves:
        return None
    return tuple((n - 1, m) for n, m in zip(numbers, moves, strict=True))


def _number(word: str, letter: str, below: int) -> int:
    digits = word[1:]
    is_number = digits.isascii() and digits.isdecimal() and len(digits) <= 2
    if word[:1] == letter and is_number and int(digits) < below:
        return int(digits)
    return -1
