"""Copies a run to a store while it trains.

A copy may be read, and its writer may die, while a state is sent. So what is complete before it is listed goes first
(checkpoints, members of a population), then the logs, then the list of them (checkpoints.jsonl, tasks.jsonl). A reader
goes the other way, so that whatever is listed is there.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shlex
import shutil
import socket
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from palestra.core.files import DamagedFile, acquire_lock, atomic_write, file_size, read_bytes, read_json
from palestra.core.http.retry import RetryPolicy
from palestra.runs.checkpoints import (
    CHECKPOINTS_FILE,
    CHECKPOINTS_FOLDER,
    TASKS_FILE,
    Checkpoint,
    list_all_checkpoints,
    list_checkpoints,
)
from palestra.runs.mirror.config import MirrorConfig
from palestra.runs.mirror.store import NUM_THREADS, CopyState, RunStore, StoreError, run_url
from palestra.runs.settings import META_FILE, find_run, read_meta, resume_command

STATUS_FILE = "mirror.json"  # in the run's folder: the state of the mirror, and why it fails; not copied itself
STAGING_FOLDER = ".mirror-links"  # in the run: links to checkpoints being sent; no .tmp-*, which a resume removes
POPULATION_LISTS = ("timings.jsonl", TASKS_FILE)  # in the order of reading: a task's line is written before its timings
MAX_ATTEMPTS = 5  # in a row, while files change
POLL_INTERVAL_S = 0.5  # seconds between looks at the run's folder
OPEN_RETRY = RetryPolicy(0.5, 4.0, timeout_s=10.0)  # before training: the address or the credentials are probably wrong
RETRY = RetryPolicy(1.0, 60.0, jitter=0.25)  # while the store fails during training
Warn = Callable[[str], None]


class MirrorTaken(ValueError):
    """Raised if the copy belongs to another run, or another process has begun to write it."""


class MirrorFailed(DamagedFile):
    """Raised if the store does not have a run's last state at its end: its copy there is not complete."""


class RunState(NamedTuple):
    """The newest state of a run's folder: `created`, `progress` and `unit` as in CopyState, the complete checkpoints,
    and the bytes of the lists, which are sent last, in the order of reading."""

    created: str
    progress: int
    unit: str
    checkpoints: list[Checkpoint]
    lists: dict[str, bytes]


def read_run_state(run: Path) -> RunState:
    """Returns the newest state of the run at `run`. Raises DamagedFile if meta.json or the list of checkpoints is."""
    created = str(read_meta(run).get("created", ""))
    if (run / TASKS_FILE).exists():
        lists = {name: _whole_lines(run / name) for name in POPULATION_LISTS}
        return RunState(created, lists[TASKS_FILE].count(b"\n"), "tasks", [], lists)
    lists = {CHECKPOINTS_FILE: _whole_lines(run / CHECKPOINTS_FILE)}
    progress = max((checkpoint.step + 1 for checkpoint in list_all_checkpoints(run)), default=0)
    return RunState(created, progress, "steps", list_checkpoints(run), lists)


def _whole_lines(path: Path) -> bytes:
    """Returns a log up to its last newline; nothing if there is no such file."""
    data = read_bytes(path) if path.exists() else b""
    return data[: data.rfind(b"\n") + 1]


def run_progress(run: Path) -> tuple[int | str, ...]:
    """Returns a value that changes whenever the run has a new state. Reads no file."""
    folder = run / CHECKPOINTS_FOLDER
    names = sorted(os.listdir(folder)) if folder.exists() else []  # a checkpoint is renamed after its line is written
    return file_size(run / CHECKPOINTS_FILE), file_size(run / TASKS_FILE), file_size(run / META_FILE), *names


def _files(root: Path) -> dict[str, Path]:
    """Returns the files in a folder by name, without hidden, unfinished or linked ones."""
    files = {}
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name[0] != "."]
        for path in (Path(folder, name) for name in names if name[0] != "."):
            if path.is_file() and not path.is_symlink():
                files[str(path.relative_to(root))] = path
    return files


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # a file system without links
        shutil.copy2(source, target)


