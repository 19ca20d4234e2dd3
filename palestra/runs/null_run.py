"""The run as ranks see it: rank 0 writes it, the others have a no-op replacement."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from palestra.parallel.process_group import ProcessGroup
from palestra.runs import Checkpoint, Run


class NullRun:
    """Replacement of the run at `path` that writes nothing, for ranks other than 0."""

    next_step = num_discarded_steps = 0
    is_new = True
    skipped_checkpoints: Sequence[str] = ()

    def resume_notes(self) -> list[str]:
        """Returns nothing: rank 0 tells the user."""
        return []

    def __init__(self, path: Path = Path()) -> None:
        self.path = path

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Does nothing: there is nothing to close."""

    def resume(self) -> Checkpoint | None:
        """Returns None: rank 0 sends the checkpoint."""
        return None

    def checkpoint(
        self, step: int, write: Callable[[Path], None], names: Mapping[str, str] | None = None, keep: bool = False
    ) -> None:
        """Calls `write`, which may contain collective operations, with a temporary folder that is then deleted."""
        with tempfile.TemporaryDirectory(prefix="palestra-") as folder:
            write(Path(folder))
        self.next_step = step + 1

    def log_metrics(self, *_: Any) -> None:
        """Does nothing."""

    log_timings = log_eval = log_workers = write_episodes = write_eval_episodes = write_replays = log_metrics

    def sync(self) -> None:
        """Does nothing."""


AnyRun = Run | NullRun  # what training writes to


@contextmanager
def run_on_rank_zero(ranks: ProcessGroup, open_run: Callable[[], Run]) -> Iterator[AnyRun]:
    """Context with this rank's view of the run: on rank 0 the run that `open_run` opens, on others a `NullRun`. The
    group is left if the block ends without an error."""
    run = open_run() if ranks.is_rank_zero else None
    with ranks.explain_lost_rank("palestra train --resume RUN"):
        path = ranks.broadcast(run.path if run else Path())
    with run or NullRun(path) as view:
        yield view
    ranks.leave()
