"""Weights & Biases sink, online or offline. Stores the W&B run id, so that a resumed run continues the same W&B run."""

from __future__ import annotations

import secrets
from pathlib import Path

import wandb

from palestra.core.config import load
from palestra.core.files import read_bytes
from palestra.runs.sinks.base import Metrics, WandbConfig

ID_FILE = "id"
STEP_METRIC = "training_step"  # own axis: W&B's step must increase, and evaluations are logged after later steps


class WandbSink:
    """Writes metrics by step, and the config. In offline mode, `wandb sync` sends sinks/wandb/wandb of the run."""

    def __init__(self, config: WandbConfig, run: Path, folder: Path) -> None:
        known = folder / ID_FILE
        if not known.exists():
            known.write_text(secrets.token_hex(4))
        self.run = wandb.init(
            project=config.project,
            entity=config.entity,
            group=config.group,
            tags=config.tags,
            mode=config.mode,
            name=run.name,
            id=read_bytes(known).decode(),
            resume="allow",
            dir=str(folder),
            config=load(run / "config.yaml"),
            settings=wandb.Settings(silent=True, console="off", init_timeout=30, login_timeout=10),
        )
        self.run.define_metric(STEP_METRIC, hidden=True)
        self.run.define_metric("*", step_metric=STEP_METRIC)

    def write(self, step: int, metrics: Metrics) -> None:
        self.run.log({STEP_METRIC: step, **metrics})

    def flush(self) -> None:
        """Does nothing: W&B sends from its own process."""

    def close(self) -> None:
        self.run.finish()
