"""Coroutines run on the loop's own thread, which ends when it should."""

import asyncio
import subprocess
import sys
import threading
import time

from palestra.core.http.loop_thread import LoopThread


async def thread_name() -> str:
    return threading.current_thread().name


def test_coroutines_run_on_the_loop_thread_from_threads_and_loops() -> None:
    loop_thread = LoopThread("mine")
    try:
        assert loop_thread.run(thread_name()) == "mine"
        assert asyncio.run(loop_thread.run_async(thread_name())) == "mine"
    finally:
        loop_thread.close()


def test_close_cancels_tasks_then_calls_on_close_and_ends_the_thread() -> None:
    loop_thread, seen = LoopThread("closing"), []

    async def wait() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    async def on_close() -> None:
        seen.append("closed")

    loop_thread.on_close = on_close
    loop_thread.run_detached(wait)
    loop_thread.run(asyncio.sleep(0))  # the task has started
    loop_thread.close()
    loop_thread.close()
    assert seen == ["cancelled", "closed"] and loop_thread.loop.is_closed()


def test_close_respects_its_timeout() -> None:
    loop_thread, end = LoopThread("stubborn"), threading.Event()

    async def ignore_cancellation() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            end.wait(10)

    loop_thread.run_detached(ignore_cancellation)
    loop_thread.run(asyncio.sleep(0))
    start = time.monotonic()
    loop_thread.close(0.1)
    assert time.monotonic() - start < 5 and not loop_thread.loop.is_closed()
    end.set()
    loop_thread.close()
    assert loop_thread.loop.is_closed()


def test_open_loop_does_not_block_the_interpreters_exit() -> None:
    """A task that ignores its cancellation delays the exit by at most the exit timeout."""
    code = """
import asyncio, time
from palestra.core.http.loop_thread import LoopThread

async def ignore_cancellation():
    try:
        await asyncio.sleep(60)
    finally:
        time.sleep(60)

loop_thread = LoopThread("open", exit_timeout_s=0.2)
loop_thread.run_detached(ignore_cancellation)
loop_thread.run(asyncio.sleep(0))
print("end")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert done.stdout == "end\n" and done.returncode == 0, done.stderr
