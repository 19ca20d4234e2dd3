"""Tasks and results as JSON: the lines of tasks.jsonl, and the messages between processes.

Reading checks every value: a missing or unknown key, or a value of the wrong type, is an error that names its place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palestra.core.files import DamagedFile, read_json, read_lines
from palestra.parallel.task_json import check_keys, from_json
from palestra.parallel.tasks import Result, Task
from palestra.populations.payoffs import MemberProfile, PayoffCell
from palestra.populations.population import Member
from palestra.populations.tasks import AssessTask, PlayTask, SolveTask, TrainTask

MEMBERS_FILE = "population.json"
CROSSPLAY_FILE = "crossplay.jsonl"  # cells played by `palestra league crossplay`, in addition to those of training
TASK_TYPES: dict[str, type[Task]] = {cls.kind: cls for cls in (TrainTask, PlayTask, AssessTask, SolveTask)}
WRITTEN_HINT = "the file was edited, or another version of palestra wrote it; restore it from a copy"
LINE_KEYS = ("number", "kind", "task", "files", "result")


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
        check_keys({key: value for key, value in line.items() if key != "checksum"}, LINE_KEYS)
        if task_type is None:
            if line["kind"] not in TASK_TYPES:
                raise ValueError(f'"{line["kind"]}" is not a kind of task; there are {", ".join(TASK_TYPES)}')
            task_type = TASK_TYPES[line["kind"]]
        return TaskRecord(
            number=from_json(int, line["number"], "number"),
            task=from_json(task_type, line["task"], "task"),
            files=from_json(dict[str, dict[str, Any]], line["files"], "files"),
            result=from_json(task_type.result_type, line["result"], "result"),
        )
    except ValueError as error:
        raise DamagedFile(f"{where}: {error}; {WRITTEN_HINT}") from error


def read_records(path: Path) -> list[TaskRecord]:
    """Returns the records of the file tasks.jsonl at `path`; [] if it does not exist. Checksums are not compared.

    Raises DamagedFile, with the line number, if a line is not as palestra writes it.
    """
    lines = enumerate(read_lines(path), start=1)
    return [task_record(line, f"{path}, line {number}") for number, line in lines]


def read_members(run: Path) -> list[Member]:
    """Returns the members in population.json; [] without the file. Raises DamagedFile for a changed one."""
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
    cells = []
    for number, line in enumerate(read_lines(path), start=1):
        try:
            check_keys(line, ("members", "payoffs"))
            members = from_json(MemberProfile, line["members"], "members")
            cells.append((members, from_json(PayoffCell, line["payoffs"], "payoffs")))
        except ValueError as error:
            raise DamagedFile(f"{path}, line {number}: {error}; {WRITTEN_HINT}") from error
    return cells
