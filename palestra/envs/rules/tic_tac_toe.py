"""The rules of tic-tac-toe, as in OpenSpiel."""

from __future__ import annotations

from itertools import product

import numpy as np

from palestra.envs.rules.base import TERMINAL, Rules

TicTacToeState = tuple[int, ...]  # marks of the 9 squares, row by row
EMPTY = 0
NOUGHT = 1
CROSS = 2
MARKS = ".ox"
LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))


class TicTacToeRules(Rules[TicTacToeState]):
    """Player 0 sets crosses, player 1 noughts; three in a line win 1, a full board is a draw.

    The `info_state` is OpenSpiel's observation, float32 [27]: planes of empty cells, noughts and crosses.
    """

    name = "tic_tac_toe"
    num_players = 2
    action_names = tuple(map("".join, product("abc", "123")))

    def initial_state(self) -> TicTacToeState:
        return (EMPTY,) * 9

    def current_player(self, state: TicTacToeState) -> int:
        left = state.count(EMPTY)
        if left == 0 or _winner(state) != EMPTY:
            return TERMINAL
        return (9 - left) % 2

    def legal_actions(self, state: TicTacToeState) -> list[int]:
        return [square for square, mark in enumerate(state) if mark == EMPTY]

    def next_state(self, state: TicTacToeState, action: int) -> TicTacToeState:
        mark = CROSS if state.count(EMPTY) % 2 else NOUGHT
        return (*state[:action], mark, *state[action + 1 :])

    def returns(self, state: TicTacToeState) -> tuple[float, ...]:
        return {CROSS: (1.0, -1.0), NOUGHT: (-1.0, 1.0), EMPTY: (0.0, 0.0)}[_winner(state)]

    def info_state(self, state: TicTacToeState, player: int) -> np.ndarray:
        view = np.zeros(27, np.float32)
        view[[9 * mark + square for square, mark in enumerate(state)]] = 1
        return view

    def info_state_text(self, state: TicTacToeState, player: int) -> str:
        marks = [MARKS[mark] for mark in state]
        rows = " / ".join(" ".join(marks[at : at + 3]) for at in (0, 3, 6))
        return f"You are {MARKS[CROSS - player]}. Board: {rows}"


def _winner(board: TicTacToeState) -> int:
    """Returns the mark that has a line, or `EMPTY`."""
    return next((board[a] for a, b, c in LINES if board[a] == board[b] == board[c] != EMPTY), EMPTY)
