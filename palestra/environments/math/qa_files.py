"""Question-answer files: columns by name, by default the published columns of GSM8K, AIME and MATH."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from palestra.environments.math.answer_extraction import MAX_ANSWER_CHARS, boxed_content
from palestra.environments.math.problem import Problem
from palestra.envs.support.row_reader import Row, find_column, read_rows
from palestra.envs.support.splits import Split, split_of_text

QUESTION_COLUMNS = ("question", "problem", "prompt")
ANSWER_COLUMNS = ("answer", "solution", "final_answer", "expected_answer")


def load_problems(path: Path, columns: Mapping[str, str] | None, split: Split | Literal["all"]) -> tuple[Problem, ...]:
    r"""Returns the problems of a file that belong to `split`, in the file's order. The split depends on the question's
    text only, not on its row or file.

    `columns` maps "question" and "answer" to column names. By default the question is in column question, problem or
    prompt, the answer in answer, solution, final_answer or expected_answer: the text after its last ####, or in its
    last \boxed{}, or all of it. Raises ValueError, naming the file and the row or column, if one is missing or empty,
    or if no problem belongs to `split`.
    """
    columns = dict(columns or {})
    for name in columns.keys() - {"question", "answer"}:
        near = difflib.get_close_matches(name, ("question", "answer"), n=1)
        hint = f'; did you mean "{near[0]}"?' if near else ""
        raise ValueError(f'columns: "{name}" is neither question nor answer{hint}')
    changed = path.stat().st_mtime_ns if path.exists() else 0
    return _of_split(path, columns.get("question"), columns.get("answer"), changed, split)


@lru_cache(maxsize=32)
def _of_split(
    path: Path, question: str | None, answer: str | None, changed: int, split: Split | Literal["all"]
) -> tuple[Problem, ...]:
    problems = _read(path, question, answer, changed)
    chosen = problems if split == "all" else tuple(one for one in problems if split_of_text(one.split_key) == split)
    if not chosen:
        raise ValueError(
            f'none of the {len(problems)} problems in {path} is of split "{split}": '
            "give a larger file, or split: all to use the file whole"
        )
    return chosen


@lru_cache(maxsize=8)
def _read(path: Path, question: str | None, answer: str | None, changed: int) -> tuple[Problem, ...]:
    rows = read_rows(path)
    question = find_column(rows[0], question, QUESTION_COLUMNS, "question", str(path))
    answer = find_column(rows[0], answer, ANSWER_COLUMNS, "answer", str(path))
    return tuple(_problem(row, question, answer, f"{path}, row {number}") for number, row in enumerate(rows, start=1))


def _problem(row: Row, question: str, answer: str, where: str) -> Problem:
    asked, gold = _cell(row, question, where), published_answer(_cell(row, answer, where))
    if not gold or len(gold) > MAX_ANSWER_CHARS:
        raise ValueError(
            f'{where}: no answer in column "{answer}", which has no #### and no \\boxed{{}} and is '
            f"{'empty' if not gold else f'longer than {MAX_ANSWER_CHARS} characters'}; name another: columns: "
            f"{{answer: ...}}"
        )
    return Problem(asked, gold, asked, f"print({gold!r})", f"question {' '.join(asked.split())}")


def _cell(row: Row, name: str, where: str) -> str:
    value: Any = row.get(name)
    text = "" if value is None else str(value).strip()
    if not text:
        raise ValueError(f'{where} has nothing in column "{name}": fill it in, or leave the row out')
    return text


def published_answer(text: str) -> str:
    r"""Returns a published solution's answer: the text after its last ####, or in its last \boxed{}, or all of it; ""
    if a \boxed{} is not closed."""
    _, marked, tail = text.rpartition("####")
    if marked:
        return tail.strip()
    inner = boxed_content(text)
    if inner is None and "\\boxed" not in text:
        return text.strip()
    return (inner or "").strip()
