"""Tasks that need tools: their data, the check of answers, and tasks from files."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Literal

from palestra.core.chat import ToolCall
from palestra.environments.tools.tool_state import Library, check_files, normalize_path
from palestra.envs.support.row_reader import read_rows
from palestra.envs.support.splits import SPLIT_SHARES, Split, first_of_split, split_of_text

TaskKind = Literal["lookup", "compute", "lookup_compute", "files", "program"]
TASK_KINDS: tuple[TaskKind, ...] = ("lookup", "compute", "lookup_compute", "files", "program")
MAX_DRAWS = 2000  # draws per task
MAX_ANSWER_CHARS = 1000  # characters at the end of an answer that are read
MINUS_SIGNS = str.maketrans({"\u2212": "-", "\u2013": "-"})
_EDGES = r"(?<!\w)(?<!\d,){}(?!\w|,\d)"  # so that "204" does not match in "1,204"
_NUMBER = re.compile(r"-?[0-9][0-9,]*(?:\.[0-9]+)?")


@dataclass(frozen=True)
class ToolRequirement:
    """Something that a tool must show before the task can be solved: a result that contains all words in
    `expected_words`.

    `calls` obtain it, each tried if the ones before it did not. `note` is the text by which a researcher reports it; ""
    if it is computed, not looked up.
    """

    expected_words: tuple[str, ...]
    calls: tuple[ToolCall, ...]
    note: str = ""

    def is_met_by(self, text: str) -> bool:
        """True if `text` contains all words of `expected_words`."""
        return all(re.search(_EDGES.format(re.escape(word)), text, re.IGNORECASE) for word in self.expected_words)


def calculation(expression: str, answer: str) -> ToolRequirement:
    """Returns the requirement that the calculator gives `answer`."""
    return ToolRequirement((answer,), (ToolCall("calculator", {"expression": expression}),))


def file_content(path: str, text: str) -> ToolRequirement:
    """Returns the requirement that a file is read, whose content is `text`."""
    return ToolRequirement((text,), (ToolCall("read_file", {"path": path}),))


@dataclass(frozen=True)
class ToolTask:
    """One task: `question` in plain English, `short_question` in as few words as possible; `split_key` decides its
    split.

    `requirements` are stages of requirements, met in order. `files` is the initial content of the scratch folder. If
    `output_file` names a file, that file must hold the answer at the end, and the reply does not count. `library` is
    for tasks with documents of their own.
    """

    kind: str
    question: str
    short_question: str
    answer: str
    split_key: str
    requirements: tuple[tuple[ToolRequirement, ...], ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    output_file: str | None = None
    library: Library | None = None

    def is_solved(self, text: str, files: Mapping[str, str]) -> bool:
        """True if the reply, or the file `output_file`, holds the answer."""
        return is_correct(files.get(self.output_file, "") if self.output_file else text, self.answer)

    def is_readable(self, text: str) -> bool:
        """True if the reply could be an answer at all: it holds a number if one is expected."""
        return bool(text) and (
            self.output_file is not None or parse_number(self.answer) is None or bool(_NUMBER.search(text))
        )


def is_correct(text: str, answer: str) -> bool:
    """True if the only number in `text` is the answer, or its words are, ignoring case."""
    wanted = parse_number(answer)
    if wanted is None:
        return _words(text) == _words(answer)
    said = text[-MAX_ANSWER_CHARS:].translate(MINUS_SIGNS)
    return {parse_number(number) for number in _NUMBER.findall(said)} == {wanted}


def parse_number(text: str) -> Fraction | None:
    """Returns the value of a text that is a number, "48,211" or "-3.5"; None for any other text."""
    text = text.strip().translate(MINUS_SIGNS)
    return Fraction(text.replace(",", "")) if _NUMBER.fullmatch(text) else None


def draw_task(
    seed: int, propose: Callable[[random.Random], ToolTask | None], split: Split, description: str
) -> ToolTask:
    """Returns the first task of `split` among those that `propose` draws from `seed`.

    Raises ValueError if 2,000 draws contain none.
    """
    rng = random.Random(f"tools {seed}")
    lacking = f'no task of split "{split}" in {MAX_DRAWS} draws of {description}: there are too few such tasks'
    return first_of_split(
        (propose(rng) for _ in range(MAX_DRAWS)), split, lambda task: split_of_text(task.split_key), lacking
    )


@cache
def read_tasks(path: Path) -> Mapping[Split, Sequence[ToolTask]]:
    """Returns a user's tasks by split, from a file of rows (.jsonl, .json or .parquet) or a folder of them.

    Each row has a "question" and an "answer", optionally "files" ({path: text}) and a "split"; without a split, the
    text of the task decides. Raises ValueError for any other row.
    """
    if not path.exists():
        raise ValueError(f"no tasks at {path}: give a .jsonl file with a question and an answer in each line")
    tasks: dict[Split, list[ToolTask]] = {split: [] for split in SPLIT_SHARES}
    for number, row in enumerate(read_rows(path), start=1):
        where = f"{path}, row {number}"
        task = _task(row, where)
        split = row.get("split") or split_of_text(task.split_key)
        if split not in tasks:
            raise ValueError(f"{where}: split {split!r} is none of {', '.join(tasks)}")
        tasks[split].append(task)
    return tasks


def _task(row: Mapping[str, object], where: str) -> ToolTask:
    question = row.get("question")
    answer = row.get("answer")
    files = row.get("files", {})
    if not (isinstance(question, str) and question.strip()) or isinstance(answer, bool | None | list | dict):
        raise ValueError(f'{where} needs a "question" and an "answer", which is a text or a number')
    if not isinstance(files, dict) or not all(isinstance(text, str) for text in files.values()):
        raise ValueError(f'{where}: "files" must be an object of paths and texts')
    stored = {normalize_path(path): text for path, text in files.items()}
    check_files(stored)
    key = json.dumps([question, stored], sort_keys=True)
    return ToolTask("given", question, question, str(answer), key, files=stored)


def _words(text: str) -> list[str]:
    words = re.findall(r"\w+", text.casefold())
    return words[1:] if words[:1] == ["the"] else words
