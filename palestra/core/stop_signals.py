"""The signals that end a run, and how child processes are started so that only their parent receives them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stop_signals_blocked() -> Iterator[None]:
    """Context in which processes are started that Ctrl-C and SIGTERM do not end, not even before their first line of
    code: a child inherits the mask of the thread that starts it.

    A terminal, systemd and Slurm send these signals to every process of a run; the parent decides when a child ends.
    What a child starts inherits the mask in turn, unless the child unblocks them.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def interrupt_on_sigterm() -> Any:
    """Makes SIGTERM, which clusters and containers send, raise KeyboardInterrupt as Ctrl-C does. Returns the handler
    that it replaced, None if it replaced none: only the main thread can, and under torchrun, whose ranks may wait for
    each other, SIGTERM must end a process at once."""
    if "RANK" in os.environ or threading.current_thread() is not threading.main_thread():
        return None
    return signal.signal(signal.SIGTERM, signal.default_int_handler)