class Mirror:
    """Writes the copy of the run at `run`, and its own status in mirror.json. `open` must be called first.

    `state` is the state of the copy, None before `open`. Methods raise StoreError if the store fails, and can be called
    again. A lock keeps other processes of this machine out: raises ValueError if it is held.
    """

    def __init__(self, run: Path, config: MirrorConfig) -> None:
        self.run = run
        self.config = config
        self.store = RunStore(run_url(config.url, run.name))
        self.writer = f"process {os.getpid()} on {socket.gethostname()}, {uuid.uuid4().hex[:8]}"
        self.state: CopyState | None = None
        self.failing_since: str | None = None
        self.sent_bytes = 0
        self.sent_files = 0
        self._lock = acquire_lock(run / ".mirror.lock", f"the mirror of {run}")
        self._seen: tuple[int | str, ...] = ()
        self._stored: dict[str, object] = {}  # files in the store; what identifies the contents that were sent

    def open(self) -> None:
        """Takes the copy over, or begins it: another process that wrote it can write no more.
        Raises MirrorTaken if it is of another run or ahead, or no copy of a run."""
        own = read_run_state(self.run)
        found = self.store.read_state()
        names = self.store.list_files()
        if found is None and names:
            raise MirrorTaken(f"{self.store.url} holds files that are no copy of a run: choose another folder")
        if found and found.progress:
            self._check_continues(own, found)
        else:
            found = CopyState(self.writer, own.created, 0, own.unit, _now(), 0)
        self._stored = dict.fromkeys(names)
        self._write_state(replace(found, writer=self.writer))
        self._write_status("")

    def sync(self, *, always: bool = True) -> bool:
        """Sends the newest state; unless `always`, only a new one. Returns whether something was
        sent. Raises MirrorTaken if another process has begun to write the copy."""
        seen = run_progress(self.run)
        if seen == self._seen and not always:
            return False
        try:
            self._check_owner()
            sent = self._send_newest()
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
            repeat(self.sync, policy)
        except (OSError, ValueError) as error:
            held = f"it has that after {self.state.text}" if self.state else "it has none"
            message = f"the run is in {self.run}, and its last state is not in its mirror; {held}: {error}"
            if not isinstance(error, MirrorTaken):
                command = f"palestra sync {shlex.quote(str(self.run))} --to {shlex.quote(self.config.url)}"
                message += f". Then send it: {command}"
            raise MirrorFailed(message) from error

    def follow(self, stop: threading.Event, warn: Warn) -> None:
        """Sends each new state until `stop` is set. A failing store causes one warning each time it begins to fail, and
        attempts with growing waits."""
        failures = 0
        wait_s = POLL_INTERVAL_S
        while not stop.wait(wait_s):
            try:
                sent = self.sync(always=False)
            except MirrorTaken as error:
                return warn(f"alarm: {error}")
            except Exception as error:  # of the store, or of a damaged file: it must not end training
                failures += 1
                wait_s = RETRY.wait_s(failures)
                if failures == 1:
                    warn(f"alarm: the mirror {self.store.url} is behind, training continues without it: {error}")
                continue
            if failures:
                warn(f"the mirror {self.store.url} has caught up")
            failures = 0
            wait_s = self.config.min_interval_s if sent else POLL_INTERVAL_S

    def close(self) -> None:
        """Releases the lock."""
        self._lock.close()

    def _check_continues(self, own: RunState, found: CopyState) -> None:
        if found.run != own.created:
            raise MirrorTaken(
                f"{self.store.url} is the copy of another run, created {found.run}: give this run another --name, or "
                "choose another folder in the store"
            )
        if own.progress < found.progress:
            raise MirrorTaken(
                f"{self.store.url} has this run after {found.text}, and {self.run} has it after {own.progress:,} only: "
                f"move that folder away and resume with: palestra train --resume {self.store.url}"
            )

    def _check_owner(self) -> None:
        found = self.store.read_state()
        if found is None or found.writer != self.writer:
            raise MirrorTaken(
                f"{found.writer if found else 'something'} has taken over {self.store.url}, to continue this run "
                "(or to remove it): what this process trains is no longer mirrored. Stop one of the two"
            )

    def _send_newest(self) -> bool:
        staging = self.run / STAGING_FOLDER
        for left in reversed(range(MAX_ATTEMPTS)):
            try:
                shutil.rmtree(staging, ignore_errors=True)
                return self._send(read_run_state(self.run), staging)
            except (FileNotFoundError, shutil.Error):  # pruned while it was read
                if not left:
                    raise
            finally:
                shutil.rmtree(staging, ignore_errors=True)
        return False

    def _send(self, own: RunState, staging: Path) -> bool:
        if not own.progress:
            return False
        for checkpoint in own.checkpoints:
            # links, so that they can be read although the run prunes them meanwhile
            shutil.copytree(checkpoint.path, staging / checkpoint.path.name, copy_function=_link_or_copy)
        checkpoints = f"{CHECKPOINTS_FOLDER}/"
        files = {f"{checkpoints}{name}": path for name, path in _files(staging).items()}
        for name, path in _files(self.run).items():
            if name not in own.lists and name != STATUS_FILE and not name.startswith(checkpoints):
                files[name] = path
        logs = {name: path for name, path in files.items() if name.endswith(".jsonl")}
        before = self.sent_files
        self._put_all({name: path for name, path in files.items() if name not in logs})
        self._put_all({name: _whole_lines(path) for name, path in logs.items()})
        for name in reversed(own.lists):
            self._put_all({name: own.lists[name]})
        old = self._stored.keys() - files.keys() - own.lists.keys()
        if self.sent_files == before and not old:
            return False
        num_bytes = sum(map(file_size, files.values())) + sum(map(len, own.lists.values()))
        self._write_state(CopyState(self.writer, own.created, own.progress, own.unit, _now(), num_bytes))
        self.store.delete(old)
        for name in old:
            del self._stored[name]
        return True

    def _put_all(self, files: Mapping[str, bytes | Path]) -> None:
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            list(pool.map(self._put, files.keys(), files.values()))

    def _put(self, name: str, source: bytes | Path) -> None:
        """Sends a file, unless it was sent with these contents."""
        identity: object
        if isinstance(source, bytes):
            size = len(source)
            identity = hashlib.sha256(source).digest()
        else:
            stat = source.stat()
            size = stat.st_size
            identity = (size, stat.st_mtime_ns, stat.st_ino)
        if self._stored.get(name) != identity:
            self.store.put(name, source)
            self._stored[name] = identity
            self.sent_bytes += size
            self.sent_files += 1

    def _write_state(self, state: CopyState) -> None:
        self.store.write_state(state)
        self.state = state

    def _write_status(self, error: str) -> None:
        self.failing_since = (self.failing_since or _now()) if error else None
        status = {
            "url": self.store.url,
            "state": self.state.text if self.state else "nothing",
            "sent_bytes": self.sent_bytes,
            "sent_files": self.sent_files,
            "failing_since": self.failing_since,
            "error": error,
        }
        with suppress(OSError):  # the run itself reports a full disk
            atomic_write(self.run / STATUS_FILE, (json.dumps(status, indent=2) + "\n").encode())


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def repeat(act: Callable[[], object], policy: RetryPolicy) -> None:
    """Calls `act`, repeatedly while the store fails."""

    async def attempt() -> None:
        act()

    asyncio.run(policy.run(attempt, StoreError, OSError))


