"""No-op replacements of `Run` for ranks other than 0."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from palestra.runs import Checkpoint, list_checkpoints


class NullRun:
    """Replacement of `Run` that writes nothing, for processes other than the first."""

    path = Path()
    next_step = num_discarded_steps = 0
    skipped_checkpoints: Sequence[str] = ()

    def resume(self) -> Checkpoint | None:
        """Returns None: the first process sends the checkpoint."""
        return None

    def checkpoint(
        self, step: int, write: Callable[[Path], None], info: Mapping[str, Any] | None = None, keep: bool = False
    ) -> None:
        """Calls `write` without a folder and advances `next_step`."""
        write(Path())  # the first process sends the real folder
        self.next_step = step + 1

    def log_metrics(self, *_: Any) -> None:
        """Does nothing."""

    log_timings = log_eval = write_episodes = write_replays = log_workers = log_metrics

    def sync(self) -> None:
        """Does nothing."""


class ReadOnlyRun(NullRun):
    """Replacement of `Run` that reads the run at `path`, writes nothing, and resumes from the newest checkpoint
    there."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Does nothing: there is nothing to close."""

    def resume(self) -> Checkpoint | None:
        """Returns the newest checkpoint, or None, and sets `next_step` to the step after it."""
        newest = next(iter(list_checkpoints(self.path)[::-1]), None)
        self.next_step = newest.step + 1 if newest else 0
        return newest

    def checkpoint(
        self, step: int, write: Callable[[Path], None], info: Mapping[str, Any] | None = None, keep: bool = False
    ) -> None:
        """Calls `write`, which may contain collective operations, with a temporary folder that is then deleted."""
        with tempfile.TemporaryDirectory(prefix="palestra-") as folder:
            write(Path(folder))
        self.next_step = step + 1
