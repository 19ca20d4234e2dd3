"""The event loop thread of the remote env client, one per process.

gRPC's asyncio calls are bound to the event loop that created them, but envs are called from several loops in turn (of a
run, of an evaluation, of a check). All gRPC traffic therefore runs on this loop, which lives as long as the process.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")
STOP_TIMEOUT_S = 5.0  # seconds that interpreter exit waits for open streams


@cache
def event_loop() -> asyncio.AbstractEventLoop:
    """Returns the event loop; the first call starts its daemon thread."""
    new = asyncio.new_event_loop()
    thread = threading.Thread(target=new.run_forever, name="remote envs", daemon=True)
    thread.start()
    atexit.register(_end, new, thread)
    return new


def submit(work: Coroutine[Any, Any, T]) -> Future[T]:
    """Schedules `work` on the client's event loop and returns its future."""
    return asyncio.run_coroutine_threadsafe(work, event_loop())


def _end(old: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    with suppress(TimeoutError):
        asyncio.run_coroutine_threadsafe(_cancelled(), old).result(STOP_TIMEOUT_S)
    old.call_soon_threadsafe(old.stop)
    thread.join(STOP_TIMEOUT_S)


async def _cancelled() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
