"""A league of small networks over Ray whose workers are killed, and the same league on one worker.

The game is rock, paper, scissors with one step. Each slice of training freezes a copy, which plays 64 earlier ones, so
that members are added until the time is over. Every `every_s` seconds a worker that runs a task is killed (SIGKILL). A
task is lost if it was submitted, was not pending at the end, and is not in tasks.jsonl, or is there twice. At the end
the run's records are replayed, as a resume does.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

from soak_parts.memory import MemoryWatch, SoakResult, cpu_seconds, process_tree

from palestra.core.config import dump, validate
from palestra.parallel.ray.workers import RayBackend
from palestra.parallel.tasks import Task, TaskResult
from palestra.populations.build.build import PopulationConfig, PopulationRecorder, PopulationSetup, build_population
from palestra.populations.scheduler import PlanCallback, PlanRun, run_plan
from palestra.populations.tasks import PlayResult, TrainResult
from palestra.runs import Run, read_lines
from palestra.vector.build.envs import make_vector_env
from palestra.vector.learners.policy_stack import read_frozen_member

GRACE_S = 120.0  # seconds that running tasks have to end after the time is over
WARM_UP = 0.1  # first part of the time, whose games do not count


def config(workers: int) -> PopulationConfig:
    """The config of a league with more learners than workers, so that no worker is idle."""
    learners = max(4, workers + workers // 4)
    tree = {
        "env": {"type": "matrix", "game": "rock_paper_scissors", "num_envs": 256},
        "population": {
            "type": "league",
            "main_agents": 1 + learners // 10,
            "main_exploiters": 1 + learners // 10,
            "league_exploiters": learners - 2 * (1 + learners // 10),
            "slices": 1_000_000,
            "env_steps": 20_480,
            "min_slices": 1,
            "max_slices": 1,
            "games_per_cell": 512,
            "rated_opponents": 64,
            "opponents_per_slice": 64,
        },
        "oracle": {
            "type": "net",
            "policy": {"hidden": [32], "lr": 1e-3},
            "algorithm": {
                "type": "ppo",
                "rollout_length": 1,
                "epochs": 2,
                "minibatches": 1,
                "gamma": 1.0,
                "value_norm": False,
            },
        },
        "backend": {"type": "ray", "workers": workers, "as_completed": True},  # one task at a time for each CPU
    }
    return validate(PopulationConfig, tree)


class CountedBackend(RayBackend):
    """A Ray backend that records the names of submitted tasks, and of those pending when the run stopped."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.submitted: set[str] = set()
        self.pending: set[str] = set()
        super().__init__(*arguments, **options)

    def submit(self, task: Task) -> None:
        self.submitted.add(task.name)
        super().submit(task)

    def cancel_pending(self) -> int:
        self.pending = {task.name for group in self._groups for task in group.queue.tasks}
        return super().cancel_pending()


class GameCounter(PlanCallback):
    """Records the number of games of each finished task, with the time in seconds."""

    def __init__(self) -> None:
        self.games: list[tuple[float, int]] = []

    def on_task_done(self, number: int, done: TaskResult, lines: Any) -> None:
        result = done.result
        games = sum(cell.games for cell in result.payoffs) if isinstance(result, PlayResult) else 0
        games += result.env_steps if isinstance(result, TrainResult) else 0  # a game has one step
        self.games.append((time.monotonic(), games))

    def per_second(self, start: float, end: float) -> float:
        """Games per second between two times."""
        return sum(games for when, games in self.games if start <= when <= end) / (end - start)


def busy_workers() -> list[int]:
    """Returns the process ids of this process's Ray workers that run a task."""
    found = []
    for pid in process_tree(os.getpid()):
        try:
            title = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if title.startswith(b"ray::WorkerActor.do"):
            found.append(pid)
    return found


def cpu_by_part() -> dict[str, float]:
    """Returns the CPU seconds so far of this process, of living workers, and of Ray's own processes."""
    found = dict.fromkeys(("driver", "workers", "ray"), 0.0)
    for pid in process_tree(os.getpid()):
        try:
            title = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        part = "driver" if pid == os.getpid() else "workers" if title.startswith(b"ray::") else "ray"
        found[part] += cpu_seconds(pid)
    return found


def kill_workers(every_s: float, ended: threading.Event, killed: list[float]) -> None:
    """Kills a busy worker every `every_s` seconds; appends the CPU seconds that it had used to `killed`."""
    rng = random.Random(0)
    while not ended.wait(every_s):
        if busy := busy_workers():
            pid = rng.choice(busy)
            killed.append(cpu_seconds(pid))
            os.kill(pid, signal.SIGKILL)


