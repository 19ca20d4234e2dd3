"""Trackio sink: a local database or a Hugging Face Space.

Trackio identifies runs by name, so names contain a random id.
"""

from __future__ import annotations

import secrets
from pathlib import Path

import trackio

from palestra.config import load
from palestra.sinks.base import Figures, Trackio, flat_config

ID = "id"


class TrackioSink:
    """Writes metrics by step, and the config."""

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
        """Does nothing: Trackio writes from its own thread."""

    def close(self) -> None:
        self.run.finish()
