"""Trains the same tasks with the same settings in palestra, in BenchMARL and by a plain script of PyTorch, and writes
docs/results-peers.md with curves against env steps and against CPU seconds.

    python results/peers/run.py                     all rows, some ten minutes of one core; first makes a virtual env
    python results/peers/run.py --list              the rows: published, measured here, open
    python results/peers/run.py --only navigation_qmix/palestra  rows whose names begin with this
    python results/peers/run.py --publish           publish what was measured here, and rewrite the page
    python results/peers/run.py --report            only rewrite the page from the published rows
    python results/peers/run.py --quick             short runs of one task: a smoke test

A row is a task, a package and a seed. All packages play the same VMAS scenario, with the same version of torch, in one
virtual environment (bench/peers/beside.txt) and one thread. The scripts are bench/peers/*_learning.py and
bench/peers/plain_mappo.py. Rows go to runs/measured/peers/rows.jsonl, also where they are published
(results/peers/measured/rows.jsonl), and each is printed beside the published one.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[2]))
from bench.peers.learning import LearningSpec
from bench.peers.running import install, installed, run
from results.ledger import Ledger, Line, Rows, absent, add_options, choose, finish
from results.peers.report import write_report
from results.peers.tasks import PACKAGES, TASKS, Task

VENV = "beside"
QUICK_TASKS = ("navigation_random", "navigation_mappo")
LIMIT_S = 3600.0


@dataclass(frozen=True)
class LearningJob:
    """A run of one of bench/peers' scripts."""

    script: str
    spec: LearningSpec

    def spec_json(self, seconds: float) -> str:
        return json.dumps(asdict(self.spec))


def table_rows() -> dict[str, tuple[Task, str, int]]:
    """Returns task, package and seed of each row, by name; all rows of one seed before those of the next."""
    rows: dict[str, tuple[Task, str, int]] = {}
    for seed in range(max(task.seeds for task in TASKS)):
        for task in TASKS:
            for package in task.packages if seed < task.seeds else ():
                rows[f"{task.name}/{package}/{seed}"] = (task, package, seed)
    return rows


def spec_of(quick: bool, name: str) -> LearningSpec:
    """Returns the spec of a row."""
    task, _, seed = table_rows()[name]
    spec = replace(task.spec, seed=seed)
    if quick:
        spec = replace(spec, env_steps=2 * spec.batch, eval_every=spec.batch, eval_games=50)
    return spec


def measure(quick: bool, name: str) -> Line:
    """Runs a row; returns its result. Raises bench.peers.running.Failed if its script fails."""
    task, package, seed = table_rows()[name]
    spec = spec_of(quick, name)
    result = run(LearningJob(PACKAGES[package], spec), 0.0, LIMIT_S)
    _, cpu_s, value = result["curve"][-1]
    line = {"task": task.name, "package": package, "seed": seed, "score": value, "cpu": cpu_s}
    return line | result | {"spec": as_tree(spec)}


def as_tree(spec: LearningSpec) -> dict[str, Any]:
    """Returns a spec as it is in the ledger."""
    return json.loads(json.dumps(asdict(spec)))


def make_ledger(quick: bool) -> Ledger:
    """Returns the ledger of the rows; a row is current if it has its spec of now."""
    return Ledger(
        "peers",
        lambda line: f"return {line['score']:.4g} after {line['cpu']:.0f} CPU-s",
        quick,
        lambda name, line: line["spec"] == as_tree(spec_of(quick, name)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    options = parser.parse_args()
    quick = options.quick
    names = choose(list(table_rows()), options.only)
    if quick and not options.only:
        names = [name for name in names if name.endswith("/0") and name.startswith(QUICK_TASKS)]
    if quick and not installed(VENV):
        absent("BenchMARL in an environment of its own: this script without --quick makes it")
    ledger = make_ledger(quick)
    if not (options.list or options.publish or options.report):
        install(VENV)
    Rows(ledger, partial(measure, quick)).run(names, options)
    if options.report or options.publish:
        write_report(list(ledger.published.values()), Path("docs/results-peers.md"))
    elif not options.list:
        scores: dict[str, list[float]] = {}
        for name in names:
            scores.setdefault(name.rpartition("/")[0], []).append(ledger.here[name]["score"])
        finish("peers", {name: float(np.mean(own)) for name, own in scores.items()}, {}, is_stored=False)


if __name__ == "__main__":
    main()
