"""Tasks of a population's training, and the protocols of plan, worker and backend.

A plan determines which tasks to do; a backend has workers that run them; the scheduler submits tasks and logs their
results in the order in which the plan gets them. A plan is a function of that order alone: a killed run is resumed by
passing the finished tasks to a new plan. A task's randomness is determined by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

ResultDict = dict[str, Any]  # JSON: a worker's result of a task


@dataclass(frozen=True)
class Task:
    """A piece of work. `name` is unique in a run; `payload` (JSON) is its input.

    Task("train/player_0-3", "train", {"player": "player_0", "opponents": {"player_1": {"player_1-2": 1.0}}},
         members=("player_1-2",), output_member="player_0-3")
    """

    name: str
    kind: str  # train, play, assess, solve
    payload: Mapping[str, Any] = field(default_factory=dict)
    members: tuple[str, ...] = ()
    """Members whose files the worker needs."""
    output_member: str = ""
    """Name of the member whose folder the task fills; "": none."""


class Plan(Protocol):
    """Determines the tasks of a run. It must be deterministic in the sequence of finished tasks."""

    def initial_tasks(self) -> Sequence[Task]:
        """Returns the tasks that need no results."""
        ...

    def on_result(self, task: Task, result: ResultDict) -> Sequence[Task]:
        """Takes the result of `task`; returns the tasks that this makes possible."""
        ...


class Worker(Protocol):
    """Runs tasks, one at a time, in a process of its own or in the current one."""

    def run_task(self, task: Task, members: Mapping[str, Path], out: Path | None) -> ResultDict:
        """Runs `task` and returns its result.

        `members` are the folders of their files (read-only); `out`, if the task produces a member, is an empty folder
        for its files, else None. All randomness must follow from the task's name and the run's seed.
        """
        ...


WorkerFactory = Callable[[], Worker]  # must be picklable: a backend calls it in the worker's process


@dataclass(frozen=True)
class TaskResult:
    """A finished task. `result` is the worker's after a round trip through JSON; `seconds` is the worker's time."""

    task: Task
    result: ResultDict
    folder: Path | None
    """Files of the member that the task produced, or None; the receiver owns the folder."""
    seconds: float


class Backend(Protocol):
    """Runs tasks on workers. A task whose worker died is given to another."""

    @property
    def workers(self) -> int:
        """Number of tasks that run at once."""
        ...

    def add_member(self, name: str, folder: Path) -> None:
        """Registers a member, so that tasks that name it in `members` find its files."""
        ...

    def remove_member(self, name: str) -> None:
        """Removes a member that no pending task needs; its folder may then be deleted."""
        ...

    def submit(self, task: Task) -> None:
        """Adds a task to the queue."""
        ...

    def wait(self, timeout: float | None = None) -> TaskResult | None:
        """Returns the next finished task, or None after `timeout` seconds. Raises ValueError, with the task's name, if
        its worker raised, or died repeatedly."""
        ...

    def cancel_pending(self) -> int:
        """Removes tasks that have not started; returns the number of running ones."""
        ...

    def close(self) -> None:
        """Ends the workers; running tasks are lost."""
        ...


def run_tasks(backend: Backend, tasks: Sequence[Task]) -> Iterator[TaskResult]:
    """Runs tasks without a plan; yields each as it finishes."""
    for task in tasks:
        backend.submit(task)
    left = len(tasks)
    while left:
        if done := backend.wait():
            left -= 1
            yield done