def mirror_status(run: Path) -> dict[str, Any]:
    """Returns the contents of a run's mirror.json; {} if it has no mirror."""
    try:
        return read_json(run / STATUS_FILE, dict, {})
    except DamagedFile:
        return {}


@contextmanager
def mirror_run(run: Path, config: MirrorConfig | None, warn: Warn) -> Iterator[None]:
    """Context that mirrors the run at `run` as described by `config` (None: not at all).

    On entry raises StoreError if the store cannot be used, and MirrorTaken if it holds another run of this name. On
    exit sends the last state: raises MirrorFailed if that fails, but only warns if the run has failed itself.
    """
    if config is None:
        yield
        return
    with closing(Mirror(run, config)) as mirror:
        try:
            repeat(mirror.open, OPEN_RETRY)
        except BaseException as error:
            error.add_note(f"nothing was trained; once that is fixed: {resume_command(run)}")
            raise
        stop = threading.Event()
        thread = threading.Thread(target=mirror.follow, args=(stop, warn), name="mirror", daemon=True)
        thread.start()
        try:
            yield
        except Exception:
            stop.set()
            thread.join()
            try:
                mirror.sync()
            except Exception as failed:
                warn(f"the mirror {mirror.store.url} does not have the run's last state: {failed}")
            raise
        finally:
            stop.set()
        thread.join()
        mirror.sync_last()


def send_state(run: Path, config: MirrorConfig, *, follow: bool = False, warn: Warn = print) -> str:
    """Sends the newest state of the run at `run` to its copy, which it begins if there is none; with `follow`, also new
    ones until Ctrl-C. Returns the state of the copy as text, such as "20 steps".

    Raises StoreError, MirrorTaken, or ValueError if `run` is not a run or another process mirrors it.
    """
    with closing(Mirror(find_run(run), config)) as mirror:
        repeat(mirror.open, OPEN_RETRY)
        try:
            mirror.sync()
        except FileNotFoundError as error:
            raise DamagedFile(f"{run} is damaged, or another process changes it: {error}") from error
        if follow:
            with suppress(KeyboardInterrupt):
                mirror.follow(threading.Event(), warn)
        assert mirror.state
        return mirror.state.text
