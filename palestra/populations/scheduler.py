"""Runs a plan: submits its tasks to a backend, stores what they produce, and logs their results.

    tasks.jsonl        one line for each finished task, in the order in which the plan got them; a resume starts from it
    members/NAME/      files of the member that a task produced; valid once the task's line is in tasks.jsonl
    metrics.jsonl      the plan's metrics after each task; rebuilt from tasks.jsonl on resume
    timings.jsonl      seconds of each task

A task's line is on disk before the plan gets the result. A process may therefore die at any moment: on resume a new
plan gets the finished tasks again, and unfinished tasks are repeated.

A task's result is determined by its name, and the plan gets results in the order in which it created the tasks: a
result that arrives early waits for earlier tasks. A run is therefore identical, byte for byte, for any number of
workers. With `as_completed` the plan gets each result at once: slow tasks delay no other, but the order of completion,
which no seed determines, decides which policies are trained against each other.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from palestra.files import (
    TEMPORARY,
    Damaged,
    atomic_folder,
    atomic_write,
    checksums,
    damaged,
    path_inside,
    read_lines,
    read_sealed,
    remove,
    sealed,
)
from palestra.populations.tasks import Backend, Done, Plan, Result, Task
from palestra.runs import Run
from palestra.runs.checkpoints import AGAIN, are_checksums
from palestra.types import TEAM, Metrics

TASKS = "tasks.jsonl"
MEMBERS = "members"
PATIENCE = 0.2  # seconds between two checks of `stop`


@runtime_checkable
class Noting(Protocol):
    """A plan that reports metrics after a task."""

    def notes(self, task: Task, result: Result) -> Mapping[str, Metrics]:
        """Returns metrics by policy, player, or TEAM, for metrics.jsonl; called after `finished`."""
        ...


class Watcher:
    """Callback for progress; the command line's progress bar is one."""

    def done(self, number: int, done: Done, lines: Mapping[str, Metrics]) -> None:
        """Called after task `number` of the run (from 0) is logged; `lines` are its metrics."""


def follow(
    plan: Plan,
    backend: Backend,
    run: Run,
    *,
    watcher: Watcher | None = None,
    stop: Callable[[], bool] = lambda: False,
    grace: float = 30.0,
    as_completed: bool = False,
) -> bool:
    """Runs the plan's remaining tasks; returns True when none are left. The caller closes the backend.

    The plan gets results in the order of its tasks, or, with `as_completed`, in the order of completion.

    Returns False if `stop` returned True: running tasks then have `grace` seconds to finish; a resume repeats the
    others. Raises ValueError if a task fails, if the run's files differ from what its tasks produced, or if the plan
    does not match the tasks that the run has done.
    """
    course, watcher = Course(plan, run, as_completed), watcher or Watcher()
    for name in course.recall():
        backend.share(name, run.path / MEMBERS / name)
    for task in list(course.open.values()):
        backend.submit(task)
    while course.open:
        if stop():
            _finish(course, backend, watcher, grace)
            return not course.open
        if done := backend.wait(PATIENCE):
            for ready in course.ready(done):
                for task in _take(course, backend, watcher, ready):
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
    """Records the running tasks that finish within `grace` seconds."""
    busy, end = backend.withdraw(), time.monotonic() + grace
    while busy and (left := end - time.monotonic()) > 0:
        if done := backend.wait(left):
            for ready in course.ready(done):
                _take(course, backend, watcher, ready)
            busy -= 1


