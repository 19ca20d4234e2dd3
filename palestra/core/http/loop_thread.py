"""An asyncio event loop on a background thread; its coroutines run while the calling thread computes."""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
_open: set[LoopThread] = set()


class LoopThread:
    """An event loop on its own daemon thread.

    Callers may be coroutines of any event loop, or ordinary threads. `close` must follow the last call; loops still
    open at interpreter exit are closed then, which waits at most `exit_timeout_s` seconds (None: until all tasks have
    ended). The coroutine returned by `on_close`, if set, runs just before the loop stops.
    """

    def __init__(self, name: str, exit_timeout_s: float | None = None) -> None:
        self.loop = asyncio.new_event_loop()
        self.exit_timeout_s = exit_timeout_s
        self.on_close: Callable[[], Coroutine[Any, Any, None]] | None = None
        # reentrant, for finalizers
        self._lock = threading.RLock()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        _open.add(self)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` on the loop thread, blocks until it ends and returns its result."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    async def run_async(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` on the loop thread and awaits its result. Cancelling the caller cancels `work`."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))

    def run_detached(self, make: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Schedules `make()` on the loop thread unless the loop is closing; its result and exceptions are dropped."""
        with self._lock:
            if not self._closing:
                asyncio.run_coroutine_threadsafe(make(), self.loop)

    def close(self, timeout_s: float | None = None) -> None:
        """Cancels all tasks of the loop and joins the thread, for at most `timeout_s` seconds (None: without limit).

        May be called repeatedly. On the loop thread itself it does not join: the thread ends later.
        """
        with self._lock:
            if not self._closing:
                self._closing = True
                asyncio.run_coroutine_threadsafe(self._end(), self.loop)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        self.loop.run_forever()
        self.loop.close()
        _open.discard(self)

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.on_close:
            await self.on_close()
        await self.loop.shutdown_default_executor()
        self.loop.stop()


@atexit.register
def _close_all() -> None:
    """Closes all open loops: a thread still running during interpreter shutdown can crash the process."""
    for loop_thread in list(_open):
        loop_thread.close(loop_thread.exit_timeout_s)
