"""Sudoku: the solver against known counts, puzzles with one solution, splits by canonical form, rewards by hand."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from palestra.environments.sudoku import canonical
from palestra.environments.sudoku import env as sudoku
from palestra.environments.sudoku.canonical import Puzzle, canonical_text, cell_permutations, draw_puzzle, line_orders
from palestra.environments.sudoku.env import Sudoku, read_cells
from palestra.environments.sudoku.solver import (
    BOXES,
    find_solutions,
    forced_cells,
    random_grid,
    remove_clues,
    violated_units,
)
from palestra.envs import check_env
from palestra.envs.support.splits import SPLIT_SHARES, split_of_text

# 1 2 | 3 4
# 3 4 | 1 2
# ---------
# 2 1 | 4 3
# 4 3 | 2 1      the cells r1 c1, r1 c2, r2 c1 and r4 c4 are empty at first
SOLUTION = (1, 2, 3, 4, 3, 4, 1, 2, 2, 1, 4, 3, 4, 3, 2, 1)
CLUES = (0, 0, 3, 4, 0, 4, 1, 2, 2, 1, 4, 3, 4, 3, 2, 0)

# The first of the puzzles that Peter Norvig's "Solving Every Sudoku Puzzle" solves (from Project Euler 96).
EULER = "003020600900305001001806400008102900700000008006708200002609500800203009005010300"
EULER_SOLVED = "483921657967345821251876493548132976729564138136798245372689514814253769695417382"


def small(monkeypatch: pytest.MonkeyPatch, **options: Any) -> Sudoku:
    """An env whose instance is always the puzzle above."""
    monkeypatch.setattr(sudoku, "draw_puzzle", lambda *_: Puzzle(CLUES, SOLUTION))
    return Sudoku(size=4, clues=12, **options)


# ---- the solver


def test_solver_matches_known_answers() -> None:
    """There are 288 grids of 4x4, and Norvig's puzzle has one solution."""
    assert len(set(find_solutions(4, (0,) * 16, 1000))) == 288
    board = tuple(map(int, EULER))
    assert find_solutions(9, board, 2) == [tuple(map(int, EULER_SOLVED))]
    assert len(set(find_solutions(9, (*board[:9], *(0,) * 72), 5))) == 5
    assert find_solutions(9, (3, *board[1:]), 2) == []  # two 3s in the first row


@pytest.mark.parametrize("size", [4, 6, 9])
def test_deduced_cells_are_correct(size: int) -> None:
    for seed in range(5):
        drawn = draw_puzzle(seed, size, sudoku.DEFAULT_CLUES[size], "train")
        found = forced_cells(size, drawn.clues)
        assert found and all(drawn.solution[cell] == digit and not drawn.clues[cell] for cell, digit in found)


def test_certain_cells_by_hand() -> None:
    """Only 1 is possible in the last cell; the first row lacks 1 and 2, but column 1 already has 2."""
    assert forced_cells(4, CLUES) == [(0, 1), (1, 2), (4, 3), (15, 1)]
    assert forced_cells(4, (1, *(0,) * 4, *(0,) * 11)) == []
    one_home = (0, 0, 0, 0, 0, 0, 0, 1, 0, 1, *(0,) * 6)  # of the first box's cells only r1 c1 can be 1
    assert (0, 1) in forced_cells(4, one_home)


def test_violations_are_named() -> None:
    assert violated_units(4, CLUES) == [] == violated_units(4, SOLUTION)
    assert violated_units(4, (2, *CLUES[1:])) == ["column 1"]
    assert violated_units(4, (4, *CLUES[1:])) == ["row 1", "column 1", "box 1"]


# ---- puzzles


@pytest.mark.parametrize(("size", "clues"), [(4, 4), (4, 7), (4, 12), (6, 9), (6, 16), (9, 24), (9, 36), (9, 60)])
@pytest.mark.few(3)
def test_puzzles_have_one_solution(size: int, clues: int) -> None:
    for seed in range(1 if size == 9 else 2):
        drawn = draw_puzzle(seed, size, clues, "test")
        assert sum(map(bool, drawn.clues)) == clues
        assert find_solutions(size, drawn.clues) == [drawn.solution] and violated_units(size, drawn.solution) == []
        assert drawn == draw_puzzle.__wrapped__(seed, size, clues, "test")


