"""Trains shipped configs with several seeds, compares scores with a bar, and writes docs/results-games.md with curves.

    python results/games/run.py                    all tasks, 3 seeds each: 39 rows, 2.5 hours of one core
    python results/games/run.py --list             the rows: published, measured here, open
    python results/games/run.py --only combat_vdn  rows whose names begin with this: 15 CPU seconds a seed
    python results/games/run.py --publish          publish what was measured here, and rewrite the page
    python results/games/run.py --report           only rewrite the page from the published rows
    python results/games/run.py --quick            one task and a twentieth of its steps: a smoke test

A row is a config in configs/games/ with a seed. Its run, in runs/learning/, is scored at the end by the config's
evaluation on held-out seeds (in Kuhn poker, by the exploitability of the policies' sampled play). Rows go to
runs/measured/games/rows.jsonl, also where they are published (results/games/measured/rows.jsonl), and each is printed
beside the published one.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np

from palestra.core.config import load, override, validate
from palestra.vector.config import VectorConfig

sys.path.append(str(Path(__file__).parents[2]))
from results.games.report import write_report
from results.games.tasks import TASKS, Task
from results.ledger import Ledger, Line, Rows, add_options, choose, finish
from results.pages import cpu_seconds

ROOT = Path("runs/learning")
SEEDS = 3
QUICK_ROWS = ("two_step_vdn/0",)


def table_rows() -> dict[str, tuple[Task, int]]:
    """Returns the task and seed of each row, by name."""
    rows = [(task, seed) for task in TASKS for seed in range(task.first, task.first + SEEDS)]
    return {f"{task.name}/{seed}": (task, seed) for task, seed in rows}


def settings_of(name: str, quick: bool) -> list[str]:
    """Returns what a row changes in its config."""
    task, seed = table_rows()[name]
    steps = int(load(task.config)["env_steps"])
    return [f"seed={seed}", *([f"env_steps={steps // 20}"] if quick else [])]


def check(quick: bool, name: str) -> None:
    """Raises ValueError if the row's config is wrong, or the package of its env is missing."""
    task, _ = table_rows()[name]
    if not (task.venv / "bin" / "palestra").exists():
        raise ValueError(f"needs {task.venv}: `make test-envs` makes it")
    if task.venv == Path(sys.prefix):  # configs of other envs can only be read where these are installed
        validate(VectorConfig, override(load(task.config), settings_of(name, quick)))


def run_folder(quick: bool, name: str) -> Path:
    return (ROOT / "quick" if quick else ROOT) / name.replace("/", "-")


def discard(quick: bool, name: str) -> None:
    shutil.rmtree(run_folder(quick, name), ignore_errors=True)


def train(quick: bool, name: str) -> Line:
    """Trains a run; returns its result. Raises RuntimeError if training fails."""
    task, seed = table_rows()[name]
    discard(quick, name)
    run = run_folder(quick, name)
    command = [str(task.venv / "bin" / "palestra"), "train", str(task.config), "--root", str(run.parent)]
    command += ["--name", run.name]
    command += [part for setting in settings_of(name, quick) for part in ("--set", setting)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise RuntimeError(f"{done.stdout[-2000:]}{done.stderr[-2000:]}")
    points = [(steps, float(f"{value:.4g}")) for steps, value in task.curve(run)]
    return {"task": task.name, "seed": seed, "score": points[-1][1], "cpu": round(cpu_seconds(run)), "curve": points}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    options = parser.parse_args()
    quick = options.quick
    names = choose(list(table_rows()), options.only or (QUICK_ROWS if quick else []))
    ledger = Ledger("games", lambda line: f"{line['score']:.3f}", quick)
    Rows(ledger, partial(train, quick), partial(check, quick), discard=partial(discard, quick)).run(names, options)
    if options.report or options.publish:
        write_report(list(ledger.published.values()), Path("docs/results-games.md"))
    elif not options.list:
        scores: dict[str, list[float]] = {}
        for name in names:
            scores.setdefault(table_rows()[name][0].name, []).append(ledger.here[name]["score"])
        figures = {name: float(np.mean(own)) for name, own in scores.items()}
        finish("learning", figures, {task.name: task.bar for task in TASKS if task.name in scores}, is_stored=False)


if __name__ == "__main__":
    main()
