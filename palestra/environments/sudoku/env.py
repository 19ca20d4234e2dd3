"""Sudoku env: fill a grid so that every row, column and box holds each digit once. The solution is unique.

A turn is a proposer's answer followed by a checker's, or one agent's answer. Observations do not use the solution: they
show the grid, and the rows, columns and boxes that hold a digit twice. Dense rewards use the solution.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from palestra.core.types import Seat, Step
from palestra.environments.sudoku.canonical import Puzzle, draw_puzzle
from palestra.environments.sudoku.solver import BOXES, SudokuBoard, forced_cells, violated_units
from palestra.envs.base import Env
from palestra.envs.reward_terms import form_or, terms_info
from palestra.envs.support.answers import answer_words, mark_answer
from palestra.envs.support.few_shot import acting_seat
from palestra.envs.support.options import Rendering, RewardMode, check_range
from palestra.envs.support.splits import Split

SOLVED_REWARD = 1.0  # team reward for the solution
INVALID_PENALTY = 0.1  # subtracted from the seat's reward for an invalid answer, which sets no cell
SudokuTeam = Literal["proposer_checker", "single"]
SEATS: dict[SudokuTeam, tuple[Seat, ...]] = {"proposer_checker": ("proposer", "checker"), "single": ("agent",)}
DEFAULT_CLUES = {4: 7, 6: 16, 9: 36}
MIN_CLUES = {4: 4, 6: 9, 9: 24}  # with fewer, hardly any grid has a puzzle with a unique solution
CONFIRM = "ok"


class Sudoku(Env):
    """A sudoku of `size` 4, 6 or 9 with `clues` clues (by default 7, 16, 36).

    An answer sets at most `max_cells` cells (default: the length of a row; for one agent, all): a list such as "r1 c2 4
    r3 c1 2", or the whole grid, of which only changed cells count. "." empties a cell. The proposer's cells are set if
    the checker answers "ok"; otherwise the checker's own cells are set.

    Dense rewards: the team is paid the change of (correct minus wrong cells) as a share of the initially empty cells,
    and 1 for the solution. The proposer is paid the same for the board with its proposal, the checker the difference
    between the final board and the proposed one. An unreadable answer, one that sets too many cells, or one that
    contradicts a clue sets nothing, is flagged and costs 0.1. With `reward: outcome` only the team is paid, and only
    for the solution.

    Raises ValueError if an option is out of range, or `max_turns` is too low to fill the grid.
    """

    name: ClassVar[str] = "sudoku"
    replaces_state = True
    picture = "sudoku"

    def __init__(
        self,
        *,
        size: Literal[4, 6, 9] = 9,
        clues: int | None = None,
        split: Split = "train",
        team: SudokuTeam = "proposer_checker",
        max_cells: int | None = None,
        max_turns: int | None = None,
        reward: RewardMode = "dense",
        rendering: Rendering = "full",
    ) -> None:
        if size not in BOXES:
            raise ValueError(f"size={size} is not a sudoku here: give 4, 6 or 9")
        self.size = size
        self.clues = DEFAULT_CLUES[size] if clues is None else clues
        self.split = split
        check_range("clues", self.clues, MIN_CLUES[size], size * size - 1)
        self.empty = size * size - self.clues
        default_cells = {"proposer_checker": size, "single": size * size}[team]
        self.cells = default_cells if max_cells is None else max_cells
        check_range("max_cells", self.cells, 1, size * size)
        needed = -(-self.empty // self.cells)
        self.turns = needed + needed // 2 + 2 if max_turns is None else max_turns
        if self.turns < needed:
            raise ValueError(
                f"max_turns={max_turns} of {self.cells} cells cannot fill the {self.empty} empty cells: give {needed} "
                "or more"
            )
        self.reward = reward
        self.rendering = rendering
        self.seats = SEATS[team]
        self.roles: Mapping[Seat, str] = {seat: self._role(seat) for seat in self.seats}
        self._acting: Seat | None = None

    # ---- env interface

    def reset(self, seed: int) -> Step:
        self.instance: Puzzle = draw_puzzle(seed, self.size, self.clues, self.split)
        self.board: SudokuBoard = self.instance.clues
        self.proposed: CellDigits | None = None
        self._acting = self.seats[0]
        self._turn = 0
        self._refused = ""
        return self._step({}, 0.0, {})

    def step(self, actions: dict[Seat, Any]) -> Step:
        seat = acting_seat(self._acting, actions)
        if seat == "proposer":
            return self._propose(actions[seat])
        return self._fill(seat, actions[seat])

    def expert(self, seat: Seat, rng: random.Random) -> str:
        """Returns an answer that corrects wrong cells first, then fills cells that the board forces, or else random
        cells from the solution. A checker confirms a correct proposal."""
        right = self.instance.solution
        if seat == "checker" and self.proposed and all(right[cell] == digit for cell, digit in self.proposed.items()):
            answer = CONFIRM
        else:
            answer = format_cell_digits(self.size, self._next(rng))
        return mark_answer(answer, is_compact=self.rendering == "compact")

    # ---- one answer

    def _propose(self, answer: Any) -> Step:
        self.proposed, self._refused = self._read(answer)
        self._acting = "checker"
        if self.proposed is None:
            return self._step({"proposer": -INVALID_PENALTY}, 0.0, {"proposer": True})
        gain = self._gain(self.board, self._with(self.proposed))
        return self._step({"proposer": gain}, 0.0, {"proposer": False})

    def _fill(self, seat: Seat, answer: Any) -> Step:
        before = self.board
        offered = self._with(self.proposed or {})
        cells: CellDigits | None
        if seat == "checker" and answer_words(answer) == [CONFIRM]:
            cells = self.proposed or {}
            self._refused = ""
        else:
            cells, self._refused = self._read(answer)
        invalid = cells is None
        self.board = self._with(cells or {})
        self._turn = self._turn + 1
        self._acting = self.seats[0]
        self.proposed = None
        reward = 0.0
        if invalid:
            reward = -INVALID_PENALTY
        elif seat == "checker":
            reward = self._gain(offered, self.board)
        return self._step({seat: reward}, self._gain(before, self.board), {seat: invalid})

    def _read(self, answer: Any) -> tuple[CellDigits | None, str]:
        """Returns the cells that an answer changes and "", or None and the reason why it is invalid."""
        cells = read_cells(answer, self.size)
        if cells is None:
            return None, "it could not be read"
        clues = self.instance.clues
        for cell, digit in cells.items():
            if clues[cell] and digit not in (clues[cell], 0):
                return None, f"{cell_name(self.size, cell)} is a clue"
        changed = {c: digit for c, digit in cells.items() if not clues[c] and digit != self.board[c]}
        if len(changed) > self.cells:
            return None, f"it sets {len(changed)} cells, {self.cells} at most are allowed"
        return changed, ""

    def _with(self, cells: CellDigits) -> SudokuBoard:
        return tuple(cells.get(cell, digit) for cell, digit in enumerate(self.board))

    def _gain(self, before: SudokuBoard, after: SudokuBoard) -> float:
        """Returns the reward of a change: right minus wrong cells as a share, and `SOLVED_REWARD`."""
        solved = SOLVED_REWARD * (after == self.instance.solution) - SOLVED_REWARD * (before == self.instance.solution)
        if self.reward == "outcome":
            return solved
        return (self._right(after) - self._right(before)) / self.empty + solved

    def _right(self, board: SudokuBoard) -> int:
        pairs = zip(board, self.instance.solution, strict=True)
        return sum(1 if digit == right else -1 for digit, right in pairs if digit)

    def _next(self, rng: random.Random) -> CellDigits:
        right = self.instance.solution
        board = list(self.board)
        cells: CellDigits = {}
        wrong = [cell for cell, digit in enumerate(board) if digit not in (0, right[cell])]
        while len(cells) < self.cells and (wrong or 0 in board):
            if wrong:
                cell = wrong.pop(0)
            else:
                sure = [cell for cell, _ in forced_cells(self.size, tuple(board))]
                cell = rng.choice(sure or [cell for cell, digit in enumerate(board) if not digit])
            cells[cell] = board[cell] = right[cell]
        return cells

    # ---- observations

    def _step(self, rewards: dict[Seat, float], team_reward: float, invalid: dict[Seat, bool]) -> Step:
        success = self.board == self.instance.solution
        if self.reward == "outcome":
            rewards = dict.fromkeys(rewards, 0.0)
        twice = violated_units(self.size, self.board)
        info: dict[str, Any] = {"success": success, "turn": self._turn, "invalid": invalid, "violations": twice}
        if any(invalid.values()):
            info["why_invalid"] = {seat: self._refused for seat in invalid}
        if self.reward == "dense":
            info |= terms_info({s: form_or("progress", reward, is_invalid=invalid[s]) for s, reward in rewards.items()})
        if success or self._turn >= self.turns:
            self._acting = None
            return Step({}, rewards, team_reward, truncated=not success, info=info)
        assert self._acting is not None
        observation = self._observation(self._acting, twice)
        return Step({self._acting: observation}, rewards, team_reward, info=info)

    def _observation(self, seat: Seat, twice: list[str]) -> str:
        set_cells = [cell for cell, digit in enumerate(self.board) if digit and not self.instance.clues[cell]]
        names = " ".join(cell_name(self.size, cell) for cell in set_cells)
        proposed = format_cell_digits(self.size, self.proposed or {}) or "none"
        if self.rendering == "compact":
            words = [compact_grid(self.size, self.board)]
            if set_cells:
                words.append(f"set {names}")
            if twice:
                words.append(f"twice {' '.join(twice)}")
            if seat == "checker":
                words.append(f"proposed {proposed}")
            return " ".join(words)
        lines = [draw_sudoku_grid(self.size, self.board), f"Set so far, not clues: {names or 'none'}."]
        if twice:
            lines.append(f"These hold a digit twice: {', '.join(twice)}.")
        if self._refused:
            lines.append(f"The last answer set nothing: {self._refused}.")
        if seat == "checker":
            lines.append(f"The proposer proposes: {proposed}.")
        return "\n".join([*lines, f"Turn {self._turn + 1} of {self.turns}."])

    def _role(self, seat: Seat) -> str:
        if self.rendering == "compact":
            return f"sudoku {self.size} {seat}"
        high, wide = BOXES[self.size]
        rules = (
            f"You play sudoku on a {self.size}x{self.size} grid with boxes of {high} rows and {wide} columns. Every "
            f"row, column and box must hold each digit from 1 to {self.size} once. '.' is an empty cell; r1 c1 is the "
            f"top left cell, r1 c{self.size} the top right one. Clues cannot be changed; there is exactly one solution."
        )
        tasks = {
            "agent": f"Set up to {self.cells} cells a turn, in {self.turns} turns.",
            "proposer": f"You are the proposer: propose up to {self.cells} cells a turn, in {self.turns} turns. Your "
            "partner, the checker, will set them, or others instead.",
            "checker": f"You are the checker: confirm the cells that your partner proposes by saying {CONFIRM}, or "
            f"set others instead, up to {self.cells} a turn, in {self.turns} turns.",
        }
        confirm = f"{CONFIRM}, or " if seat == "checker" else ""
        return (
            f"{rules}\n{tasks[seat]} You may change cells that were set before; '.' empties one.\nThink briefly if you "
            f"need to, then end your answer with #### and {confirm}the cells, each as row, column and digit, for "
            "example: #### r1 c2 4 r3 c1 2"
        )


# ---- text of boards and cells, and the parser of answers; rows and columns count from 1


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
        triples = [tuple(int(number.replace(".", "0")) for number in match) for match in _CELL.findall(text)]
        cells = {(row - 1) * size + column - 1: digit for row, column, digit in triples}
        bad = any(not (1 <= r <= size and 1 <= c <= size and digit <= size) for r, c, digit in triples)
        if bad or len(cells) < len(triples):
            return None
        return cells
    digits = re.sub(r"[|/+ -]", "", text).replace(".", "0").replace("_", "0")
    if len(digits) != size * size or not (digits.isascii() and digits.isdecimal()):
        return None
    if max(digits) > str(size):
        return None
    return dict(enumerate(map(int, digits)))


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

    def line(name: str, labels: list[str]) -> str:
        groups = [" ".join(f"{label:>2}" for label in labels[at : at + wide]) for at in range(0, size, wide)]
        return f"{name} {' | '.join(groups)}"

    lines = [line("  ", [f"c{column + 1}" for column in range(size)])]
    for row in range(size):
        if row and row % high == 0:
            lines.append("-" * len(lines[0]))
        lines.append(line(f"r{row + 1}", [str(digit or ".") for digit in board[row * size : (row + 1) * size]]))
    return "\n".join(lines)
