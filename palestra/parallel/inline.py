"""Backend that runs tasks in the calling process and thread.

A debugger stops in the worker, and a seed decides everything, including the order of results.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from pathlib import Path

from palestra.core.failures import describe_error
from palestra.parallel.task_queue import MemberFolders, TaskQueue, run_timed, task_error
from palestra.parallel.tasks import Task, TaskResult, WorkerFactory


class InlineBackend:
    """Runs tasks in submission order, each inside `wait`, whose timeout is ignored."""

    workers = 1

    def __init__(self, make_worker: WorkerFactory) -> None:
        self._worker = make_worker()
        self._waiting = TaskQueue()
        self._members = MemberFolders()
        self._scratch = tempfile.mkdtemp(prefix="palestra-")
        self._release = weakref.finalize(self, shutil.rmtree, self._scratch, ignore_errors=True)

    def add_member(self, name: str, folder: Path) -> None:
        self._members[name] = folder

    def remove_member(self, name: str) -> None:
        del self._members[name]

    def submit(self, task: Task) -> None:
        self._waiting.add(task)

    def wait(self, timeout: float | None = None) -> TaskResult | None:
        if (task := self._waiting.pop()) is None:
            return None
        out = Path(tempfile.mkdtemp(dir=self._scratch)) if task.output_member else None
        members = self._members.folders_for(task)
        try:
            result, seconds = run_timed(self._worker, task, members, out, self._waiting.traces.get(task.name))
        except Exception as error:
            raise task_error(task, describe_error(error)) from error
        self._waiting.finish(task)
        return TaskResult(task, result, out, seconds)

    def cancel_pending(self) -> int:
        self._waiting.clear()
        return 0

    def close(self) -> None:
        self._release()
