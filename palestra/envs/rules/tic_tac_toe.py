"""The rules of tic-tac-toe, as in OpenSpiel."""

from __future__ import annotations

import numpy as np

from palestra.envs.rules.base import OVER, Rules

Board = tuple[int, ...]  # marks of the 9 squares, row by row
EMPTY, NOUGHT, CROSS = 0, 1, 2
MARKS = ".ox"
LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))


class TicTacToeRules(Rules[Board]):
    """Player 0 sets crosses, player 1 noughts; three in a line win 1, a full board is a draw.

    The `view` is OpenSpiel's observation, float32 [27]: planes of empty cells, noughts and crosses.
    """

    name = "tic_tac_toe"
    players = 2
    actions = tuple(row + column for row in "abc" for column in "123")

    def initial(self) -> Board:
        return (EMPTY,) * 9

    def turn(self, state: Board) -> int:
        left = state.count(EMPTY)
        return OVER if left == 0 or _winner(state) != EMPTY else (9 - left) % 2

    def legal(self, state: Board) -> list[int]:
        return [square for square, mark in enumerate(state) if mark == EMPTY]

    def next(self, state: Board, action: int) -> Board:
        mark = CROSS if state.count(EMPTY) % 2 else NOUGHT
        return (*state[:action], mark, *state[action + 1 :])

    def returns(self, state: Board) -> tuple[float, ...]:
        return {CROSS: (1.0, -1.0), NOUGHT: (-1.0, 1.0), EMPTY: (0.0, 0.0)}[_winner(state)]

    def view(self, state: Board, player: int) -> np.ndarray:
        view = np.zeros(27, np.float32)
        view[[9 * mark + square for square, mark in enumerate(state)]] = 1
        return view

    def words(self, state: Board, player: int) -> str:
        marks = [MARKS[mark] for mark in state]
        rows = " / ".join(" ".join(marks[at : at + 3]) for at in (0, 3, 6))
        return f"You are {MARKS[CROSS - player]}. Board: {rows}"


def _winner(board: Board) -> int:
    """Returns the mark that has a line, or `EMPTY`."""
    return next((board[a] for a, b, c in LINES if board[a] == board[b] == board[c] != EMPTY), EMPTY)
