"""Measures the scheduler's cost of a task, and the speedup by a second Ray worker.

    python results/populations/parts/scheduling.py            about two minutes; prints the figures as JSON

`overhead` runs a chain of empty tasks: a task is submitted when the one before is done, written to disk and passed to
the plan. `ray_speedup` plays payoff cells of Leduc poker between networks, as PSRO does, on Ray actors.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import ray

from palestra.parallel.inline import InlineBackend
from palestra.parallel.local import LocalBackend
from palestra.parallel.ray.workers import RayBackend
from palestra.parallel.tasks import Backend, Result, Task, WorkerFactory
from palestra.populations.population import Sides
from palestra.populations.scheduler import run_plan
from palestra.populations.tasks import Opponents, PlayResult, PlayTask, TrainTask
from palestra.populations.workers.net_oracle import NetOracle, NetWorker
from palestra.runs import Run

SEATS = ("player_0", "player_1")


class EmptyTask(Task):
    """A `play` task without output."""

    kind = "play"
    result_type = Result


class MemberTask(EmptyTask):
    """A `train` task with a member as output."""

    kind = "train"


class Chain:
    """A plan of `length` tasks of a kind, each returned when the one before is done. `times` has the seconds at which
    the plan was notified."""

    def __init__(self, length: int, kind: str) -> None:
        self.length, self.kind = length, kind
        self.times: list[float] = []

    def initial_tasks(self) -> Sequence[Task]:
        self.times.append(time.perf_counter())
        return [self._task(0)]

    def on_result(self, task: Task, result: Result) -> Sequence[Task]:
        self.times.append(time.perf_counter())
        number = len(self.times) - 1
        return [self._task(number)] if number < self.length else []

    def _task(self, number: int) -> Task:
        if self.kind == "train":
            return MemberTask(f"train/{number}", output_member=f"m-{number}")
        return EmptyTask(f"play/{number}")


class Nothing:
    """A worker that does no work; an output member has the size of a small network."""

    def run_task(self, task: Task, members: Mapping[str, Path], out: Path | None) -> Result:
        if out:
            (out / "policy.safetensors").write_bytes(b"x" * 50_000)
        return Result()


def overhead(make: Callable[[WorkerFactory], Backend], kind: str = "play", tasks: int = 100) -> float:
    """Median milliseconds between two notifications of the plan, with tasks that take no time themselves."""
    plan = Chain(tasks, kind)
    with tempfile.TemporaryDirectory() as root, Run.create(root, "") as run, closing(make(Nothing)) as backend:
        run_plan(plan, backend, run)
    gaps = [after - before for before, after in zip(plan.times[1:], plan.times[2:], strict=False)]
    return 1e3 * statistics.median(gaps)


def fsync(times: int = 50) -> float:
    """Median milliseconds to write and fsync a line, the lower bound of a task's time."""
    taken = []
    with tempfile.NamedTemporaryFile() as file:
        for _ in range(times):
            start = time.perf_counter()
            file.write(b"x" * 200)
            file.flush()
            os.fsync(file.fileno())
            taken.append(time.perf_counter() - start)
    return 1e3 * statistics.median(taken)


def leduc(games: int = 512) -> WorkerFactory:
    """A factory of workers for Leduc poker."""
    oracle = NetOracle(env={"type": "leduc_poker", "num_envs": games}, env_steps=games * 32)
    return partial(NetWorker, oracle, Sides.of(SEATS))


def some_members(folder: Path, each: int = 3) -> list[tuple[str, str]]:
    """Trains `each` networks per seat briefly, with files in `folder`; returns the cells of their payoff table."""
    names = {seat: [f"{seat}-{number}" for number in range(each)] for seat in SEATS}
    worker = leduc()()
    for seat, other in (SEATS, SEATS[::-1]):
        for name in names[seat]:
            opponents = Opponents({other: {"uniform": 1.0}})
            (folder / name).mkdir()
            task = TrainTask(f"train/{name}", player=seat, opponents=opponents, output_member=name)
            worker.run_task(task, {}, folder / name)
    return [(one, two) for one in names[SEATS[0]] for two in names[SEATS[1]]]


def warm(backend: Backend, task: Task) -> None:
    """Waits until every worker has started and has run `task` once."""
    busy = 0
    while busy < backend.workers:
        for _ in range(backend.workers):
            backend.submit(task)
        busy = backend.cancel_pending()
        for _ in range(max(busy, 1)):
            backend.wait(None if busy else 1.0)


def games_per_s(
    backend: Backend, folder: Path, cells: list[tuple[str, str]], tasks: int = 16, games: int = 2000
) -> float:
    """Games per second of a backend that plays `games` of each cell in each of `tasks`, after its workers started."""
    members = tuple(sorted({name for cell in cells for name in cell}))
    for name in members:
        backend.add_member(name, folder / name)
    warm(backend, PlayTask("play/warm", cells=tuple(cells), games_per_cell=10, members=members))
    start = time.perf_counter()
    for number in range(tasks):
        backend.submit(PlayTask(f"play/{number}", cells=tuple(cells), games_per_cell=games, members=members))
    done = [backend.wait() for _ in range(tasks)]
    seconds = time.perf_counter() - start
    results = [found.result for found in done if found]
    return sum(cell.games for result in results if isinstance(result, PlayResult) for cell in result.payoffs) / seconds


def ray_speedup(repeats: int = 5) -> dict[str, float]:
    """Games per second of one Ray worker and of two, medians over `repeats` alternating measurements, and their
    ratio."""
    os.environ.setdefault("RAY_worker_niceness", "0")  # as RayBackend sets it when it starts Ray itself
    ray.init("local", num_cpus=3, include_dashboard=False, logging_level=logging.ERROR)
    with tempfile.TemporaryDirectory() as root, closing(RayBackend(leduc(), 1)) as one:
        cells = some_members(Path(root))
        with closing(RayBackend(leduc(), 2)) as two:
            rates = [[games_per_s(backend, Path(root), cells) for backend in (one, two)] for _ in range(repeats)]
    ray.shutdown()
    alone, both = (statistics.median(column) for column in zip(*rates, strict=True))
    return {"ray_1_games_per_s": alone, "ray_2_games_per_s": both, "ray_2_vs_1": both / alone}


TARGETS = {"overhead_inline_ms": 5.0, "overhead_local_ms": 5.0, "ray_2_vs_1": 1.6}
AT_LEAST = {"ray_2_vs_1"}


def figures(quick: bool = False) -> dict[str, float]:
    """All figures."""
    local = partial(LocalBackend, workers=1)
    return {
        "fsync_ms": fsync(),
        "overhead_inline_ms": overhead(InlineBackend),
        "overhead_local_ms": overhead(local),
        "overhead_inline_member_ms": overhead(InlineBackend, "train"),
        "overhead_local_member_ms": overhead(local, "train"),
        **ray_speedup(2 if quick else 5),
    }


if __name__ == "__main__":
    print(json.dumps(figures(), indent=2))
