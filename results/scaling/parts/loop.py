"""Measures a training step in one process, in several processes of this machine and on Ray, and its phases.

    python results/scaling/parts/loop.py            about five minutes on two cores; prints a table, and JSON
    python results/scaling/parts/loop.py --quick    about two: fewer steps of fewer episodes
    python results/scaling/parts/loop.py --quick --only ray_2 --copy-every 1

Each way trains the same run of two adapters on the base `tiny` for some steps; figures are medians over all steps but
the first, which warms up. Ray's cluster is started here, so that its actors share this machine's cores.
Figures, where WAY is `inline`, `local_1`, `local_2`, `ray_1` or `ray_2` (backend and number of workers):

    WAY_step_s       wall seconds of a step
    WAY_rollout_s    wall seconds of the rollout, until the last episode has arrived
    WAY_train_s      wall seconds of training all learners
    WAY_driver_s     CPU seconds of this process in a step
    WAY_busy         share of the rollout's seconds in which a worker played, a mean over workers
    WAY_worker_s     CPU seconds of all workers in a step (without the learners' actors on Ray)
    WAY_sent_mb      on Ray, MB of adapters that a step puts into the object store for all workers
    WAY_returned_mb  on Ray, MB of episodes that workers return in a step
    WAY_copied_mb    on Ray, MB that the learners' actors return in a step, a mean: adapters, and copies of states
    WAY_start_s      wall seconds from the start to the end of the first step, with starting processes and loading bases
    ahead_step_s     wall seconds of a step with two local workers and staleness 1
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from palestra.core.config import dump, validate
from palestra.core.types import TEAM, Metrics
from palestra.parallel.config import COPY_EVERY
from palestra.parallel.ray.workers import traffic
from palestra.runs import Run, read_lines
from palestra.runs.loop import Callback, run_training
from palestra.text.build.distributed import build
from palestra.text.config import TextConfig
from palestra.text.training.episode_tasks import DistributedSource
from palestra.text.training.recoverable_weights import trainer_traffic
from palestra.text.training.trainer import TextTrainer

WAYS: dict[str, dict[str, Any]] = {
    "inline": {"type": "inline"},
    "local_1": {"type": "local", "workers": 1},
    "local_2": {"type": "local", "workers": 2},
    "ray_1": {"type": "ray", "workers": 1},
    "ray_2": {"type": "ray", "workers": 2},
}
SECONDS = ("step_s", "rollout_s", "train_s", "driver_s", "worker_s", "busy", "start_s")
FIGURES = (*SECONDS, "sent_mb", "returned_mb", "copied_mb")


def config(backend: dict[str, Any], quick: bool, staleness: int = 0) -> TextConfig:
    speech = {"type": "lora", "base": "tiny", "batch_size": 256, "sampling": {"max_tokens": 9}}
    tree = {
        "steps": 4 if quick else 8,
        "episodes": 16 if quick else 32,
        "env": {"type": "plan_path", "size": 7, "wall_density": 0.1, "team": "planner_executor", "max_turns": 4},
        "policies": {"planner": speech, "executor": speech},
        "algorithm": {"type": "grpo", "branch_at": "turn", "continue_from": "best", "group_size": 8, "scale": "none"},
        "checkpoint_every": 1000,
        "staleness": staleness,
        "backend": backend,
    }
    return validate(TextConfig, tree)


class Stopwatch(Callback):
    """At the end of each step: seconds since the start, total wall and CPU seconds of workers, and MB sent, returned
    and copied so far."""

    def __init__(self, setup: TextTrainer) -> None:
        source = setup.stages[0].source
        self.troupe = source.dispatcher if isinstance(source, DistributedSource) else None
        self.start = time.perf_counter()
        self.ends: list[float] = []
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self.sent: list[float] = []
        self.returned: list[float] = []
        self.copied: list[float] = []

    def on_step(self, step: int, metrics: Mapping[str, Metrics]) -> None:
        self.ends.append(time.perf_counter() - self.start)
        self.wall.append(self.troupe.wall_s if self.troupe else 0.0)
        self.cpu.append(self.troupe.cpu_s if self.troupe else 0.0)
        self.sent.append(traffic["put_bytes"] / 1e6)
        self.returned.append(traffic["returned_bytes"] / 1e6)
        self.copied.append(trainer_traffic["returned_bytes"] / 1e6)


def way(backend: dict[str, Any], quick: bool, staleness: int = 0) -> dict[str, float]:
    """Trains a run with one backend; returns its figures."""
    described = config(backend, quick, staleness)
    with tempfile.TemporaryDirectory() as root, Run.create(root, dump(described)) as run:
        began = time.perf_counter()
        setup = build(described)
        watcher = Stopwatch(setup)
        run_training(setup, run, watcher)
        lines = [line for line in read_lines(run.path / "timings.jsonl") if line["policy"] == TEAM][1:]
    workers = max(1, described.backend.num_workers)
    waits = "rollout_s" if staleness == 0 else "wait_s"
    shares = [own / (workers * line[waits]) for own, line in zip(between(watcher.wall), lines, strict=True)]
    return {
        "step_s": statistics.median(between(watcher.ends)),
        "rollout_s": statistics.median(line[waits] for line in lines),
        "train_s": statistics.median(line["train_s"] for line in lines),
        "driver_s": statistics.median(sum(v for k, v in line.items() if k.endswith("cpu_s")) for line in lines),
        "worker_s": statistics.median(between(watcher.cpu)),
        "busy": statistics.median(shares) if watcher.troupe else 1.0,
        "start_s": watcher.start - began + watcher.ends[0],
        "sent_mb": statistics.median(between(watcher.sent)),
        "returned_mb": statistics.median(between(watcher.returned)),
        "copied_mb": statistics.mean(between(watcher.copied)),
    }


def between(readings: list[float]) -> list[float]:
    """Differences between consecutive readings."""
    return [after - before for before, after in itertools.pairwise(readings)]


def measure(quick: bool, only: str | None = None, copy_every: int = COPY_EVERY) -> dict[str, float]:
    """All figures, or those of one way if `only` names it; prints a table of them."""
    table, found = Table("way", *FIGURES), dict[str, float]()
    for name, backend in WAYS.items():
        if only not in (None, name):
            continue
        figures = way({**backend, "copy_every": copy_every}, quick)
        table.add_row(name, *(f"{figures[key]:.2f}" for key in FIGURES))
        found |= {f"{name}_{key}": figures[key] for key in FIGURES}
    if only is None:
        found["ahead_step_s"] = way(WAYS["local_2"], quick, staleness=1)["step_s"]
    Console().print(table)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", choices=WAYS)
    parser.add_argument("--copy-every", type=int, default=COPY_EVERY, help="optimizer steps between copies of states")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    arguments = parser.parse_args()
    figures = measure(arguments.quick, arguments.only, arguments.copy_every)
    print(json.dumps(figures))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures))
