"""Tasks, their results, and the protocols of the worker that runs them and the backend that has workers.

A task's randomness is determined by its name. Tasks and results consist of text, numbers, None, mappings, tuples and
further dataclasses, so that `task_json.py` can write them as JSON and read them back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import ClassVar, Protocol

from pydantic import ConfigDict


@dataclass(frozen=True)
class Result:
    """Base class of the results of tasks, with one subclass for each kind of task."""

    __pydantic_config__ = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class Task:
    """Base class of tasks, with one subclass for each kind. `name` is unique in a run."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    kind: ClassVar[str]
    """Name of the kind: backends reserve workers by it, and tasks.jsonl identifies the class by it."""
    result_type: ClassVar[type[Result]]
    is_output_member: ClassVar[bool] = True
    """True if the files that the task returns are the member's files, unchanged: a backend may then serve them to other
    tasks without reading the member's folder."""

    name: str
    _: KW_ONLY
    members: tuple[str, ...] = ()
    """Members whose files the worker needs."""
    output_member: str = ""
    """Name of the member that the task produces; "": none."""


class TaskWorker(Protocol):
    """Runs tasks, one at a time, in a process of its own or in the current one."""

    def run_task(self, task: Task, members: Mapping[str, Path], out: Path | None) -> Result:
        """Runs `task` and returns its result, of type `task.result_type`.

        `members` maps the task's members to the folders of their files (read-only). `out` is an empty folder for the
        files of the member that the task produces, or None. All randomness must follow from the task's name and the
        run's seed.
        """


WorkerFactory = Callable[[], TaskWorker]  # must be picklable: a backend calls it in the worker's process


@dataclass(frozen=True)
class TaskResult:
    """A finished task, its result after a round trip through JSON, and the seconds that it took."""

    task: Task
    result: Result
    folder: Path | None
    """Files of the member that the task produced, or None; the receiver owns the folder."""
    seconds: float


class Backend(Protocol):
    """Runs tasks on workers. A task whose worker died is given to another."""

    @property
    def workers(self) -> int:
        """Number of tasks that run at once."""

    def add_member(self, name: str, folder: Path) -> None:
        """Registers a member, so that tasks that name it in `members` find its files."""

    def remove_member(self, name: str) -> None:
        """Removes a member that no pending task needs; its folder may then be deleted."""

    def submit(self, task: Task) -> None: ...

    def wait(self, timeout: float | None = None) -> TaskResult | None:
        """Returns the next finished task, or None after `timeout` seconds. Raises ValueError, with the task's name, if
        its worker raised, or died repeatedly."""

    def cancel_pending(self) -> int:
        """Removes tasks that have not started; returns the number of running ones."""

    def close(self) -> None:
        """Ends the workers; running tasks are lost."""


def run_tasks(backend: Backend, tasks: Sequence[Task]) -> Iterator[TaskResult]:
    """Runs tasks without a plan; yields each as it finishes."""
    for task in tasks:
        backend.submit(task)
    left = len(tasks)
    while left:
        if done := backend.wait():
            left -= 1
            yield done
