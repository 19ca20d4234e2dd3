"""Checkpoints of a run, as listed in checkpoints.jsonl: listing, verification, and recovery after a crash."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeGuard

from safetensors import SafetensorError

from palestra.core.failures import one_line
from palestra.core.files import (
    TEMPORARY_PREFIX,
    DamagedFile,
    check_is_file,
    file_size,
    find_damage,
    path_inside,
    read_checksummed,
)

TASKS_FILE = "tasks.jsonl"

NUM_KEPT = 2  # newest checkpoints that pruning leaves, besides those marked keep: one more in case one is damaged
CHECKPOINTS_FILE = "checkpoints.jsonl"
CHECKPOINTS_FOLDER = "checkpoints"
TRUNCATED_LOGS = ("metrics.jsonl", "timings.jsonl")  # logs that a resume truncates by size
CHECKSUMMED_LOGS = (
    *TRUNCATED_LOGS,
    "evals.jsonl",
)  # evals.jsonl is cut by step: `palestra eval` may have appended older steps
RECOVERY_HINT = "bring the run back from a copy, or start a new one"
STEP_PATTERN = re.compile(r"step-(\d{6,})")
SHA256_PATTERN = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: the state after `step`. `names` maps each policy to its folder below
    `path`. `entry` is the whole line of checkpoints.jsonl."""

    step: int
    path: Path
    names: dict[str, str] = field(default_factory=dict)
    entry: dict[str, Any] = field(default_factory=dict)

    @property
    def damage(self) -> str:
        """A message on the first of its files that is missing or damaged; "" if all are intact. Reads every file."""
        if not self.path.is_dir():
            return f"{self.path} is missing"
        return find_damage(self.path, self.entry["files"])

    def verify(self) -> Checkpoint:
        """Returns this checkpoint after comparing its files with their checksums. Raises DamagedFile if one differs."""
        if damage := self.damage:
            raise DamagedFile(f"{damage}; --resume resumes from the checkpoint before and writes this one again")
        return self

    @contextmanager
    def explain_load_errors(self) -> Iterator[None]:
        """Context that turns errors of loading the wrong kind of files into DamagedFile, which names the checkpoint."""
        try:
            yield
        except (KeyError, RuntimeError, OSError, SafetensorError) as error:
            why = one_line(error)
            raise DamagedFile(
                f"cannot resume from {self.path} ({why}): was it made by another run? {RECOVERY_HINT}"
            ) from error

    def find_changed_log(self, run: Path) -> str:
        """Returns a message on the first log whose part before this checkpoint has changed since; "" if none has."""
        for name, fact in self.entry["logs"].items():
            path = check_is_file(run / name)
            if file_size(path) < fact["bytes"]:
                return f"{path} has {file_size(path)} bytes, and had {fact['bytes']} then: lines are missing"
            if _start_checksum(path, fact["bytes"]) != fact["sha256"]:
                return f"{path} is not as it was then: it was edited or damaged"
        return ""


def list_checkpoints(path: str | Path) -> list[Checkpoint]:
    """Returns the complete checkpoints of the run at `path`, by step. Needs no lock, and compares
    sizes only; `Checkpoint.damage` compares contents. Raises DamagedFile if a line of
    checkpoints.jsonl differs from what was written, or names a path outside the run."""
    return [checkpoint for checkpoint in list_all_checkpoints(path) if _complete(checkpoint)]


def list_all_checkpoints(path: str | Path) -> list[Checkpoint]:
    """Returns all checkpoints that the run at `path` ever had, by step. Raises DamagedFile for a
    line that differs from what was written."""
    path = Path(path) / CHECKPOINTS_FILE
    if not path.exists():
        return []
    lines = [_checkpoint(path, number, line) for number, line in enumerate(read_checksummed(path), start=1)]
    by_step = {checkpoint.step: checkpoint for checkpoint in lines}  # of one step, the later line
    return [by_step[step] for step in sorted(by_step)]


def finish_rename(checkpoint: Checkpoint) -> None:
    """Renames the checkpoint's folder to its final name, if the process died before it could."""
    if (folder := _current_folder(checkpoint)) != checkpoint.path:
        os.rename(folder, checkpoint.path)


def _current_folder(checkpoint: Checkpoint) -> Path:
    """Returns the folder that has the checkpoint's files: the temporary one if the process died before the rename."""
    complete = checkpoint.path.with_name(TEMPORARY_PREFIX + checkpoint.path.name)
    if complete.is_dir() and not checkpoint.path.exists():
        return complete
    return checkpoint.path


