"""What a population's training consists of, and what a plan, a worker and a backend are to the scheduler.

A plan says which tasks there are to do; a backend has workers that do them; the scheduler hands tasks out and notes
what came of them, in the order it came. A plan is a function of that order alone: so a run that was killed is taken up
by telling a new plan the finished tasks again, and a task's randomness follows from its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

Result = dict[str, Any]  # JSON: what a worker tells of a task


@dataclass(frozen=True)
class Task:
    """A piece of work. `name` is unique in a run; `order` (JSON) says what to do; `members` are those whose weights the
    worker needs; `makes` is the member whose folder the task fills, "" for none.

        Task("train/player_0-3", "train", {"player": "player_0", "opponents": {"player_1": {"player_1-2": 1.0}}},
             members=("player_1-2",), makes="player_0-3")
    """

    name: str
    kind: str  # train, play, assess
    order: Mapping[str, Any] = field(default_factory=dict)
    members: tuple[str, ...] = ()
    makes: str = ""


class Plan(Protocol):
    """Which tasks there are. It must answer alike, told the same finished tasks in the same order."""

    def begin(self) -> Sequence[Task]:
        """The tasks that need nothing."""
        ...

    def finished(self, task: Task, result: Result) -> Sequence[Task]:
        """The tasks that can be done now that `task` is."""
        ...


class Worker(Protocol):
    """Does tasks, one at a time, in a process of its own or in this one."""

    def do(self, task: Task, members: Mapping[str, Path], out: Path | None) -> Result:
        """What came of `task`. `members` says where their files lie (read-only); `out`, where the task makes a member,
        is an empty folder for its files. What it draws follows from the task's name and the run's seed."""
        ...


MakeWorker = Callable[[], Worker]  # picklable: a backend calls it where the worker is to live


@dataclass(frozen=True)
class Done:
    """What a backend reports. `result` is as JSON gives it back; `folder` holds the files of the member that the task
    made, and is the caller's to take; `seconds` are the worker's."""

    task: Task
    result: Result
    folder: Path | None
    seconds: float


class Backend(Protocol):
    """Workers, and what it takes to reach them. A task whose worker died is done again by another."""

    @property
    def workers(self) -> int:
        """How many tasks are done at once."""
        ...

    def share(self, name: str, folder: Path) -> None:
        """Makes a member known: tasks that name it in `members` find its files."""
        ...

    def forget(self, name: str) -> None:
        """Lets go of a member that no open task needs; from then on its folder may go."""
        ...

    def submit(self, task: Task) -> None:
        """Takes a task on; it waits its turn."""
        ...

    def wait(self, timeout: float | None = None) -> Done | None:
        """The next task to be done, or None where `timeout` seconds pass first. Raises ValueError, naming the task,
        where its worker raised, or died at it again and again."""
        ...

    def withdraw(self) -> int:
        """Forgets the tasks whose turn has not come; how many are being done."""
        ...

    def close(self) -> None:
        """Ends the workers; what they were doing is lost."""
        ...


def done_by(backend: Backend, tasks: Sequence[Task]) -> Iterator[Done]:
    """Hands out tasks that no plan waits for, and tells of each as it is done."""
    for task in tasks:
        backend.submit(task)
    left = len(tasks)
    while left:
        if done := backend.wait():
            left -= 1
            yield done