def play(workers: int, seconds: float, kill_every_s: float | None) -> tuple[dict[str, float], MemoryWatch]:
    """Runs the league for `seconds` after all workers have started; returns its figures and memory."""
    described = config(workers)
    setup = build_population(described)
    counter, ended, killed = GameCounter(), threading.Event(), list[float]()
    with tempfile.TemporaryDirectory() as root, Run.create(root, dump(described)) as run:
        at_once = described.backend.ray_tasks_at_once
        with closing(CountedBackend(setup.make_worker, workers, at_once=at_once)) as backend:
            until, cpu = [float("inf")], dict[str, float]()

            def stop() -> bool:
                if until[0] == float("inf") and len(counter.games) >= 4 * workers:  # all workers have started
                    until[0] = time.monotonic() + seconds
                    cpu.update(cpu_by_part())
                if time.monotonic() < until[0]:
                    return False
                until[0] = time.monotonic()  # later where a slow machine has finished no game in the time that counts
                return counter.per_second(until[0] - seconds * (1 - WARM_UP), until[0]) > 0

            watch = MemoryWatch(lambda: {"league driver": [os.getpid()], "league workers": busy_workers()})
            killer = threading.Thread(target=kill_workers, args=[kill_every_s or 1e9, ended, killed], daemon=True)
            killer.start()
            recorder = PopulationRecorder(setup.plan, run, counter)
            with watch:
                run_plan(setup.plan, backend, run, callback=recorder, stop=stop, grace_s=GRACE_S, as_completed=True)
            ended.set()
            cpu = {part: after - cpu[part] for part, after in cpu_by_part().items()}
            cpu["workers"] += sum(killed)
        done = Counter(line["task"]["name"] for line in read_lines(run.path / "tasks.jsonl"))
        end = until[0]
        games = sum(games for when, games in counter.games if when >= end - seconds)
        figures = {
            **{f"{part}_cpu": 1e6 * own / games for part, own in cpu.items()},
            "games_per_s": counter.per_second(end - seconds * (1 - WARM_UP), end),
            "tasks": done.total(),
            "members": len(setup.plan.population),
            "kills": len(killed),
            "lost_tasks": len(backend.submitted - set(done) - backend.pending) + done.total() - len(done),
            "replayed": replayed(build_population(described), run),
            "load_us": load_us(run.path),
        }
    return figures, watch


def replayed(setup: PopulationSetup, run: Run) -> int:
    """Returns the number of members that a resume finds."""
    return len(PlanRun(setup.plan, run, True).replay())


def load_us(run: Path) -> float:
    """Returns the CPU microseconds to load a member's network from a league's run, the least of ten rounds."""
    env, folders = make_vector_env(config(1).env), list((run / "members").iterdir())[:50]
    rounds = []
    for _ in range(10):
        start = time.process_time()
        for folder in folders:
            read_frozen_member(folder, env, [0])
        rounds.append((time.process_time() - start) / max(1, len(folders)))
    return 1e6 * min(rounds)


def soak(minutes: float, quick: bool) -> SoakResult:
    """Runs the league on one worker for a sixth of the time, then on many of which some are killed."""
    workers, kill_every_s = (4, 20.0) if quick else (16, 60.0)
    alone, _ = play(1, 10 * minutes, None)
    many, memory = play(workers, 50 * minutes, kill_every_s)
    cpu = ("workers_cpu", "driver_cpu", "ray_cpu")
    heads = ("league", "games/s", "tasks", "members", "kills", "lost tasks", *(f"{part} s/1M games" for part in cpu))
    rows = [
        (
            f"{n} workers",
            f"{f['games_per_s']:,.0f}",
            *(f"{f[k]:.0f}" for k in ("tasks", "members", "kills", "lost_tasks")),
            *(f"{f[k]:.2f}" for k in cpu),
        )
        for n, f in ((1, alone), (workers, many))
    ]
    figures = {
        "league_games_per_s_vs_one_worker": many["games_per_s"] / alone["games_per_s"],
        "lost_tasks": alone["lost_tasks"] + many["lost_tasks"],
        **{
            f"league_{name}": many[name]
            for name in ("games_per_s", "tasks", "members", "kills", "replayed", "load_us", *cpu)
        },
        **{f"league_alone_{name}": alone[name] for name in ("games_per_s", *cpu)},
    }
    return SoakResult(figures, heads, rows, memory.curves)