def test_digging_keeps_the_solution_unique() -> None:
    assert remove_clues(4, SOLUTION, 0, random.Random(0)) is None
    board = remove_clues(4, SOLUTION, 5, random.Random(0))
    assert board and find_solutions(4, board) == [SOLUTION]


def permuted(size: int, board: tuple[int, ...], rng: random.Random) -> tuple[int, ...]:
    """An equivalent sudoku: digits renamed, lines permuted within bands and stacks, and bands and stacks permuted."""
    high, wide = BOXES[size]
    rows, columns = rng.choice(line_orders(size, high)), rng.choice(line_orders(size, wide))
    names = [0, *rng.sample(range(1, size + 1), size)]
    grid = [[names[board[row * size + column]] for column in columns] for row in rows]
    if high == wide and rng.random() < 0.5:
        grid = [list(column) for column in zip(*grid, strict=True)]
    return tuple(digit for row in grid for digit in row)


@pytest.mark.parametrize("size", [4, 6, 9])
@pytest.mark.few(1)
def test_canonical_form_is_invariant_to_symmetries(size: int) -> None:
    rng, texts = random.Random(1), set()
    for seed in range(6):
        drawn = draw_puzzle(seed, size, sudoku.DEFAULT_CLUES[size], "train")
        board = drawn.solution if size == 9 else drawn.clues
        texts.add(canonical_text(size, board))
        for _ in range(8):
            image = permuted(size, board, rng)
            assert image != board and canonical_text(size, image) == canonical_text(size, board)
    assert len(texts) == 6


def test_number_of_canonical_forms_matches_known_counts() -> None:
    """There are two essentially different grids of 4x4, and 49 of 6x6 (Pettersen, Silver, Jarvis)."""
    assert len({canonical_text(4, grid) for grid in find_solutions(4, (0,) * 16, 1000)}) == 2
    rng = random.Random(0)
    assert 20 < len({canonical_text(6, random_grid(6, rng)) for _ in range(120)}) <= 49
    assert len(cell_permutations(4)) == 128 and len(cell_permutations(6)) == 3456


@pytest.mark.parametrize("size", [4, 6, 9])
@pytest.mark.few(2)
def test_no_two_splits_share_a_puzzle(size: int) -> None:
    for split in SPLIT_SHARES:
        for seed in range(4):
            drawn = draw_puzzle(seed, size, sudoku.DEFAULT_CLUES[size], split)
            assert split_of_text(canonical_text(size, drawn.solution if size == 9 else drawn.clues)) == split


# ---- answers


@pytest.mark.parametrize(
    ("answer", "cells"),
    [
        ("r1 c2 4 r3 c1 2", {1: 4, 8: 2}),
        ("So it must be:\n#### R1C2=4, r3c1: 2", {1: 4, 8: 2}),
        ("r4 c4 .", {15: 0}),
        ("1 2 3 4 / 3 4 1 2 / 2 1 4 3 / 4 3 2 .", dict(enumerate((*SOLUTION[:-1], 0)))),
        ("#### 1 2 | 3 4\n3 4 | 1 2\n----+----\n2 1 | 4 3\n4 3 | 2 _", dict(enumerate((*SOLUTION[:-1], 0)))),
        ("1234341221434321", dict(enumerate(SOLUTION))),
        ("", None),
        ("r1 c2", None),
        ("r1 c2 5", None),  # no such digit
        ("r5 c1 1", None),  # no such row
        ("r0 c1 1", None),
        ("r1 c2 4 r1 c2 3", None),  # twice
        ("r1 c2 4 please", None),
        ("1234 3412 2143 432", None),  # a cell is missing
        ("1234341221434325", None),
        ("r1 c٢ 4", None),
    ],
)
def test_answers_are_parsed(answer: str, cells: dict[int, int] | None) -> None:
    assert read_cells(answer, 4) == cells


