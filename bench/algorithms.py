"""Algorithms for language agents on two small tasks and one of a real model, with equal samples: what each learns and
what it costs.

    python bench/algorithms.py                          5 seeds each of what was not measured; hours on one core
    python bench/algorithms.py --processes 11           11 runs at once, one torch thread each
    python bench/algorithms.py --methods GRPO "online DPO" --tasks duel
    python bench/algorithms.py --tasks real --device cuda --processes 4
    python bench/algorithms.py --report                 prints the tables of what was measured and draws the picture
    python bench/algorithms.py --quick                  two small steps, one seed, no tuning: does the road hold?

`sums` is cooperative, `duel` zero-sum (both a base of a million parameters, on the CPU), `real` a lone agent of
SmolLM2-135M-Instruct (configs/algorithms/), on `--device`; several processes on one GPU slow each other down, unless
CUDA's multi-process service runs (docs/scaling/gpu.md). Learning rates that were tuned are in
algorithms_parts/rates.yaml; a method without one takes the better of two on instances of split dev, with two seeds that
are not counted. `real` has one rate, which is not tuned. Scores are of split test. One seed of all methods comes after
the other, so that what is broken off has as many of each. What was measured is a line for each run in the ledger
(bench/measured/); what is there is not run again. Runs are in runs/algorithms/.
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
    parser.add_argument("--device", default="cpu", help="of the task real: cpu or cuda")
    parser.add_argument("--ledger", type=Path, help=f"file of what was measured; {LEDGER} if not given")
    parser.add_argument("--unsafe", action="store_true", help="sums runs programs of models without a sandbox")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--no-tune", action="store_true", help="the lowest learning rate of a task for all methods")
    parser.add_argument("--report", action="store_true")
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
