"""Learning rates of the rows of docs/results-real.md: one for each task, chosen on split dev.

The rule, which is older than the runs that it chooses by:

- Methods that are compared have the same rate, schedule (linear, to 0), samples per optimizer step of an adapter
  (`batch_size`) and sampled tokens. So a task has one rate, not one for each method.
- `run.py --tune` trains each method of a task with each of `RATES`, by `TUNING_SEEDS` that are not reported, and scores
  it on split dev; `--tune --publish` writes the scores to rates.yaml. Before all of them are there, the task has the
  rate of its config.
- The rate with the highest mean over methods and seeds replaces that of the config only if its lead is greater than its
  standard error over the pairs of runs of one method and seed (the one-standard-error rule, Hastie, Tibshirani and
  Friedman, 2009, section 7.10).
- A task whose rate is the lowest or the highest of `RATES` is not published: extend `RATES` first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from results.rates import Rates, RatesFile

RATES = (1e-4, 2e-4, 5e-4)
CONFIG_RATE = 2e-4  # learning rate of the tasks' configs
TUNING_SEEDS = (100, 101, 102)
DEV_EPISODES = 200  # instances of split dev that each run is scored on
FILE = RatesFile(
    Path(__file__).parent / "rates.yaml",
    "Greedy success on 200 dev instances by rate and seed, by `python results/real/run.py --tune`.",
)


def is_tuned(task: str, rates: Rates) -> bool:
    """True if methods of the task were measured, each with all `RATES` and `TUNING_SEEDS`."""
    measured = rates.get(task, {}).values()
    wanted = set(TUNING_SEEDS)
    return bool(measured) and all(wanted <= runs.get(rate, {}).keys() for runs in measured for rate in RATES)


def chosen_rate(task: str, rates: Rates) -> float:
    """Returns the task's rate by the rule above."""
    if not is_tuned(task, rates):
        return CONFIG_RATE
    methods = rates[task].values()
    scores = {rate: np.array([runs[rate][seed] for runs in methods for seed in TUNING_SEEDS]) for rate in RATES}
    best = max(RATES, key=lambda rate: scores[rate].mean())
    leads = scores[best] - scores[CONFIG_RATE]
    return best if leads.mean() > leads.std(ddof=1) / math.sqrt(len(leads)) else CONFIG_RATE


def check_inside(tasks: Iterable[str], rates: Rates) -> None:
    """Raises SystemExit if the rate of a task lies at an edge of `RATES`."""
    for task in tasks:
        if (rate := chosen_rate(task, rates)) in (min(RATES), max(RATES)):
            raise SystemExit(f"--publish: the rate of {task}, {rate:g}, is at an edge of the rates tried: extend RATES")
