"""The training loop over any trainer: logging, evaluation, checkpoints, stopping and resuming."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from palestra.core.failures import RunFailed
from palestra.core.types import TEAM, Metrics
from palestra.parallel.process_group import SINGLE_PROCESS, ProcessGroup
from palestra.runs import Checkpoint, Run, list_checkpoints, read_lines
from palestra.runs.loop import Callback, Evaluation, play_evals, restore_checkpoint, run_training
from palestra.runs.null_run import AnyRun


@dataclass
class Counter:
    """A trainer whose weights are a number: the sum of the steps on which it was updated."""

    steps: int = 12
    log_every: int = 1
    checkpoint_every: int = 100
    keep_every: int = 0
    fails_at: int = -1
    evals: list[Evaluation] = field(default_factory=lambda: [Evaluation(name="dev", episodes=1, every=4)])
    policy_names: tuple[str, ...] = ("counter",)
    can_save_any_time: bool = True
    ranks: ProcessGroup = SINGLE_PROCESS
    total: int = 0
    events: list[str] = field(default_factory=list)
    logged: list[list[int]] = field(default_factory=list)  # the updates of each logged step

    @contextmanager
    def open(self, run: AnyRun, callback: Callback) -> Iterator[None]:
        self.run = run
        self.events.append("open")
        try:
            yield
        finally:
            self.events.append("closed")

    def collect(self, step: int) -> int:
        return step

    def update(self, step: int, collected: int) -> int:
        if step == self.fails_at:
            raise RunFailed("no gradient")
        self.total += collected
        return collected

    def log(self, step: int, updates: Sequence[int]) -> dict[str, Metrics]:
        self.logged.append(list(updates))
        self.run.log_metrics(step, TEAM, {"total": self.total})
        return {TEAM: {"total": float(self.total)}}

    def evaluate(self, step: int, evaluation: Evaluation) -> dict[str, Any]:
        return {"total": self.total}

    def save(self, step: int, folder: Path) -> None:
        (folder / "counter").mkdir()
        (folder / "counter" / "total").write_text(str(self.total))

    def load(self, checkpoint: Checkpoint) -> None:
        self.total = int((checkpoint.path / "counter" / "total").read_text())


class StopAfter(Callback):
    """Counts logged steps and evaluations, and stops after `step`."""

    def __init__(self, step: int = 1000) -> None:
        self.last, self.steps, self.evals = step, list[int](), list[int]()

    def on_step(self, step: int, metrics: Any) -> None:
        self.steps.append(step)
        if step >= self.last:
            self.stop()

    def on_eval(self, step: int, name: str, metrics: Any) -> None:
        self.evals.append(step)


def train(trainer: Counter, root: Path, callback: StopAfter | None = None) -> Path:
    callback = callback or StopAfter()
    with Run.create(root, "") as run:
        run_training(trainer, run, callback, lambda: callback.stop_requested)
        return run.path


def test_evaluations_run_after_logged_steps_only(tmp_path: Path) -> None:
    seen = StopAfter()
    path = train(Counter(steps=11, log_every=2), tmp_path, seen)
    assert seen.steps == [1, 3, 5, 7, 9, 10] and seen.evals == [-1, 3, 7, 10]
    assert [line["step"] for line in read_lines(path / "metrics.jsonl")] == seen.steps
    assert [line["total"] for line in read_lines(path / "evals.jsonl")] == [0, 6, 28, 55]


def test_log_gets_what_update_returned_since_the_last_one(tmp_path: Path) -> None:
    trainer = Counter(steps=5, log_every=2)
    train(trainer, tmp_path)
    assert trainer.logged == [[0, 1], [2, 3], [4]]


def test_newest_two_and_kept_checkpoints_remain(tmp_path: Path) -> None:
    path = train(Counter(steps=11, checkpoint_every=2, keep_every=3), tmp_path)
    assert [c.step + 1 for c in list_checkpoints(path)] == [3, 6, 9, 10, 11]
    assert [c.entry["keep"] for c in list_checkpoints(path)] == [True, True, True, False, True]
    assert [c.names for c in list_checkpoints(path)] == [{"counter": "counter"}] * 5


def test_stop_writes_a_checkpoint_for_resume(tmp_path: Path) -> None:
    path = train(Counter(log_every=2), tmp_path, StopAfter(4))
    assert [c.step for c in list_checkpoints(path)] == [5]
    with Run.open(path) as run:
        again, seen = Counter(log_every=2), StopAfter()
        assert restore_checkpoint(again, run) == 6 and again.total == sum(range(6))
        assert run_training(again, run, seen) and again.total == sum(range(12))
    assert seen.steps == [7, 9, 11] and seen.evals == [7, 11]


def test_stop_after_the_last_step_counts_as_finished(tmp_path: Path) -> None:
    with Run.create(tmp_path, "") as run:
        seen = StopAfter(11)
        assert run_training(Counter(), run, seen, lambda: seen.stop_requested)


class Threads(ProcessGroup):
    """One of two ranks, which are threads. `items` and `barrier` are theirs together."""

    world_size = 2

    def __init__(self, rank: int, items: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.items, self.barrier = rank, items, barrier

    def all_gather(self, item: Any) -> list[Any]:
        self.items[self.rank] = item
        self.barrier.wait(10)
        found = list(self.items)
        self.barrier.wait(10)
        return found


def test_the_clock_saves_only_if_every_rank_can_save(tmp_path: Path) -> None:
    items: list[Any] = [None] * 2
    barrier = threading.Barrier(2)
    trainers = [
        Counter(steps=4, can_save_any_time=can, ranks=Threads(rank, items, barrier))
        for rank, can in enumerate((True, False))
    ]

    def train_rank(rank: Counter) -> list[int]:
        with Run.create(tmp_path, "") as run:
            run_training(rank, run, checkpoint_interval_s=0.0)
            return [checkpoint.step for checkpoint in list_checkpoints(run.path)]

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(train_rank, trainers)) == [[3], [3]]


def test_exception_closes_the_trainer_without_checkpoint(tmp_path: Path) -> None:
    trainer = Counter(fails_at=3)
    with Run.create(tmp_path, "") as run, pytest.raises(RunFailed, match="no gradient"):
        run_training(trainer, run)
    assert trainer.events == ["open", "closed"] and list_checkpoints(run.path) == []


def test_evaluations_can_be_requested_by_a_callback(tmp_path: Path) -> None:
    with Run.create(tmp_path, "") as run:
        play_evals(Counter(), run, 1, seen := StopAfter())
        assert seen.evals == []
        play_evals(Counter(), run, 1, seen, due_only=False)
        assert seen.evals == [1]
