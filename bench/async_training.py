"""Measures asynchronous against synchronous training on equal samples, in an env whose steps take 50 ms each.

    python bench/async_training.py            about 10 minutes on one core: staleness 0, 1 and 2, three seeds each
    python bench/async_training.py --quick    two steps and one seed: a smoke test

The task is Plan-Path for a planner and an executor (two adapters on the base `tiny`). Its env sleeps in each joint
step, as if it ran a program or asked a judge. Everything else is equal: steps, episodes, seeds. Runs with different
staleness alternate, so that other load on the machine slows all of them equally. Figures:

    wall_ratio_N     wall seconds of training with staleness N over those without, a mean over seeds
    success_N        held-out success after training, a mean over seeds
    success_gap_N    its distance from the success without staleness, over the half-width of the difference's 95 %
                     interval (Student's t over paired seeds; with one seed, the interval of two proportions)
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from palestra.core.config import dump, validate
from palestra.core.types import Metrics, Step
from palestra.envs.text.grid.plan_path import PlanPath
from palestra.runs import Run, read_lines
from palestra.runs.loop import Callback, read_clocks, run_training
from palestra.text.build.build import build
from palestra.text.config import TextConfig

sys.path.append(str(Path(__file__).parents[1]))
from results.ledger import finish
from results.pages import half_interval

STALENESS = (0, 1, 2)
STEPS, EVAL_EPISODES = 80, 300
TARGETS = {"wall_ratio_1": 0.7, "wall_ratio_2": 0.7, "success_gap_1": 1.0, "success_gap_2": 1.0}
console = Console(width=110)


class SlowPath(PlanPath):
    """Plan-Path that takes `seconds` for a step."""

    blocking = True

    def __init__(self, *, seconds: float = 0.05, split: str = "train") -> None:
        super().__init__(size=5, wall_density=0.1, max_turns=4, split=split)  # type: ignore[arg-type]
        self.seconds = seconds

    def step(self, actions: dict[str, Any]) -> Step:
        time.sleep(self.seconds)
        return super().step(actions)


class Stopwatch(Callback):
    """Wall and CPU seconds from the end of the first evaluation to the end of the last step."""

    def __init__(self) -> None:
        self.start = self.end = (0.0, 0.0)

    def on_eval(self, step: int, name: str, metrics: Mapping[str, Any]) -> None:
        if step < 0:
            self.start = read_clocks()

    def on_step(self, step: int, metrics: Mapping[str, Metrics]) -> None:
        self.end = read_clocks()

    @property
    def seconds(self) -> dict[str, float]:
        return {"wall": self.end[0] - self.start[0], "cpu": self.end[1] - self.start[1]}


def config(staleness: int, seed: int, steps: int) -> TextConfig:
    """The config of a run: eight episodes a step, each of up to eight joint steps with three sibling answers."""
    policy = {"type": "lora", "base": "tiny", "lr": 2e-3, "lr_schedule": "linear", "sampling": {"max_tokens": 9}}
    episodes = EVAL_EPISODES if steps == STEPS else 10  # fewer steps: a smoke test
    evaluation = {"episodes": episodes, "env": {"split": "test", "seconds": 0.0}}
    return validate(
        TextConfig,
        {
            "seed": seed,
            "steps": steps,
            "episodes": 8,
            "staleness": staleness,
            "env": {"type": "async_training:SlowPath"},
            "policies": {"planner": policy, "executor": policy},
            "algorithm": {"type": "grpo", "group_size": 3, "scale": "none", "entropy_coef": 0.03},
            "evals": {"test": evaluation},
            "checkpoint_every": 1000,
        },
    )


def trained(root: Path, staleness: int, seed: int, steps: int) -> dict[str, float]:
    """Trains a run; returns its wall and CPU seconds, and its held-out success after training."""
    settings, watch = config(staleness, seed, steps), Stopwatch()
    with Run.create(root, dump(settings), f"n{staleness}-{seed}") as run:
        run_training(build(settings), run, watch)
        before, after = (line["success"] for line in read_lines(run.path / "evals.jsonl"))
    line = watch.seconds | {"success": after}
    console.print(
        f"staleness {staleness}, seed {seed}: {line['wall']:.1f} s, {line['cpu']:.1f} CPU-s, success {before:.1%} -> "
        f"{after:.1%}"
    )
    return line


def half_width(ours: list[float], theirs: list[float]) -> float:
    """Half-width of the 95 % interval of the mean difference: over seeds, or with one seed over evaluation episodes."""
    if len(ours) > 1:
        return half_interval(np.array(ours) - np.array(theirs))
    return float(1.96 * sum(p * (1 - p) / EVAL_EPISODES for p in (ours[0], theirs[0])) ** 0.5)


def figures_of(results: dict[int, list[dict[str, float]]]) -> dict[str, float]:
    success = {n: [line["success"] for line in lines] for n, lines in results.items()}
    figures = {f"success_{n}": float(np.mean(values)) for n, values in success.items()}
    for n in STALENESS[1:]:
        pairs = zip(results[n], results[0], strict=True)
        figures[f"wall_ratio_{n}"] = float(np.mean([ours["wall"] / theirs["wall"] for ours, theirs in pairs]))
        gap = abs(figures[f"success_{n}"] - figures["success_0"])
        figures[f"success_gap_{n}"] = gap / max(half_width(success[n], success[0]), 1e-9)
    return figures


def table_of(results: dict[int, list[dict[str, float]]]) -> Table:
    table = Table(title="equal samples, 50 ms an env step", title_justify="left")
    for heading in ("staleness", "seconds", "CPU seconds", "held-out success"):
        table.add_column(heading, justify="right")
    for n, lines in results.items():
        success = [line["success"] for line in lines]
        said = f"{np.mean(success):.1%}" + (f" ± {half_interval(success):.1%}" if len(success) > 1 else "")
        seconds = (f"{np.mean([line[clock] for line in lines]):.1f}" for clock in ("wall", "cpu"))
        table.add_row(str(n), *seconds, said)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two steps and one seed")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    steps, seeds = (2, 1) if options.quick else (STEPS, options.seeds)
    results: dict[int, list[dict[str, float]]] = {n: [] for n in STALENESS}
    with tempfile.TemporaryDirectory() as name:
        for seed in range(seeds):
            for n in STALENESS:
                results[n].append(trained(Path(name), n, seed, steps))
    console.print(table_of(results))
    finish("async_training", figures_of(results), TARGETS, is_stored=not options.quick)


if __name__ == "__main__":
    main()