def find_newest_intact(path: Path) -> tuple[Checkpoint | None, list[str]]:
    """Returns the newest intact checkpoint of a run (None if it has had none yet), and a message on each newer one.
    Changes no file: `finish_rename` completes a checkpoint that the process died in.

    Raises DamagedFile if the run had checkpoints and none is intact.
    """
    if not (path / CHECKPOINTS_FILE).exists():
        raise DamagedFile(
            f"{path / CHECKPOINTS_FILE} is missing, so that no checkpoint of the run counts: {RECOVERY_HINT}"
        )
    found = list_all_checkpoints(path)
    wrong = list[str]()
    unknown = _without_line(path, found)
    for checkpoint in reversed(found):
        folder = _current_folder(checkpoint) if checkpoint is found[-1] else checkpoint.path
        fault = replace(checkpoint, path=folder).damage or checkpoint.find_changed_log(path)
        if not fault:
            newer = [other for other in unknown if is_after(other, checkpoint.step)]
            return checkpoint, [
                f"{other} is passed over: {CHECKPOINTS_FILE} has no line for it" for other in newer
            ] + wrong
        if folder.exists() or not wrong:  # others were pruned
            wrong.append(f"the checkpoint after {checkpoint.step + 1} steps is passed over: {fault}")
    if wrong:
        raise DamagedFile(f"no checkpoint of {path} is intact ({wrong[0].partition(': ')[2]}): {RECOVERY_HINT}")
    if unknown:
        raise DamagedFile(
            f"{path / CHECKPOINTS_FILE} has no line for {unknown[0].name} in {CHECKPOINTS_FOLDER}/: {RECOVERY_HINT}"
        )
    return None, []


def _without_line(path: Path, found: Sequence[Checkpoint]) -> list[Path]:
    """Returns the checkpoint folders that have no line in checkpoints.jsonl."""
    known = {checkpoint.path.name for checkpoint in found}
    return [folder for folder in sorted((path / CHECKPOINTS_FOLDER).glob("step-*")) if folder.name not in known]


def is_after(folder: Path, step: int) -> bool:
    """True if the file or folder is named after a step later than `step`; False if it is not named after a step."""
    found = STEP_PATTERN.fullmatch(folder.stem)
    return found is not None and int(found[1]) > step


def step_name(step: int) -> str:
    """Returns the name of a step's file or folder: "step-000012"."""
    return f"step-{step:06d}"


def _checkpoint(path: Path, number: int, line: Mapping[str, Any]) -> Checkpoint:
    """Parses one line. The folder follows from the step; no path in the line is used unchecked."""
    step = line.get("step")
    names = line.get("names", {})
    facts = [line.get("files"), line.get("logs")]
    if (
        not _is_count(step)
        or not isinstance(line.get("keep"), bool)
        or not all(map(are_checksums, facts))
        or set(line["logs"]) != set(CHECKSUMMED_LOGS)
    ):
        raise DamagedFile(f"{path}, line {number} is not the line of a checkpoint: {RECOVERY_HINT}")
    folder = path.parent / CHECKPOINTS_FOLDER / step_name(step)
    try:
        if line.get("path") != f"{CHECKPOINTS_FOLDER}/{folder.name}":
            raise DamagedFile(f"path is {line.get('path')!r}, not {CHECKPOINTS_FOLDER}/{folder.name}")
        path_inside(path.parent, f"{CHECKPOINTS_FOLDER}/{folder.name}")
        for inside in [*line["files"], *(names.values() if isinstance(names, dict) else [names])]:
            path_inside(folder, inside)
    except DamagedFile as error:
        raise DamagedFile(f"{path}, line {number}: {error}; do not resume a run that you do not trust") from None
    return Checkpoint(step, folder, dict(names), dict(line))


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53


def are_checksums(files: Any) -> bool:
    """True if `files` has the form that `palestra.core.files.checksums` returns."""
    return isinstance(files, dict) and all(
        isinstance(fact, dict) and _is_count(fact.get("bytes")) and SHA256_PATTERN.fullmatch(str(fact.get("sha256")))
        for fact in files.values()
    )


def _complete(checkpoint: Checkpoint) -> bool:
    files = checkpoint.entry["files"].items()
    return checkpoint.path.is_dir() and all(file_size(checkpoint.path / name) == fact["bytes"] for name, fact in files)


def _start_checksum(path: Path, length: int) -> str:
    """Returns the SHA-256 of the first `length` bytes of a file, or of no bytes if it does not exist."""
    if not path.exists():
        return hashlib.sha256().hexdigest()
    with open(path, "rb") as file:
        return hashlib.sha256(file.read(length)).hexdigest()
