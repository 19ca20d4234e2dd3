"""The rules of connect four, as in OpenSpiel.

The game is far too large to enumerate (4.5e12 positions), so exact solvers do not support it; the expert searches a few
moves deep instead.
"""

from __future__ import annotations

from itertools import chain, product
from typing import NamedTuple

import numpy as np

from palestra.envs.rules.base import TERMINAL, Rules

COLUMNS = 7
ROWS = 6
COLUMN_BITS = ROWS + 1  # bits of a column: the top one stays empty, so that no line continues into the next column
CELL_BITS = [[1 << (COLUMN_BITS * column + row) for column in range(COLUMNS)] for row in range(ROWS)]
# bit shifts along a line: vertical, horizontal, both diagonals
LINE_SHIFTS = (1, COLUMN_BITS, COLUMN_BITS - 1, COLUMN_BITS + 1)


class ConnectFourState(NamedTuple):
    """A state: each player's stones as a bit mask, bit `COLUMN_BITS * column + row`, row 0 at the bottom."""

    crosses: int = 0
    noughts: int = 0


def _lines() -> tuple[int, ...]:
    full = sum(map(sum, CELL_BITS))
    starts = product(LINE_SHIFTS, range(COLUMN_BITS * COLUMNS))
    lines = [1 << bit | 1 << bit + step | 1 << bit + 2 * step | 1 << bit + 3 * step for step, bit in starts]
    return tuple(line for line in lines if not line & ~full)


LINE_MASKS = _lines()  # bit masks of the 69 lines of four cells


class ConnectFourRules(Rules[ConnectFourState]):
    """Player 0 drops crosses, player 1 noughts, into columns 1 to 7; four in a line win 1, a full board is a draw.

    The `info_state` is OpenSpiel's observation, float32 [126]: planes of crosses, noughts and empty cells, [3, 6, 7]
    flattened.
    """

    name = "connect_four"
    num_players = 2
    action_names = tuple(str(column + 1) for column in range(COLUMNS))

    def initial_state(self) -> ConnectFourState:
        return ConnectFourState()

    def current_player(self, state: ConnectFourState) -> int:
        taken = (state.crosses | state.noughts).bit_count()
        if taken == COLUMNS * ROWS or has_line(state.crosses) or has_line(state.noughts):
            return TERMINAL
        return taken % 2

    def legal_actions(self, state: ConnectFourState) -> list[int]:
        taken = state.crosses | state.noughts
        return [column for column, top in enumerate(CELL_BITS[-1]) if not taken & top]

    def next_state(self, state: ConnectFourState, action: int) -> ConnectFourState:
        taken = state.crosses | state.noughts
        stone = (taken + CELL_BITS[0][action]) & ~taken & _COLUMN[action]
        if taken.bit_count() % 2:
            return ConnectFourState(state.crosses, state.noughts | stone)
        return ConnectFourState(state.crosses | stone, state.noughts)

    def returns(self, state: ConnectFourState) -> tuple[float, ...]:
        first = float(has_line(state.crosses)) - float(has_line(state.noughts))
        return first, -first

    def info_state(self, state: ConnectFourState, player: int) -> np.ndarray:
        empty = ~(state.crosses | state.noughts)
        planes = [bool(own & cell) for own in (*state, empty) for cell in chain.from_iterable(CELL_BITS)]
        return np.array(planes, np.float32)

    def info_state_text(self, state: ConnectFourState, player: int) -> str:
        rows = [" ".join(_mark(state, cell) for cell in row) for row in reversed(CELL_BITS)]
        return f"You are {'xo'[player]}. Board: {' / '.join(rows)}"


_COLUMN = list(map(sum, zip(*CELL_BITS, strict=True)))


def has_line(stones: int) -> bool:
    """True if four stones of the bit mask are in a line."""
    for step in LINE_SHIFTS:
        pairs = stones & stones >> step
        if pairs & pairs >> 2 * step:
            return True
    return False


def line_heuristic(state: ConnectFourState, player: int) -> float:
    """Returns a heuristic value of the board for `player`, in (-1, 1).

    Sums over the lines that only one side can still complete the square of its stones there, positive for `player`.
    """
    own = state[player]
    other = state[1 - player]
    looks = 0
    for line in LINE_MASKS:
        mine = (own & line).bit_count()
        theirs = (other & line).bit_count()
        looks += mine * mine * (not theirs) - theirs * theirs * (not mine)
    return looks / (16 * len(LINE_MASKS))


def _mark(state: ConnectFourState, cell: int) -> str:
    if state.crosses & cell:
        return "x"
    return "o" if state.noughts & cell else "."
