"""Parts that all backends share: the task queue with retries, registered member folders, and running a task."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

from palestra.core.failures import ErrorText, RunFailed, describe_error
from palestra.core.tracing import TraceContext, continue_trace, span, trace_context
from palestra.parallel.task_json import through_json
from palestra.parallel.tasks import Result, Task, TaskWorker

MAX_ATTEMPTS = 3  # worker deaths at one task, or in a row before a worker is ready, that end the run


class TaskQueue:
    """First-in, first-out queue of tasks. A task whose worker died is put back at the front."""

    def __init__(self) -> None:
        self.tasks: deque[Task] = deque()
        self.deaths: dict[str, list[str]] = {}  # by task name: the nodes on which workers died at it
        self.traces: dict[str, TraceContext] = {}  # by task name: the span that was current when it was submitted

    def add(self, task: Task) -> None:
        self.tasks.append(task)
        if trace := trace_context():
            self.traces[task.name] = trace

    def finish(self, task: Task) -> None:
        """Drops the records of a finished task."""
        self.deaths.pop(task.name, None)
        self.traces.pop(task.name, None)

    def pop(self) -> Task | None:
        """Removes and returns the first task; None if the queue is empty."""
        return self.tasks.popleft() if self.tasks else None

    def retry(
        self, task: Task, reason: str, *, node: str = "", is_node_lost: Callable[[str], bool] = lambda node: False
    ) -> None:
        """Puts back a task whose worker died on `node`. Raises ValueError if `MAX_ATTEMPTS` workers have died at it on
        nodes that are still alive: a large cluster loses nodes all the time, which is no fault of the task."""
        deaths = self.deaths.setdefault(task.name, [])
        deaths.append(node)
        if len(deaths) >= MAX_ATTEMPTS and sum(not is_node_lost(each) for each in deaths) >= MAX_ATTEMPTS:
            raise ValueError(
                f"{MAX_ATTEMPTS} workers died at task {task.name}, the last one: {reason}. Memory that runs out ends a "
                "process like that; fewer workers, or smaller tasks, need less of it"
            )
        self.tasks.appendleft(task)

    def clear(self) -> None:
        self.tasks.clear()


class MemberFolders(dict[str, Path]):
    """Folders of the registered members, by name."""

    def folders_for(self, task: Task) -> dict[str, Path]:
        """Returns the folders that `task` needs. Raises ValueError if a member is not registered."""
        if unknown := [name for name in task.members if name not in self]:
            raise ValueError(f"task {task.name} needs {', '.join(unknown)}: no finished task made this member")
        return {name: self[name] for name in task.members}


def task_error(task: Task, fault: ErrorText) -> RunFailed:
    """Returns the error for a task whose worker raised; the worker's traceback is attached as a note."""
    return RunFailed.from_traceback(f"task {task.name} failed: {fault.message}", fault.traceback)


def worker_start_error(fault: ErrorText) -> RunFailed:
    """Returns the error for a worker that could not be built."""
    return RunFailed.from_traceback(f"a worker cannot be made: {fault.message}", fault.traceback)


def run_timed(
    worker: TaskWorker, task: Task, members: Mapping[str, Path], out: Path | None, trace: TraceContext | None = None
) -> tuple[Result, float]:
    """Runs a task below the span `trace`; returns its result, after JSON and back, and the seconds taken."""
    start = time.perf_counter()
    with continue_trace(trace), span("work", task=task.name, kind=task.kind):
        result = through_json(worker.run_task(task, members, out), task)
    return result, time.perf_counter() - start


def run_or_fault(
    worker: TaskWorker, task: Task, members: Mapping[str, Path], out: Path | None, trace: TraceContext | None = None
) -> tuple[Result, float] | ErrorText:
    """Like `run_timed`, but returns an exception as an `ErrorText`, which can always be pickled."""
    try:
        return run_timed(worker, task, members, out, trace)
    except Exception as error:
        return describe_error(error)
