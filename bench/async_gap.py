"""Measures how stale episodes may be (the gaps at which a task is still learned) and what waiting for envs costs.

    python bench/async_gap.py               gaps 0 to 24, two seeds each, and an env that waits 1 s a step
    python bench/async_gap.py --quick       gaps 0 and 2, one seed, an eighth of the steps
    python bench/async_gap.py --task duel   gaps 0 to 12 of the 16 steps of a task of results/algorithms/run.py, by GRPO

Gap: the value N of `staleness: N`. An agent sees a bit after noise and must answer with the other bit (an adapter on a
random base of 0.1M parameters; chance is 0.5). The number of steps is the same for all gaps and kinds of in-flight
updates. A gap counts as learned if the held-out success, a mean over seeds, is at least 0.9 of that without staleness.
With `--task` the same is measured on a shipped task, scored on split dev as in results/algorithms/run.py.

Waiting: an episode has two such questions, and each step waits 1 s on a thread, without CPU time. Reported are wall
seconds of training with staleness N over those without. Figures:

    success_U_N      held-out success (of a task: score) after training with in-flight updates U (none, keep_kv,
                     recompute_kv) and gap N
    largest_gap_U    largest gap that is learned, if all smaller ones that were tried are learned too
    wall_ratio_U_N   wall seconds over those of synchronous training, with the env that waits
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from async_training import Stopwatch
from rich.console import Console
from rich.table import Table

from palestra.core.config import dump, validate
from palestra.core.types import Step
from palestra.envs.base import Env
from palestra.runs import Run, read_lines
from palestra.runs.loop import run_training
from palestra.testing import tiny_lm
from palestra.text.build.build import build
from palestra.text.config import TextConfig

sys.path.append(str(Path(__file__).parents[1]))
from results.algorithms.methods import TASKS, Task, find_method, settings_of, shorten, tuned_rates
from results.algorithms.runs import curve
from results.ledger import finish

GAPS, TASK_GAPS, QUICK_GAPS = (0, 2, 4, 8, 16, 24), (0, 1, 2, 4, 8, 12), (0, 2)
WAITING_GAPS, WAIT_S = (0, 1, 2, 4), 1.0
UPDATES = ("none", "keep_kv", "recompute_kv")
BASE = "base"  # folder of the random base
LEARNED_SHARE = 0.9  # of the success without staleness
STEPS, EVAL_EPISODES = 24, 100
Results = dict[tuple[str, int], list[dict[str, float]]]
Settings = Callable[[str, int, int], TextConfig]  # arguments: kind of in-flight updates, gap, seed
console = Console(width=110)


class Contrary(Env):
    """An agent sees noise and a bit, and answers with the other bit: the parity of its answer's first character. An
    episode has `turns` such questions; its success is that of the last. Each step takes `seconds`."""

    name = "contrary"
    seats = ("agent",)
    roles = {"agent": "s"}
    blocking = True

    def __init__(self, *, turns: int = 1, seconds: float = 0.0, split: str = "train") -> None:
        self.turns, self.seconds, self.split = turns, seconds, split

    def reset(self, seed: int) -> Step:
        self.rng, self.left = random.Random(f"{self.split} {seed}"), self.turns
        return Step(self._ask())

    def step(self, actions: dict[str, Any]) -> Step:
        time.sleep(self.seconds)
        text, self.left = actions["agent"], self.left - 1
        right = bool(text) and ord(text[0]) % 2 != self.bit
        return Step(self._ask() if self.left else {}, {"agent": float(right)}, info={"success": right})

    def _ask(self) -> dict[str, str]:
        self.bit = self.rng.randrange(2)
        return {"agent": "".join(self.rng.choices("abcdefgh", k=6)) + str(self.bit)}


def config(base: Path, update: str, gap: int, seed: int, steps: int, **changes: Any) -> TextConfig:
    policy = {"type": "lora", "base": str(base), "lr": 1e-2, "sampling": {"max_tokens": 2, "stop_at_eos": False}}
    tree = {
        "seed": seed,
        "steps": steps,
        "episodes": 16,
        "staleness": gap,
        "in_flight_updates": update if gap else "none",
        "env": {"type": "async_gap:Contrary"},
        "policies": {"agent": policy},
        "algorithm": {"type": "grpo", "group_size": 8},
        "evals": {"test": {"episodes": EVAL_EPISODES, "env": {"split": "test", "seconds": 0.0}}},
        "checkpoint_every": 1000,
        "device": "cpu",
    }
    return validate(TextConfig, tree | changes)


def task_config(task: Task, update: str, gap: int, seed: int, quick: bool) -> TextConfig:
    """The config of a GRPO run on a task of results/algorithms/run.py, with the learning rate used there."""
    rate = tuned_rates().get(task.name, {}).get("GRPO", task.rates[0])
    tree = settings_of(task, find_method(task, "GRPO"), rate, seed)
    tree |= {"staleness": gap, "in_flight_updates": update if gap else "none", "device": "cpu"}
    for settings in tree["evals"].values():
        settings["every"] = tree["steps"]
    return validate(TextConfig, shorten(tree) if quick else tree)


def trained(folder: Path, settings: TextConfig, label: str, task: Task | None = None) -> dict[str, float]:
    """Trains a run; returns its wall and CPU seconds, its held-out success or score, and its tokens' mean staleness."""
    watch = Stopwatch()
    with Run.create(folder, dump(settings), label) as run:
        run_training(build(settings), run, watch)
        if task:
            before, after = (score for _, score in curve(task, run.path))
        else:
            before, after = (line["success"] for line in read_lines(run.path / "evals.jsonl"))
        lines = [line for line in read_lines(run.path / "metrics.jsonl") if line["policy"] in settings.policies]
    ages = [line.get("token_staleness", line.get("staleness", 0.0)) for line in lines]
    line = watch.seconds | {"success": after, "age": float(np.mean(ages))}
    console.print(f"{label}: {line['wall']:.1f} s, {line['cpu']:.1f} CPU-s, {before:.3f} -> {after:.3f}")
    return line


