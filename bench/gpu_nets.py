"""Measures where a GPU trains small networks faster than the CPU: env steps per second of rollouts and updates.

    python bench/gpu_nets.py            some minutes; without CUDA only the CPU is measured
    python bench/gpu_nets.py --quick    one env and number of games, measured once: a smoke test

MAPPO on simple_spread and independent PPO on Overcooked's cramped room (palestra's own envs), with two networks (policy
and critic) of two hidden layers, and two passes over each rollout in four minibatches. Envs run on one CPU core in both
cases. On the CPU, networks run with one thread and with half as many threads as cores, at most 8; the faster counts
(--quick: one thread for 64 games of narrow networks, otherwise the larger number). Figures, for each env, width and
number of games:

    *_cpu, *_cuda      env steps per second
    *_cuda_over_cpu    their ratio
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from palestra.core.config import validate
from palestra.vector.build.build import check_vector_run
from palestra.vector.config import VectorConfig

sys.path.append(str(Path(__file__).parents[1]))
from results.ledger import finish

ENVS: dict[str, dict[str, Any]] = {
    "simple_spread": {"type": "simple_spread"},
    "overcooked": {"type": "overcooked", "layout": "cramped_room"},
}
PRESETS = {"simple_spread": "mappo", "overcooked": "ppo"}
GAMES, WIDTHS = (64, 1024, 8192), (64, 512)
QUICK_LENGTHS = {64: 25, 1024: 8, 8192: 4}  # steps of a rollout
LENGTH = 25
SLOW_S = 1.5  # with --quick an update that takes longer is not repeated
console = Console(width=120)


@dataclass(frozen=True)
class Setting:
    """One row of the table: env, width of the hidden layers, parallel games, and steps of a rollout (`length`)."""

    env: str
    width: int
    games: int
    length: int

    @property
    def name(self) -> str:
        return f"{self.env}_{self.width}_{self.games}"

    def config(self, device: str, threads: int) -> VectorConfig:
        algorithm = {"type": PRESETS[self.env], "rollout_length": self.length, "value_norm": False}
        algorithm |= {"epochs": 2, "minibatches": 4}
        tree = {
            "env": ENVS[self.env] | {"num_envs": self.games},
            "policies": {"default": {"type": "net", "hidden": [self.width, self.width]}},
            "algorithm": algorithm,
            "device": device,
            "torch_threads": threads,
        }
        return validate(VectorConfig, tree)


@dataclass(frozen=True)
class Measured:
    """Env steps per second, and the share of the time that rollouts took."""

    steps_per_s: float
    rollout_share: float


def measure(setting: Setting, device: str, threads: int, seconds: float, quick: bool) -> Measured:
    """Trains for `seconds`; returns the speed. A first rollout and update are not counted; if they are slow on a CPU
    with `quick`, only they are."""
    trainer = check_vector_run(setting.config(device, threads))
    rollout_s, update_s, updates = 0.0, 0.0, 0

    def step(number: int) -> float:
        nonlocal rollout_s, update_s, updates
        start = time.perf_counter()
        players = trainer.learner.rollout_policies(0.0)
        batch = trainer.rollout.collect(players, setting.length, number)
        middle = time.perf_counter()
        trainer.learner.update(batch, 0.0)
        trainer.learner.check_finite()
        end = time.perf_counter()
        rollout_s, update_s, updates = rollout_s + middle - start, update_s + end - middle, updates + 1
        return end - start

    if not (step(0) > SLOW_S and quick and device == "cpu"):
        rollout_s, update_s, updates = 0.0, 0.0, 0
        while not updates or rollout_s + update_s < seconds:
            step(updates + 1)
    trainer.close()
    whole = rollout_s + update_s
    return Measured(updates * setting.length * setting.games / whole, rollout_s / whole)


def on_cpu(setting: Setting, seconds: float, quick: bool) -> Measured:
    """Measures with one thread and with half as many as cores, at most 8; returns the faster. With `quick`, one of
    the two."""
    cores = max(1, min(8, len(os.sched_getaffinity(0)) // 2))
    threads: Sequence[int] = sorted({1, cores})
    if quick:
        threads = [1 if setting.width == min(WIDTHS) and setting.games == min(GAMES) else cores]
    return max((measure(setting, "cpu", each, seconds, quick) for each in threads), key=lambda found: found.steps_per_s)


def settings(quick: bool, games: Sequence[int], envs: Sequence[str]) -> Iterator[Setting]:
    for env in envs:
        for width in WIDTHS:
            for number in games:
                yield Setting(env, width, number, QUICK_LENGTHS.get(number, LENGTH) if quick else LENGTH)


def cells(measured: Measured) -> list[str]:
    return [f"{measured.steps_per_s:,.0f}", f"{measured.rollout_share:.0%}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one env and number of games, once")
    parser.add_argument("--games", type=int, nargs="+", default=None, help=f"default: {GAMES}")
    parser.add_argument("--envs", nargs="+", choices=list(ENVS), default=None)
    options = parser.parse_args()
    options.games = options.games or (GAMES[:1] if options.quick else GAMES)
    options.envs = options.envs or list(ENVS)[: 1 if options.quick else None]
    seconds, cuda = 0.5 if options.quick else 8.0, torch.cuda.is_available()
    console.print(f"GPU: {torch.cuda.get_device_name()}" if cuda else "no CUDA device: only the CPU is measured")
    for env in options.envs:  # compiles the env and the CPU's kernels, and starts CUDA
        for device in ("cpu", "cuda") if cuda else ("cpu",):
            measure(Setting(env, 8, 8, 2), device, 1, 0.0, options.quick)
    table, figures = Table("env", "units", "games", title="env steps per second"), {}
    for column in ("CPU", "in rollouts", "CUDA", "in rollouts", "CUDA / CPU")[: 5 if cuda else 2]:
        table.add_column(column, justify="right")
    for setting in settings(options.quick, options.games, options.envs):
        cpu = on_cpu(setting, seconds, options.quick)
        row = [setting.env, str(setting.width), f"{setting.games:,}", *cells(cpu)]
        figures[f"{setting.name}_cpu"] = cpu.steps_per_s
        if cuda:
            gpu = measure(setting, "cuda", 1, seconds, options.quick)
            ratio = gpu.steps_per_s / cpu.steps_per_s
            figures |= {f"{setting.name}_cuda": gpu.steps_per_s, f"{setting.name}_cuda_over_cpu": ratio}
            row += [*cells(gpu), f"{ratio:.2f}"]
        table.add_row(*row)
    console.print(table)
    finish("gpu_nets", figures, {}, is_stored=not options.quick)


if __name__ == "__main__":
    main()
