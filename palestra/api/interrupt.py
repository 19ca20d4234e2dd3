"""Ctrl-C and SIGTERM end a run after the current step, a second one at once."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress

from palestra.api.console import print_line
from palestra.core.stop_signals import STOP_SIGNALS

STOPPING = "stopping after this step; again to stop now"


class StopOnInterrupt:
    """Context that yields a function which returns True after the first Ctrl-C or SIGTERM; a second one raises
    KeyboardInterrupt.

    Under torchrun repeated signals count once: torchrun forwards its signals, and kills processes that take more than
    half a minute. Only the main thread receives signals: in other threads the function always returns False.
    """

    def __enter__(self) -> Callable[[], bool]:
        self.stop_requested = False
        self.under_torchrun = "RANK" in os.environ
        is_main = threading.current_thread() is threading.main_thread()
        self.before = {each: signal.signal(each, self._request_stop) for each in STOP_SIGNALS if is_main}
        return lambda: self.stop_requested

    def _request_stop(self, *_: object) -> None:
        if self.stop_requested:
            return
        self.stop_requested = True
        if not self.under_torchrun:
            for each in self.before:
                signal.signal(each, _interrupt)
        with suppress(RuntimeError):  # the signal came while a line was being printed
            print_line(STOPPING)

    def __exit__(self, *_: object) -> None:
        for each, handler in self.before.items():
            signal.signal(each, handler)


def _interrupt(*_: object) -> None:
    """Raises KeyboardInterrupt. asyncio replaces Python's own handler by one that waits for the training pass in
    progress, but does not replace this one."""
    logging.getLogger("asyncio").addFilter(_is_no_interrupt)
    raise KeyboardInterrupt


def _is_no_interrupt(record: logging.LogRecord) -> bool:
    """Returns False for asyncio's report of a task in which KeyboardInterrupt was raised; it has a long traceback."""
    return not (record.exc_info and isinstance(record.exc_info[1], KeyboardInterrupt))
