"""The loop on several ranks: each goes through it with the same numbers, the first alone writes the run.

What a rank plays and passes is decided below, where there is something to share (rollouts/shared.py and
engine/trainer.py). Here they begin at one place and end at one step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from palestra import train, train_async
from palestra.engine.ranks import here, leave
from palestra.followers import Onlooker
from palestra.runs import Run
from palestra.train import Setup, Watcher

LOST = ("closed by peer", "reset by peer", "Broken pipe", "imed out", "remote process exited")  # of broken connections


@contextmanager
def opened(open_run: Callable[[], Run]) -> Iterator[Run | Onlooker]:
    """The run, which the first rank opens by `open_run`, as this rank has it. The ranks part when it has ended well."""
    ranks = here()
    run = open_run() if ranks.first else None
    with _together():
        path = ranks.told(run.path if run else None)
    with run or Onlooker(path) as own:
        yield own
    leave()


def restore(setup: Setup, run: Any) -> int:
    """`train.restore` on every rank, the first before the others. Raises ValueError where they do not find the same
    checkpoint."""
    ranks = here()
    with _together():
        if ranks.first:
            train.restore(setup, run)
        ranks.told(None)  # by now nobody cuts the run any more
        if not ranks.first:
            train.restore(setup, run)
        steps: list[int] = ranks.gather(run.next_step)
    if len(set(steps)) > 1:
        raise ValueError(
            f"the ranks would go on with steps {steps} of {run.path}: keep runs in a folder that all machines share"
        )
    return steps[0]


def run_training(
    setup: Setup, run: Any, watcher: Watcher | None = None, stop: Callable[[], bool] = lambda: False
) -> bool:
    """`train_async.run_training` on every rank; all stop at the step at which one of them is told to."""
    ranks = here()
    with _together():
        return train_async.run_training(setup, run, watcher, lambda: ranks.any(stop()))


@contextmanager
def _together() -> Iterator[None]:
    """Within, what a broken connection raises is a ValueError that says so."""
    try:
        yield
    except RuntimeError as error:
        if here().size == 1 or not any(sign in str(error) for sign in LOST):
            raise
        raise ValueError("another rank has ended, or did not answer: see what it says. --resume goes on") from error
