"""Reads new lines of a run's logs and sends them to its sinks.

The byte offsets already sent are stored in the run's folder, in sinks/KIND/sent.json. Lines are sent again only if a
resumed run writes them again.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from palestra.core.config import hide_credentials
from palestra.core.failures import one_line
from palestra.core.files import acquire_lock, atomic_write, file_size, read_json
from palestra.core.http.retry import RetryPolicy
from palestra.runs.settings import find_run
from palestra.runs.sinks.base import LOG_PREFIXES, Sink, SinkConfigs, metrics_of_line
from palestra.runs.sinks.factory import open_sink

OFFSETS_FILE = "sent.json"
POLL_INTERVAL_S = 1.0  # seconds between reads of the logs
RETRY = RetryPolicy(2 * POLL_INTERVAL_S, 60.0)  # pauses while a sink fails
END_TIMEOUT_S = 60.0  # seconds that the end of a run waits for its sinks
Warn = Callable[[str], None]


def read_new_lines(run: Path, offsets: dict[str, int]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields log and content of each new line of a run's logs, and advances `offsets`."""
    for log in LOG_PREFIXES:
        path = run / log
        # Not beyond the end: a resumed run truncates a log and writes it again.
        offsets[log] = min(offsets.get(log, 0), file_size(path))
        if not path.exists():
            continue
        with open(path, "rb") as file:
            file.seek(offsets[log])
            for line in file:
                if not line.endswith(b"\n"):
                    break
                offsets[log] += len(line)
                try:
                    values = json.loads(line)
                except ValueError:  # rest of a line whose beginning a resumed run cut off
                    continue
                if isinstance(values, dict) and isinstance(values.get("step"), int):
                    yield log, values


def _read_offsets(path: Path) -> dict[str, int]:
    """Returns the byte offsets in a file; {} if there is none, since the logs are then sent from their start."""
    return {log: offset for log, offset in read_json(path, dict, {}).items() if isinstance(offset, int) and offset >= 0}


class SinkCursor:
    """Sends a run's logs to one sink, opened at the first line, and stores the offsets sent. Raises
    ValueError if another process does, and the tracker's exceptions."""

    def __init__(self, run: Path, config: Any) -> None:
        self.run = run
        self.config = config
        self.folder = run / "sinks" / config.type
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = acquire_lock(self.folder / ".lock", f"the sink {config.type} of {run}")
        self.offsets = _read_offsets(self.folder / OFFSETS_FILE)
        self.sink: Sink | None = None

    def send(self) -> int:
        """Sends all new lines and returns their number. After an exception the same lines are sent again."""
        offsets = dict(self.offsets)
        count = 0
        for log, line in read_new_lines(self.run, offsets):
            self.sink = self.sink or open_sink(self.config, self.run, self.folder)
            self.sink.write(*metrics_of_line(log, line))
            count += 1
        if self.sink and count:
            self.sink.flush()
        if offsets != self.offsets:
            atomic_write(self.folder / OFFSETS_FILE, json.dumps(offsets).encode())
        self.offsets = offsets
        return count

    def close(self) -> None:
        """Closes the sink and releases the lock."""
        try:
            if self.sink:
                self.sink.close()
        finally:
            self._lock.close()


class SinkThread(threading.Thread):
    """Thread that sends a run's logs to one sink until `stop_event` is set. A failing sink causes one warning and is
    retried with backoff; it never delays or stops the run."""

    def __init__(self, run: Path, config: Any, warn: Warn) -> None:
        super().__init__(name=f"sink-{config.type}", daemon=True)
        self.path = run
        self.config = config
        self.warn = warn
        self.stop_event = threading.Event()
        self._has_warned = False

    def run(self) -> None:
        cursor: SinkCursor | None = None
        failures = 0  # in a row
        is_last = False
        while not is_last:
            is_last = self.stop_event.is_set()  # read before sending, so that everything written until then is sent
            try:
                cursor = cursor or SinkCursor(self.path, self.config)
                cursor.send()
                failures = 0
                wait_s = POLL_INTERVAL_S
            except Exception as error:
                self._warn_once(error)
                failures += 1
                wait_s = RETRY.wait_s(failures)
            if not is_last:
                self.stop_event.wait(wait_s)
        try:
            if cursor:
                cursor.close()
        except Exception as error:
            self._warn_once(error)

    def _warn_once(self, error: Exception) -> None:
        """Trackers raise arbitrary exceptions, which must not end the run."""
        why = hide_credentials(one_line(error))[:300]
        if not self._has_warned:
            self.warn(f"the sink {self.config.type} fails, training continues without it: {why}")
        self._has_warned = True


@contextmanager
def follow_run(path: Path, sinks: SinkConfigs, warn: Warn) -> Iterator[None]:
    """Context that sends the logs of the run at `path` to `sinks`; on exit waits up to END_TIMEOUT_S."""
    threads = [SinkThread(path, config, warn) for config in sinks]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        until = time.monotonic() + END_TIMEOUT_S
        for thread in threads:
            thread.stop_event.set()
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
            if thread.is_alive():
                kind = thread.config.type
                warn(f"the sink {kind} is slow: what it lacks is sent by palestra sync {path} --to {kind}")


def send_logs(path: Path, config: Any, *, follow: bool = False) -> int:
    """Sends the lines that the sink lacks and returns their number; with `follow` until Ctrl-C.
    Raises ValueError if `path` is no run, or another process does so."""
    with closing(SinkCursor(find_run(path), config)) as cursor:
        count = cursor.send()
        with suppress(KeyboardInterrupt):
            while follow:
                time.sleep(POLL_INTERVAL_S)
                count += cursor.send()
    return count
