"""An event loop on a thread of its own: what runs there goes on while the caller computes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Aside:
    """Callers may be coroutines of any loop, or none. Close it when nothing is asked of it any more."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=_run, args=(self.loop,), name=name, daemon=True)
        self._thread.start()

    def now(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine that runs there, waited for."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    async def soon(self, work: Coroutine[Any, Any, T]) -> T:
        """The same for callers that are coroutines. Where they are cancelled, so is the work."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))

    def close(self) -> None:
        """Cancels what runs there, lets it end, and ends the thread."""
        if self.loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(_end(self.loop), self.loop)
        if threading.current_thread() is not self._thread:
            self._thread.join()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


async def _end(loop: asyncio.AbstractEventLoop) -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await loop.shutdown_default_executor()
    loop.stop()
