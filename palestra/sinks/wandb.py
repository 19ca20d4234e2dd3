"""Weights & Biases, online or offline. A run's id is kept beside it: a resumed run goes on in the same one."""

from __future__ import annotations

import secrets
from pathlib import Path

import wandb

from palestra.config import load
from palestra.sinks.base import Figures, Wandb

ID = "id"
STEP = "training_step"  # an axis of our own: wandb's must rise, and exams come after the steps they are of


class WandbSink:
    """Offline, `wandb sync` sends what is in the run's sinks/wandb/wandb."""

    def __init__(self, config: Wandb, run: Path, folder: Path) -> None:
        known = folder / ID
        if not known.exists():
            known.write_text(secrets.token_hex(4))
        self.run = wandb.init(
            project=config.project,
            entity=config.entity,
            group=config.group,
            tags=config.tags,
            mode=config.mode,
            name=run.name,
            id=known.read_text(),
            resume="allow",
            dir=str(folder),
            config=load(run / "config.yaml"),
            settings=wandb.Settings(silent=True, console="off", init_timeout=30, login_timeout=10),
        )
        self.run.define_metric(STEP, hidden=True)
        self.run.define_metric("*", step_metric=STEP)

    def write(self, step: int, figures: Figures) -> None:
        self.run.log({STEP: step, **figures})

    def flush(self) -> None:
        """wandb sends from a process of its own, as it likes."""

    def close(self) -> None:
        self.run.finish()
