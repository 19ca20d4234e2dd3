"""Calling functions of users' so that none of them holds anybody up, whatever it does or never does."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

MOST_STUCK = 256  # calls that were given up and whose threads have not ended
_running: set[asyncio.Task[Any]] = set()  # a loop keeps no tasks alive by itself
_stuck: set[Future[Any]] = set()


class Failed(Exception):
    """A call came to nothing, and not by the agent's fault."""


async def in_time(function: Callable[..., Any], arguments: Mapping[str, Any], seconds: float) -> Any:
    """What a user's function returns. Raises ValueError where it does, Failed for all else that it may raise.

    Failed too where it has not returned after `seconds`; a coroutine that does not let itself be cancelled is not
    waited for either.
    """
    task = asyncio.ensure_future(_called(function, arguments))
    _running.add(task)
    task.add_done_callback(_gone)
    try:
        await asyncio.wait({task}, timeout=seconds)
    finally:
        late = not task.done()
        task.cancel()
    if late:
        raise Failed(f"did not answer within {seconds:g} seconds")
    if task.cancelled():
        raise Failed("cancelled itself")
    return task.result()


def _gone(task: asyncio.Task[Any]) -> None:
    _running.discard(task)
    if not task.cancelled():
        task.exception()  # asyncio complains of those that nobody looks at


async def _called(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    try:
        is_async = inspect.iscoroutinefunction(function)
        value = function(**arguments) if is_async else await _on_a_thread(function, arguments)
        return await value if inspect.isawaitable(value) else value
    except (ValueError, Failed):
        raise
    except (Exception, SystemExit) as error:  # foreign code: whatever it raises is what came of the call
        raise Failed(_told(error)) from error


async def _on_a_thread(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """What the function returns, on a thread of its own: a pool would be full once enough of them hang.

    Raises Failed where too many that were given up have not ended yet.
    """
    if len(_stuck) >= MOST_STUCK:
        raise Failed(f"was not called: {MOST_STUCK} earlier calls still hang; give the tool a time limit of its own")
    came = Future[Any]()
    came.set_running_or_notify_cancel()  # giving up does not cancel it: a thread cannot be
    threading.Thread(target=_settle, args=(came, function, arguments), name="tool", daemon=True).start()
    try:
        return await asyncio.wrap_future(came)
    except asyncio.CancelledError:
        _stuck.add(came)
        came.add_done_callback(_stuck.discard)
        raise


def _settle(came: Future[Any], function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    try:
        came.set_result(function(**arguments))
    except ValueError as error:
        came.set_exception(error)
    except BaseException as error:  # foreign too, and nobody else hears of what a thread dies of
        came.set_exception(Failed(_told(error)))


def _told(error: BaseException) -> str:
    return f"failed with {type(error).__name__}: {error}"
