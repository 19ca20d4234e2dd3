"""Processes that train together: the death of one of them."""

from __future__ import annotations

import os
import time

import pytest

from palestra.core.failures import RunFailed
from palestra.parallel.shared_memory import start_processes, stop_processes


class Deadly:
    """Ends the process that unpickles it."""

    def __reduce__(self) -> tuple[object, ...]:
        return os._exit, (3,)

    def __call__(self, *_: object) -> None:
        raise AssertionError


def test_a_process_that_dies_at_its_start_is_not_waited_for() -> None:
    began = time.monotonic()
    try:
        with pytest.raises(RunFailed, match=r"training process 1 of 2 died \(exit code 3\)"):
            start_processes(2, Deadly())
    finally:
        stop_processes()
    assert time.monotonic() - began < 60
