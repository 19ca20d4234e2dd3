"""An event loop on a thread of its own: what runs there goes on while the caller computes."""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
_open: set[Aside] = set()


class Aside:
    """Callers may be coroutines of any loop, or none. Close it when nothing is asked of it any more; what is open when
    the process ends is closed then. The coroutine that `last` makes is what it does last."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.last: Callable[[], Coroutine[Any, Any, None]] | None = None
        self._lock, self._closing = threading.RLock(), False  # what is let go of may be so anywhere
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        _open.add(self)
        self._thread.start()

    def now(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine that runs there, waited for."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    async def soon(self, work: Coroutine[Any, Any, T]) -> T:
        """The same for callers that are coroutines. Where they are cancelled, so is the work."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))

    def later(self, make: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Runs a coroutine there when it can, unless it is being closed; nobody hears what came of it."""
        with self._lock:
            if not self._closing:
                asyncio.run_coroutine_threadsafe(make(), self.loop)

    def close(self) -> None:
        """Cancels what runs there and ends the thread. May be called twice, and on that thread too, which then ends by
        itself."""
        with self._lock:
            if not self._closing:
                self._closing = True
                asyncio.run_coroutine_threadsafe(self._end(), self.loop)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        self.loop.run_forever()
        self.loop.close()
        _open.discard(self)

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.last:
            await self.last()
        await self.loop.shutdown_default_executor()
        self.loop.stop()


@atexit.register
def _close_all() -> None:
    """A thread that is still at work while the interpreter goes takes the process down with it."""
    for aside in list(_open):
        aside.close()
