"""One-line summaries of the runs in a folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palestra.core.files import read_lines
from palestra.runs.checkpoints import Checkpoint, list_checkpoints
from palestra.runs.settings import find_run, read_meta


@dataclass(frozen=True)
class RunSummary:
    """One row of `palestra runs`: `steps` logged, the newest complete `checkpoint`, and the evaluations.

    If the run's files are damaged, only `path` and `damage` are set.
    """

    path: Path
    created: str
    steps: int
    checkpoint: Checkpoint | None
    evals: list[dict[str, Any]]
    damage: str = ""


def list_runs(root: str | Path) -> list[RunSummary]:
    """Returns summaries of the runs directly under `root`, oldest first; [] if there is no such folder."""
    folders = [path.parent for path in Path(root).glob("*/config.yaml")]
    return sorted((_summary(folder) for folder in folders), key=lambda run: (run.created, run.path.name))


def _summary(folder: Path) -> RunSummary:
    try:
        created = read_meta(find_run(folder), needs_config=False).get("created", "")
        last = next(iter(read_lines(folder / "metrics.jsonl")[::-1]), {"step": -1}).get("step")
        newest = next(iter(list_checkpoints(folder)[::-1]), None)
        evals = read_lines(folder / "evals.jsonl")
    except (ValueError, OSError) as error:
        return RunSummary(folder, "", 0, None, [], damage=str(error))
    return RunSummary(folder, created, last + 1 if isinstance(last, int) else 0, newest, evals)
