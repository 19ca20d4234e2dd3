"""Learning rates of the rows of docs/results-real.md: chosen for each task and method on split dev.

`run.py --tune` measures each rate with a seed that is not reported; `--tune --publish` writes them to rates.yaml.
Another rate than that of the config is chosen only if it is better by more than the standard error of the difference:
one run for each rate says no more (the one-standard-error rule, Hastie, Tibshirani and Friedman, 2009, section 7.10).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

Rates = dict[str, dict[str, dict[float, float]]]  # success on dev by task, method and rate

RATES = (2e-4, 5e-4, 1e-3)
CONFIG_RATE = 5e-4  # learning rate of the tasks' configs, for methods that were not tuned
TUNING_SEED = 100
DEV_EPISODES = 200  # instances of split dev that each rate is scored on
SAME_RATE = {  # methods that are not tuned, and the method that each has the rate of
    "team + GRPO, 8 examples": "team + GRPO",
    "team + AT-GRPO, 8 examples": "team + AT-GRPO",
}
RATES_FILE = Path(__file__).parent / "rates.yaml"
RATES_SAY = "# Greedy success on 200 dev instances by learning rate, by `python results/real/run.py --tune`.\n"


def read_rates() -> Rates:
    """Returns the scores measured by tuning; an empty dict if there are none."""
    return (yaml.safe_load(RATES_FILE.read_text()) or {}) if RATES_FILE.exists() else {}


def is_tuned(task: str, method: str, rates: Rates) -> bool:
    """True if all `RATES` were measured."""
    return set(RATES) <= _measured(task, method, rates).keys()


def _measured(task: str, method: str, rates: Rates) -> dict[float, float]:
    return rates.get(task, {}).get(SAME_RATE.get(method, method), {})


def chosen_rate(task: str, method: str, rates: Rates) -> float:
    """Returns the rate with the highest success on dev if its lead over `CONFIG_RATE` is greater than the standard
    error of the difference; otherwise, and if any of `RATES` was not measured, `CONFIG_RATE`."""
    measured = _measured(task, method, rates)
    if not is_tuned(task, method, rates):
        return CONFIG_RATE
    best = max(measured, key=lambda rate: measured[rate])
    variance = sum(measured[rate] * (1 - measured[rate]) for rate in (best, CONFIG_RATE)) / DEV_EPISODES
    return best if measured[best] - measured[CONFIG_RATE] > math.sqrt(variance) else CONFIG_RATE


def write_rates(results: Iterable[dict[str, Any]], target: Path | None = None) -> None:
    """Writes the published scores to a file, with those of `results` in their place. Without `target` they are
    published."""
    rates, file = read_rates(), target or RATES_FILE
    for result in results:
        rates.setdefault(result["task"], {}).setdefault(result["method"], {})[result["lr"]] = result["success"]
    file.write_text(RATES_SAY + yaml.safe_dump(rates, sort_keys=True))
    print(f"{file} has the scores by learning rate")
