"""Retries after temporary failures: which HTTP statuses are retried, how long to wait, and when to give up."""

from __future__ import annotations

import asyncio
import email.utils
import random
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

RETRY_STATUSES = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})  # HTTP statuses of temporary failures
MAX_DOUBLINGS = 64  # of a wait: more would overflow a float, and every wait has reached its maximum by then

T = TypeVar("T")


@dataclass(frozen=True)
class RetryPolicy:
    """Waits between attempts, and when to stop.

    The wait after a failure is `first_wait_s` seconds; it doubles with each further failure in a row, up to
    `max_wait_s`. `jitter` 0.25 multiplies each wait by a random factor from 0.75 to 1.25, so that clients which failed
    together do not return together. `run` gives up after `max_attempts` attempts, or with the first failure later than
    `timeout_s` seconds after its start (None: never).
    """

    first_wait_s: float
    max_wait_s: float
    max_attempts: int | None = None
    timeout_s: float | None = None
    jitter: float = 0.0

    def wait_s(self, failures: int) -> float:
        """Returns the seconds to wait after `failures` failures in a row (1 or more)."""
        doubled = min(self.max_wait_s, self.first_wait_s * 2.0 ** min(failures - 1, MAX_DOUBLINGS))
        return doubled * random.uniform(1 - self.jitter, 1 + self.jitter) if self.jitter else doubled

    async def run(self, attempt: Callable[[], Awaitable[T]], *errors: type[Exception]) -> T:
        """Returns the result of `attempt()`, which is repeated while it raises one of `errors`.

        An attribute `retry_after_s` of such an error is the least number of seconds to wait. Raises the last error on
        giving up, and every other exception at once.
        """
        start = time.monotonic()
        failures = 0
        while True:
            try:
                return await attempt()
            except errors as error:
                failures += 1
                if self._gives_up(failures, time.monotonic() - start):
                    raise
                wait_s = max(self.wait_s(failures), getattr(error, "retry_after_s", 0.0))
            await asyncio.sleep(wait_s)

    def _gives_up(self, failures: int, elapsed_s: float) -> bool:
        if self.max_attempts is not None and failures >= self.max_attempts:
            return True
        return self.timeout_s is not None and elapsed_s > self.timeout_s


def parse_retry_after(header: str) -> float:
    """Returns the seconds in a Retry-After header, given as a number or a date; 0 if it holds neither."""
    if re.fullmatch(r"\s*\d+(\.\d+)?\s*", header):
        return float(header)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(header).timestamp() - time.time())
    except (ValueError, OverflowError):
        return 0.0
