"""Runs a plan: submits its tasks to a backend, stores what they produce, and logs their results.

    tasks.jsonl        one line for each finished task, in the order in which the plan got them; read by a resume
    members/NAME/      files of the member that a task produced; valid once the task's line is in tasks.jsonl
    metrics.jsonl      the plan's metrics after each task; rebuilt from tasks.jsonl on resume
    timings.jsonl      seconds of each task

A task's line is on disk before the plan gets the result, so the process may die at any time: on resume a new plan gets
the finished tasks again, and unfinished tasks are repeated.

A task's result is determined by its name, and the plan gets results in the order in which it created the tasks: a
result that arrives early waits for earlier tasks. A run is therefore identical, byte for byte, for any number of
workers. With `as_completed` the plan gets each result immediately: slow tasks do not delay others, but the order of
completion, which no seed determines, decides which policies are trained against each other.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from palestra.core.files import (
    TEMPORARY_PREFIX,
    DamagedFile,
    atomic_folder,
    atomic_write,
    checksums,
    find_damage,
    path_inside,
    read_checksummed,
    read_lines,
    remove_path,
)
from palestra.core.tracing import end_shared_span, is_tracing, shared_span
from palestra.core.types import TEAM, Metrics
from palestra.parallel.tasks import Backend, Result, Task, TaskResult
from palestra.populations.task_json import TaskRecord, task_record
from palestra.populations.tasks import Plan, TrainTask
from palestra.runs import Run
from palestra.runs.checkpoints import RECOVERY_HINT, TASKS_FILE, are_checksums

MEMBERS_DIR = "members"
MAX_NAMED = 8  # largest number of members that the span of a task names
STOP_POLL_INTERVAL_S = 0.2  # seconds between two checks of `stop`


class PlanCallback:
    """Callback for progress; the command line's progress bar is one."""

    def on_task_done(self, number: int, done: TaskResult, lines: Mapping[str, Metrics]) -> None:
        """Called after task `number` of the run (from 0) is logged; `lines` are its metrics."""


def run_plan(
    plan: Plan,
    backend: Backend,
    run: Run,
    *,
    callback: PlanCallback | None = None,
    stop: Callable[[], bool] = lambda: False,
    grace_s: float = 30.0,
    as_completed: bool = False,
) -> bool:
    """Runs the plan's remaining tasks; returns True when none are left. The caller closes the backend.

    The plan gets results in the order of its tasks, or, with `as_completed`, in the order of completion.

    Returns False if `stop` returned True: running tasks then have `grace_s` seconds to finish; a resume repeats the
    others. Raises ValueError if a task fails, if the run's files differ from what its tasks produced, or if the plan
    does not match the tasks that the run has done.
    """
    plan_run = PlanRun(plan, run, as_completed)
    callback = callback or PlanCallback()
    for name in plan_run.replay():
        backend.add_member(name, run.path / MEMBERS_DIR / name)
    for task in list(plan_run.open_tasks.values()):
        _submit(backend, task)
    while plan_run.open_tasks:
        if stop():
            _finish(plan_run, backend, callback, grace_s)
            return not plan_run.open_tasks
        if done := backend.wait(STOP_POLL_INTERVAL_S):
            for ready in plan_run.in_order(done):
                for task in _take(plan_run, backend, callback, ready):
                    _submit(backend, task)
    return True


def _submit(backend: Backend, task: Task) -> None:
    """Submits a task. Its span lasts until its result is recorded, and names the members that play."""
    names: Sequence[str] = ()
    if is_tracing():
        names = task.opponents.names() if isinstance(task, TrainTask) else task.members
    members = ", ".join([*names[:MAX_NAMED], *(["..."] if len(names) > MAX_NAMED else [])])
    with shared_span(f"task {task.name}", "task", task=task.name, kind=task.kind, members=members):
        backend.submit(task)


def _take(plan_run: PlanRun, backend: Backend, callback: PlanCallback, done: TaskResult) -> Sequence[Task]:
    number = plan_run.num_done
    new, lines = plan_run.record(done)
    end_shared_span(f"task {done.task.name}")
    if done.task.output_member:
        backend.add_member(done.task.output_member, plan_run.run.path / MEMBERS_DIR / done.task.output_member)
    callback.on_task_done(number, done, lines)
    return new