def test_time_of_reading_a_long_list_does_not_explode() -> None:
    """With two ways to read each space, 45 cells and a full stop would take months."""
    started = time.perf_counter()
    assert read_cells("r1 c1 4, " * 45 + "r9 c9 4.", 9) is None
    assert time.perf_counter() - started < 1


# ---- the env


def test_episode_of_one_agent_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    env = small(monkeypatch, team="single", max_turns=5)
    step = env.reset(0)
    assert "r1  .  . |  3  4" in step.observations["agent"] and "not clues: none" in step.observations["agent"]
    step = env.step({"agent": "r1 c1 1 r1 c2 4"})  # of 4 empty cells one is right and one wrong
    assert step.team_reward == 0 and step.info["violations"] == ["row 1", "column 2", "box 1"]
    assert "These hold a digit twice: row 1, column 2, box 1." in step.observations["agent"]
    step = env.step({"agent": "r1 c2 2"})
    assert step.team_reward == pytest.approx(2 / 4) and step.info["violations"] == []
    step = env.step({"agent": "r1 c2 ."})
    assert step.team_reward == pytest.approx(-1 / 4)
    step = env.step({"agent": "1 2 3 4 / 3 4 1 2 / 2 1 4 3 / 4 3 2 1"})
    assert step.team_reward == pytest.approx(3 / 4 + 1) and step.done and not step.truncated
    assert step.info == {
        "success": True,
        "turn": 4,
        "invalid": {"agent": False},
        "violations": [],
        "reward_terms": {"agent": {"form": 0.0, "progress": 0.0}},
    }


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("I do not know", "it could not be read"),
        ("r1 c1 1 r1 c3 2", "r1 c3 is a clue"),
        ("1 2 2 4 / 3 4 1 2 / 2 1 4 3 / 4 3 2 1", "r1 c3 is a clue"),
        ("r1 c1 1 r1 c2 2 r2 c1 3", "it sets 3 cells, 2 at most are allowed"),
    ],
)
def test_invalid_answers_change_nothing_and_are_explained(
    monkeypatch: pytest.MonkeyPatch, answer: str, why: str
) -> None:
    env = small(monkeypatch, team="single", max_cells=2)
    env.reset(0)
    step = env.step({"agent": answer})
    assert step.rewards == {"agent": -0.1} and step.team_reward == 0 and step.info["invalid"] == {"agent": True}
    assert env.board == CLUES and f"The last answer set nothing: {why}." in step.observations["agent"]


def test_a_grid_counts_the_cells_that_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    env = small(monkeypatch, team="single", max_cells=1)
    env.reset(0)
    step = env.step({"agent": "1 . 3 4 / . 4 1 2 / 2 1 4 3 / 4 3 2 ."})
    assert step.info["invalid"] == {"agent": False} and step.team_reward == pytest.approx(1 / 4)


def test_the_checker_confirms_or_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    env = small(monkeypatch, rendering="compact")
    step = env.reset(0)
    assert step.observations == {"proposer": "r1 . . 3 4 r2 . 4 1 2 r3 2 1 4 3 r4 4 3 2 ."}
    step = env.step({"proposer": "r1 c1 1"})
    assert step.rewards == {"proposer": pytest.approx(1 / 4)} and step.team_reward == 0
    assert step.observations == {"checker": "r1 . . 3 4 r2 . 4 1 2 r3 2 1 4 3 r4 4 3 2 . proposed r1 c1 1"}
    step = env.step({"checker": "ok"})
    assert step.rewards == {"checker": 0} and step.team_reward == pytest.approx(1 / 4)
    step = env.step({"proposer": "r1 c2 1"})  # wrong
    assert step.rewards == {"proposer": pytest.approx(-1 / 4)}
    step = env.step({"checker": "r1 c2 2 r2 c1 3"})  # two right instead of one wrong
    assert step.rewards == {"checker": pytest.approx(3 / 4)} and step.team_reward == pytest.approx(2 / 4)
    assert step.observations == {
        "proposer": "r1 1 2 3 4 r2 3 4 1 2 r3 2 1 4 3 r4 4 3 2 . set r1 c1 r1 c2 r2 c1",
    }
    step = env.step({"proposer": "fly"})
    assert step.info["invalid"] == {"proposer": True} and step.observations["checker"].endswith("proposed none")
    step = env.step({"checker": "ok"})  # there is nothing to confirm
    assert step.info["invalid"] == {"checker": False} and step.team_reward == 0 and step.done and step.truncated