def measure_gaps(folder: Path, gaps: tuple[int, ...], seeds: int, settings: Settings, task: Task | None) -> Results:
    """Results of runs with each kind of in-flight updates and each gap; gap 0 runs once a seed, as "none"."""
    results: Results = {}
    for seed in range(seeds):
        for update in UPDATES:
            for gap in gaps if update == "none" else gaps[1:]:
                line = trained(folder, settings(update, gap, seed), f"gap-{update}-{gap}-{seed}", task)
                results.setdefault((update, gap), []).append(line)
    return results


def measure_waiting(folder: Path, gaps: tuple[int, ...], steps: int) -> Results:
    """Results of runs in an env that waits, one for each gap and kind of in-flight updates."""
    changes = {"episodes": 4, "env": {"type": "async_gap:Contrary", "turns": 2, "seconds": WAIT_S}}
    changes["evals"] = {"test": {"episodes": 4, "env": {"split": "test", "seconds": 0.0}}}
    results: Results = {}
    for gap in gaps:
        for update in UPDATES if gap else UPDATES[:1]:
            settings = config(folder / BASE, update, gap, 0, steps, **changes)
            results[update, gap] = [trained(folder, settings, f"wait-{update}-{gap}")]
    return results


def mean(results: Results, key: tuple[str, int], what: str) -> float:
    return float(np.mean([line[what] for line in results[key]]))


def largest_gap(results: Results, update: str) -> int:
    """The largest gap that is learned, if all smaller ones that were tried are learned too; 0 if none is."""
    bar, largest = LEARNED_SHARE * mean(results, ("none", 0), "success"), 0
    for gap in sorted(gap for own, gap in results if own == update and gap):
        if mean(results, (update, gap), "success") < bar:
            break
        largest = gap
    return largest


def figures_of(gaps: Results, waiting: Results) -> dict[str, float]:
    figures = {f"success_{update}_{gap}": mean(gaps, (update, gap), "success") for update, gap in gaps}
    figures |= {f"largest_gap_{update}": float(largest_gap(gaps, update)) for update in UPDATES}
    if not waiting:
        return figures
    sync = mean(waiting, ("none", 0), "wall")
    return figures | {f"wall_ratio_{u}_{n}": mean(waiting, (u, n), "wall") / sync for u, n in waiting if n}


def print_tables(gaps: Results, waiting: Results) -> None:
    table = Table(title="held-out success by gap; mean staleness of tokens", title_justify="left")
    table.add_column("gap", justify="right")
    for update in UPDATES:
        table.add_column(update, justify="right")
    for gap in sorted({gap for _, gap in gaps}):
        cells = [(update, gap) for update in UPDATES if (update, gap) in gaps]
        shown = [f"{mean(gaps, cell, 'success'):.3f} ({mean(gaps, cell, 'age'):.1f})" for cell in cells]
        table.add_row(str(gap), *shown)
    console.print(table)
    if not waiting:
        return
    table = Table(title=f"an env that waits {WAIT_S:.0f} s a step", title_justify="left")
    for heading in ("updates", "gap", "seconds", "ratio"):
        table.add_column(heading, justify="right")
    for update, gap in waiting:
        wall = mean(waiting, (update, gap), "wall")
        table.add_row(update, str(gap), f"{wall:.1f}", f"{wall / mean(waiting, ('none', 0), 'wall'):.2f}")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="gaps 0 and 2, one seed, an eighth of the steps")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument(
        "--task",
        choices=[task.name for task in TASKS],
        help="a shipped task in place of the toy task; skips the env that waits",
    )
    options = parser.parse_args()
    seeds = 1 if options.quick else options.seeds
    with tempfile.TemporaryDirectory() as name:
        if options.task:
            task = next(task for task in TASKS if task.name == options.task)
            chosen, settings = (
                QUICK_GAPS if options.quick else TASK_GAPS,
                partial(task_config, task, quick=options.quick),
            )
            gaps, waiting = measure_gaps(Path(name), chosen, seeds, settings, task), Results()
        else:
            gaps, waiting = measure_toy(Path(name), seeds, options.quick)
    print_tables(gaps, waiting)
    bench = f"async_gap_{options.task}" if options.task else "async_gap"
    finish(bench, figures_of(gaps, waiting), {}, is_stored=not options.quick)


def measure_toy(folder: Path, seeds: int, quick: bool) -> tuple[Results, Results]:
    """Results of the toy task by gap, and of the env that waits, on a random base."""
    engine = tiny_lm(initializer_range=0.2)  # a wide range, since the last layer is not trained
    engine.model.save_pretrained(folder / BASE)
    engine.tokenizer.save_pretrained(folder / BASE)
    waiting = measure_waiting(folder, QUICK_GAPS if quick else WAITING_GAPS, 2 if quick else 10)
    settings = partial(config, folder / BASE, steps=STEPS // 8 if quick else STEPS)
    return measure_gaps(folder, QUICK_GAPS if quick else GAPS, seeds, settings, None), waiting


if __name__ == "__main__":
    main()
