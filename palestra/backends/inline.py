"""Backend that runs tasks in the calling process and thread.

A debugger stops in the worker, and a seed decides everything, including the order of results.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from pathlib import Path

from palestra.backends.waiting import Members, Waiting, failed, timed
from palestra.populations.tasks import Done, MakeWorker, Task
from palestra.rollouts.failures import fault_of


class Inline:
    """Runs tasks in submission order, each inside `wait`, whose timeout is ignored."""

    workers = 1

    def __init__(self, make_worker: MakeWorker) -> None:
        self._worker = make_worker()
        self._waiting, self._members = Waiting(), Members()
        self._scratch = tempfile.mkdtemp(prefix="palestra-")
        self._release = weakref.finalize(self, shutil.rmtree, self._scratch, ignore_errors=True)

    def share(self, name: str, folder: Path) -> None:
        self._members[name] = folder

    def forget(self, name: str) -> None:
        del self._members[name]

    def submit(self, task: Task) -> None:
        self._waiting.add(task)

    def wait(self, timeout: float | None = None) -> Done | None:
        if (task := self._waiting.next()) is None:
            return None
        out = Path(tempfile.mkdtemp(dir=self._scratch)) if task.makes else None
        members = self._members.of(task)
        try:
            result, seconds = timed(self._worker, task, members, out)
        except Exception as error:
            raise failed(task, fault_of(error)) from error
        return Done(task, result, out, seconds)

    def withdraw(self) -> int:
        self._waiting.clear()
        return 0

    def close(self) -> None:
        self._release()