def test_outcome_reward_pays_success_only(monkeypatch: pytest.MonkeyPatch) -> None:
    env = small(monkeypatch, reward="outcome")
    env.reset(0)
    paid = []
    for answer in ("r1 c1 1 r1 c2 2", "ok", "fly", "r2 c1 3", "r4 c4 1", "ok"):
        step = env.step({("proposer", "checker")[len(paid) % 2]: answer})
        paid.append((step.team_reward, sum(step.rewards.values())))
    assert paid == [(0, 0)] * 5 + [(1, 0)] and step.done


OPTIONS: list[dict[str, Any]] = [
    {"size": 4},
    {"size": 4, "reward": "outcome", "rendering": "compact"},
    {"size": 4, "team": "single", "max_cells": 1, "split": "test"},
    {"size": 6, "clues": 10, "rendering": "compact", "split": "dev"},
    {"size": 6, "team": "single", "reward": "outcome"},
    {"size": 9, "clues": 30, "split": "base"},
    {"size": 9, "team": "single", "rendering": "compact"},
]


def some_cells(seat: str, observation: str, rng: random.Random) -> str:
    cells = [f"r{rng.randint(1, 4)} c{rng.randint(1, 4)} {rng.randint(1, 4)}" for _ in range(rng.randint(1, 3))]
    return rng.choice(["ok", "#### ok", " ".join(cells), f"#### {cells[0]}", "hm"])


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.few(2)
def test_env_passes_the_env_check(options: dict[str, Any]) -> None:
    check_env(lambda: Sudoku(**options), seeds=range(3), act=some_cells)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_experts_solve_from_any_board(options: dict[str, Any]) -> None:
    env = Sudoku(**options | {"max_turns": 200})
    for seed in range(3):
        rng, step, paid = random.Random(seed), env.reset(seed), 0.0
        for turn in range(6):  # a bad start
            seat = next(iter(step.observations))
            step = env.step({seat: some_cells(seat, "", rng) if turn % 3 else "r1 c1 2"})
            paid += step.team_reward
        while not step.done:
            seat = next(iter(step.observations))
            board, answer = env.board, env.expert(seat, rng)
            assert env.board == board
            step = env.step({seat: answer})
            paid += step.team_reward
            assert step.info["invalid"] == {seat: False}
        assert step.info["success"] and paid == pytest.approx(1 if env.reward == "outcome" else 2)


def test_experts_need_no_more_than_the_usual_turns() -> None:
    for options in OPTIONS:
        env, rng = Sudoku(**options), random.Random(0)
        step = env.reset(7)
        while not step.done:
            seat = next(iter(step.observations))
            step = env.step({seat: env.expert(seat, rng)})
        assert step.info["success"]


def test_invalid_options_are_refused() -> None:
    with pytest.raises(ValueError, match="size=5"):
        Sudoku(size=5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="clues=16 is out of range: give 4 to 15"):
        Sudoku(size=4, clues=16)
    with pytest.raises(ValueError, match="max_turns=2 of 4 cells cannot fill the 9 empty cells: give 3"):
        Sudoku(size=4, max_turns=2)
    with pytest.raises(ValueError, match="only a full grid"):
        canonical_text(9, (0,) * 81)


def test_impossible_puzzle_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canonical, "MAX_GRIDS", 50)
    with pytest.raises(ValueError, match='clues=3: no puzzle of size 4 in split "train" among 50 grids; give more'):
        draw_puzzle(0, 4, 3, "train")
