"""Mirrors a run to a store while it trains: a thread, its status file, and the last state at the end."""

from __future__ import annotations

import asyncio
import json
import shlex
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from palestra.core.files import DamagedFile, acquire_lock, atomic_write, read_json
from palestra.core.http.retry import RetryPolicy
from palestra.runs import find_run
from palestra.runs.mirror.config import MirrorConfig
from palestra.runs.mirror.snapshot import STATUS_FILE, Changed, run_progress
from palestra.runs.mirror.store import StoreError, run_url
from palestra.runs.mirror.uploader import MirrorTaken, Uploader

POLL_INTERVAL_S = 0.5  # seconds between looks at the run's folder
OPEN_RETRY = RetryPolicy(0.5, 4.0, timeout_s=10.0)  # before training: the address or the credentials are probably wrong
RETRY = RetryPolicy(1.0, 60.0, jitter=0.25)  # while the store fails during training
RETRIED = (StoreError, Changed, OSError)
Warn = Callable[[str], None]
T = TypeVar("T")


class MirrorFailed(DamagedFile):
    """Raised if the store does not have a run's last state at its end: its copy there is not complete."""


class Mirror:
    """Keeps the copy of the run at `run` up to date, and its status in mirror.json.

    A lock keeps other processes of this machine out: raises ValueError if it is held.
    """

    def __init__(self, run: Path, config: MirrorConfig) -> None:
        self.run, self.config = run, config
        self.uploader = Uploader(run, run_url(config.url, run.name))
        self.failing_since: str | None = None
        self._lock = acquire_lock(run / ".mirror.lock", f"the mirror of {run}")
        self._seen: tuple[int | str, ...] = ()

    @property
    def url(self) -> str:
        """URL of the run's copy."""
        return self.uploader.store.url

    def open(self) -> None:
        """Takes the copy over or begins it. Raises StoreError if the store fails for ten seconds, and MirrorTaken if
        it holds another run."""
        _repeat(self.uploader.open, OPEN_RETRY)
        self._write_status("")

    def sync(self, *, always: bool = True) -> bool:
        """Sends the newest state; unless `always`, only if there is a new one. Returns True if something was sent. An
        exception is recorded in mirror.json."""
        seen = run_progress(self.run)
        if seen == self._seen and not always:
            return False
        try:
            sent = self.uploader.sync()
        except Exception as error:
            self._write_status(str(error))
            raise
        self._seen = seen
        self._write_status("")
        return sent

    def sync_last(self) -> None:
        """Sends the last state. Raises MirrorFailed if the store fails for `final_wait_s` seconds."""
        policy = RetryPolicy(RETRY.first_wait_s, 15.0, timeout_s=self.config.final_wait_s)
        try:
            _repeat(self.sync, policy)
        except (*RETRIED, ValueError) as error:
            kept = self.uploader.manifest
            held = f"it has that after {kept.state}" if kept else "it has none"
            again = "" if isinstance(error, MirrorTaken) else f". Then send it: {sync_command(self.run, self.config)}"
            raise MirrorFailed(
                f"the run is in {self.run}, and its last state is not in its mirror; {held}: {error}{again}"
            ) from error

    def close(self) -> None:
        """Releases the lock."""
        self._lock.close()

    def _write_status(self, error: str) -> None:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        self.failing_since = (self.failing_since or now) if error else None
        kept, uploader = self.uploader.manifest, self.uploader
        status = {
            "url": self.url,
            "generation": kept.generation if kept else 0,
            "state": kept.state if kept else "nothing",
            "sent_bytes": uploader.sent_bytes,
            "sent_objects": uploader.sent_objects,
            "failing_since": self.failing_since,
            "error": error,
        }
        with suppress(OSError):  # the run itself reports a full disk
            atomic_write(self.run / STATUS_FILE, (json.dumps(status, indent=2) + "\n").encode())


def _repeat(act: Callable[[], T], policy: RetryPolicy) -> T:
    """Returns the result of `act()`, repeated while the store fails."""

    async def attempt() -> T:
        return act()

    return asyncio.run(policy.run(attempt, *RETRIED))


