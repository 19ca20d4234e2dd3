"""Compares algorithms for language agents at equal samples on two small tasks and one of a real model: scores and cost.

    python bench/algorithms.py                          5 seeds of each method; hours on one core
    python bench/algorithms.py --processes 11           11 runs at once, one torch thread each
    python bench/algorithms.py --methods GRPO "online DPO" --tasks duel
    python bench/algorithms.py --tasks real --device cuda --processes 4
    python bench/algorithms.py --report                 prints the tables of the ledger and draws the picture
    python bench/algorithms.py --quick                  two small steps, one seed, no tuning: a smoke test

`sums` is cooperative, `duel` zero-sum (both with a base of a million parameters, on the CPU); `real` is a single agent
on SmolLM2-135M-Instruct, on `--device`. Configs are in configs/algorithms/. Several processes on one GPU slow each
other down unless CUDA's multi-process service runs (docs/scaling/gpu.md). Tuned learning rates are in
algorithms_parts/rates.yaml; a method without one gets the better of two rates on split dev, tried with two seeds that
are not counted. `real` has one rate, which is not tuned. Scores are on split test. All methods run with one seed before
the next seed begins, so that an interrupted comparison has equally many seeds of each. The ledger (bench/measured/) has
a line for each run; a run with a line is not repeated. Run folders are in runs/algorithms/.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import json
from pathlib import Path

from algorithms_parts.jobs import Schedule, run_all
from algorithms_parts.methods import METHODS, TASKS
from algorithms_parts.runs import TUNING, Place, known

ROOT = Path("runs/algorithms")
LEDGER = Path("bench/measured/algorithms.jsonl")
PICTURE = Path("docs/results-algorithms.png")


def parse() -> argparse.Namespace:
    names = list(dict.fromkeys(method.name for method in METHODS))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=[task.name for task in TASKS])
    parser.add_argument("--methods", nargs="+", choices=names)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=1, help="runs at once")
    parser.add_argument("--device", default="cpu", help="device of the task real: cpu or cuda")
    parser.add_argument("--ledger", type=Path, help=f"file with a line for each measured run; {LEDGER} if not given")
    parser.add_argument("--unsafe", action="store_true", help="run the programs that models write without a sandbox")
    parser.add_argument("--quick", action="store_true", help="two small steps, one seed, no tuning")
    parser.add_argument("--no-tune", action="store_true", help="use the lowest learning rate of a task for all methods")
    parser.add_argument("--report", action="store_true", help="only print the tables and draw the picture")
    return parser.parse_args()


def main() -> None:
    options = parse()
    tasks = [task for task in TASKS if task.name in (options.tasks or [task.name])]
    methods = [method for method in METHODS if method.name in (options.methods or [method.name])]
    root, ledger = (ROOT / "quick", ROOT / "quick.jsonl") if options.quick else (ROOT / "runs", LEDGER)
    place = Place(root, options.ledger or ledger, options.device, options.quick, options.unsafe)
    if options.report:
        from algorithms_parts import report

        have = known(place.ledger)
        print("\n".join(filter(None, [*(report.table(task, have) for task in tasks), report.over_tasks(have)])))
        report.draw(have, ROOT / "quick.png" if options.quick else PICTURE)
        return
    tune = not (options.no_tune or options.quick)
    schedule = Schedule(tasks, methods, 1 if options.quick else options.seeds, place, tune)
    run_all(schedule, options.processes)
    have = {job: line for job, line in known(place.ledger).items() if job.seed not in TUNING}
    figures = {f"{job.task}, {job.method}, {job.seed}": line["score"] for job, line in have.items()}
    print(json.dumps({"bench": "algorithms", "figures": figures, "targets": {}}))
    if schedule.failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
