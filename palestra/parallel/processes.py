"""Child processes that ignore Ctrl-C and SIGTERM, end with their parent and stop within a time limit; and why a process
ended."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import subprocess
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any

from palestra.core.stop_signals import STOP_SIGNALS, stop_signals_blocked
from palestra.parallel.fork_server import (
    SAFE_PATH,
    Caller,
    can_fork,
    changed_variables,
    ensure_fork_server,
    restore_variable,
    run_forked,
)

SPAWN_CONTEXT = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
FORK_CONTEXT = multiprocessing.get_context("forkserver")
_starting = threading.Lock()  # held while the environment of this process is that of one it starts


def start_process(target: Callable[..., object], arguments: Iterable[Any], *, daemon: bool = False) -> BaseProcess:
    """Starts and returns a process that runs `target(*arguments)`: a fork of the fork server where that is safe, which
    takes a fraction of a second, or a new process.

    It begins with Ctrl-C and SIGTERM blocked. A `daemon` may not start processes of its own.
    """
    with _starting:
        resource_tracker.ensure_running()  # started first, since its start unblocks the signals
        if can_fork():
            process: BaseProcess = FORK_CONTEXT.Process(
                target=run_forked, args=(Caller(), target, *arguments), daemon=daemon
            )
            with stop_signals_blocked():
                ensure_fork_server()
                process.start()
        else:
            safe_path = os.environ.get(SAFE_PATH)
            process = SPAWN_CONTEXT.Process(target=_run, args=(safe_path, target, *arguments), daemon=daemon)
            with stop_signals_blocked(), changed_variables({SAFE_PATH: "1"}):
                process.start()
    if daemon:  # at the end of this process multiprocessing sends SIGTERM to it and waits, and it may ignore SIGTERM
        Finalize(None, _kill, (weakref.ref(process),), exitpriority=0)
    return process


def _kill(reference: weakref.ref[BaseProcess]) -> None:
    process = reference()
    if process is not None:
        with suppress(ValueError):  # it was closed
            process.kill()


def leave_signals_to_parent() -> None:
    """Ignores Ctrl-C and SIGTERM, which a terminal or a cluster sends to all processes of a run: the parent decides
    when this one ends. Programs that this process starts receive them."""
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which programs that this process starts would inherit
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _run(safe_path: str | None, target: Callable[..., object], *arguments: Any) -> None:
    restore_variable(SAFE_PATH, safe_path)
    target(*arguments)


class StoppableProcess:
    """A child process that runs `target(*arguments, stop)` and ends with this process. `stop` is an event, which the
    method `stop` sets to ask the target to return."""

    def __init__(self, target: Callable[..., object], arguments: Iterable[Any]) -> None:
        self._event = SPAWN_CONTEXT.Event()
        self._process = start_process(target, (*arguments, self._event))

    @property
    def exitcode(self) -> int | None:
        """The process's exit code, None while it runs."""
        return self._process.exitcode

    def stop(self) -> None:
        """Sets the event."""
        self._event.set()

    def kill(self) -> None:
        """Kills the process."""
        self._process.kill()


class PipeProcess:
    """A child process that runs `target(pipe, *arguments)`, and this end of the pipe.

    The pipe closes when either process ends, for whatever reason; the child must end when the pipe closes.
    """

    def __init__(self, target: Callable[..., object], *arguments: Any, daemon: bool = False) -> None:
        self.pipe: Connection
        self.pipe, theirs = SPAWN_CONTEXT.Pipe()
        self.process = start_process(target, (theirs, *arguments), daemon=daemon)
        theirs.close()  # the child has a copy; this one would keep the pipe open after its death

    def stop(self, timeout_s: float) -> None:
        """Closes the pipe; kills the process if it still runs `timeout_s` seconds later."""
        self.pipe.close()
        join_or_kill(self.process, timeout_s)

    def exit_reason(self) -> str:
        """Returns how the process ended, for messages; see `exit_reason`."""
        return exit_reason(self.process.exitcode)


def pickle_factory(make: Callable[[], object], what: str) -> bytes:
    """Returns a function pickled that makes `what` in another process. Raises ValueError if it cannot be pickled."""
    try:
        return pickle.dumps(make)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise pickling_error(error, what) from error


def pickling_error(error: Exception, what: str) -> ValueError:
    """Returns the error for a function that makes `what` and cannot be pickled."""
    fix = "use a function of a module, or functools.partial of one"
    return ValueError(f"what makes {what} cannot be sent to another process ({error}): {fix}")


def join_or_kill(process: BaseProcess, timeout_s: float) -> bool:
    """Waits `timeout_s` seconds for a process to end, then kills it. Returns True if it had to be killed."""
    process.join(max(0.0, timeout_s))
    if not process.is_alive():
        return False
    process.kill()
    process.join()
    return True


def wait_or_kill(process: subprocess.Popen[Any], timeout_s: float) -> None:
    """Waits `timeout_s` seconds for a command to end, then kills it."""
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def exit_with_parent(cleanup: Callable[[], object] = lambda: None) -> None:
    """Ends this process, which multiprocessing started, once its parent has ended in any way; calls `cleanup` first."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        cleanup()
        os._exit(1)

    threading.Thread(target=wait, name="exit with parent", daemon=True).start()


def exit_reason(code: int | None) -> str:
    """Returns how a process with this exit code ended: "exit code 3", or "exit code -9, SIGKILL" for a signal."""
    if code is None or code >= 0:
        return f"exit code {code}"
    try:
        return f"exit code {code}, {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal has no name
        return f"exit code {code}"


class ProcessLost(Exception):
    """The other process died, with its state."""