class Course:
    """A plan, its run, and the pending tasks in order (`open`). `done` counts finished tasks."""

    def __init__(self, plan: Plan, run: Run, as_completed: bool) -> None:
        self.plan, self.run, self.as_completed = plan, run, as_completed
        self.open: dict[str, Task] = {}
        self.done = 0
        self._early: dict[str, Done] = {}  # finished before a task that was created earlier
        self._names: set[str] = set()
        self._start = time.monotonic()
        self._add(plan.begin())

    def recall(self) -> list[str]:
        """Replays the run's finished tasks to the plan and restores the run folder to that state; returns the members'
        names.

        Raises ValueError (Damaged) if files are missing or changed.
        """
        lines: list[dict[str, Any]] = []
        members: dict[str, Any] = {}
        timings = read_lines(self.run.path / "timings.jsonl")
        for line in _finished(self.run.path, timings):
            task = self._known(line)
            if task.makes:
                members[task.makes] = line["files"]
            number = self.done
            _, notes = self._retell(task, line["result"])
            lines += [{"step": number, "policy": policy, **figures} for policy, figures in notes.items()]
        _only(self.run.path / MEMBERS, members)
        self.run.rewrite("metrics.jsonl", lines)
        elapsed = [line.get("elapsed_s", 0.0) for line in timings]
        self._start -= max((seconds for seconds in elapsed if isinstance(seconds, float)), default=0.0)
        return list(members)

    def ready(self, done: Done) -> Iterator[Done]:
        """Yields the results that are next in order, now that `done` has arrived. The caller must `take` each before
        the next."""
        if self.as_completed:
            yield done
            return
        self._early[done.task.name] = done
        while self.open and (first := next(iter(self.open))) in self._early:
            yield self._early.pop(first)

    def take(self, done: Done) -> tuple[Sequence[Task], Mapping[str, Metrics]]:
        """Stores a task's output and its line, then passes the result to the plan; returns the new tasks and the
        metrics."""
        task, result = done.task, done.result
        files = keep(done.folder, self.run.path / MEMBERS / task.makes) if done.folder else {}
        line = {"number": self.done, "task": task.name, "kind": task.kind, "makes": task.makes}
        line |= {"members": task.members, "files": files, "order": task.order, "result": result}
        self.run.record(TASKS, sealed(line))
        times = {"task": task.name, "kind": task.kind, "seconds": done.seconds}
        self.run.time(self.done, TEAM, {**times, "elapsed_s": time.monotonic() - self._start})
        self.run.roll_call(self.done)
        number = self.done
        new, notes = self._tell(task, result)
        for policy, figures in notes.items():
            self.run.log(number, policy, figures)
        return new, notes

    def _retell(self, task: Task, result: Result) -> tuple[Sequence[Task], Mapping[str, Metrics]]:
        """`_tell` for a result read from disk. Raises Damaged if the plan cannot process it."""
        try:
            return self._tell(task, result)
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise Damaged(
                f"{self.run.path / TASKS}, line {self.done}: the plan cannot take the result of {task.name} "
                f"({type(error).__name__}: {error}); {AGAIN}"
            ) from error

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
        """Returns the pending task that a line of tasks.jsonl belongs to."""
        said = [line.get(key) for key in ("task", "kind", "makes")]
        if line.get("number") != self.done or not all(isinstance(one, str) for one in said):
            raise Damaged(
                f"{self.run.path / TASKS}, line {self.done + 1} is not the line of task number {self.done}: lines were "
                f"removed, repeated or moved; {AGAIN}"
            )
        if not are_checksums(line.get("files")) or "result" not in line:
            raise Damaged(f"{self.run.path / TASKS}, line {self.done + 1} is not the line of a task; {AGAIN}")
        task = self.open.get(line["task"])
        if task is None or (task.kind, task.makes) != (line["kind"], line["makes"]):
            raise ValueError(
                f"{self.run.path / TASKS}, line {self.done + 1}: the run did {line['kind']} task {line['task']}, which "
                "is not in the plan at this point: config or code changed since; go back to them, or start a new run"
            )
        return task


def _finished(run: Path, timings: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the lines of tasks.jsonl; creates the file for a new run.

    Raises ValueError if lines are missing: those tasks would be repeated, and their members deleted.
    """
    path = run / TASKS
    made = [folder for folder in (run / MEMBERS).glob("*") if not folder.name.startswith(TEMPORARY)]
    if not path.exists() and not made and not timings:
        atomic_write(path, b"")
    if not path.exists():
        raise Damaged(f"{path} is missing, and the run has done tasks: {AGAIN}")
    lines = read_sealed(path)
    if len(timings) > len(lines) or (made and not lines and len(made) > 1):
        done = max(len(timings), len(made))
        raise Damaged(f"{path} has lost lines: it has {len(lines)}, and the run has done {done} tasks; {AGAIN}")
    return lines


def keep(made: Path, folder: Path) -> dict[str, dict[str, Any]]:
    """Moves a task's output folder `made` to `folder`, durably; returns size and checksum by file."""
    facts = checksums(made)

    def fill(temporary: Path) -> None:
        for path in made.iterdir():
            shutil.move(path, temporary / path.name)

    atomic_folder(folder, fill)
    shutil.rmtree(made)
    return facts


def _only(folder: Path, members: Mapping[str, Mapping[str, Any]]) -> None:
    """Deletes members that no finished task produced. Raises ValueError if a member's files are missing or changed."""
    for name, files in members.items():
        if fault := damaged(path_inside(folder, name), files):
            raise Damaged(f"{fault}; {AGAIN}")
    for path in list(folder.glob("*")):
        if path.name not in members:
            remove(path)
