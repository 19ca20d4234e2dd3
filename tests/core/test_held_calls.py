"""Results of calls that take a random time come back together, in the order in which the calls began."""

import asyncio
import random
import time

import pytest

from palestra.core.held_calls import HeldCalls


async def wait_and_return(seconds, value):
    await asyncio.sleep(seconds)
    if isinstance(value, Exception):
        raise value
    return value


def order_of_results(seconds, **options):
    """The indices of calls of these lengths in the order in which their results came."""

    async def main():
        held = HeldCalls(**options)
        order = []

        async def one(i):
            order.append(await held.hold(wait_and_return(seconds[i], i)))

        waiting = asyncio.gather(*(one(i) for i in range(len(seconds))))
        await asyncio.sleep(0)
        assert held.are_held
        await held.wait()
        assert not held.are_held
        await waiting
        return order

    return asyncio.run(main())


def test_results_come_in_the_order_of_the_calls():
    rng = random.Random(0)
    for _ in range(5):
        assert order_of_results([rng.uniform(0, 0.02) for _ in range(20)]) == list(range(20))


def test_call_that_takes_longer_than_the_limit_delays_nobody():
    assert order_of_results([0.01, 0.6, 0.0, 0.02], max_wait_s=0.2) == [0, 2, 3, 1]


def test_call_that_begins_while_others_are_handed_back_is_waited_for():
    async def main():
        held = HeldCalls()
        order = []

        async def twice(name, first, second):
            await held.hold(wait_and_return(first, None))
            await held.hold(wait_and_return(second, None))
            order.append(name)

        async def late(turns):
            for _ in range(turns):
                await asyncio.sleep(0)
            await held.hold(wait_and_return(0.03, None))
            order.append("late")

        await asyncio.gather(twice("a", 0, 0), twice("b", 0, 0.01), late(4))
        return order

    assert asyncio.run(main()) == ["late", "a", "b"]


def test_errors_come_in_their_turn_and_a_cancelled_call_waits_for_nobody():
    async def main():
        held = HeldCalls()
        failing = asyncio.create_task(held.hold(wait_and_return(0, ValueError("no verdict"))))
        slow = asyncio.create_task(held.hold(wait_and_return(0.1, 1)))
        cancelled = asyncio.create_task(held.hold(wait_and_return(5, 2)))
        await asyncio.sleep(0.03)
        assert not failing.done()
        began = time.monotonic()
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert await slow == 1 and time.monotonic() - began < 2
        with pytest.raises(ValueError, match="no verdict"):
            await failing

    asyncio.run(main())
