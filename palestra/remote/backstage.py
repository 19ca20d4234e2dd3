"""The thread on which a client talks to its servers.

gRPC's asyncio calls belong to the event loop that made them, while envs are asked from one loop after another: of a
run, of an exam, of a check. So the talking has a loop of its own, which lasts as long as the process and goes on while
others are at work.
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
END = 5.0  # seconds that the end of the process waits for streams to end


@cache
def loop() -> asyncio.AbstractEventLoop:
    """The event loop of that thread."""
    new = asyncio.new_event_loop()
    thread = threading.Thread(target=new.run_forever, name="remote envs", daemon=True)
    thread.start()
    atexit.register(_end, new, thread)
    return new


def begin(work: Coroutine[Any, Any, T]) -> Future[T]:
    """Does `work` there."""
    return asyncio.run_coroutine_threadsafe(work, loop())


def _end(old: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    with suppress(TimeoutError):
        asyncio.run_coroutine_threadsafe(_cancelled(), old).result(END)
    old.call_soon_threadsafe(old.stop)
    thread.join(END)


async def _cancelled() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
