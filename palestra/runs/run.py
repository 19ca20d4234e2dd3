"""The writer of a run directory."""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from palestra.core.config import hide_credentials, parse
from palestra.core.files import (
    EDITED_HINT,
    TEMPORARY_PREFIX,
    DamagedFile,
    JsonlWriter,
    acquire_lock,
    atomic_folder,
    atomic_write,
    checksum,
    checksums,
    filter_lines,
    parse_line,
    path_inside,
    read_bytes,
    read_lines,
    remove_path,
    to_checksummed_line,
    to_json_line,
)
from palestra.core.processor import processor
from palestra.core.types import TEAM, Episode, Metrics
from palestra.parallel.worker_stats import REPORT_INTERVAL_S, worker_stats
from palestra.runs.checkpoints import (
    CHECKPOINTS_FILE,
    CHECKPOINTS_FOLDER,
    CHECKSUMMED_LOGS,
    NUM_KEPT,
    TRUNCATED_LOGS,
    Checkpoint,
    find_newest_intact,
    finish_rename,
    is_after,
    list_checkpoints,
    step_name,
)
from palestra.runs.episodes import to_table
from palestra.runs.eval_files import EVAL_EPISODES_FOLDER, REPLAYS_FOLDER, eval_file
from palestra.runs.inputs import input_digests
from palestra.runs.replays import GameReplay, ReplayHeader, replay_table
from palestra.runs.settings import CONFIG_FILE, META_FILE, check_config, check_run_folder, find_run, read_meta
from palestra.runs.system_metrics import ResourceMeter

ROUNDING_FACTS = ("palestra", "torch", "transformers", "python", "processor")  # of meta.json


