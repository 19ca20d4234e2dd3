"""What the backends have in common: tasks that wait their turn, members that are known, and how a task is done."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from palestra.files import to_line
from palestra.populations.tasks import Result, Task, Worker
from palestra.rollouts.failures import Fault, RunFailed, fault_of

TRIES = 3  # how often workers may die at one task, or before they are ready, in a row


class Waiting:
    """Tasks that wait, first come first served; one whose worker died waits in front."""

    def __init__(self) -> None:
        self.tasks: deque[Task] = deque()
        self.deaths: dict[str, int] = {}  # of workers, by task

    def add(self, task: Task) -> None:
        self.tasks.append(task)

    def next(self) -> Task | None:
        """Takes out the first."""
        return self.tasks.popleft() if self.tasks else None

    def again(self, task: Task, why: str) -> None:
        """Puts back a task at which a worker died; raises ValueError where that was once too often."""
        self.deaths[task.name] = self.deaths.get(task.name, 0) + 1
        if self.deaths[task.name] >= TRIES:
            raise ValueError(
                f"{TRIES} workers died at task {task.name}, the last so: {why}. Memory that runs out ends a process "
                "like that; fewer workers, or smaller tasks, need less of it"
            )
        self.tasks.appendleft(task)

    def clear(self) -> None:
        self.tasks.clear()


class Members(dict[str, Path]):
    """Folders of the members that are known, by name."""

    def of(self, task: Task) -> dict[str, Path]:
        """The folders that a task needs. Raises ValueError where a member is not known."""
        if unknown := [name for name in task.members if name not in self]:
            raise ValueError(f"task {task.name} needs {', '.join(unknown)}: no finished task made such a member")
        return {name: self[name] for name in task.members}


def failed(task: Task, fault: Fault) -> RunFailed:
    """The error to raise where a worker raised one; the worker's traceback is its note."""
    return RunFailed.caused(f"task {task.name} failed: {fault.message}", fault.trace)


def unmade(fault: Fault) -> RunFailed:
    """The error to raise where a worker cannot be made."""
    return RunFailed.caused(f"a worker cannot be made: {fault.message}", fault.trace)


def unsendable(error: Exception) -> ValueError:
    """The error to raise where what makes a worker cannot be pickled."""
    fix = "use a function of a module, or functools.partial of one"
    return ValueError(f"what makes a worker cannot be sent to another process ({error}): {fix}")


def timed(worker: Worker, task: Task, members: Mapping[str, Path], out: Path | None) -> tuple[Result, float]:
    """A task's result, as JSON gives it back, and the seconds it took."""
    start = time.perf_counter()
    result: Result = json.loads(to_line(worker.do(task, members, out)))
    return result, time.perf_counter() - start


def attempt(worker: Worker, task: Task, members: Mapping[str, Path], out: Path | None) -> tuple[Result, float] | Fault:
    """The same, or what the worker raised, as text: this can be sent to another process in any case."""
    try:
        return timed(worker, task, members, out)
    except Exception as error:
        return fault_of(error)
