"""PSRO with LoRA adapters on the base `tiny` in Kuhn poker as text: NashConv by iteration.

    python -m results.populations.parts.text 0                       the curve of one seed, stored for the page
    python -m results.populations.parts.text 100 population.train_steps=40 with other settings, not stored

NashConv is exact, from the agents' probabilities of the allowed words in every information state; uniform play has
11/12. The run is `configs/populations/text_kuhn_psro.yaml`, which ends once NashConv is low enough; iteration 0 is
uniform play.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from palestra.core.config import dump, load, override
from palestra.core.files import read_lines
from palestra.populations.build.build import build_population, run_population
from palestra.populations.build.validation import validate_population
from palestra.populations.scheduler import PlanCallback
from palestra.runs import Run
from results.populations.parts.keeping import kept

CONFIG = Path(__file__).parents[3] / "palestra/data/configs/populations/text_kuhn_psro.yaml"
TARGETS = {"text_kuhn_nashconv": 0.25}
SEEDS = 3
console = Console(width=160)


def curve(seed: int, settings: list[str]) -> tuple[list[float], float]:
    """Trains a run; returns NashConv by iteration, and CPU seconds."""
    config = validate_population(override(load(CONFIG), [f"seed={seed}", *settings]))
    start = time.process_time()
    with tempfile.TemporaryDirectory() as root, Run.create(root, dump(config)) as kept:
        run_population(build_population(config), kept, PlanCallback())
        lines = read_lines(kept.path / "metrics.jsonl")
    return [line["nash_conv"] for line in lines if "nash_conv" in line], time.process_time() - start


def measured(seed: int) -> tuple[list[float], float]:
    """The stored curve of a seed that counts; trains and stores it if there is none."""
    return kept(f"text/{seed}", partial(curve, seed, []))


def show(curves: Mapping[int, tuple[list[float], float]]) -> None:
    longest = max(len(values) for values, _ in curves.values())
    shown = Table("seed", *map(str, range(longest)), "CPU s", title="NashConv by iteration", title_justify="left")
    for seed, (values, seconds) in curves.items():
        cells = [f"{value:.3f}" for value in values]
        shown.add_row(str(seed), *cells, *[""] * (longest - len(cells)), f"{seconds:.0f}")
    console.print(shown)


def figures(quick: bool = False) -> dict[str, float]:
    """The figure: the last NashConv, a mean over seeds."""
    settings = ["population.iterations=2", "population.train_steps=10", "oracle.imitation_steps=20"] if quick else []
    curves = {0: curve(0, settings)} if quick else {seed: measured(seed) for seed in range(SEEDS)}
    show(curves)
    return {"text_kuhn_nashconv": float(np.mean([values[-1] for values, _ in curves.values()]))}


if __name__ == "__main__":
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    settings = sys.argv[2:]
    show({seed: curve(seed, settings) if settings else measured(seed)})
