"""The training loop under torchrun: all ranks run it on the same episode numbers; only rank 0 writes the run.

How ranks share episodes and training passes is decided in rollouts/shared.py and engine/trainer.py. This module makes
them start from the same checkpoint and end at the same step.
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

LOST = ("closed by peer", "reset by peer", "Broken pipe", "imed out", "remote process exited")  # lost connection


@contextmanager
def opened(open_run: Callable[[], Run]) -> Iterator[Run | Onlooker]:
    """Context with this rank's view of the run: on rank 0 the run that `open_run` opens, on other ranks a read-only
    stand-in. The process group is left if the block ends without an error."""
    ranks = here()
    run = open_run() if ranks.first else None
    with _together():
        path = ranks.told(run.path if run else None)
    with run or Onlooker(path) as own:
        yield own
    leave()


def restore(setup: Setup, run: Any) -> int:
    """Runs `train.restore` on every rank, on rank 0 first. Raises ValueError if the ranks find different
    checkpoints."""
    ranks = here()
    with _together():
        if ranks.first:
            train.restore(setup, run)
        ranks.told(None)  # barrier: rank 0 has truncated the run's logs
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
    """Runs `train_async.run_training` on every rank. All stop after the step in which `stop` returns True on any of
    them.

    Raises ValueError if another rank ended or did not answer.
    """
    ranks = here()
    with _together():
        return train_async.run_training(setup, run, watcher, lambda: ranks.any(stop()))


@contextmanager
def _together() -> Iterator[None]:
    """Context that turns the error of a lost connection into a ValueError that explains it."""
    try:
        yield
    except RuntimeError as error:
        if here().size == 1 or not any(sign in str(error) for sign in LOST):
            raise
        raise ValueError("another rank has ended, or did not answer: see what it says. --resume goes on") from error
