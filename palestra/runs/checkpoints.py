"""Checkpoints of a run, as listed in checkpoints.jsonl: listing, verification, and recovery after a crash."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from safetensors import SafetensorError

from palestra.files import TEMPORARY, Damaged, damaged, path_inside, plain_file, read_sealed, size

KEPT = 2  # newest checkpoints that pruning leaves, besides those marked keep: one more in case one is damaged
CHECKPOINTS = "checkpoints.jsonl"
FOLDER = "checkpoints"
CUT = ("metrics.jsonl", "timings.jsonl")  # logs that a resume truncates by size
LOGS = (*CUT, "evals.jsonl")  # evals.jsonl is cut by step: `palestra eval` may have appended older steps
AGAIN = "bring the run back from a copy, or start a new one"
STEP = re.compile(r"step-(\d{6,})")
SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: the state after `step`.

    `names` maps each saved item (policy or state) to its folder below `path`. `line` is the whole line of
    checkpoints.jsonl, the writer's own entries included.
    """

    step: int
    path: Path
    names: dict[str, str] = field(default_factory=dict)
    line: dict[str, Any] = field(default_factory=dict)

    @property
    def damage(self) -> str:
        """A message on the first of its files that is missing or damaged; "" if all are intact. Reads every file."""
        if not self.path.is_dir():
            return f"{self.path} is missing"
        return damaged(self.path, self.line["files"])

    def checked(self) -> Checkpoint:
        """Returns this checkpoint after comparing its files with their checksums. Raises Damaged if one differs."""
        if damage := self.damage:
            raise Damaged(f"{damage}; --resume goes on from the checkpoint before, and makes this one again")
        return self

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Context that turns errors of loading the wrong kind of files into Damaged, which names the checkpoint."""
        try:
            yield
        except (KeyError, RuntimeError, OSError, SafetensorError) as error:
            why = f"{type(error).__name__}: {error}".splitlines()[0]
            raise Damaged(f"cannot go on from {self.path} ({why}): was it made by another run? {AGAIN}") from error

    def changed_log(self, run: Path) -> str:
        """Returns a message on the first log whose part before this checkpoint has changed since; "" if none has."""
        for name, fact in self.line["logs"].items():
            path = plain_file(run / name)
            if size(path) < fact["bytes"]:
                return f"{path} has {size(path)} bytes, and had {fact['bytes']} then: lines are missing"
            if _start_checksum(path, fact["bytes"]) != fact["sha256"]:
                return f"{path} is not as it was then: it was edited or damaged"
        return ""


def checkpoints(path: str | Path) -> list[Checkpoint]:
    """Returns the complete checkpoints of the run at `path`, by step.

    Needs no lock, and compares file sizes only; `Checkpoint.damage` compares contents. Raises Damaged if a line of
    checkpoints.jsonl differs from what was written, or names a path outside the run.
    """
    return [checkpoint for checkpoint in listed(path) if _complete(checkpoint)]


def listed(path: str | Path) -> list[Checkpoint]:
    """Returns all checkpoints that the run at `path` ever had, pruned ones included, by step.

    Raises Damaged if a line of checkpoints.jsonl differs from what was written.
    """
    path = Path(path) / CHECKPOINTS
    lines = read_sealed(path) if path.exists() else []
    found = [_checkpoint(path, number, line) for number, line in enumerate(lines, start=1)]
    by_step = {checkpoint.step: checkpoint for checkpoint in found}  # of one step, the later line
    return [by_step[step] for step in sorted(by_step)]


def finish_newest(path: Path) -> None:
    """Renames the newest checkpoint's folder to its final name, if the process died before it could."""
    for checkpoint in listed(path)[-1:]:
        complete = checkpoint.path.with_name(TEMPORARY + checkpoint.path.name)
        if complete.is_dir() and not checkpoint.path.exists():
            os.rename(complete, checkpoint.path)


