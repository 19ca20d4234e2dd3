"""Functions that child processes run in tests of palestra.parallel.processes."""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection
from pathlib import Path

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


def wait_for_parent(pipe: Connection, path: str) -> None:
    exit_with_parent(lambda: Path(path).write_text("cleaned up"))
    pipe.send(os.getpid())
    time.sleep(60)
