"""Reads new lines of a run's logs and sends them to its sinks.

The byte offsets already sent are stored in the run's folder, in sinks/KIND/sent.json. Lines are sent again only if a
resumed run writes them again.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from palestra.core.config import hide_credentials
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


class LogTailer:
    """Reads complete new lines of the logs of the run at `path`; `offsets` holds the byte offset in each log."""

    def __init__(self, path: Path, offsets: dict[str, int]) -> None:
        self.path = path
        self.offsets = {log: offsets.get(log, 0) for log in LOG_PREFIXES}

    def new_lines(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yields the name of the log and the parsed line for each new line, and advances `offsets`."""
        for log in LOG_PREFIXES:
            path = self.path / log
            self.offsets[log] = min(
                self.offsets[log], file_size(path)
            )  # a resumed run truncated the log and writes it again
            for line in _lines(path, self.offsets[log]):
                self.offsets[log] += len(line)
                try:
                    found = json.loads(line)
                except ValueError:  # rest of a line whose beginning a resumed run cut off
                    continue
                if isinstance(found, dict) and isinstance(found.get("step"), int):
                    yield log, found


def _offsets(path: Path) -> dict[str, int]:
    """Returns the byte offsets in a file; {} if there is none, since the logs are then sent from their start."""
    return {log: offset for log, offset in read_json(path, dict, {}).items() if isinstance(offset, int) and offset >= 0}


def _lines(path: Path, start: int) -> Iterator[bytes]:
    """Yields the complete lines of a file from byte `start` on; none if there is no file."""
    if path.exists():
        with open(path, "rb") as file:
            file.seek(start)
            yield from (line for line in file if line.endswith(b"\n"))


class SinkCursor:
    """Sends a run's logs to one sink and stores the offsets sent. Opens the sink at the first new line.

    A lock excludes other processes: raises ValueError if it is held. Methods also raise the tracker's exceptions.
    """

    def __init__(self, run: Path, config: Any) -> None:
        self.run = run
        self.config = config
        self.folder = run / "sinks" / config.type
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = acquire_lock(self.folder / ".lock", f"the sink {config.type} of {run}")
        kept = self.folder / OFFSETS_FILE
        self.tailer = LogTailer(run, _offsets(kept))
        self.sink: Sink | None = None

    def send(self) -> int:
        """Sends all new lines and returns their number. After an exception the same lines are sent again."""
        before = dict(self.tailer.offsets)
        count = 0
        try:
            for log, line in self.tailer.new_lines():
                self.sink = self.sink or open_sink(self.config, self.run, self.folder)
                self.sink.write(*metrics_of_line(log, line))
                count += 1
            if self.sink and count:
                self.sink.flush()
        except BaseException:
            self.tailer.offsets = before  # send all of it again next time
            raise
        if self.tailer.offsets != before:
            atomic_write(self.folder / OFFSETS_FILE, json.dumps(self.tailer.offsets).encode())
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
        self._warned = False
        self._failures = 0  # in a row

    def run(self) -> None:
        post: SinkCursor | None = None
        while True:
            last = self.stop_event.is_set()  # read before sending, so that everything written until then is sent
            post = self._send(post)
            if last:
                break
            self.stop_event.wait(RETRY.wait_s(self._failures) if self._failures else POLL_INTERVAL_S)
        if post:
            self._try(post.close)

    def _send(self, post: SinkCursor | None) -> SinkCursor | None:
        """Sends new lines, creating the `SinkCursor` first if needed; returns it."""

        def sent() -> None:
            nonlocal post
            post = post or SinkCursor(self.path, self.config)
            post.send()

        self._failures = 0 if self._try(sent) else self._failures + 1
        return post

    def _try(self, act: Callable[[], Any]) -> bool:
        try:
            act()
        except Exception as error:  # trackers raise arbitrary exceptions, which must not end the run
            if not self._warned:
                self.warn(f"the sink {self.config.type} fails, training continues without it: {_short(error)}")
            self._warned = True
            return False
        return True


def _short(error: Exception) -> str:
    return hide_credentials(f"{type(error).__name__}: {error}".splitlines()[0])[:300]


class follow_run:
    """Context manager that sends the logs of the run at `path` to `sinks`; on exit waits up to END_TIMEOUT_S."""

    def __init__(self, path: Path, sinks: SinkConfigs, warn: Warn) -> None:
        self.warn = warn
        self.threads = [SinkThread(path, config, warn) for config in sinks]

    def __enter__(self) -> None:
        for follower in self.threads:
            follower.start()

    def __exit__(self, *_: object) -> None:
        until = time.monotonic() + END_TIMEOUT_S
        for follower in self.threads:
            follower.stop_event.set()
        for follower in self.threads:
            follower.join(max(0.0, until - time.monotonic()))
            if follower.is_alive():
                kind = follower.config.type
                path = follower.path
                self.warn(f"the sink {kind} is slow: what it lacks is sent by palestra sync {path} --to {kind}")


def send_logs(path: Path, config: Any, *, follow: bool = False) -> int:
    """Sends the log lines that the sink lacks and returns their number; with `follow`, also new ones until Ctrl-C.

    Raises ValueError if `path` is not a run, or another process sends its logs to this sink.
    """
    post = SinkCursor(find_run(path), config)
    try:
        count = post.send()
        with suppress(KeyboardInterrupt):
            while follow:
                time.sleep(POLL_INTERVAL_S)
                count += post.send()
    finally:
        post.close()
    return count
