"""Two LoRA adapters on the base `tiny` in Kuhn poker as text, by self-play: NashConv of their words.

    python -m results.populations.parts.text 0                       the run of one seed, stored for the page
    python -m results.populations.parts.text 100 policies.player_0.rank=8  with other settings, not stored

NashConv is exact, from the agents' probabilities of the two words in every information state; uniform play has 11/12.
The run is `configs/text/kuhn.yaml`. Neither player is averaged or mixed: it is the weights of the last step that play.
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

import palestra as pl
from palestra.core.config import load, override
from palestra.evaluation.evaluate import evaluate
from palestra.runs import list_checkpoints
from results.populations.parts.keeping import kept

CONFIG = Path(__file__).parents[3] / "palestra/data/configs/text/kuhn.yaml"
TARGETS = {"text_kuhn_nashconv_max": 0.1}
SEEDS = 5
EVERY = 80  # steps between two measurements of NashConv
console = Console(width=160)


def curve(seed: int, settings: list[str]) -> tuple[dict[int, float], float]:
    """Trains a run; returns NashConv by step, and the CPU seconds of training."""
    with tempfile.TemporaryDirectory() as root:
        every = [f"keep_every={EVERY}", "save_episodes_every=0"]
        start = time.process_time()
        path = pl.train(override(load(CONFIG), [f"seed={seed}", *every, *settings]), root=root).path
        seconds = time.process_time() - start
        steps = [checkpoint.step + 1 for checkpoint in list_checkpoints(path)]
        found = {step: evaluate(path, episodes=1, checkpoint=step).metrics["nash_conv"] for step in steps}
    return found, seconds


def measured(seed: int) -> tuple[dict[int, float], float]:
    """The stored curve of a seed that counts; trains and stores it if there is none."""
    found, seconds = kept(f"text/{seed}", partial(curve, seed, []))
    return {int(step): value for step, value in found.items()}, seconds


def show(curves: Mapping[int, tuple[Mapping[int, float], float]]) -> None:
    steps = list(next(iter(curves.values()))[0])
    shown = Table("seed", *map(str, steps), "CPU s", title="NashConv by step", title_justify="left")
    for seed, (values, seconds) in curves.items():
        shown.add_row(str(seed), *(f"{values[step]:.3f}" for step in steps), f"{seconds:.0f}")
    console.print(shown)


def figures(quick: bool = False) -> dict[str, float]:
    """The last NashConv: the mean over seeds, and that of the worst."""
    settings = ["episodes=8", "steps=4", "stages=[]", "keep_every=2"]
    curves = {0: curve(0, settings)} if quick else {seed: measured(seed) for seed in range(SEEDS)}
    show(curves)
    last = [list(values.values())[-1] for values, _ in curves.values()]
    return {"text_kuhn_nashconv": float(np.mean(last)), "text_kuhn_nashconv_max": max(last)}


if __name__ == "__main__":
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    settings = sys.argv[2:]
    show({seed: curve(seed, settings) if settings else measured(seed)})
