"""Tasks and results as JSON: the lines of tasks.jsonl, and the messages between processes.

Reading checks every value: a missing or unknown key, or a value of the wrong type, is an error that names its place.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from palestra.files import DamagedFile, read_json, read_lines, to_json_line
from palestra.populations.payoffs import MemberProfile, PayoffCell
from palestra.populations.population import Member
from palestra.populations.tasks import AssessTask, PlayTask, Result, SolveTask, Task, TrainTask

TASKS_FILE = "tasks.jsonl"
MEMBERS_FILE = "population.json"
CROSSPLAY_FILE = "crossplay.jsonl"  # cells played by `palestra league crossplay`, in addition to those of training
TASK_TYPES: dict[str, type[Task]] = {cls.kind: cls for cls in (TrainTask, PlayTask, AssessTask, SolveTask)}
WRITTEN_HINT = "the file was edited, or another version of palestra wrote it; restore it from a copy"
LINE_KEYS = ("number", "kind", "task", "files", "result")

T = TypeVar("T")


@dataclass(frozen=True)
class TaskRecord:
    """A line of tasks.jsonl: a finished task, its result, and size and checksum of each file that it produced."""

    number: int
    """Number of tasks that finished before this one."""
    task: Task
    files: dict[str, dict[str, Any]]
    result: Result

    def to_json(self) -> dict[str, Any]:
        """Returns the values of the line for `to_json_line`, without checksum."""
        return {
            "number": self.number,
            "kind": self.task.kind,
            "task": self.task,
            "files": self.files,
            "result": self.result,
        }


def task_record(line: Mapping[str, Any], where: str, task_type: type[Task] | None = None) -> TaskRecord:
    """Returns the record of a line at `where` ("FILE, line N"), as `TaskRecord.to_json` wrote it. The task is of
    `task_type`, by default the type that the line's kind names.

    Raises DamagedFile if a key is missing or unknown, or a value is of the wrong type.
    """
    try:
        _check_keys({key: value for key, value in line.items() if key != "checksum"}, LINE_KEYS)
        task_type = task_type or task_type_of(line["kind"])
        return TaskRecord(
            number=from_json(int, line["number"], "number"),
            task=from_json(task_type, line["task"], "task"),
            files=from_json(dict[str, dict[str, Any]], line["files"], "files"),
            result=from_json(task_type.result_type, line["result"], "result"),
        )
    except ValueError as error:
        raise DamagedFile(f"{where}: {error}; {WRITTEN_HINT}") from error


def task_type_of(kind: object) -> type[Task]:
    """Returns the class of the tasks of this kind. Raises ValueError if there is none."""
    if kind not in TASK_TYPES:
        raise ValueError(f'"{kind}" is not a kind of task; there are {", ".join(TASK_TYPES)}')
    return TASK_TYPES[str(kind)]


def read_records(path: Path) -> list[TaskRecord]:
    """Returns the records of the file tasks.jsonl at `path`; [] if it does not exist. Checksums are not compared.

    Raises DamagedFile, with the line number, if a line is not as palestra writes it.
    """
    lines = enumerate(read_lines(path), start=1)
    return [task_record(line, f"{path}, line {number}") for number, line in lines]


def read_members(run: Path) -> list[Member]:
    """Returns the members that population.json of a run lists; [] if it does not exist. Raises DamagedFile if one is
    not as palestra writes it."""
    path = run / MEMBERS_FILE
    try:
        return from_json(list[Member], read_json(path, list, []), "members")
    except ValueError as error:
        raise DamagedFile(f"{path}: {error}; {WRITTEN_HINT}") from error


def crossplay_line(members: MemberProfile, cell: PayoffCell) -> dict[str, Any]:
    """Returns a line of crossplay.jsonl."""
    return {"members": members, "payoffs": cell}


def read_crossplay(path: Path) -> list[tuple[MemberProfile, PayoffCell]]:
    """Returns the cells of the file crossplay.jsonl at `path`; [] if it does not exist.

    Raises DamagedFile, with the line number, if a line is not as palestra writes it.
    """
    found = []
    for number, line in enumerate(read_lines(path), start=1):
        try:
            _check_keys(line, ("members", "payoffs"))
            members = from_json(MemberProfile, line["members"], "members")
            found.append((members, from_json(PayoffCell, line["payoffs"], "payoffs")))
        except ValueError as error:
            raise DamagedFile(f"{path}, line {number}: {error}; {WRITTEN_HINT}") from error
    return found


def through_json(result: Result, task: Task) -> Result:
    """Returns a worker's result as it will be read from tasks.jsonl: NumPy values become Python's, NaN becomes None.

    Raises ValueError if it is not a result of the task's type, TypeError if JSON cannot hold it.
    """
    if not isinstance(result, task.result_type):
        raise ValueError(f"the worker returned {type(result).__name__}, not {task.result_type.__name__}")
    return from_json(task.result_type, json.loads(to_json_line(result)), "result")


def from_json(kind: type[T], value: Any, where: str) -> T:
    """Returns JSON `value` as a `kind`. If that is a dataclass, every field must be present, also those with a default.

    Raises ValueError, which names the place below `where`, if the value does not fit.
    """
    try:
        found: T = _adapter(cast(Any, kind)).validate_python(value)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        place = ".".join(map(str, [where, *fault["loc"]]))
        raise ValueError(f"{place}: {_reason(fault['type'], fault['msg'])}") from None
    if is_dataclass(kind):
        _check_keys(value, [field.name for field in fields(kind)], f"{where}: ")
    return found


def _check_keys(tree: Mapping[str, Any], keys: Sequence[str], where: str = "") -> None:
    if missing := [key for key in keys if key not in tree]:
        raise ValueError(f'{where}key "{missing[0]}" is missing')
    if unknown := [key for key in tree if key not in keys]:
        raise ValueError(f'{where}key "{unknown[0]}" is unknown; there are {", ".join(keys)}')


def _reason(kind: str, message: str) -> str:
    known = {"missing": "this key is missing", "unexpected_keyword_argument": "this key is unknown"}
    return known.get(kind, message[:1].lower() + message[1:])


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
