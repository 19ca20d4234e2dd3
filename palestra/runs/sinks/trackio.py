"""Trackio sink: a local database or a Hugging Face Space.

Trackio identifies runs by name, so names contain a random id.
"""

from __future__ import annotations

import secrets
from pathlib import Path

import trackio

from palestra.core.config import load
from palestra.runs.sinks.base import Metrics, Sink, TrackioConfig, config_as_text, stored_id


class TrackioSink(Sink):
    """Writes metrics by step, and the config. Trackio sends from its own thread."""

    def __init__(self, config: TrackioConfig, run: Path, folder: Path) -> None:
        self.run = trackio.init(
            project=config.project,
            name=stored_id(folder, lambda: f"{run.name}-{secrets.token_hex(3)}"),
            space_id=config.space,
            config=config_as_text(load(run / "config.yaml")),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def write(self, step: int, metrics: Metrics) -> None:
        self.run.log(metrics, step=step)

    def close(self) -> None:
        self.run.finish()