def sync_command(run: Path, config: MirrorConfig) -> str:
    """Returns the command that sends what a run's copy lacks."""
    return f"palestra sync {shlex.quote(str(run))} --to {shlex.quote(config.url)}"


def mirror_status(run: Path) -> dict[str, Any]:
    """Returns the status of a run's mirror: `failing_since` (None: it does not fail), `error`, `state`, ...; {} if it
    has none."""
    try:
        return read_json(run / STATUS_FILE, dict, {})
    except DamagedFile:
        return {}


class MirrorThread(threading.Thread):
    """Thread that sends each new state until `stop_event` is set. A failing store causes one warning each time it
    begins to fail, and attempts with growing waits; it never delays the run."""

    def __init__(self, mirror: Mirror, warn: Warn) -> None:
        super().__init__(name="mirror", daemon=True)
        self.mirror, self.warn = mirror, warn
        self.stop_event = threading.Event()
        self.taken: MirrorTaken | None = None

    def run(self) -> None:
        failures, wait_s = 0, POLL_INTERVAL_S
        while not self.stop_event.wait(wait_s):
            try:
                sent = self.mirror.sync(always=False)
            except MirrorTaken as error:
                self.warn(f"alarm: {error}")
                self.taken = error
                return
            except Exception as error:  # of the store, or of a damaged file: it must not end training
                failures += 1
                wait_s = RETRY.wait_s(failures)
                if failures == 1:
                    self.warn(f"alarm: the mirror {self.mirror.url} is behind, training continues without it: {error}")
                continue
            if failures:
                self.warn(f"the mirror {self.mirror.url} has caught up")
            failures, wait_s = 0, self.mirror.config.min_interval_s if sent else POLL_INTERVAL_S


class mirror_run:
    """Context manager that mirrors the run at `run` as described by `config` (None: not at all).

    On entry raises StoreError if the store cannot be used, and MirrorTaken if it holds another run of this name. On
    exit sends the last state: raises MirrorFailed if that fails, but only warns if the run has failed itself.
    """

    def __init__(self, run: Path, config: MirrorConfig | None, warn: Warn) -> None:
        self.run, self.config, self.warn = run, config, warn

    def __enter__(self) -> None:
        if self.config is None:
            return
        self.mirror = Mirror(self.run, self.config)
        try:
            self.mirror.open()
        except BaseException as error:
            self.mirror.close()
            error.add_note(
                f"nothing was trained; once that is fixed: palestra train --resume {shlex.quote(str(self.run))}"
            )
            raise
        self.thread = MirrorThread(self.mirror, self.warn)
        self.thread.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self.config is None:
            return
        self.thread.stop_event.set()
        try:
            if kind is not None and not issubclass(kind, Exception):
                return  # interrupted: at once
            self.thread.join()
            if error is None:
                self.mirror.sync_last()
                return
            try:
                self.mirror.sync()
            except Exception as failed:
                self.warn(f"the mirror {self.mirror.url} does not have the run's last state: {failed}")
        finally:
            self.mirror.close()


def send_state(run: Path, config: MirrorConfig, *, follow: bool = False, warn: Warn = print) -> str:
    """Sends the newest state of the run at `run` to its copy, which it begins if there is none; with `follow`, also new
    ones until Ctrl-C. Returns the state of the copy as text, such as "20 steps".

    Raises StoreError, MirrorTaken, or ValueError if `run` is not a run or another process mirrors it.
    """
    mirror = Mirror(find_run(run), config)
    try:
        mirror.open()
        mirror.sync()
        if follow:
            thread = MirrorThread(mirror, warn)
            with suppress(KeyboardInterrupt):
                thread.run()
        assert mirror.uploader.manifest
        return mirror.uploader.manifest.state
    except Changed as error:
        raise DamagedFile(f"{run} is damaged, or another process changes it: {error}") from error
    finally:
        mirror.close()
