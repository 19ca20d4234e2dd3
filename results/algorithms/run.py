"""Compares algorithms for language agents at equal samples on two small tasks and one of a real model: scores and cost.

    python results/algorithms/run.py                 5 seeds of each method: 290 rows, 7 hours of one core
    python results/algorithms/run.py --list          the rows: published, measured here, open
    python results/algorithms/run.py --processes 11  11 runs at once, one torch thread each
    python results/algorithms/run.py --only duel/GRPO/ "duel/online DPO/0"  half a CPU minute a row
    python results/algorithms/run.py --only real/ --device cuda --processes 4
    python results/algorithms/run.py --publish       publishes what was measured here
    python results/algorithms/run.py --report        prints the tables of the published rows and draws the picture
    python results/algorithms/run.py --quick         two small steps, one seed, no tuning: a smoke test

`sums` is cooperative, `duel` zero-sum (both with a base of a million parameters, on the CPU); `real` is a single agent
on SmolLM2-135M-Instruct, on `--device`. Configs are in results/algorithms/configs/. Several processes on one GPU slow
each other down unless CUDA's multi-process service runs (docs/scaling/gpu.md). Tuned learning rates are in rates.yaml;
a method without one gets the better of two rates on split dev, tried with two seeds that are not counted. `real` has
one rate, which is not tuned. Scores are on split test. All methods run with one seed before the next seed begins, so
that an interrupted comparison has equally many seeds of each. A row is a run; it goes to
runs/measured/algorithms/rows.jsonl, also where it is published (results/algorithms/measured/rows.jsonl), and is printed
beside the published one. Run folders are in runs/algorithms/. A run that fails does not stop the others.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import shutil
import sys
from pathlib import Path

from palestra.core.config import validate
from palestra.text.config import TextConfig

sys.path.append(str(Path(__file__).parents[2]))
from results.algorithms import report
from results.algorithms.jobs import Schedule, run_all
from results.algorithms.methods import METHODS, TASKS, settings_of
from results.algorithms.runs import TUNING, Job, Line, Place, by_job
from results.ledger import Ledger, add_options, choose, finish, provenance

ROOT = Path("runs/algorithms")
PICTURE = Path("docs/results-algorithms.png")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--device", default="cpu", help="device of the task real: cpu or cuda")
    parser.add_argument("--unsafe", action="store_true", help="run the programs that models write without a sandbox")
    parser.add_argument("--no-tune", action="store_true", help="use the lowest learning rate of a task for all methods")
    return parser.parse_args()


def row_names(seeds: int) -> list[str]:
    """Returns the names of the rows, without their learning rates."""
    pairs = [(task, method) for method in METHODS for task in TASKS if task.name in method.tasks]
    return [Job(task.name, method.name, 0.0, seed).row for seed in range(seeds) for task, method in pairs]


def make_schedule(options: argparse.Namespace, ledger: Ledger) -> Schedule:
    """Returns the schedule of the chosen rows. Raises SystemExit if a config is wrong or a name matches nothing."""
    seeds = 1 if options.quick else options.seeds
    rows = choose(row_names(seeds), options.only or (["duel/GRPO/"] if options.quick else []))
    parts = {tuple(row.split("/")[:2]) for row in rows}
    tasks = [task for task in TASKS if any(name == task.name for name, _ in parts)]
    methods = [method for method in METHODS if any((task, method.name) in parts for task in method.tasks)]
    for task in tasks:
        for method in methods:
            if task.name in method.tasks:
                try:
                    validate(TextConfig, settings_of(task, method, task.rates[0], 0))
                except ValueError as error:
                    raise SystemExit(f"{task.name}/{method.name}: {error}") from error
    root = ROOT / "quick" if options.quick else ROOT / "runs"
    place = Place(root, options.device, options.quick, options.unsafe)
    return Schedule(tasks, methods, seeds, place, not (options.no_tune or options.quick), ledger, rows)


def figure(line: Line) -> str:
    return f"{line['score']:.3f}" if "score" in line else f"{line['dev']:.3f} on dev"


def show_report(ledger: Ledger, quick: bool) -> None:
    """Prints the tables and draws the picture, of the published runs."""
    lines = list((ledger.here if quick else ledger.published).values())
    have = by_job(lines)
    tasks = [task for task in TASKS if any(job.task == task.name for job in have)]
    print("\n".join(filter(None, [*(report.table(task, have) for task in tasks), report.over_tasks(have)])))
    print(provenance(lines))
    report.draw(have, ROOT / "quick.png" if quick else PICTURE)


def main() -> None:
    options = parse()
    ledger = Ledger("algorithms", figure, options.quick)
    if options.report:
        return show_report(ledger, options.quick)
    schedule = make_schedule(options, ledger)
    names = [str(job) for job in schedule.wanted()[0]]
    if options.list:
        print("\n".join(f"{ledger.state(name)}  {ledger.compared(name)}" for name in names))
        return None
    if options.publish:
        print(f"published: {', '.join(ledger.publish(names))}")
        return show_report(ledger, options.quick)
    if options.again:
        for job in schedule.wanted()[0]:
            shutil.rmtree(schedule.place.folder(job), ignore_errors=True)
        ledger.forget(names)
        schedule = make_schedule(options, ledger)
    elif all(ledger.is_measured(name) for name in names) and not schedule.wanted()[1]:
        print("\n".join(map(ledger.compared, names)))
        print(f"nothing to do: all {len(names)} rows are in {ledger.here_file}. Use --again to measure them.")
    run_all(schedule, options.processes)
    have = {job: line for job, line in schedule.have.items() if job.seed not in TUNING and str(job) in names}
    figures = {str(job): line["score"] for job, line in have.items()}
    finish("algorithms", figures, {}, is_stored=False)
    if schedule.failed:
        raise SystemExit("\n".join(f"failed: {job}: {error}" for job, error in schedule.failed.items()))
    return None


if __name__ == "__main__":
    main()
