"""Reads a run's logs as they grow and hands what is new to a sink.

A sink's place is kept in the run, in sinks/KIND/sent.json: what was sent once is sent again only where a resumed run
makes it again.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from palestra.files import atomic_write, check_folder, lock, size
from palestra.sinks.base import LOGS, Sink, Sinks, figures_of
from palestra.sinks.kinds import open_sink

SENT = "sent.json"
PAUSE = 1.0  # seconds between two looks at the logs
PATIENCE = 60.0  # seconds that the end of a run waits for a sink
Warn = Callable[[str], None]


class Tail:
    """The whole new lines of the logs of the run at `path`, from byte `sent` of each on."""

    def __init__(self, path: Path, sent: dict[str, int]) -> None:
        self.path, self.sent = path, {log: sent.get(log, 0) for log in LOGS}

    def news(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Each new line with its log's name; `sent` then counts it."""
        for log in LOGS:
            path = self.path / log
            self.sent[log] = min(self.sent[log], size(path))  # a resumed run cut it back: what follows is made again
            for line in _lines(path, self.sent[log]):
                self.sent[log] += len(line)
                try:
                    found = json.loads(line)
                except ValueError:  # the end of a line whose beginning was cut away by a resumed run
                    continue
                if isinstance(found, dict) and isinstance(found.get("step"), int):
                    yield log, found


def _lines(path: Path, start: int) -> Iterator[bytes]:
    """The whole lines of a file from a byte on; none where there is no file."""
    if path.exists():
        with open(path, "rb") as file:
            file.seek(start)
            yield from (line for line in file if line.endswith(b"\n"))


class Post:
    """One sink's place beside a run: opens the sink at the first news, sends, and remembers what it sent. A lock keeps
    a second process out. Raises ValueError where one is in, and whatever the tracker raises."""

    def __init__(self, run: Path, config: Any) -> None:
        self.run, self.config = run, config
        self.folder = run / "sinks" / config.type
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = lock(self.folder / ".lock", f"the sink {config.type} of {run}")
        kept = self.folder / SENT
        self.tail = Tail(run, json.loads(kept.read_text()) if kept.exists() else {})
        self.sink: Sink | None = None

    def send(self) -> int:
        """Sends what is new; how many lines."""
        before, count = dict(self.tail.sent), 0
        try:
            for log, line in self.tail.news():
                self.sink = self.sink or open_sink(self.config, self.run, self.folder)
                self.sink.write(*figures_of(log, line))
                count += 1
            if self.sink and count:
                self.sink.flush()
        except BaseException:
            self.tail.sent = before  # all of it again, next time
            raise
        if self.tail.sent != before:
            atomic_write(self.folder / SENT, json.dumps(self.tail.sent).encode())
        return count

    def close(self) -> None:
        try:
            if self.sink:
                self.sink.close()
        finally:
            self._lock.close()


class Follower(threading.Thread):
    """Sends to one sink while a run goes on. A sink that fails is warned of once, asked again later, and never holds up
    nor breaks the run."""

    def __init__(self, run: Path, config: Any, warn: Warn) -> None:
        super().__init__(name=f"sink-{config.type}", daemon=True)
        self.path, self.config, self.warn = run, config, warn
        self.over = threading.Event()
        self._warned = False
        self._pause = PAUSE

    def run(self) -> None:
        post: Post | None = None
        while True:
            last = self.over.is_set()  # asked before, so that what was written until then is sent
            post = self._send(post)
            if last:
                break
            self.over.wait(self._pause)
        if post:
            self._try(post.close)

    def _send(self, post: Post | None) -> Post | None:
        """Sends, from a place that is made where there is none yet."""

        def sent() -> None:
            nonlocal post
            post = post or Post(self.path, self.config)
            post.send()

        self._pause = PAUSE if self._try(sent) else min(60.0, 2 * self._pause)
        return post

    def _try(self, act: Callable[[], Any]) -> bool:
        try:
            act()
        except Exception as error:  # a tracker's code and its network raise anything, and the run must not end of it
            if not self._warned:
                self.warn(f"the sink {self.config.type} fails, training goes on without it: {_short(error)}")
            self._warned = True
            return False
        return True


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


class following:
    """Within, the run at `path` is followed by its sinks; at the end they have PATIENCE to take what is left."""

    def __init__(self, path: Path, sinks: Sinks, warn: Warn) -> None:
        self.warn = warn
        self.followers = [Follower(path, config, warn) for config in sinks]

    def __enter__(self) -> None:
        for follower in self.followers:
            follower.start()

    def __exit__(self, *_: object) -> None:
        until = time.monotonic() + PATIENCE
        for follower in self.followers:
            follower.over.set()
        for follower in self.followers:
            follower.join(max(0.0, until - time.monotonic()))
            if follower.is_alive():
                kind, path = follower.config.type, follower.path
                self.warn(f"the sink {kind} is slow: what it lacks is sent by palestra sync {path} --to {kind}")


def sync(path: Path, config: Any, *, follow: bool = False) -> int:
    """Sends what a run's logs hold and the sink lacks; how many lines. With `follow`, what comes too, until Ctrl-C.

    Raises ValueError where the run has no logs, or another process sends them.
    """
    if not (path / "config.yaml").is_file():
        raise ValueError(f"{path} is not a run: it has no config.yaml; `palestra runs` lists the runs there are")
    check_folder(path)
    post = Post(path, config)
    try:
        count = post.send()
        with suppress(KeyboardInterrupt):
            while follow:
                time.sleep(PAUSE)
                count += post.send()
    finally:
        post.close()
    return count
