"""Backend with worker processes on this machine, without server or shared memory.

Tasks and results go through a pipe; members and task outputs are files.
"""

from __future__ import annotations

import os
import pickle
import shutil
import sys
import tempfile
import time
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.util import Finalize
from pathlib import Path

from palestra.core.failures import ErrorText, describe_error
from palestra.core.tracing import export_wait_s, stop_tracing
from palestra.parallel.processes import PipeProcess, exit_with_parent, leave_signals_to_parent, pickle_factory
from palestra.parallel.task_queue import (
    MAX_ATTEMPTS,
    MemberFolders,
    TaskQueue,
    run_or_fault,
    task_error,
    worker_start_error,
)
from palestra.parallel.tasks import Task, TaskResult, WorkerFactory
from palestra.parallel.worker_stats import process_label, worker_stats

WORKER_KIND = "local worker"
END_TIMEOUT_S = 1.0  # seconds that processes have to end once their pipes are closed


# ---- in the worker's process


def _work(pipe: Connection, make: bytes, threads: int, scratch: str) -> None:
    """Sends None when the worker is built, or the fault if that failed; then runs tasks until the pipe closes."""
    leave_signals_to_parent()  # which closes the pipe
    exit_with_parent(partial(shutil.rmtree, scratch, ignore_errors=True))  # a parent that was killed left it behind
    os.environ["OMP_NUM_THREADS"] = str(threads)  # for libraries that are not imported yet
    with suppress(EOFError, ConnectionError):  # the parent closed the pipe
        try:
            worker = pickle.loads(make)()
        except Exception as error:
            pipe.send(describe_error(error))
            return
        if torch := sys.modules.get("torch"):
            torch.set_num_threads(threads)
        pipe.send(None)
        while True:
            pipe.send(run_or_fault(worker, *pipe.recv()))
    stop_tracing()


# ---- in the parent


class _Process(PipeProcess):
    """One worker process. `ready` once its worker is built; runs `task` with output folder `out`, or is idle (None)."""

    def __init__(self, make: bytes, threads: int, scratch: str) -> None:
        super().__init__(_work, make, threads, scratch)  # not a daemon: its envs may start processes of their own
        self.ready = False
        self.task: Task | None = None
        self.out: Path | None = None
        self.where = process_label(self.process.pid)


class LocalBackend:
    """Backend with `workers` processes of `threads` threads each.

    `make_worker` must be picklable; each process calls it once. A process that dies is replaced, and its task goes to
    the next free worker. Workers end with this process, even if it is killed, and ignore Ctrl-C. Raises ValueError if
    `workers` is below 1 or `make_worker` cannot be pickled.
    """

    def __init__(self, make_worker: WorkerFactory, workers: int, threads: int = 1) -> None:
        if workers < 1:
            raise ValueError(f"workers is {workers}: at least one is needed to do the tasks")
        self.workers = workers
        self._scratch = tempfile.mkdtemp(prefix="palestra-")
        self._job = (pickle_factory(make_worker, "a worker"), threads, self._scratch)
        self._waiting = TaskQueue()
        self._members = MemberFolders()
        self._stillborn = 0  # workers in a row that died before they were ready
        self._pool: list[_Process] = []
        self._release = Finalize(self, _release, (self._pool, self._scratch), exitpriority=10)
        self._pool += [_Process(*self._job) for _ in range(workers)]

    def add_member(self, name: str, folder: Path) -> None:
        self._members[name] = folder.absolute()

    def remove_member(self, name: str) -> None:
        del self._members[name]

    def submit(self, task: Task) -> None:
        self._waiting.add(task)
        self._hand_out()

    def wait(self, timeout: float | None = None) -> TaskResult | None:
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            left = None if end is None else max(0.0, end - time.monotonic())
            ready = wait([process.pipe for process in self._pool], left)
            if not ready:
                return None
            for process in [process for process in self._pool if process.pipe in ready]:
                if done := self._hear(process):
                    self._hand_out()
                    return done
            self._hand_out()

    def cancel_pending(self) -> int:
        self._waiting.clear()
        return sum(process.task is not None for process in self._pool)

    def close(self) -> None:
        self._release()

    def _hand_out(self) -> None:
        for process in self._pool:
            if process.ready and process.task is None and (task := self._waiting.pop()):
                members = self._members.folders_for(task)
                process.task = task
                process.out = Path(tempfile.mkdtemp(dir=self._scratch)) if task.output_member else None
                with suppress(ConnectionError):  # the worker died: `_hear` will find its pipe closed
                    process.pipe.send((task, members, process.out, self._waiting.traces.get(task.name)))

    def _hear(self, process: _Process) -> TaskResult | None:
        """Reads a worker's message: a finished task, "ready" (None), or the end of its pipe, if it died."""
        try:
            answer = process.pipe.recv()
        except (EOFError, OSError):
            self._replace(process)
            return None
        if isinstance(answer, ErrorText):
            raise task_error(process.task, answer) if process.task else worker_start_error(answer)
        self._stillborn = 0
        if answer is None:
            process.ready = True
            return None
        assert process.task is not None
        worker_stats.count(WORKER_KIND, process.where, done=1, seconds=answer[1])
        done = TaskResult(process.task, answer[0], process.out, answer[1])
        self._waiting.finish(process.task)
        process.task = process.out = None
        return done

    def _replace(self, process: _Process) -> None:
        """Starts a new worker in place of a dead one and puts its task at the front of the queue."""
        process.stop(1.0)
        why = f"its process ended with {process.exit_reason()}"
        worker_stats.count(WORKER_KIND, process.where, why, lost=1)
        if process.out:
            shutil.rmtree(process.out)
        if process.task:
            self._waiting.retry(process.task, why)
        elif not process.ready:
            self._stillborn += 1
            if self._stillborn >= MAX_ATTEMPTS:
                raise ValueError(
                    f"{MAX_ATTEMPTS} workers in a row died before they were ready, the last one: {why}; its output is "
                    'above. A script must start workers below `if __name__ == "__main__":`, which their processes skip'
                )
        self._pool[self._pool.index(process)] = _Process(*self._job)


def _release(pool: list[_Process], scratch: str) -> None:
    for process in pool:
        process.pipe.close()
    end = time.monotonic() + END_TIMEOUT_S + export_wait_s()
    for process in pool:
        process.stop(end - time.monotonic())
    pool.clear()
    shutil.rmtree(scratch, ignore_errors=True)
