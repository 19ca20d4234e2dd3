"""The worker's process: its lock, and its retries while the database does not answer."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import BinaryIO

from palestra.core.files import acquire_lock
from palestra.core.http.retry import RetryPolicy
from palestra.parallel.processes import leave_signals_to_parent
from palestra.service.storage.database import OUTAGE_ERRORS, first_line
from palestra.service.storage.store import Store
from palestra.service.storage.wakeup import WakeupSocket
from palestra.service.worker.worker import SAMPLE_GRACE_S, Worker, WorkerSettings

MIN_STOP_ATTEMPTS = 3  # attempts to reach the database before giving up on shutdown
DATABASE_RETRY = RetryPolicy(0.5, 15.0)  # pauses between attempts to reach the database


class DatabaseRetry:
    """Error handler of the worker's database: logs the error and retries with growing pauses.

    If the front end has exited or asks to end, it raises the error after `MIN_STOP_ATTEMPTS` attempts.
    """

    def __init__(self, wakeup: WakeupSocket) -> None:
        self.wakeup = wakeup
        self.failing_since = 0.0

    def __call__(self, error: Exception, attempt: int) -> None:
        self.failing_since = self.failing_since if attempt else time.monotonic()
        self.wakeup.wait(0)  # updates `peer_gone`
        if self.wakeup.peer_gone and attempt >= MIN_STOP_ATTEMPTS:
            raise error
        pause = DATABASE_RETRY.wait_s(attempt + 1)
        lasted = time.monotonic() - self.failing_since
        what = f"the database does not answer ({first_line(error)}), for {lasted:.0f} s now"
        print(f"{what}: trying again in {pause:.1f} s", file=sys.stderr, flush=True)
        time.sleep(pause)


def run_worker(settings: WorkerSettings, wakeup: WakeupSocket) -> None:
    """Entry point of the worker process: runs until its front end exits, or asks it to end. Exits with a message if the
    database does not answer during shutdown."""
    leave_signals_to_parent()
    with _lock(settings.data):
        worker = Worker(settings, Store(settings.store, DatabaseRetry(wakeup)), wakeup)
        wakeup.wake()
        try:
            worker.run()
        except OUTAGE_ERRORS as error:
            sys.exit(
                f"the engine's worker stopped while the database did not answer ({first_line(error)}): answers that "
                "were not written, and what models learned after they were last saved, are lost"
            )


def _lock(data: Path) -> BinaryIO:
    """Acquires the lock that admits one worker per server, waiting for a worker that still saves models after its front
    end was killed. Raises ValueError if the lock stays taken for twice `SAMPLE_GRACE_S` seconds."""
    until = time.monotonic() + 2 * SAMPLE_GRACE_S
    while True:
        try:
            return acquire_lock(data / "worker.lock", f"the server's data in {data}")
        except ValueError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)
