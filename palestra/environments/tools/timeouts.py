"""Calls users' functions with a time limit, so that none can block the caller."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

MAX_STUCK_CALLS = 256  # abandoned calls whose threads are still running
_running: set[asyncio.Task[Any]] = set()  # strong references: an event loop holds only weak ones
_stuck: set[Future[Any]] = set()


class ToolCallFailed(Exception):
    """A call failed for a reason that is not the agent's fault."""


async def call_with_timeout(function: Callable[..., Any], arguments: Mapping[str, Any], timeout_s: float) -> Any:
    """Returns the result of a user's function. Raises ValueError if the function does, ToolCallFailed for any other
    exception.

    Also raises ToolCallFailed if it has not returned after `timeout_s`; a coroutine that ignores cancellation is not
    awaited further.
    """
    task = asyncio.ensure_future(_call_function(function, arguments))
    _running.add(task)
    task.add_done_callback(_forget_task)
    try:
        await asyncio.wait({task}, timeout=timeout_s)
    finally:
        late = not task.done()
        task.cancel()
    if late:
        raise ToolCallFailed(f"did not answer within {timeout_s:g} seconds")
    if task.cancelled():
        raise ToolCallFailed("cancelled itself")
    return task.result()


def _forget_task(task: asyncio.Task[Any]) -> None:
    _running.discard(task)
    if not task.cancelled():
        task.exception()  # asyncio warns about exceptions that are never retrieved


async def _call_function(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    try:
        is_async = inspect.iscoroutinefunction(function)
        value = function(**arguments) if is_async else await _on_a_thread(function, arguments)
        return await value if inspect.isawaitable(value) else value
    except (ValueError, ToolCallFailed):
        raise
    except (Exception, SystemExit) as error:  # foreign code: any exception is the result of the call
        raise ToolCallFailed(_describe_error(error)) from error


async def _on_a_thread(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Returns the function's result, from a new thread: a pool would be exhausted once enough calls hang.

    Raises ToolCallFailed if too many abandoned calls are still running.
    """
    if len(_stuck) >= MAX_STUCK_CALLS:
        raise ToolCallFailed(
            f"was not called: {MAX_STUCK_CALLS} earlier calls still hang; give the tool a time limit of its own"
        )
    came = Future[Any]()
    came.set_running_or_notify_cancel()  # a timeout cannot cancel a thread
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
    except BaseException as error:  # foreign code too; an exception in a thread would be lost
        came.set_exception(ToolCallFailed(_describe_error(error)))


def _describe_error(error: BaseException) -> str:
    return f"failed with {type(error).__name__}: {error}"
