"""Async interface to a backend: coroutines submit tasks and await their results.

Backends have no event loop. One thread opens the backend, makes all calls to it and closes it. Coroutines reach that
thread through a first-in, first-out queue.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from palestra.core.event_loop import settle
from palestra.core.tracing import TraceContext, continue_trace, trace_context
from palestra.parallel.tasks import Backend, Task, TaskResult

POLL_INTERVAL_S = 0.02  # seconds between two checks of the queue while tasks run: the longest delay of a submitted task

BackendCall = Callable[[Backend], None]


class AsyncBackend:
    """Async front of one backend, which `open_backend` opens with the first call.

    An error that ends the backend, such as a failed task, is raised to all waiting coroutines and by all later calls.
    """

    def __init__(self, open_backend: Callable[[], Backend]) -> None:
        self._open_backend = open_backend
        self._wishes: queue.SimpleQueue[BackendCall | None] = queue.SimpleQueue()
        self._open: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Future[TaskResult]]] = {}
        self._lock = threading.Lock()  # guards _open and _error
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def start(self) -> None:
        """Starts the thread and the backend, if they do not run yet."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._tend, name="async backend", daemon=True)
            self._thread.start()

    async def run_task(self, task: Task) -> TaskResult:
        """Runs `task` and returns its result. Its name must be unique among pending tasks.

        Raises ValueError if the task or the backend failed.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[TaskResult] = loop.create_future()
        with self._lock:
            self._check()
            self._open[task.name] = (loop, future)
        trace = trace_context()
        self._wish(lambda backend: _submit(backend, task, trace))
        return await future

    def add_member(self, name: str, folder: Path) -> None:
        """Registers a member's folder, which must exist until `remove_member` is called."""
        self._wish(lambda backend: backend.add_member(name, folder))

    def remove_member(self, name: str) -> None:
        """Removes a member. No pending task may need it."""
        self._wish(lambda backend: backend.remove_member(name))

    def close(self) -> None:
        """Closes the backend and waits until it has ended. A later task opens a new one."""
        if self._thread is not None:
            self._wishes.put(None)
            self._thread.join()
            self._thread = None
            self._open.clear()

    def _wish(self, wish: BackendCall) -> None:
        self._check()
        self.start()
        self._wishes.put(wish)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    # ---- in the thread

    def _tend(self) -> None:
        backend: Backend | None = None
        try:
            backend = self._open_backend()
            while self._execute_calls(backend):
                if done := backend.wait(POLL_INTERVAL_S):
                    with self._lock:
                        waiting = self._open.pop(done.task.name)
                    _tell(waiting, done)
        except Exception as error:  # an error of a worker or of the backend: raised to all waiting coroutines
            self._fail(error)
        finally:
            if backend is not None:
                backend.close()

    def _execute_calls(self, backend: Backend) -> bool:
        """Executes queued calls; blocks for one if no task is pending. Returns False on the request to close."""
        while not (self._open and self._wishes.empty()):
            wish = self._wishes.get()
            if wish is None:
                return False
            wish(backend)
        return True

    def _fail(self, error: Exception) -> None:
        with self._lock:
            self._error = error
            waiting = list(self._open.values())
            self._open.clear()
        for each in waiting:
            _tell(each, error)


def _submit(backend: Backend, task: Task, trace: TraceContext | None) -> None:
    with continue_trace(trace):
        backend.submit(task)


def _tell(waiting: tuple[asyncio.AbstractEventLoop, asyncio.Future[TaskResult]], what: TaskResult | Exception) -> None:
    """Settles a future in its own event loop; does nothing if that loop is closed."""
    loop, future = waiting
    with suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(settle, future, what)