def newest_intact(path: Path) -> tuple[Checkpoint | None, list[str]]:
    """Returns the newest intact checkpoint of a run (None if it has had none yet), and a message on each newer one.

    Raises Damaged if the run had checkpoints and none is intact.
    """
    if not (path / CHECKPOINTS).exists():
        raise Damaged(f"{path / CHECKPOINTS} is missing, so that no checkpoint of the run counts: {AGAIN}")
    found, wrong = listed(path), list[str]()
    unknown = _without_line(path, found)
    for checkpoint in reversed(found):
        fault = checkpoint.damage or checkpoint.changed_log(path)
        if not fault:
            newer = [folder for folder in unknown if after(folder, checkpoint.step)]
            return checkpoint, [
                f"{folder} is passed over: {CHECKPOINTS} has no line for it" for folder in newer
            ] + wrong
        if checkpoint.path.exists() or not wrong:  # others were pruned
            wrong.append(f"the checkpoint after step {checkpoint.step + 1} is passed over: {fault}")
    if wrong:
        raise Damaged(f"no checkpoint of {path} is intact ({wrong[0].partition(': ')[2]}): {AGAIN}")
    if unknown:
        raise Damaged(f"{path / CHECKPOINTS} has no line for {unknown[0].name} in {FOLDER}/: {AGAIN}")
    return None, []


def _without_line(path: Path, found: Sequence[Checkpoint]) -> list[Path]:
    """Checkpoint folders that have no line in checkpoints.jsonl."""
    known = {checkpoint.path.name for checkpoint in found}
    return [folder for folder in sorted((path / FOLDER).glob("step-*")) if folder.name not in known]


def after(folder: Path, step: int) -> bool:
    """True if the file or folder is named after a step later than `step`; False if it is not named after a step."""
    found = STEP.fullmatch(folder.stem)
    return found is not None and int(found[1]) > step


def step_name(step: int) -> str:
    """Returns the name of a step's file or folder: "step-000012"."""
    return f"step-{step:06d}"


def _checkpoint(path: Path, number: int, line: Mapping[str, Any]) -> Checkpoint:
    """Parses one line. The folder follows from the step; no path in the line is used unchecked."""
    step, names = line.get("step"), line.get("names", {})
    facts = [line.get("files"), line.get("logs")]
    if (
        not _is_count(step)
        or not isinstance(line.get("keep"), bool)
        or not all(map(are_checksums, facts))
        or set(line["logs"]) != set(LOGS)
    ):
        raise Damaged(f"{path}, line {number} is not the line of a checkpoint: {AGAIN}")
    folder = path.parent / FOLDER / step_name(step)
    try:
        if line.get("path") != f"{FOLDER}/{folder.name}":
            raise Damaged(f"path is {line.get('path')!r}, not {FOLDER}/{folder.name}")
        path_inside(path.parent, f"{FOLDER}/{folder.name}")
        for inside in [*line["files"], *(names.values() if isinstance(names, dict) else [names])]:
            path_inside(folder, inside)
    except Damaged as error:
        raise Damaged(f"{path}, line {number}: {error}; do not go on with a run that you do not trust") from None
    return Checkpoint(step, folder, dict(names), dict(line))


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53


def are_checksums(files: Any) -> bool:
    """True if `files` has the form that `palestra.files.checksums` returns."""
    return isinstance(files, dict) and all(
        isinstance(fact, dict) and _is_count(fact.get("bytes")) and SHA256.fullmatch(str(fact.get("sha256")))
        for fact in files.values()
    )


def _complete(checkpoint: Checkpoint) -> bool:
    files = checkpoint.line["files"].items()
    return checkpoint.path.is_dir() and all(size(checkpoint.path / name) == fact["bytes"] for name, fact in files)


def _start_checksum(path: Path, length: int) -> str:
    """SHA-256 of the first `length` bytes of a file, or of no bytes if it does not exist."""
    if not path.exists():
        return hashlib.sha256().hexdigest()
    with open(path, "rb") as file:
        return hashlib.sha256(file.read(length)).hexdigest()