def _finish(plan_run: PlanRun, backend: Backend, callback: PlanCallback, grace: float) -> None:
    """Records the running tasks that finish within `grace` seconds."""
    busy = backend.cancel_pending()
    end = time.monotonic() + grace
    while busy and (left := end - time.monotonic()) > 0:
        if done := backend.wait(left):
            for ready in plan_run.in_order(done):
                _take(plan_run, backend, callback, ready)
            busy -= 1


class PlanRun:
    """A plan, its run, and the pending tasks in order (`open_tasks`). `num_done` counts finished tasks."""

    def __init__(self, plan: Plan, run: Run, as_completed: bool) -> None:
        self.plan = plan
        self.run = run
        self.as_completed = as_completed
        self.open_tasks: dict[str, Task] = {}
        self.num_done = 0
        self._early: dict[str, TaskResult] = {}  # finished before a task that was created earlier
        self._names: set[str] = set()
        self._start = time.monotonic()
        self._add(plan.initial_tasks())

    def replay(self) -> list[str]:
        """Passes the run's finished tasks to the plan again and restores the run's folder to that state; returns the
        members' names.

        Raises ValueError (DamagedFile) if files are missing or changed.
        """
        lines: list[dict[str, Any]] = []
        records: list[TaskRecord] = []
        timings = read_lines(self.run.path / "timings.jsonl")
        for line in _read_task_lines(self.run.path, timings):
            record = self._record_of(line)
            if record.task.output_member:
                records.append(record)
            _, metrics = self._replay_result(record)
            lines += [{"step": record.number, "policy": policy, **values} for policy, values in metrics.items()]
        members = member_folders(self.run.path, records, [record.task.output_member for record in records])
        _remove_others(self.run.path / MEMBERS_DIR, members)
        self.run.rewrite_log("metrics.jsonl", lines)
        elapsed = [line.get("elapsed_s", 0.0) for line in timings]
        self._start -= max((seconds for seconds in elapsed if isinstance(seconds, float)), default=0.0)
        return list(members)

    def in_order(self, done: TaskResult) -> Iterator[TaskResult]:
        """Yields the results next in order, now that `done` is there; `record` each before the next."""
        if self.as_completed:
            yield done
            return
        self._early[done.task.name] = done
        while self.open_tasks and (first := next(iter(self.open_tasks))) in self._early:
            yield self._early.pop(first)

    def record(self, done: TaskResult) -> tuple[Sequence[Task], Mapping[str, Metrics]]:
        """Stores a task's output and line, and passes the result on; returns new tasks, metrics."""
        task = done.task
        files = store_output(done.folder, self.run.path / MEMBERS_DIR / task.output_member) if done.folder else {}
        record = TaskRecord(self.num_done, task, files, done.result)
        self.run.append_checksummed(TASKS_FILE, record.to_json())
        times = {"task": task.name, "kind": task.kind, "seconds": done.seconds}
        self.run.log_timings(self.num_done, TEAM, {**times, "elapsed_s": time.monotonic() - self._start})
        self.run.log_workers(self.num_done)
        new, metrics = self._pass_result(task, done.result)
        for policy, values in metrics.items():
            self.run.log_metrics(record.number, policy, values)
        return new, metrics

    def _replay_result(self, record: TaskRecord) -> tuple[Sequence[Task], Mapping[str, Metrics]]:
        """Calls `_pass_result` for a result read from disk. Raises DamagedFile if the plan cannot process it."""
        place = self._place()
        try:
            return self._pass_result(self.open_tasks[record.task.name], record.result)
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise DamagedFile(
                f"{place}: the plan cannot take the result of {record.task.name} "
                f"({type(error).__name__}: {error}); {RECOVERY_HINT}"
            ) from error

    def _pass_result(self, task: Task, result: Result) -> tuple[Sequence[Task], Mapping[str, Metrics]]:
        """Passes a result to the plan; returns the new tasks and the metrics."""
        del self.open_tasks[task.name]
        self.num_done += 1
        new = self.plan.on_result(task, result)
        self._add(new)
        return new, self.plan.task_metrics(task, result)

    def _add(self, tasks: Sequence[Task]) -> None:
        for task in tasks:
            for name in filter(None, (f"task {task.name}", task.output_member and f"member {task.output_member}")):
                if name in self._names:
                    raise ValueError(f"the plan names {name} twice; names of tasks and members are unique in a run")
                self._names.add(name)
            if task.output_member != Path(task.output_member).name or task.output_member.startswith("."):
                raise ValueError(
                    f'task {task.name} makes "{task.output_member}": a member\'s name is a plain folder name'
                )
            self.open_tasks[task.name] = task

    def _record_of(self, line: Mapping[str, Any]) -> TaskRecord:
        """Returns the record in the next line of tasks.jsonl. Raises ValueError if it is of no pending task."""
        fields = line.get("task")
        name, makes = (fields.get("name"), fields.get("output_member")) if isinstance(fields, Mapping) else (None, None)
        if line.get("number") != self.num_done or not isinstance(name, str):
            raise DamagedFile(
                f"{self._place()} is not the line of task number {self.num_done}: lines were removed, repeated or "
                f"moved; {RECOVERY_HINT}"
            )
        task = self.open_tasks.get(name)
        if task is None or (task.kind, task.output_member) != (line.get("kind"), makes):
            raise ValueError(
                f"{self._place()}: the run did {line.get('kind')} task {name}, which is not in the plan at this "
                "point: config or code changed since; go back to them, or start a new run"
            )
        record = task_record(line, self._place(), type(task))
        if not are_checksums(record.files):
            raise DamagedFile(f"{self._place()}: files: these are not checksums; {RECOVERY_HINT}")
        return record

    def _place(self) -> str:
        """Returns the place of the next line of tasks.jsonl, for error messages."""
        return f"{self.run.path / TASKS_FILE}, line {self.num_done + 1}"


