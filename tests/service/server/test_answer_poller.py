"""Polls that wait for an answer: they are woken by the worker's socket, and ask the store seldom otherwise."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sql

from palestra.service.server.answer_poller import AnswerPoller
from palestra.service.server.state import ServiceContext
from palestra.service.storage.store import StoredAnswer
from palestra.service.storage.wakeup import WakeupSocket


@pytest.fixture(autouse=True)
def long_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("palestra.service.server.answer_poller.WOKEN_INTERVAL_S", 30.0)


@pytest.fixture
def worker_end(context: ServiceContext) -> Iterator[WakeupSocket]:
    """The other end of the front end's wake-up socket."""
    context.wakeup.sock.close()
    context.wakeup, theirs = WakeupSocket.pair()
    yield theirs
    theirs.sock.close()
    context.wakeup.sock.close()


@pytest.fixture
def queries(context: ServiceContext) -> list[str]:
    """The statements that the store has executed."""
    found: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        found.append(statement)

    sql.event.listen(context.store.database.engine, "before_cursor_execute", note)
    return found


def test_poll_asks_once_until_the_worker_wakes_it(
    context: ServiceContext, worker_end: WakeupSocket, queries: list[str]
) -> None:
    id = context.store.submit("ann", "sample", b"")

    async def play() -> bool:
        poller = AnswerPoller(context)
        poll = asyncio.create_task(poller.wait([id], 30))
        await asyncio.sleep(0.3)
        assert len([statement for statement in queries if "SELECT" in statement]) == 1
        context.store.write_answers([StoredAnswer.json(id)])
        worker_end.wake()
        return await asyncio.wait_for(poll, 10)

    assert asyncio.run(play())


def test_poll_that_comes_after_the_wake_up_is_answered_at_once(
    context: ServiceContext, worker_end: WakeupSocket
) -> None:
    first, second = (context.store.submit("ann", "sample", b"") for _ in range(2))

    async def play() -> bool:
        poller = AnswerPoller(context)
        poll = asyncio.create_task(poller.wait([first], 20))
        await asyncio.sleep(0.1)
        context.store.write_answers([StoredAnswer.json(second)])
        worker_end.wake()
        await asyncio.sleep(0.1)
        found = await asyncio.wait_for(poller.wait([second], 20), 10)
        poll.cancel()
        return found

    assert asyncio.run(play())


def test_poll_without_a_worker_asks_again_and_again(context: ServiceContext) -> None:
    id = context.store.submit("ann", "sample", b"")

    async def play() -> bool:
        poller = AnswerPoller(context)
        poll = asyncio.create_task(poller.wait([id], 30))
        await asyncio.sleep(0.1)
        context.store.write_answers([StoredAnswer.json(id)])
        return await asyncio.wait_for(poll, 10)

    assert asyncio.run(play())
