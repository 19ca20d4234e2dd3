"""Does what a plan names: hands tasks to a backend's workers, keeps what they make, notes what came of them.

    tasks.jsonl        a line for every finished task, in the order they finished: what a resume goes on from
    members/NAME/      the files of the member that a task made; counts once the task's line stands in tasks.jsonl
    metrics.jsonl      what the plan says of itself after each task; follows from tasks.jsonl and is made again from it
    timings.jsonl      the seconds of each task

A task's line is on the disk before the plan hears of it. So a process may die at any moment: a new plan is told the
finished tasks again, and the tasks that were under way are done again. One worker makes one order of lines; of several
the first to be done comes first, but what comes of a task follows from its name alone.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from palestra.files import atomic_folder, read_lines, remove
from palestra.populations.tasks import Backend, Done, Plan, Result, Task
from palestra.runs import Run
from palestra.types import TEAM, Metrics

TASKS = "tasks.jsonl"
MEMBERS = "members"
PATIENCE = 0.2  # seconds between two looks at `stop`


@runtime_checkable
class Noting(Protocol):
    """A plan that has something to say after a task."""

    def notes(self, task: Task, result: Result) -> Mapping[str, Metrics]:
        """Lines for metrics.jsonl, called after `finished`: figures by policy, player, or TEAM."""
        ...


class Watcher:
    """Told what happens; the command line's progress bar is one."""

    def done(self, number: int, done: Done, lines: Mapping[str, Metrics]) -> None:
        """Task `number` of the run (from 0) is done and noted; `lines` went to metrics.jsonl."""


def follow(
    plan: Plan,
    backend: Backend,
    run: Run,
    *,
    watcher: Watcher | None = None,
    stop: Callable[[], bool] = lambda: False,
    grace: float = 30.0,
) -> bool:
    """Does the plan's tasks, from where the run stands; True when there are none left. The caller closes the backend.

    False when `stop` said so: tasks under way then have `grace` seconds to end; a resume does the others again, from
    their beginning. Raises ValueError where a task fails, where the run's files are not what its tasks made, and where
    the plan is not the one whose tasks the run has done.
    """
    course, watcher = Course(plan, run), watcher or Watcher()
    for name in course.recall():
        backend.share(name, run.path / MEMBERS / name)
    for task in list(course.open.values()):
        backend.submit(task)
    while course.open:
        if stop():
            _finish(course, backend, watcher, grace)
            return not course.open
        if done := backend.wait(PATIENCE):
            for task in _take(course, backend, watcher, done):
                backend.submit(task)
    return True


def _take(course: Course, backend: Backend, watcher: Watcher, done: Done) -> Sequence[Task]:
    number = course.done
    new, lines = course.take(done)
    if done.task.makes:
        backend.share(done.task.makes, course.run.path / MEMBERS / done.task.makes)
    watcher.done(number, done, lines)
    return new


def _finish(course: Course, backend: Backend, watcher: Watcher, grace: float) -> None:
    """Takes what is under way and ends in time."""
    busy, end = backend.withdraw(), time.monotonic() + grace
    while busy and (left := end - time.monotonic()) > 0:
        if done := backend.wait(left):
            _take(course, backend, watcher, done)
            busy -= 1


