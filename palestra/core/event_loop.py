"""Calls from within a running event loop, such as a notebook's."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

from palestra.core.stop_signals import interrupt_on_sigterm

T = TypeVar("T")
WAIT_S = 0.2  # seconds between looks for a Ctrl-C
QUIET_TURNS = 6  # turns of the loop without news, after which each coroutine that was ready has run


def call_outside_loop(work: Callable[[], T], on_interrupt: Callable[[], None] | None = None) -> T:
    """Returns `work()`. Inside a running event loop it is called in a thread of its own, where it can run another loop.

    There, the first KeyboardInterrupt or SIGTERM calls `on_interrupt` and the call still waits for the result; the
    second raises KeyboardInterrupt.
    """
    if not _is_in_loop():
        return work()
    pool = ThreadPoolExecutor(1, "palestra")
    future = pool.submit(work)
    pool.shutdown(wait=False)
    before = interrupt_on_sigterm()
    try:
        return _result_of(future)
    except KeyboardInterrupt:
        if on_interrupt is None:
            raise
        on_interrupt()
        return _result_of(future)
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def _is_in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _result_of(future: Future[T]) -> T:
    """Returns the result. Waits in short turns: a Ctrl-C that comes just before a wait is handled after it."""
    while not future.done():
        wait([future], timeout=WAIT_S)
    return future.result()


def settle(future: asyncio.Future[T], outcome: T | Exception) -> None:
    """Sets the result of a future, or the exception that it raises; does nothing if it was cancelled or is settled."""
    if future.done():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


async def until_quiet(count: Callable[[], int]) -> None:
    """Returns when the coroutines that are ready have run: when `count()` has stayed the same for some turns of the
    loop."""
    quiet = 0
    seen = count()
    while quiet < QUIET_TURNS:
        await asyncio.sleep(0)
        quiet += 1
        if count() != seen:
            quiet = 0
            seen = count()