class Run:
    """The only writer of a run directory; a lock keeps other processes out. Use it as a context manager, or call
    `close`.

    `next_step` is the step after the newest complete checkpoint, 0 if there is none. `skipped_checkpoints` holds a
    message on each damaged checkpoint that the last `resume` skipped, `num_discarded_steps` is the number of steps that
    it removed. `is_new` is False for a run that existed before. Raises ValueError if the lock is taken, and DamagedFile
    if the folder or its list of checkpoints is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        check_run_folder(path)  # must be first: from here on files are opened and removed without checks
        self._lock = acquire_lock(path / ".lock", f"the run {path}")
        self._logs: dict[str, JsonlWriter] = {}
        self.skipped_checkpoints: list[str] = []
        self.num_discarded_steps = 0
        self.is_new = True
        self._resources = ResourceMeter()
        self._called = -1  # step of the last worker report
        worker_stats.take_report(0.0)  # resets counts from before this run
        try:
            self.next_step = max((c.step + 1 for c in list_checkpoints(path)), default=0)
        except ValueError:
            self._lock.close()
            raise

    @classmethod
    def create(
        cls,
        root: str | Path,
        config_yaml: str,
        name: str | None = None,
        meta: Mapping[str, Any] | None = None,
        *,
        exact_name: bool = False,
    ) -> Self:
        """Creates a run under `root`. An existing one is never overwritten: if `name` is taken, name-2, name-3, ... is
        used, or with `exact_name` ValueError raised. Of processes that create one name at once, one succeeds.

        `meta` is added to the versions, command line, time and digests of input files in meta.json; put the seed there.
        Raises ValueError if `name` is not a plain folder name.
        """
        name = name or "run"
        if "/" in name or name in (".", ".."):
            raise ValueError(f"a run's name is a plain folder name, not {name!r}; the folder around it is the root")
        path_inside(root, name)
        if exact_name:
            run = cls._of_exact_name(Path(root, name))
        else:
            run = cls(_fresh_folder(Path(root), name))
        inputs = input_digests(parse(config_yaml, CONFIG_FILE))
        facts = {**_facts(), **(meta or {}), "inputs": inputs, "config": config_yaml}
        atomic_write(run.path / META_FILE, (json.dumps(facts, indent=2) + "\n").encode())
        atomic_write(run.path / CHECKPOINTS_FILE, b"")  # so that a missing file means a lost one
        atomic_write(run.path / CONFIG_FILE, config_yaml.encode())  # last: a folder with a config counts as a run
        return run

    @classmethod
    def _of_exact_name(cls, path: Path) -> Self:
        """Returns the run to create at `path`, where a process that died may have begun to."""
        path.mkdir(parents=True, exist_ok=True)
        run = cls(path)
        begun = {".lock", META_FILE, CHECKPOINTS_FILE}
        others = [file.name for file in path.iterdir() if file.name not in begun]
        if taken := sorted(name for name in others if not name.startswith(TEMPORARY_PREFIX)):
            run.close()
            raise ValueError(
                f"{path} holds {taken[0]}, which another process wrote: start again, or use another --name"
            )
        return run

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Opens an existing run for writing; before training continues, call `resume`. Raises
        ValueError if `path` is no run, or another process writes it."""
        run = cls(find_run(path))
        run.is_new = False
        return run

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Writes everything to disk and releases the lock, even if the disk is full."""
        try:
            self.log_workers(self._called, 0.0)
            self.sync()
        finally:
            self._close_logs()
            self._lock.close()

    @property
    def config(self) -> str:
        return (self.path / CONFIG_FILE).read_text(encoding="utf-8")

    def replace_config(self, config_yaml: str) -> None:
        """Replaces the run's config. meta.json keeps the old one, with the command line and the step of the change."""
        if config_yaml == self.config:
            return
        meta = read_meta(self.path)
        change = {"step": self.next_step - 1, "command": _command(), "config": self.config}
        meta |= {"changed": [*meta.get("changed", []), change], "config": config_yaml}
        atomic_write(self.path / META_FILE, (json.dumps(meta, indent=2) + "\n").encode())
        atomic_write(self.path / CONFIG_FILE, config_yaml.encode())

    def log_metrics(self, step: int, policy: str, metrics: Mapping[str, Any]) -> None:
        """Appends a line to metrics.jsonl. Only values that the seed determines belong here: no seconds, paths or
        dates."""
        self._append("metrics.jsonl", {"step": step, "policy": policy, **metrics})

    def log_timings(self, step: int, policy: str, metrics: Mapping[str, Any]) -> None:
        """Appends a line to timings.jsonl: seconds, tokens per second. The line of all policies together (`TEAM`) also
        gets the CPU and memory use of this process since its last such line."""
        usage: Metrics = {}
        if policy == TEAM:
            usage = self._resources.metrics()
        self._append("timings.jsonl", {"step": step, "policy": policy, **metrics, **usage})

    def log_workers(self, step: int, min_interval_s: float = REPORT_INTERVAL_S) -> None:
        """Appends worker counters since the last report to workers.jsonl, if it is `min_interval_s` seconds old."""
        self._called = step
        for line in worker_stats.take_report(min_interval_s):
            self._append("workers.jsonl", {"step": step, **line})

    def log_eval(self, step: int, name: str, metrics: Mapping[str, Any]) -> None:
        """Appends a line to evals.jsonl: the metrics of evaluation `name` after `step` (-1: before training)."""
        self._append("evals.jsonl", {"step": step, "name": name, **metrics})

    def append_line(self, name: str, line: Mapping[str, Any]) -> None:
        """Appends a line to the log file `name`. It is on disk on return."""
        self._append(name, line)
        self._logs[name].fsync()

    def append_checksummed(self, name: str, line: Mapping[str, Any]) -> None:
        """Appends a line for `read_checksummed` to the log `name`. It is on disk on return."""
        self._log(name).write(to_checksummed_line(line))
        self._logs[name].fsync()

    def rewrite_log(self, name: str, lines: Iterable[Mapping[str, Any]]) -> None:
        """Atomically replaces the lines of the log file `name`. Does nothing if they are unchanged."""
        path = self.path / name
        data = b"".join(map(to_json_line, lines))
        if (path.read_bytes() if path.exists() else b"") != data:
            self._close_logs()
            atomic_write(path, data)

    def write_episodes(self, step: int, episodes: list[Episode]) -> Path:
        """Writes episodes/step-000012.parquet and returns its path. A second call for a step replaces the file."""
        return self._write_table(f"episodes/{step_name(step)}.parquet", to_table(step, episodes))

    def write_replays(self, step: int, name: str, header: ReplayHeader, replays: Sequence[GameReplay]) -> Path:
        """Writes the replays of an evaluation after `step` (-1: before training)."""
        return self._write_table(eval_file(REPLAYS_FOLDER, name, step), replay_table(header, replays))

    def write_eval_episodes(self, step: int, name: str, episodes: list[Episode]) -> Path:
        """Writes the episodes of an evaluation likewise."""
        return self._write_table(eval_file(EVAL_EPISODES_FOLDER, name, step), to_table(step, episodes))

    def _write_table(self, name: str, table: pa.Table) -> Path:
        path = path_inside(self.path, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        buffer = io.BytesIO()
        pq.write_table(table, buffer, compression="zstd", write_page_checksum=True)
        atomic_write(path, buffer.getvalue())
        return path

    def sync(self) -> None:
        """Calls fsync on all logs. The training loop calls it once per step; readers see every line at once."""
        for log in self._logs.values():
            log.fsync()

    def checkpoint(
        self, step: int, write: Callable[[Path], None], names: Mapping[str, str] | None = None, keep: bool = False
    ) -> Checkpoint:
        """Saves the state after `step`: `write` fills the folder that it is given. The checkpoint is complete and on
        disk on return.

        `names` become `Checkpoint.names`. Older checkpoints are then pruned: the newest two remain, and those saved
        with `keep`. Raises DamagedFile if the run's folder is not where it was opened: its path would be made anew
        beside it.
        """
        lock = self.path / ".lock"
        if not lock.exists() or not os.path.samestat(lock.stat(), os.fstat(self._lock.fileno())):
            raise DamagedFile(
                f"{self.path} was moved or removed during training, which ends here: --resume the run where it is now"
            )
        folder = self.path / CHECKPOINTS_FOLDER / step_name(step)
        names = dict(names or {})
        for name in names.values():
            path_inside(folder, name)
        path = f"{CHECKPOINTS_FOLDER}/{folder.name}"
        line: dict[str, Any] = {"step": step, "path": path, "keep": keep, "names": names}

        def commit(complete: Path) -> None:
            self.sync()  # the log lines that the checksums cover must be on disk first
            line["logs"] = {log: self._checksum(log) for log in CHECKSUMMED_LOGS}
            line["files"] = checksums(complete)
            self.append_checksummed(CHECKPOINTS_FILE, line)

        atomic_folder(folder, write, commit=commit)
        self.next_step = step + 1
        self._prune()
        return Checkpoint(step, folder, names, line)

    def resume_notes(self) -> list[str]:
        """Returns a note for the user if the run began with other versions of packages or on another processor, and one
        if files that its config names have changed since."""
        begun = read_meta(self.path)
        now = _facts()
        changes = []
        for key in ROUNDING_FACTS:
            before = begun.get(key)
            if before is not None and before != now[key]:
                changes.append(f"{key} {before}, now {now[key]}")
        notes = []
        if changes:
            notes.append(
                f"the run began with {'; '.join(changes)}: from here on it may round otherwise than without a stop"
            )
        inputs = begun.get("inputs", {})
        digests = input_digests(parse(self.config, CONFIG_FILE))
        if other := [name for name, digest in digests.items() if inputs.get(name, digest) != digest]:
            notes.append(
                f"{', '.join(other)} changed since the run began: from here on it uses what is there now; put the old "
                "contents back if that is not meant"
            )
        return notes

    def resume(self) -> Checkpoint | None:
        """Returns the newest intact checkpoint, or None, and reverts the run to that state.

        Log lines and episodes written after it are removed, as are unfinished files; evaluations are kept up to the
        checkpoint's step. Raises ValueError, and changes nothing, if the run had checkpoints and none is intact, or its
        config was edited.
        """
        newest, self.skipped_checkpoints = self.check_resume()  # first: if it raises, the run is unchanged
        step = newest.step if newest else -1
        self.num_discarded_steps = max(0, _last_step(self.path / "metrics.jsonl") - step)
        self._close_logs()
        if newest:
            finish_rename(newest)
        # unfinished files of a process that died
        for depth in ("", "*/", "*/*/"):
            for leftover in list(self.path.glob(f"{depth}{TEMPORARY_PREFIX}*")):
                remove_path(leftover)
        evals = self.path / "evals.jsonl"
        filter_lines(evals, lambda line: newest is not None and _step_of(evals, line) <= step)
        for log in TRUNCATED_LOGS:
            if (self.path / log).exists():
                os.truncate(self.path / log, newest.entry["logs"][log]["bytes"] if newest else 0)
        # the episodes, replays and checkpoints after `step`
        for folder in ("episodes", f"{EVAL_EPISODES_FOLDER}/*", f"{REPLAYS_FOLDER}/*", CHECKPOINTS_FOLDER):
            for path in list(self.path.glob(f"{folder}/step-*")):
                if is_after(path, step):
                    remove_path(path)
        filter_lines(self.path / CHECKPOINTS_FILE, lambda line: line["step"] <= step)  # after removing their folders
        self._prune()  # the process may have died between the checkpoint and its pruning
        self.next_step = step + 1
        return newest

    def check_resume(self) -> tuple[Checkpoint | None, list[str]]:
        """Returns the checkpoint that `resume` would return, and a message on each newer one that it would skip.
        Changes nothing. Raises ValueError as `resume` does."""
        check_config(self.path)
        newest, skipped = find_newest_intact(self.path)
        evals = self.path / "evals.jsonl"
        for line in read_lines(evals):
            if newest:
                _step_of(evals, line)
        return newest, skipped

    def _append(self, name: str, line: Mapping[str, Any]) -> None:
        self._log(name).write(to_json_line(line))

    def _log(self, name: str) -> JsonlWriter:
        if name not in self._logs:
            self._logs[name] = JsonlWriter(self.path / name)
        return self._logs[name]

    def _checksum(self, name: str) -> dict[str, Any]:
        """Returns the checksum of a log in its current state."""
        if name not in self._logs and not (self.path / name).exists():
            return {"bytes": 0, "sha256": hashlib.sha256().hexdigest()}
        if name in self._logs:
            return self._logs[name].checksum
        return checksum(self.path / name)

    def _close_logs(self) -> None:
        for log in self._logs.values():
            log.close()
        self._logs.clear()

    def _prune(self) -> None:
        for old in list_checkpoints(self.path)[:-NUM_KEPT]:
            if not old.entry["keep"]:
                remove_path(old.path)


def _fresh_folder(root: Path, name: str) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    number = 1
    path = root / name
    while True:
        try:
            path.mkdir()
            return path
        except FileExistsError:
            number += 1
            path = root / f"{name}-{number}"


def _facts() -> dict[str, Any]:
    facts: dict[str, Any] = {
        "created": datetime.now(UTC).isoformat(timespec="microseconds"),
        "command": _command(),
        "python": platform.python_version(),
        "processor": processor(),
    }
    return facts | {name: _version(name) for name in ("palestra", "torch", "transformers")}


def _command() -> list[str]:
    return [hide_credentials(word) for word in sys.argv]


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _last_step(log: Path) -> int:
    """Returns the step of the last intact line of a log, -1 if there is none. What is damaged after it is ignored."""
    if not log.exists():
        return -1
    for line in reversed(read_bytes(log).split(b"\n")):
        with suppress(ValueError):
            return _step_of(log, parse_line(log, 0, line, ""))
    return -1


def _step_of(path: Path, line: Mapping[str, Any]) -> int:
    step = line.get("step")
    if not isinstance(step, int):
        raise DamagedFile(f"{path} has a line whose step is {step!r}, not a number; {EDITED_HINT}")
    return step
