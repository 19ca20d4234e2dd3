"""A run is a directory: what dashboards, reports and resume read, and the only thing they read.

    config.yaml             the resolved config
    meta.json               versions, seed, command line, time of creation
    metrics.jsonl           what the seed determines: two runs of one seed are equal here, byte for byte
    timings.jsonl           what the machine determines: seconds, tokens per second
    workers.jsonl           who did what of the work elsewhere: tasks, sessions, losses; kept over a resume
    evals.jsonl             scores on held-out instances
    episodes/step-000012.parquet
    checkpoints/step-000012/
    checkpoints.jsonl       append-only: one line per complete checkpoint, with the sizes the logs had then

A process may die at any moment. A checkpoint appears by one rename, after its bytes are on the disk, and counts once
its line stands in checkpoints.jsonl; `resume` cuts the logs back to that moment, and the deterministic re-run makes the
rest again.
"""

from __future__ import annotations

import io
import json
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO, Self

import pyarrow.parquet as pq

from palestra.episodes import load_episodes, read_episodes, to_table
from palestra.files import (
    TEMPORARY,
    atomic_folder,
    atomic_write,
    keep_lines,
    lock,
    open_log,
    read_lines,
    remove,
    size,
    to_line,
)
from palestra.roll import PAUSE, roll
from palestra.types import Episode

__all__ = [
    "Checkpoint",
    "Run",
    "RunSummary",
    "checkpoints",
    "list_runs",
    "load_episodes",
    "read_episodes",
    "read_lines",
]

