"""Snapshot of a run's folder: the files, each up to a byte, that make a state from which the run can resume.

The folder may be in use: logs grow, checkpoints are pruned. A state of a run of policies is its newest checkpoint with
the logs up to then; a state of a population is its finished tasks. Both are read from the folder alone.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from palestra.core.files import file_size, read_bytes
from palestra.runs import Checkpoint, list_checkpoints
from palestra.runs.checkpoints import CHECKPOINTS_FILE, CHECKPOINTS_FOLDER, TASKS_FILE, TRUNCATED_LOGS, is_after
from palestra.runs.mirror.manifest import Manifest
from palestra.runs.settings import META_FILE, WANDB_FOLDER, read_meta

STATUS_FILE = "mirror.json"  # in the run's folder: the state of the mirror, and why it fails; not mirrored itself
STAGING_FOLDER = ".mirror-links"  # in the run: links to checkpoints being sent; no .tmp-*, which a resume removes
TIMINGS_FILE = "timings.jsonl"


class Changed(Exception):
    """Raised if files changed while they were read: take another snapshot."""


class SourceFile(NamedTuple):
    """The first `num_bytes` bytes of the file at `path`, to be stored as `name`. `sha256` is the SHA-256 of these
    bytes; "" if it is not known."""

    name: str
    path: Path
    num_bytes: int
    sha256: str = ""


class Snapshot(NamedTuple):
    """A whole state of a run; see `Manifest` for `run`, `progress` and `unit`."""

    run: str
    progress: int
    unit: str
    sources: list[SourceFile]


def take_snapshot(run: Path) -> Snapshot:
    """Returns the newest whole state of the run at `run`. Raises Changed if it changed meanwhile, and DamagedFile if
    meta.json or the list of checkpoints is damaged."""
    try:
        created = str(read_meta(run).get("created", ""))
        is_population = (run / TASKS_FILE).exists()
        return _population_state(run, created) if is_population else _checkpoint_state(run, created)
    except FileNotFoundError as error:
        raise Changed(str(error)) from error


def run_progress(run: Path) -> tuple[int | str, ...]:
    """Returns a value that changes whenever the run has a new whole state. Reads no file."""
    folder = run / CHECKPOINTS_FOLDER
    names = sorted(os.listdir(folder)) if folder.exists() else []  # a checkpoint is renamed after its line is written
    return file_size(run / CHECKPOINTS_FILE), file_size(run / TASKS_FILE), file_size(run / META_FILE), *names


def _population_state(run: Path, created: str) -> Snapshot:
    # A task's line is written before its timings and after its member's files: read in the other order.
    num_timings = _whole_lines(run / TIMINGS_FILE)
    tasks = run / TASKS_FILE
    num_bytes = _whole_lines(tasks)
    with open(tasks, "rb") as file:
        num_tasks = file.read(num_bytes).count(b"\n")
    lengths = {TIMINGS_FILE: num_timings, TASKS_FILE: num_bytes}
    return Snapshot(created, num_tasks, "tasks", list(_rest(run, lengths, None)))


def _checkpoint_state(run: Path, created: str) -> Snapshot:
    newest = next(iter(list_checkpoints(run)[::-1]), None)
    step = newest.step if newest else -1
    logs = newest.entry["logs"] if newest else {}
    lengths = {log: logs[log]["bytes"] if newest else 0 for log in TRUNCATED_LOGS}
    lengths[CHECKPOINTS_FILE] = _lines_up_to(run / CHECKPOINTS_FILE, step)
    sources = [
        source._replace(sha256=logs[source.name]["sha256"]) if newest and source.name in TRUNCATED_LOGS else source
        for source in _rest(run, lengths, step)
    ]
    for checkpoint in list_checkpoints(run):
        if checkpoint.step <= step:
            sources += _files_of(checkpoint)
    return Snapshot(created, step + 1, "steps", sources)


def _files_of(checkpoint: Checkpoint) -> Iterator[SourceFile]:
    for name, fact in checkpoint.entry["files"].items():
        inside = f"{CHECKPOINTS_FOLDER}/{checkpoint.path.name}/{name}"
        yield SourceFile(inside, checkpoint.path / name, fact["bytes"], fact["sha256"])


def _rest(run: Path, lengths: dict[str, int], step: int | None) -> Iterator[SourceFile]:
    """Yields the files of a run, without its checkpoints and files after `step` (None: with all).

    Logs end with a whole line, or after `lengths` bytes. Hidden and unfinished files are left out.
    """
    for folder, folders, names in os.walk(run):
        here = Path(folder)
        is_root = here == run
        folders[:] = [
            name for name in folders if not name.startswith(".") and not (is_root and name == CHECKPOINTS_FOLDER)
        ]
        for name in sorted(names):
            path = here / name
            inside = str(path.relative_to(run))
            if name.startswith(".") or inside == STATUS_FILE or not path.is_file():
                continue
            if inside.startswith(f"{WANDB_FOLDER}/") and path.is_symlink():
                continue
            if step is not None and is_after(path, step) and not is_root:
                continue
            if name.endswith(".jsonl"):
                yield SourceFile(inside, path, lengths[inside] if inside in lengths else _whole_lines(path))
            else:
                yield SourceFile(inside, path, path.stat().st_size)


def _whole_lines(path: Path) -> int:
    """Returns the bytes of a log up to its last newline; 0 if there is no such file."""
    if not path.exists():
        return 0
    with open(path, "rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - 65536)
            file.seek(start)
            if (found := file.read(end - start).rfind(b"\n")) >= 0:
                return start + found + 1
            end = start
    return 0


def _lines_up_to(path: Path, step: int) -> int:
    """Returns the bytes of checkpoints.jsonl up to the last line of `step`."""
    end = length = 0
    for line in read_bytes(path).splitlines(keepends=True):
        end += len(line)
        if line.endswith(b"\n") and json.loads(line).get("step") == step:
            length = end
    return length


def stage(run: Path, snapshot: Snapshot) -> Snapshot:
    """Returns the snapshot with links to the files of checkpoints, so that they can be read although the run prunes
    them meanwhile. Where the file system has no links, they are read in place. Raises Changed if they are gone."""
    staging = run / STAGING_FOLDER
    shutil.rmtree(staging, ignore_errors=True)
    return snapshot._replace(sources=[_linked(staging, source) for source in snapshot.sources])


def _linked(staging: Path, source: SourceFile) -> SourceFile:
    if not source.name.startswith(f"{CHECKPOINTS_FOLDER}/"):
        return source
    link = staging / source.name
    try:
        link.parent.mkdir(parents=True, exist_ok=True)
        os.link(source.path, link)
    except FileNotFoundError as error:
        raise Changed(str(error)) from error
    except OSError:
        return source
    return source._replace(path=link)


def has_state_of(run: Path, manifest: Manifest) -> bool:
    """True if the run at `run` is the run of the manifest and has progressed at least as far. Raises ValueError if it
    is another run, or an earlier state."""
    try:
        own = take_snapshot(run)
    except (ValueError, Changed) as error:
        raise ValueError(f"{run} is there and cannot be read ({error}): remove it, or choose another --root") from error
    if own.run != manifest.run:
        raise ValueError(f"{run} is another run of that name: choose another folder with --root")
    if own.progress < manifest.progress:
        raise ValueError(
            f"{run} is an older copy of this run, after {own.progress:,} {own.unit}, and the mirror has it after "
            f"{manifest.state}: move it away, or choose another folder with --root"
        )
    return True
