"""Trackio: a database of this machine, or a Space of the hub. Runs are known by name there: ours have an id in it."""

from __future__ import annotations

import secrets
from pathlib import Path

import trackio

from palestra.config import load
from palestra.sinks.base import Figures, Trackio, flat_config

ID = "id"


class TrackioSink:
    """Figures by step, the config beside them."""

    def __init__(self, config: Trackio, run: Path, folder: Path) -> None:
        known = folder / ID
        if not known.exists():
            known.write_text(f"{run.name}-{secrets.token_hex(3)}")
        self.run = trackio.init(
            project=config.project,
            name=known.read_text(),
            space_id=config.space,
            config=flat_config(load(run / "config.yaml")),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def write(self, step: int, figures: Figures) -> None:
        self.run.log(figures, step=step)

    def flush(self) -> None:
        """Trackio writes from a thread of its own, as it likes."""

    def close(self) -> None:
        self.run.finish()
