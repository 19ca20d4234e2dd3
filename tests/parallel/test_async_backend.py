"""The asynchronous front of a backend: concurrent tasks, and errors that reach every waiting coroutine."""

import asyncio
import time
from functools import partial
from pathlib import Path

import pytest
from helpers.toy_tasks import Adder, LookTask, MakeTask, Value, leaf

from palestra.parallel.async_backend import AsyncBackend
from palestra.parallel.inline import InlineBackend
from palestra.parallel.local import LocalBackend
from palestra.parallel.tasks import Result


def test_concurrent_tasks_are_awaited_independently() -> None:
    desk = AsyncBackend(lambda: InlineBackend(partial(Adder, 0.02)))

    async def ticks() -> int:
        count, end = 0, time.monotonic() + 0.2
        while time.monotonic() < end:
            count += 1
            await asyncio.sleep(0.001)
        return count

    async def both() -> tuple[list[Result], int]:
        tasks = [desk.run_task(MakeTask(f"train/sum-{i}-{i + 1}")) for i in range(10)]
        count = asyncio.create_task(ticks())
        return [done.result for done in await asyncio.gather(*tasks)], await count

    values, count = asyncio.run(both())
    desk.close()
    assert values == [Value(leaf(f"train/sum-{i}-{i + 1}")) for i in range(10)]
    assert count > 20


def test_members_are_added_before_tasks_that_need_them(tmp_path: Path) -> None:
    desk = AsyncBackend(lambda: InlineBackend(Adder))
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "number").write_text("11")
    desk.add_member("x", tmp_path)
    assert asyncio.run(desk.run_task(LookTask("play/1", members=("x",)))).result == Value(11)
    desk.remove_member("x")
    with pytest.raises(ValueError, match="task play/2 needs x: no finished task made"):
        asyncio.run(desk.run_task(LookTask("play/2", members=("x",))))
    desk.close()


def test_failure_propagates_to_current_and_later_tasks() -> None:
    desk = AsyncBackend(lambda: InlineBackend(partial(Adder, bad="bad")))

    async def all_at_once() -> list[object]:
        tasks = [desk.run_task(LookTask(name)) for name in ("bad", "good", "better")]
        return list(await asyncio.gather(*tasks, return_exceptions=True))

    assert ["task bad failed: RuntimeError" in str(error) for error in asyncio.run(all_at_once())] == [True] * 3
    with pytest.raises(ValueError, match="task bad failed"):
        asyncio.run(desk.run_task(LookTask("late")))
    desk.close()


def test_backend_start_error_is_reported() -> None:
    desk = AsyncBackend(lambda: LocalBackend(Adder, 0))
    with pytest.raises(ValueError, match="workers is 0"):
        asyncio.run(desk.run_task(LookTask("play/1")))
    desk.close()


def test_cancelled_waiter_does_not_affect_others() -> None:
    """A task is completed even if its coroutine was cancelled and its event loop has ended."""
    desk = AsyncBackend(lambda: InlineBackend(partial(Adder, 0.1)))

    async def impatient() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(desk.run_task(LookTask("play/1")), 0.02)

    asyncio.run(impatient())
    assert asyncio.run(desk.run_task(LookTask("play/2"))).result == Value(leaf("play/2"))
    desk.close()
    desk.close()
