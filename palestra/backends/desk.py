"""Where coroutines hand in tasks and wait for what comes of them, while others go on.

A backend knows no event loop. One thread opens it, alone talks to it, and closes it; what coroutines want of it reaches
that thread through a queue, in the order it was said.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from palestra.populations.tasks import Backend, Done, Task

GLANCE = 0.02  # seconds between two looks at the queue while tasks are being done: a task waits no longer to be heard

Wish = Callable[[Backend], None]


class Desk:
    """Tasks for the backend that `open_backend` opens with the first of them. What ends the backend, such as a task
    that fails, is raised to whoever waits, and to all who ask later."""

    def __init__(self, open_backend: Callable[[], Backend]) -> None:
        self._open_backend = open_backend
        self._wishes: queue.SimpleQueue[Wish | None] = queue.SimpleQueue()
        self._open: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Future[Done]]] = {}
        self._lock = threading.Lock()  # of what is open, and of the error
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def start(self) -> None:
        """Begins to make the workers, where there are none yet."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._tend, name="desk", daemon=True)
            self._thread.start()

    async def do(self, task: Task) -> Done:
        """What came of a task, whose name no other open one has. Raises ValueError where it failed, or the backend."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Done] = loop.create_future()
        with self._lock:
            self._check()
            self._open[task.name] = (loop, future)
        self._wish(lambda backend: backend.submit(task))
        return await future

    def share(self, name: str, folder: Path) -> None:
        """Makes a member known; its folder must stay until it is forgotten."""
        self._wish(lambda backend: backend.share(name, folder))

    def forget(self, name: str) -> None:
        """Lets go of a member that no open task needs."""
        self._wish(lambda backend: backend.forget(name))

    def close(self) -> None:
        """Ends the backend, and waits for its end. A task that is handed in later opens another one."""
        if self._thread is not None:
            self._wishes.put(None)
            self._thread.join()
            self._thread = None
            self._open.clear()

    def _wish(self, wish: Wish) -> None:
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
            while self._heard(backend):
                if done := backend.wait(GLANCE):
                    with self._lock:
                        waiting = self._open.pop(done.task.name)
                    _tell(waiting, done)
        except Exception as error:  # a worker's, or the backend's: whoever waits must hear of it
            self._fail(error)
        finally:
            if backend is not None:
                backend.close()

    def _heard(self, backend: Backend) -> bool:
        """Does what is wished; waits for a wish where there is nothing else to do. False where the end was wished."""
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


def _tell(waiting: tuple[asyncio.AbstractEventLoop, asyncio.Future[Done]], what: Done | Exception) -> None:
    """Settles a future in its own loop; nobody waits any more where that has ended."""
    loop, future = waiting
    with suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(_settle, future, what)


def _settle(future: asyncio.Future[Done], what: Done | Exception) -> None:
    if future.done():  # cancelled
        return
    if isinstance(what, Exception):
        future.set_exception(what)
    else:
        future.set_result(what)
