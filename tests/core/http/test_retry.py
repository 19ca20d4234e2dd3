"""Waits double up to their maximum, and attempts end with the policy's last error."""

import asyncio
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from palestra.core.http.retry import RetryPolicy, parse_retry_after


class Busy(Exception):
    def __init__(self, retry_after_s: float = 0.0) -> None:
        self.retry_after_s = retry_after_s


class Service:
    """Fails `failures` times, then returns the number of attempts."""

    def __init__(self, failures: int, error: Exception) -> None:
        self.failures, self.error, self.attempts = failures, error, 0

    async def ask(self) -> int:
        self.attempts += 1
        if self.attempts <= self.failures:
            raise self.error
        return self.attempts


def test_waits_double_up_to_the_maximum() -> None:
    policy = RetryPolicy(0.5, 15.0)
    assert [policy.wait_s(failures) for failures in (1, 2, 3, 5, 6, 7)] == [0.5, 1.0, 2.0, 8.0, 15.0, 15.0]
    assert policy.wait_s(5000) == 15.0  # a float overflows after 1,024 doublings: hours of failures in a row


def test_jitter_is_bounded() -> None:
    waits = [RetryPolicy(1.0, 1.0, jitter=0.25).wait_s(1) for _ in range(1000)]
    assert 0.75 <= min(waits) < 0.8 and 1.2 < max(waits) <= 1.25


def test_attempts_repeat_until_success() -> None:
    service = Service(3, Busy())
    assert asyncio.run(RetryPolicy(0.001, 0.01).run(service.ask, Busy)) == 4


def test_the_last_attempt_raises_its_error() -> None:
    service = Service(9, Busy())
    with pytest.raises(Busy):
        asyncio.run(RetryPolicy(0.001, 0.01, max_attempts=3).run(service.ask, Busy))
    assert service.attempts == 3


def test_no_retry_after_the_timeout() -> None:
    service, start = Service(10**6, Busy()), time.monotonic()
    with pytest.raises(Busy):
        asyncio.run(RetryPolicy(0.01, 0.01, timeout_s=0.1).run(service.ask, OSError, Busy))
    assert service.attempts > 1 and 0.1 < time.monotonic() - start < 5


def test_other_errors_are_not_retried() -> None:
    service = Service(1, KeyError("x"))
    with pytest.raises(KeyError):
        asyncio.run(RetryPolicy(0.001, 0.01).run(service.ask, Busy))
    assert service.attempts == 1


def test_retry_after_is_respected() -> None:
    start = time.monotonic()
    asyncio.run(RetryPolicy(0.001, 0.001).run(Service(1, Busy(0.2)).ask, Busy))
    assert time.monotonic() - start >= 0.2


def test_retry_after_is_a_number_or_a_date() -> None:
    date = format_datetime(datetime.now(UTC) + timedelta(seconds=60), usegmt=True)
    assert parse_retry_after(" 1.5 ") == 1.5 and 55 < parse_retry_after(date) <= 60
    assert [parse_retry_after(text) for text in ("", "soon", "-3", "Fri, 01 Jan 1990 00:00:00 GMT")] == [0.0] * 4
