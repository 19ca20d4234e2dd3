"""A plan whose tasks add up numbers that lie in members' files: what any backend must get right, and easy to check.

`leaves` members are made with a number each, then each pair of members makes one with their sum, until one is left.
Every member is read by a `play` task when it is there; the last is assessed. Which tasks there are does not depend on
the order in which they finish.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from palestra.populations.tasks import ResultDict, Task
from palestra.seeding import derive_seed


class Sums:
    """The plan. `total` is the sum once it is assessed; `heard` are the tasks told, in their order."""

    def __init__(self, leaves: int) -> None:
        self.leaves, self.total = leaves, None
        self.made: set[str] = set()
        self.heard: list[tuple[str, ResultDict]] = []

    def initial_tasks(self) -> Sequence[Task]:
        return [self._make(i, i + 1) for i in range(self.leaves)]

    def on_result(self, task: Task, result: ResultDict) -> Sequence[Task]:
        self.heard.append((task.name, result))
        if task.kind == "assess":
            self.total = result["value"]
        if task.kind != "train":
            return []
        low, high = task.payload["low"], task.payload["high"]
        self.made.add(task.output_member)
        last = high - low == self.leaves
        look = Task(
            f"{'assess' if last else 'play'}/{task.output_member}",
            "assess" if last else "play",
            {},
            (task.output_member,),
        )
        whole = self._above(low, high)
        return [look, *([whole] if not last and {*whole.members} <= self.made else [])]

    def task_metrics(self, task: Task, result: ResultDict) -> Mapping[str, Mapping[str, float]]:
        return {"team": {"made": len(self.made)}} if task.output_member else {}

    def _above(self, low: int, high: int) -> Task:
        """The task that adds this member to its neighbour."""
        width = high - low
        start = low - low % (2 * width)
        return self._make(start, start + 2 * width)

    def _make(self, low: int, high: int) -> Task:
        middle = (low + high) // 2
        parts = (f"sum-{low}-{middle}", f"sum-{middle}-{high}") if high - low > 1 else ()
        return Task(f"train/sum-{low}-{high}", "train", {"low": low, "high": high}, parts, f"sum-{low}-{high}")


def expected(leaves: int) -> int:
    return sum(leaf(f"train/sum-{i}-{i + 1}") for i in range(leaves))


def leaf(task: str) -> int:
    return derive_seed(7, task) % 1000


@dataclass
class Adder:
    """The worker. It takes `seconds` for a task, and as many more as `slow` gives its name.

    At a task that `fatal` names it kills its process so many times, of which files in `bodies` keep count; at the task
    `bad` it raises. The folder `begun` gets a file for each task and the process that began it."""

    seconds: float = 0.0
    slow: dict[str, float] = field(default_factory=dict)
    fatal: dict[str, int] = field(default_factory=dict)
    bodies: str = ""
    bad: str = ""
    begun: str = ""

    def run_task(self, task: Task, members: Mapping[str, Path], out: Path | None) -> ResultDict:
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
        return {"value": value}

    def _die(self, task: Task) -> None:
        died = len(list(Path(self.bodies).glob(f"{task.output_member}.*"))) if task.name in self.fatal else 0
        if died < self.fatal.get(task.name, 0):
            (Path(self.bodies) / f"{task.output_member}.{died}").touch()
            os.kill(os.getpid(), signal.SIGKILL)


class Odd:
    """A worker whose results JSON has other names for, or cannot tell."""

    def run_task(self, task: Task, *_: object) -> ResultDict:
        return {"pair": (1, 2), 3: float("nan"), "thing": object() if task.name == "bad" else None}


class Teller:
    """A worker that says which process it is, and whose, and how many threads it is to use."""

    def run_task(self, task: Task, *_: object) -> ResultDict:
        time.sleep(task.payload.get("seconds", 0.0))
        return {"pid": os.getpid(), "parent": os.getppid(), "threads": os.environ.get("OMP_NUM_THREADS")}


def cannot() -> Adder:
    raise RuntimeError("no worker today")


def dies() -> Adder:
    os.kill(os.getpid(), signal.SIGKILL)
    return Adder()
