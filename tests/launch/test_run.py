"""Interrupts of a run: the first Ctrl-C asks for a stop, the second ends the pass in progress."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
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


INTERRUPTED_TWICE = """
import asyncio, os, signal
from palestra.launch.run import StopOnInterrupt

async def sample():
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0)

async def play():
    sampling = asyncio.create_task(sample())  # which nobody awaits, as that of a sampler
    await asyncio.sleep(60)

try:
    with StopOnInterrupt(), asyncio.Runner() as loop:
        loop.run(play())
except KeyboardInterrupt:
    print("ended at once")
"""


def test_a_second_interrupt_inside_a_task_prints_no_traceback() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED_TWICE], capture_output=True, text=True)
    assert done.returncode == 0 and "ended at once" in done.stdout
    assert "Traceback" not in done.stderr and "never retrieved" not in done.stderr, done.stderr
