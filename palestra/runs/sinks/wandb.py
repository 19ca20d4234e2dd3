"""Weights & Biases sink, online or offline. Stores the W&B run id, so that a resumed run continues the same W&B run."""

from __future__ import annotations

import secrets
from pathlib import Path

import wandb

from palestra.core.config import load
from palestra.runs.sinks.base import Metrics, Sink, WandbConfig, stored_id

STEP_METRIC = "training_step"  # own axis: W&B's step must increase, and evaluations are logged after later steps


class WandbSink(Sink):
    """Writes metrics by step, and the config. W&B sends from its own process. In offline mode, `wandb sync` sends
    sinks/wandb/wandb of the run."""

    def __init__(self, config: WandbConfig, run: Path, folder: Path) -> None:
        tree = load(run / "config.yaml")
        self.run = wandb.init(
            project=config.project,
            entity=config.entity,
            group=config.group,
            tags=tree.get("tags"),
            mode=config.mode,
            name=run.name,
            id=stored_id(folder, lambda: secrets.token_hex(4)),
            resume="allow",
            dir=str(folder),
            config=tree,
            settings=wandb.Settings(silent=True, console="off", init_timeout=30, login_timeout=10),
        )
        self.run.define_metric(STEP_METRIC, hidden=True)
        self.run.define_metric("*", step_metric=STEP_METRIC)

    def write(self, step: int, metrics: Metrics) -> None:
        self.run.log({STEP_METRIC: step, **metrics})

    def close(self) -> None:
        self.run.finish()