class Course:
    """A plan, its run, and the tasks that it named and that are not done: `open`. `done` counts the others."""

    def __init__(self, plan: Plan, run: Run) -> None:
        self.plan, self.run = plan, run
        self.open: dict[str, Task] = {}
        self.done = 0
        self._names: set[str] = set()
        self._start = time.monotonic()
        self._add(plan.begin())

    def recall(self) -> list[str]:
        """Tells the plan what the run has done and brings the run's folder to that state; the members there are."""
        lines: list[dict[str, Any]] = []
        members: dict[str, Any] = {}
        for line in read_lines(self.run.path / TASKS):
            task = self._known(line)
            if task.makes:
                members[task.makes] = line["files"]
            number = self.done
            _, notes = self._tell(task, line["result"])
            lines += [{"step": number, "policy": policy, **figures} for policy, figures in notes.items()]
        self.run.rewrite("metrics.jsonl", lines)
        _only(self.run.path / MEMBERS, members)
        timings = read_lines(self.run.path / "timings.jsonl")
        self._start -= max((line.get("elapsed_s", 0.0) for line in timings), default=0.0)
        return list(members)

    def take(self, done: Done) -> tuple[Sequence[Task], Mapping[str, Metrics]]:
        """Keeps what came of a task, then tells the plan: the tasks it names, and its lines in metrics.jsonl."""
        task, result = done.task, done.result
        files = keep(done.folder, self.run.path / MEMBERS / task.makes) if done.folder else {}
        line = {"task": task.name, "kind": task.kind, "makes": task.makes, "members": task.members, "files": files}
        self.run.record(TASKS, {**line, "order": task.order, "result": result})
        times = {"task": task.name, "kind": task.kind, "seconds": done.seconds}
        self.run.time(self.done, TEAM, {**times, "elapsed_s": time.monotonic() - self._start})
        self.run.roll_call(self.done)
        number = self.done
        new, notes = self._tell(task, result)
        for policy, figures in notes.items():
            self.run.log(number, policy, figures)
        return new, notes

    def _tell(self, task: Task, result: Result) -> tuple[Sequence[Task], Mapping[str, Metrics]]:
        del self.open[task.name]
        self.done += 1
        new = self.plan.finished(task, result)
        self._add(new)
        return new, self.plan.notes(task, result) if isinstance(self.plan, Noting) else {}

    def _add(self, tasks: Sequence[Task]) -> None:
        for task in tasks:
            for name in filter(None, (f"task {task.name}", task.makes and f"member {task.makes}")):
                if name in self._names:
                    raise ValueError(f"the plan names {name} twice; names of tasks and members are unique in a run")
                self._names.add(name)
            if task.makes != Path(task.makes).name or task.makes.startswith("."):
                raise ValueError(f'task {task.name} makes "{task.makes}": a member\'s name is a plain folder name')
            self.open[task.name] = task

    def _known(self, line: Mapping[str, Any]) -> Task:
        """The open task that a line of tasks.jsonl is of."""
        task = self.open.get(line["task"])
        if task is None or (task.kind, task.makes) != (line["kind"], line["makes"]):
            raise ValueError(
                f"{self.run.path / TASKS}, line {self.done + 1}: the run did {line['kind']} task {line['task']}, which "
                "is not in the plan at this point: config or code changed since; go back to them, or start a new run"
            )
        return task


def keep(made: Path, folder: Path) -> dict[str, dict[str, Any]]:
    """Moves what a task made to `folder`, on the disk on return; size and checksum of each file."""
    facts = _facts(made)

    def fill(temporary: Path) -> None:
        for path in made.iterdir():
            shutil.move(path, temporary / path.name)

    atomic_folder(folder, fill)
    shutil.rmtree(made)
    return facts


def _facts(folder: Path) -> dict[str, dict[str, Any]]:
    return {str(path.relative_to(folder)): _fact(path) for path in sorted(folder.rglob("*")) if path.is_file()}


def _fact(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _only(folder: Path, members: Mapping[str, Mapping[str, Any]]) -> None:
    """Removes what no finished task made; raises ValueError where what one made is not there as it was."""
    for path in list(folder.glob("*")):
        if path.name not in members:
            remove(path)
    for name, files in members.items():
        found = _facts(folder / name)
        if wrong := [file for file, fact in files.items() if found.get(file) != fact]:
            what = "damaged" if wrong[0] in found else "missing"
            raise ValueError(
                f"{folder / name / wrong[0]} is {what}: tasks.jsonl has another checksum for it; bring the file back "
                "from a copy, or start a new run"
            )
