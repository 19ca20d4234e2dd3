"""Interrupts of a run: the first Ctrl-C asks for a stop, the second ends the pass in progress."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

from palestra.launch.run import StopOnInterrupt


def test_a_second_interrupt_ends_a_pass_that_does_not_yield() -> None:
    passed = []

    async def training_pass() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
        passed.append(True)

    before = signal.getsignal(signal.SIGINT)
    with StopOnInterrupt() as stop_requested, asyncio.Runner() as event_loop:
        event_loop.run(training_pass())
        assert stop_requested() and passed == [True]
        with pytest.raises(KeyboardInterrupt):
            event_loop.run(training_pass())
    assert passed == [True] and signal.getsignal(signal.SIGINT) is before
