"""Functions that child processes run in tests of palestra.parallel.processes."""

import atexit
import os
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from palestra.parallel.processes import exit_with_parent


def echo(pipe: Connection, prefix: str) -> None:
    """Answers each message until the pipe closes."""
    try:
        while True:
            pipe.send(prefix + pipe.recv())
    except EOFError:
        return


def sleep_long() -> None:
    time.sleep(60)


def sleep_with(pipe: Connection) -> None:
    """Sends its id and its parent's, then sleeps, whatever becomes of the parent."""
    pipe.send(f"{os.getpid()} {os.getppid()}")
    time.sleep(60)


def wait_for_parent(pipe: Connection, path: str) -> None:
    exit_with_parent(lambda: Path(path).write_text("cleaned up"))
    pipe.send(os.getpid())
    time.sleep(60)


def describe(pipe: Connection) -> None:
    """Sends what a process takes over from the one that starts it, then writes to stderr, now and at its end."""
    atexit.register(lambda: print("and the end", file=sys.stderr))
    pipe.send((os.getppid(), dict(os.environ), float(np.random.random())))
    print("a word", file=sys.stderr)