KEPT = 2  # newest checkpoints that pruning leaves, besides those marked keep: one to read, one in case it is damaged
LOGS = (
    "metrics.jsonl",
    "timings.jsonl",
)  # cut by size on resume; evals.jsonl by step, it may hold later hand-made ones


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: the state after `step`. `names` maps what was saved to where, as the writer chose.

    `line` is the whole line of checkpoints.jsonl, the writer's own entries included.
    """

    step: int
    path: Path
    names: dict[str, str] = field(default_factory=dict)
    line: dict[str, Any] = field(default_factory=dict)


class Run:
    """The one writer of a run directory; a lock keeps a second process out. Use as a context manager, or `close`.

    `next_step` is the step after the newest complete checkpoint, 0 where there is none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = lock(path / ".lock", f"the run {path}")
        self._files: dict[str, BinaryIO] = {}
        self._called = -1  # the last step of a roll call
        roll.lines(0.0)  # what was counted before is not this run's
        self.next_step = max((c.step + 1 for c in checkpoints(path)), default=0)

    @classmethod
    def create(
        cls, root: str | Path, config_yaml: str, name: str | None = None, meta: Mapping[str, Any] | None = None
    ) -> Self:
        """A new run under `root`, never over an old one: where `name` is taken, name-2, name-3, ... is next.

        `meta` joins the versions, the command line and the time in meta.json; put the seed there.
        """
        name = name or "run"
        if name in (".", "..") or "/" in name:
            raise ValueError(f"a run's name is a plain folder name, not {name!r}; the folder around it is the root")
        run = cls(_fresh_folder(Path(root), name))
        atomic_write(run.path / "meta.json", (json.dumps(_facts() | dict(meta or {}), indent=2) + "\n").encode())
        atomic_write(run.path / "config.yaml", config_yaml.encode())  # last: a folder with a config is a run
        return run

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """An existing run, for writing. Training goes on only after `resume`; evaluations may be added without it.

        Raises ValueError where `path` is not a run, or another process is writing it.
        """
        path = Path(path)
        if not (path / "config.yaml").is_file():
            raise ValueError(f"{path} is not a run: it has no config.yaml; `palestra runs` lists the runs there are")
        return cls(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Put everything on the disk and give the lock back."""
        self.roll_call(self._called, 0.0)
        self.sync()
        self._close_files()
        self._lock.close()

    @property
    def config(self) -> str:
        """The resolved config, as YAML."""
        return (self.path / "config.yaml").read_text(encoding="utf-8")

    def go_on_with(self, config_yaml: str) -> None:
        """Put this config in the place of the one so far; meta.json keeps who asked for it, and after which step."""
        if config_yaml == self.config:
            return
        path = self.path / "meta.json"
        meta = json.loads(path.read_text(encoding="utf-8"))
        change = {"step": self.next_step - 1, "command": sys.argv, "config": self.config}
        meta["changed"] = [*meta.get("changed", []), change]
        atomic_write(path, (json.dumps(meta, indent=2) + "\n").encode())
        atomic_write(self.path / "config.yaml", config_yaml.encode())

    def log(self, step: int, policy: str, metrics: Mapping[str, Any]) -> None:
        """Add a line to metrics.jsonl. Only what the seed determines belongs here: no seconds, no paths, no dates."""
        self._append("metrics.jsonl", {"step": step, "policy": policy, **metrics})

    def time(self, step: int, policy: str, figures: Mapping[str, Any]) -> None:
        """Add a line to timings.jsonl: seconds, tokens per second, bytes of memory."""
        self._append("timings.jsonl", {"step": step, "policy": policy, **figures})

    def roll_call(self, step: int, pause: float = PAUSE) -> None:
        """Add to workers.jsonl who did what elsewhere since the last call, where that is `pause` seconds ago."""
        self._called = step
        for line in roll.lines(pause):
            self._append("workers.jsonl", {"step": step, **line})

    def eval(self, step: int, name: str, figures: Mapping[str, Any]) -> None:
        """Add a line to evals.jsonl: the scores after `step` (-1: before the first) on the evaluation called `name`."""
        self._append("evals.jsonl", {"step": step, "name": name, **figures})

    def record(self, name: str, line: Mapping[str, Any]) -> None:
        """Add a line to a log of the caller's own; it is on the disk on return."""
        self._append(name, line)
        os.fsync(self._files[name].fileno())

    def rewrite(self, name: str, lines: Iterable[Mapping[str, Any]]) -> None:
        """Make these the lines of a log, at once and on the disk; nothing happens where they are that already."""
        path, data = self.path / name, b"".join(map(to_line, lines))
        if (path.read_bytes() if path.exists() else b"") != data:
            self._close_files()
            atomic_write(path, data)

    def write_episodes(self, step: int, episodes: list[Episode]) -> Path:
        """Write episodes/step-000012.parquet and return its path. A second call for a step replaces the first."""
        path = self.path / "episodes" / f"{_step_name(step)}.parquet"
        path.parent.mkdir(exist_ok=True)
        buffer = io.BytesIO()
        pq.write_table(to_table(step, episodes), buffer, compression="zstd")
        atomic_write(path, buffer.getvalue())
        return path

    def sync(self) -> None:
        """Put the lines logged so far on the disk. The loop calls this once a step; readers see every line at once."""
        for file in self._files.values():
            os.fsync(file.fileno())

    def checkpoint(
        self, step: int, write: Callable[[Path], None], info: Mapping[str, Any] | None = None, keep: bool = False
    ) -> Checkpoint:
        """Save the state after `step`: `write` fills the folder it is given. Complete and on the disk on return.

        `info` joins the line of checkpoints.jsonl; its "names" become `Checkpoint.names`. Old checkpoints are then
        pruned: the newest two stay, and those saved with `keep`.
        """
        folder = self.path / "checkpoints" / _step_name(step)
        files = atomic_folder(folder, write)
        self.sync()  # the line promises that the log lines it counts are on the disk
        line = {
            "step": step,
            "path": str(folder.relative_to(self.path)),
            "keep": keep,
            "bytes": {log: size(self.path / log) for log in LOGS},
            **(info or {}),
            "files": files,
        }
        self._append("checkpoints.jsonl", line)
        self.sync()
        self.next_step = step + 1
        self._prune()
        return Checkpoint(step, folder, line.get("names", {}), line)

    def resume(self) -> Checkpoint | None:
        """The newest checkpoint that is complete on the disk, or None; the run is cut back to that moment.

        Log lines and episodes made after it are removed, and so is what a killed process left half-written;
        evaluations stay up to the checkpoint's step. Raises ValueError where a log is shorter than the checkpoint says.
        """
        newest = next(iter(checkpoints(self.path)[::-1]), None)
        self._close_files()
        for log in LOGS:
            _cut(self.path / log, newest.line["bytes"][log] if newest else 0)
        step = newest.step if newest else -1
        keep_lines(self.path / "evals.jsonl", lambda line: newest is not None and line["step"] <= step)
        _remove_after(self.path, step)
        self._prune()  # the process may have died between the checkpoint and its pruning
        self.next_step = step + 1
        return newest

    def _append(self, name: str, line: Mapping[str, Any]) -> None:
        if name not in self._files:
            self._files[name] = open_log(self.path / name)
        self._files[name].write(to_line(line))

    def _close_files(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _prune(self) -> None:
        for old in checkpoints(self.path)[:-KEPT]:
            if not old.line["keep"]:
                remove(old.path)


@dataclass(frozen=True)
class RunSummary:
    """What `palestra runs` shows of a run: steps logged, the newest complete checkpoint, the evaluations."""

    path: Path
    created: str
    steps: int
    checkpoint: Checkpoint | None
    evals: list[dict[str, Any]]


def list_runs(root: str | Path) -> list[RunSummary]:
    """The runs directly under `root`, oldest first; [] where there is no such folder."""
    folders = [path.parent for path in Path(root).glob("*/config.yaml")]
    return sorted((_summary(folder) for folder in folders), key=lambda run: (run.created, run.path.name))


def checkpoints(path: str | Path) -> list[Checkpoint]:
    """The checkpoints of the run at `path` that are complete on the disk, by step. Needs no lock."""
    path = Path(path)
    lines = {line["step"]: line for line in read_lines(path / "checkpoints.jsonl")}
    found = (Checkpoint(step, path / line["path"], line.get("names", {}), line) for step, line in sorted(lines.items()))
    return [checkpoint for checkpoint in found if _complete(checkpoint)]


def _complete(checkpoint: Checkpoint) -> bool:
    files = checkpoint.line["files"].items()
    return checkpoint.path.is_dir() and all(size(checkpoint.path / name) == length for name, length in files)


def _summary(folder: Path) -> RunSummary:
    meta = folder / "meta.json"
    created = json.loads(meta.read_text(encoding="utf-8"))["created"] if meta.exists() else ""
    lines = read_lines(folder / "metrics.jsonl")
    newest = next(iter(checkpoints(folder)[::-1]), None)
    return RunSummary(
        folder, created, lines[-1]["step"] + 1 if lines else 0, newest, read_lines(folder / "evals.jsonl")
    )


def _fresh_folder(root: Path, name: str) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    number, path = 1, root / name
    while True:
        try:
            path.mkdir()
            return path
        except FileExistsError:
            number += 1
            path = root / f"{name}-{number}"


def _facts() -> dict[str, Any]:
    versions = {name: _version(name) for name in ("palestra", "torch", "transformers")}
    created = datetime.now(UTC).isoformat(timespec="microseconds")
    return {"created": created, "command": sys.argv, "python": platform.python_version()} | versions


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _step_name(step: int) -> str:
    return f"step-{step:06d}"


def _step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))


def _cut(path: Path, length: int) -> None:
    if size(path) < length:
        raise ValueError(
            f"{path} has {size(path)} bytes, the newest checkpoint counts {length}: the file was edited, or the run "
            "was copied while it was being written; start a new run, or remove the newest folder in checkpoints/ to "
            "resume from the one before"
        )
    if path.exists():
        os.truncate(path, length)


def _remove_after(run: Path, step: int) -> None:
    """Remove the episodes and checkpoints after `step`, and everything temporary."""
    for file in (run / "episodes").glob("step-*.parquet"):
        if _step_of(file) > step:
            file.unlink()
    for folder in (run / "checkpoints").glob("step-*"):
        if _step_of(folder) > step:
            remove(folder)
    for leftover in [*run.glob(f"{TEMPORARY}*"), *run.glob(f"*/{TEMPORARY}*")]:
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
