"""Results of a shipped grid: trains its cells, compares their scores with the published ones, writes a docs page.

    python results/grid/run.py cooperation                 all cells: 360, about 40 CPU minutes of play and learning
    python results/grid/run.py cooperation --list          the cells: published, measured here, open
    python results/grid/run.py cooperation --only two_step/qmix/  some of them: seconds a cell
    python results/grid/run.py cooperation --collect RUNS  scores of cells that `palestra grid` trained in RUNS
    python results/grid/run.py cooperation --publish       publish what was measured here, and write the page
    python results/grid/run.py cooperation --report        only write the page from the published rows
    python results/grid/run.py --quick                     one short cell: a smoke test

A row is a task, an algorithm and a seed. Rows go to runs/measured/grid/NAME.jsonl, also where they are published
(results/grid/measured/NAME.jsonl), and each is printed beside the published one; runs are in runs/grids/NAME/. The page
docs/results-grid.md is of the grid cooperation; the tables of other pages with rows of a grid are written by hand.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

from palestra.api.experiments.grid import GridConfig, cell_name, grid_cells, load_grid
from palestra.api.experiments.results import NotANumber, final_value
from palestra.api.experiments.schedule import check_cells, finished_cells
from palestra.runs.headline import headline_eval
from palestra.runs.series import RunLogs, series_of

sys.path.append(str(Path(__file__).parents[2]))
from results.grid.report import PAGE_GRID, write_page
from results.ledger import Ledger, Line, Rows, add_options, choose, finish
from results.pages import cpu_seconds

CONFIGS = Path(__file__).parent / "configs"


def collect(grid: GridConfig, runs: Path) -> list[Line]:
    """Returns a line for each finished run: task, algorithm, seed, metric, the metric's last value, CPU seconds of
    rollouts and updates, and the metric's curve as [env steps, value] for each evaluation. The value is None, without a
    curve, if the metric ended as NaN."""
    lines, done = [], finished_cells(runs)
    for task, algorithm, seed in grid.keys:
        run = runs / cell_name(task, algorithm, seed)
        if run.name in done:
            logs, own = RunLogs(run), grid.tasks[task]
            score: Line = {"metric": own.metric, "value": None}
            curve: list[list[float]] = []
            try:
                score["metric"], score["value"] = final_value(logs, own.eval, own.metric)
            except NotANumber as error:
                print(f"without a score: {error}")
            else:
                curve = metric_curve(logs, own.eval or headline_eval(list(logs.evals)), score["metric"])
            cpu = round(cpu_seconds(run), 1)
            lines.append({"task": task, "algorithm": algorithm, "seed": seed, **score, "cpu": cpu, "curve": curve})
    return lines


def grid_file(name: str) -> Path:
    return CONFIGS / f"{name}.yaml"


def runs_of(name: str, quick: bool) -> Path:
    """Returns the folder of the grid's runs, which `palestra grid` names after the grid."""
    root = Path("runs/grids/quick" if quick else "runs/grids")
    return root / load_grid(grid_file(name)).name


def check(grid: str, name: str) -> None:
    """Raises ValueError if the cell's config is wrong."""
    cells = grid_cells(load_grid(grid_file(grid)), grid_file(grid).parent, [name.replace("/", "-")])
    check_cells(cells, runs_of(grid, False), load_grid(grid_file(grid)).tasks)


def discard(grid: str, quick: bool, name: str) -> None:
    """Removes the cell's run, and what the grid knows of it."""
    runs, cell = runs_of(grid, quick), name.replace("/", "-")
    shutil.rmtree(runs / cell, ignore_errors=True)
    statuses = runs / "cells.jsonl"
    if statuses.exists():
        kept = [line for line in statuses.read_text().splitlines(keepends=True) if f'"cell": "{cell}"' not in line]
        statuses.write_text("".join(kept))


def train(grid: str, quick: bool, name: str) -> Line:
    """Trains a cell by `palestra grid`; returns its result. Raises RuntimeError if training fails."""
    runs, cell = runs_of(grid, quick), name.replace("/", "-")
    command = [sys.executable, "-m", "palestra", "grid", str(grid_file(grid)), "--only", cell]
    command += ["--root", str(runs.parent)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise RuntimeError(f"{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return next(line for line in collect(load_grid(grid_file(grid)), runs) if row_name(line) == name)


def row_name(line: Line) -> str:
    return f"{line['task']}/{line['algorithm']}/{line['seed']}"


def figure(line: Line) -> str:
    return "no number" if line["value"] is None else f"{line['metric']} {line['value']:.4g}"


def metric_curve(logs: RunLogs, evaluation: str | None, metric: str) -> list[list[float]]:
    """Returns [env steps, value] of a metric for each line of an evaluation."""
    series = series_of(logs.evals[evaluation], metric)
    steps = (series.x + 1).astype(int) * env_steps_per_step(logs)
    return [[step, float(f"{y:.5g}")] for step, y in zip(steps.tolist(), series.y, strict=True)]


def env_steps_per_step(logs: RunLogs) -> int:
    """Returns the joint steps in one training step of a run."""
    line = next(line for line in logs.metrics if "env_steps" in line)
    return round(line["env_steps"] / (line["step"] + 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", default=PAGE_GRID, help="a file of configs/, without .yaml")
    add_options(parser)
    parser.add_argument("--collect", type=Path, metavar="RUNS", help="folder of runs that `palestra grid` trained")
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="folder of the page")
    options = parser.parse_args()
    grid, quick = load_grid(grid_file(options.name)), options.quick
    names = [f"{task}/{algorithm}/{seed}" for task, algorithm, seed in grid.keys]
    names = choose(names, options.only or (names[:1] if quick else []))
    ledger = Ledger("grid", figure, quick, name=options.name)
    if options.collect:
        for line in collect(grid, options.collect):
            ledger.add(row_name(line), line)
            print(ledger.compared(row_name(line)))
        return
    measure = partial(train, options.name, quick)
    removed = partial(discard, options.name, quick)
    Rows(ledger, measure, partial(check, options.name), discard=removed).run(names, options)
    if (options.report or options.publish) and options.name != PAGE_GRID:
        print(f"no page is written: docs/results-grid.md is of {PAGE_GRID}, pages with {options.name} are by hand")
    elif options.report or options.publish:
        print(write_page(grid, list(ledger.published.values()), options.docs))
    elif not options.list:
        figures = {name: ledger.here[name]["value"] for name in names if ledger.here[name]["value"] is not None}
        finish("grids", figures, {}, is_stored=False)


if __name__ == "__main__":
    main()
