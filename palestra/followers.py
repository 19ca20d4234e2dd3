"""What stands for the run in the processes beside the first, which alone writes it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from palestra.runs import Checkpoint, checkpoints


class Follower:
    """Stands where the run stands in the first process, and writes nothing."""

    path = Path()
    next_step = 0
    passed_over: Sequence[str] = ()

    def resume(self) -> Checkpoint | None:
        return None

    def checkpoint(
        self, step: int, write: Callable[[Path], None], info: Mapping[str, Any] | None = None, keep: bool = False
    ) -> None:
        write(Path())  # where to is what the first process says
        self.next_step = step + 1

    def log(self, *_: Any) -> None:
        """Nothing."""

    time = eval = write_episodes = roll_call = log

    def sync(self) -> None:
        """Nothing."""


class Onlooker(Follower):
    """A follower that reads the run itself: it goes on from the checkpoint that the first process left the newest."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to close."""

    def resume(self) -> Checkpoint | None:
        newest = next(iter(checkpoints(self.path)[::-1]), None)
        self.next_step = newest.step + 1 if newest else 0
        return newest

    def checkpoint(
        self, step: int, write: Callable[[Path], None], info: Mapping[str, Any] | None = None, keep: bool = False
    ) -> None:
        """Takes part in what `write` does together; what it leaves here is thrown away."""
        with tempfile.TemporaryDirectory(prefix="palestra-") as folder:
            write(Path(folder))
        self.next_step = step + 1
