"""A plan whose tasks add up numbers in members' files: every backend must get the same, easily checked result.

`leaves` members are made with a number each, then each pair of members gives one with their sum, until one is left.
Every member is read by a `play` task once it exists; the last is assessed. The set of tasks does not depend on the
order in which they finish.
"""

import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from palestra.core.seeding import derive_seed
from palestra.parallel.tasks import Result, Task


@dataclass(frozen=True)
class Value(Result):
    value: int


@dataclass(frozen=True)
class MakeTask(Task):
    """Makes a member with the sum of the numbers of its parts, which are the leaves from `low` to `high`."""

    kind = "train"
    result_type = Value

    low: int = 0
    high: int = 0


class LookTask(Task):
    """Reads the number of a member."""

    kind = "play"
    result_type = Value


class TotalTask(Task):
    """Reads the number of the last member."""

    kind = "assess"
    result_type = Value


class Sums:
    """The plan; `total` is the sum once it is assessed, `heard` the reported tasks in order."""

    def __init__(self, leaves: int) -> None:
        self.leaves, self.total = leaves, None
        self.made: set[str] = set()
        self.heard: list[tuple[str, Result]] = []

    def initial_tasks(self) -> Sequence[Task]:
        return [self._make(i, i + 1) for i in range(self.leaves)]

    def on_result(self, task: Task, result: Result) -> Sequence[Task]:
        assert isinstance(result, Value)
        self.heard.append((task.name, result))
        if task.kind == "assess":
            self.total = result.value
        if not isinstance(task, MakeTask):
            return []
        low, high = task.low, task.high
        self.made.add(task.output_member)
        last = high - low == self.leaves
        kind = TotalTask if last else LookTask
        look = kind(f"{kind.kind}/{task.output_member}", members=(task.output_member,))
        whole = self._above(low, high)
        return [look, *([whole] if not last and {*whole.members} <= self.made else [])]

    def task_metrics(self, task: Task, result: Result) -> Mapping[str, Mapping[str, float]]:
        return {"team": {"made": len(self.made)}} if task.output_member else {}

    def _above(self, low: int, high: int) -> MakeTask:
        """The task that adds this member to its neighbour."""
        width = high - low
        start = low - low % (2 * width)
        return self._make(start, start + 2 * width)

    def _make(self, low: int, high: int) -> MakeTask:
        middle = (low + high) // 2
        parts = (f"sum-{low}-{middle}", f"sum-{middle}-{high}") if high - low > 1 else ()
        return make(f"sum-{low}-{high}", low, high, parts)


def make(member: str, low: int = 0, high: int = 0, parts: tuple[str, ...] = ()) -> MakeTask:
    return MakeTask(f"train/{member}", low, high, members=parts, output_member=member)


def expected(leaves: int) -> int:
    return sum(leaf(f"train/sum-{i}-{i + 1}") for i in range(leaves))


def leaf(task: str) -> int:
    return derive_seed(7, task) % 1000


@dataclass
class Adder:
    """The worker. A task takes `seconds`, plus `slow[task.name]`.

    At a task in `fatal` it kills its process that many times, counted by files in `bodies`; at the task `bad` it
    raises. The folder `begun` gets a file for each task and the process that started it. Members have `ballast`
    additional bytes."""

    seconds: float = 0.0
    slow: dict[str, float] = field(default_factory=dict)
    fatal: dict[str, int] = field(default_factory=dict)
    bodies: str = ""
    bad: str = ""
    begun: str = ""
    ballast: int = 0

    def run_task(self, task: Task, members: Mapping[str, Path], out: Path | None) -> Value:
        if self.begun:
            Path(self.begun, f"{task.name.replace('/', ' ')}.{os.getpid()}").touch()
        time.sleep(self.seconds + self.slow.get(task.name, 0.0))
        if task.name == self.bad:
            raise RuntimeError(f"no {self.bad} today")
        self._die(task)
        numbers = [int((members[name] / "deep" / "number").read_text()) for name in task.members]
        value = sum(numbers) if numbers else leaf(task.name)
        if out:
            (out / "deep").mkdir()
            (out / "deep" / "number").write_text(str(value))
            if self.ballast:
                (out / "ballast").write_bytes(bytes(self.ballast))
        return Value(value)

    def _die(self, task: Task) -> None:
        died = len(list(Path(self.bodies).glob(f"{task.output_member}.*"))) if task.name in self.fatal else 0
        if died < self.fatal.get(task.name, 0):
            (Path(self.bodies) / f"{task.output_member}.{died}").touch()
            os.kill(os.getpid(), signal.SIGKILL)


class Shelf:
    """A worker that counts the folders beside that of a task's member."""

    def run_task(self, task: Task, members: Mapping[str, Path], out: Path | None) -> Value:
        return Value(len(list(members[task.members[0]].parent.iterdir())))


@dataclass(frozen=True)
class OddResult(Result):
    pair: tuple[int, ...]
    number: float | None
    by_name: dict[str, Any]


class OddTask(Task):
    kind = "play"
    result_type = OddResult


class Odd:
    """A worker whose results contain values that JSON changes or cannot represent."""

    def run_task(self, task: Task, *_: object) -> Result:
        if task.name == "other":
            return Value(1)
        return OddResult(
            (1, 2), float("nan"), {"3": np.float64(0.5), "thing": object() if task.name == "bad" else None}
        )


@dataclass(frozen=True)
class ProcessInfo(Result):
    pid: int
    parent: int
    threads: str | None


@dataclass(frozen=True)
class TellTask(Task):
    """Takes `seconds`."""

    kind = "play"
    result_type = ProcessInfo

    seconds: float = 0.0


class TellToTrain(TellTask):
    kind = "train"


class TellToAssess(TellTask):
    kind = "assess"


class Teller:
    """A worker that returns its process id, its parent's, and its number of threads."""

    def run_task(self, task: Task, *_: object) -> ProcessInfo:
        assert isinstance(task, TellTask)
        time.sleep(task.seconds)
        return ProcessInfo(os.getpid(), os.getppid(), os.environ.get("OMP_NUM_THREADS"))


def cannot() -> Adder:
    raise RuntimeError("no worker today")


def dies() -> Adder:
    os.kill(os.getpid(), signal.SIGKILL)
    return Adder()
