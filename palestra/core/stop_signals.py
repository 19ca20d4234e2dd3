"""The signals that end a run, and how child processes are started so that only their parent receives them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

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