def _read_task_lines(run: Path, timings: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the lines of tasks.jsonl; creates the file for a new run.

    Raises ValueError if lines are missing: those tasks would be repeated, and their members deleted.
    """
    path = run / TASKS_FILE
    members = [folder for folder in (run / MEMBERS_DIR).glob("*") if not folder.name.startswith(TEMPORARY_PREFIX)]
    if not path.exists() and not members and not timings:
        atomic_write(path, b"")
    if not path.exists():
        raise DamagedFile(f"{path} is missing, and the run has done tasks: {RECOVERY_HINT}")
    lines = read_checksummed(path)
    if len(timings) > len(lines) or (members and not lines and len(members) > 1):
        done = max(len(timings), len(members))
        raise DamagedFile(
            f"{path} has lost lines: it has {len(lines)}, and the run has done {done} tasks; {RECOVERY_HINT}"
        )
    return lines


def store_output(output: Path, folder: Path) -> dict[str, dict[str, Any]]:
    """Moves a task's output folder `output` to `folder`, durably; returns size and checksum by file."""
    facts = checksums(output)

    def fill(temporary: Path) -> None:
        for path in output.iterdir():
            shutil.move(path, temporary / path.name)

    atomic_folder(folder, fill)
    shutil.rmtree(output)
    return facts


def member_folders(run: Path, records: Iterable[TaskRecord], names: Iterable[str]) -> dict[str, Path]:
    """Returns the folders of these members' weights, by name. Raises DamagedFile if files are missing or changed since
    the task that made them, one of `records`, was done."""
    files = {record.task.output_member: record.files for record in records}
    folders: dict[str, Path] = {}
    for name in dict.fromkeys(names):
        folders[name] = path_inside(run / MEMBERS_DIR, name)
        if name not in files:
            raise DamagedFile(f"{run / TASKS_FILE} has no task that made the member {name}; {RECOVERY_HINT}")
        if fault := find_damage(folders[name], files[name]):
            raise DamagedFile(f"{fault}; {RECOVERY_HINT}")
    return folders


def _remove_others(folder: Path, names: Collection[str]) -> None:
    """Deletes members that no finished task produced."""
    for path in list(folder.glob("*")):
        if path.name not in names:
            remove_path(path)
