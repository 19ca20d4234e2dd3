"""The training loop under torchrun: all ranks run it on the same episode numbers; only rank 0 writes the run.

How ranks share episodes and training passes is decided in text/rollouts/rank_split.py and engine/training/trainer.py.
This module makes them start from the same checkpoint and end at the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from palestra.parallel.process_group import join_process_group, leave_process_group
from palestra.runs import Run, loop
from palestra.runs.loop import Callback, Trainer
from palestra.runs.null_run import ReadOnlyRun

CONNECTION_LOST_SIGNS = (
    "closed by peer",
    "reset by peer",
    "Broken pipe",
    "imed out",
    "remote process exited",
)  # substrings of torch's error messages when the connection to a rank is lost


@contextmanager
def distributed_run(open_run: Callable[[], Run]) -> Iterator[Run | ReadOnlyRun]:
    """Context with this rank's view of the run: on rank 0 the run that `open_run` opens, on other ranks a read-only
    stand-in. The process group is left if the block ends without an error."""
    ranks = join_process_group()
    run = open_run() if ranks.is_rank_zero else None
    with _together():
        path = ranks.broadcast(run.path if run else None)
    with run or ReadOnlyRun(path) as own:
        yield own
    leave_process_group()


def restore_checkpoint(trainer: Trainer[Any, Any], run: Any) -> int:
    """Runs `loop.restore_checkpoint` on every rank, on rank 0 first. Raises ValueError if the ranks find different
    checkpoints."""
    ranks = join_process_group()
    with _together():
        if ranks.is_rank_zero:
            loop.restore_checkpoint(trainer, run)
        ranks.broadcast(None)  # barrier: rank 0 has truncated the run's logs
        if not ranks.is_rank_zero:
            loop.restore_checkpoint(trainer, run)
        steps: list[int] = ranks.all_gather(run.next_step)
    if len(set(steps)) > 1:
        raise ValueError(
            f"the ranks would resume at steps {steps} of {run.path}: keep runs in a folder that all machines share"
        )
    return steps[0]


def run_training(
    trainer: Trainer[Any, Any],
    run: Any,
    callback: Callback | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> bool:
    """Runs `loop.run_training` on every rank. All stop after the step in which `should_stop` returns True on any
    of them.

    Raises ValueError if another rank ended or did not answer.
    """
    ranks = join_process_group()
    with _together():
        return loop.run_training(trainer, run, callback, should_stop, any_rank=ranks.any_rank)


@contextmanager
def _together() -> Iterator[None]:
    """Context that turns the error of a lost connection into a ValueError that explains it."""
    try:
        yield
    except RuntimeError as error:
        if join_process_group().world_size == 1 or not any(sign in str(error) for sign in CONNECTION_LOST_SIGNS):
            raise
        raise ValueError(
            "another rank ended or did not answer: see its output. Resume the run with --resume"
        ) from error
