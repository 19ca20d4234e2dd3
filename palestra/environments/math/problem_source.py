"""The source of an env's problems: generated, from a file, or reasoning-gym tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from palestra.core.config.key_hints import nearest
from palestra.environments.math.answer_extraction import MAX_ANSWER_CHARS, final_answer
from palestra.environments.math.generate import DEFAULT_KINDS, DIFFICULTIES, PROBLEM_GENERATORS, generate_problem
from palestra.environments.math.problem import Problem, ProblemKind
from palestra.environments.math.reasoning import check_tasks, reasoning_problem
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
        hint = nearest(name, ("question", "answer"))
        raise ValueError(f'columns: "{name}" is neither question nor answer{hint}')
    changed = path.stat().st_mtime_ns if path.exists() else 0
    return _of_split(path, columns.get("question"), columns.get("answer"), changed, split)


@lru_cache(maxsize=32)
def _of_split(
    path: Path, question: str | None, answer: str | None, changed: int, split: Split | Literal["all"]
) -> tuple[Problem, ...]:
    problems = _read(path, question, answer, changed)
    if split == "all":
        return problems
    chosen = tuple(one for one in problems if split_of_text(one.split_key) == split)
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
    asked = _cell(row, question, where)
    gold = published_answer(_cell(row, answer, where))
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
    if not isinstance(value, str | int | float) or value != value:
        raise ValueError(f'{where} has {text[:40]} in column "{name}", which is no text or number: write it as one')
    return text


def published_answer(text: str) -> str:
    r"""Returns a published solution's answer, as the answers to it are read: the line after its last ####, or in its
    last \boxed{}, or all of it without either; "" if a \boxed{} is not closed."""
    if any(mark in text for mark in ("####", "\\boxed", "\\fbox")):
        return final_answer(text) or ""
    return text.strip()


@dataclass(frozen=True)
class ProblemSource:
    """Options that select the source of problems; None if not given.

    Raises ValueError if options of two sources are mixed or a value is invalid.
    """

    kinds: Sequence[ProblemKind] | None
    difficulty: int | Sequence[int] | None
    split: Split | Literal["all"]
    path: Path | None = None
    columns: Mapping[str, str] | None = None
    reasoning: Sequence[str] | None = None

    def __post_init__(self) -> None:
        ours = self.kinds is not None or self.difficulty is not None
        if ours + (self.path is not None) + (self.reasoning is not None) > 1:
            raise ValueError(
                "kinds and difficulty are for generated problems, path and columns for a file, reasoning for "
                "reasoning-gym's tasks: give the options of one of the three"
            )
        if self.columns is not None and self.path is None:
            raise ValueError("columns: names columns of a file: give its path too")
        if self.split == "all" and self.path is None:
            raise ValueError("split: all uses a file whole: give its path, or one of the splits base, train, dev, test")
        if self.path is not None:
            load_problems(self.path, self.columns, self.split)
        if self.reasoning is not None:
            check_tasks(self.reasoning)
        if unknown := [kind for kind in self._kinds if kind not in PROBLEM_GENERATORS]:
            raise ValueError(f"kinds: there is no kind {unknown[0]}; there are {', '.join(PROBLEM_GENERATORS)}")
        if not self._kinds:
            raise ValueError(f"kinds: names none; give at least one of {', '.join(PROBLEM_GENERATORS)}")
        if not self._levels or any(level not in DIFFICULTIES for level in self._levels):
            raise ValueError(f"difficulty: {self.difficulty} is not one or several of 1 to 5")

    @property
    def is_generated(self) -> bool:
        """True if problems are generated by `generate`."""
        return self.path is None and self.reasoning is None

    def instance_of(self, seed: int) -> int | tuple[str, int]:
        """Returns the index of the problem in a file, whose problems are taken in order, cyclically; the task and entry
        of reasoning-gym's; else the seed."""
        if self.reasoning is not None:
            return self.problem(seed).reasoning_entry or seed
        if self.path is None:
            return seed
        return seed % len(load_problems(self.path, self.columns, self.split))

    def problem(self, seed: int) -> Problem:
        if self.path is not None:
            problems = load_problems(self.path, self.columns, self.split)
            return problems[seed % len(problems)]
        assert self.split != "all"
        if self.reasoning is not None:
            return reasoning_problem(seed, tuple(self.reasoning), self.split)
        return generate_problem(seed, self._kinds, self._levels, self.split)

    @property
    def _kinds(self) -> tuple[ProblemKind, ...]:
        return tuple(DEFAULT_KINDS if self.kinds is None else self.kinds)

    @property
    def _levels(self) -> tuple[int, ...]:
        if self.difficulty is None:
            return (3,)
        if isinstance(self.difficulty, int):
            return (self.difficulty,)
        return tuple(self.difficulty)
