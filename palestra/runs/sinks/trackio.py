"""Trackio sink: a local database or a Hugging Face Space.

Trackio identifies runs by name, so names contain a random id.
"""

from __future__ import annotations

import secrets
from pathlib import Path

import trackio

from palestra.core.config import load
from palestra.core.files import read_bytes
from palestra.runs.sinks.base import Metrics, TrackioConfig, flatten_config

ID_FILE = "id"


class TrackioSink:
    """Writes metrics by step, and the config."""

    def __init__(self, config: TrackioConfig, run: Path, folder: Path) -> None:
        known = folder / ID_FILE
        if not known.exists():
            known.write_text(f"{run.name}-{secrets.token_hex(3)}")
        self.run = trackio.init(
            project=config.project,
            name=read_bytes(known).decode(),
            space_id=config.space,
            config=flatten_config(load(run / "config.yaml")),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def write(self, step: int, metrics: Metrics) -> None:
        self.run.log(metrics, step=step)

    def flush(self) -> None:
        """Does nothing: Trackio writes from its own thread."""

    def close(self) -> None:
        self.run.finish()
