"""One worker in this process and thread: a debugger stops in it, and a seed decides everything, the order too."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from pathlib import Path

from palestra.backends.waiting import Members, Waiting, failed, timed
from palestra.populations.tasks import Done, MakeWorker, Task
from palestra.rollouts.failures import fault_of


class Inline:
    """Does the tasks in the order they came, each within `wait`, whose timeout then means nothing."""

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
