"""Creates sinks from their config; imports a tracker's package only if it is used."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from palestra.core.config import import_object
from palestra.runs.sinks.base import OwnSinkConfig, Sink, SinkConfigs

CLASSES = {  # by kind, which is the name of its module too
    "tensorboard": "TensorBoardSink",
    "wandb": "WandbSink",
    "mlflow": "MLflowSink",
    "trackio": "TrackioSink",
    "prometheus": "PrometheusSink",
}
PACKAGES = {"prometheus": ("prometheus_client", "uvicorn", "httptools")}  # of sinks that need others than their name


def check_sinks(sinks: SinkConfigs) -> None:
    """Raises ValueError if a sink's package is not installed or a kind of sink is listed twice."""
    kinds = [sink.type for sink in sinks]
    for kind in kinds:
        if ":" not in kind and not all(map(find_spec, PACKAGES.get(kind, (kind,)))):
            raise ValueError(f"the sink {kind} needs its package: pip install 'palestra[{kind}]'")
        if kinds.count(kind) > 1:
            raise ValueError(f"sinks: names {kind} twice: a run has one sink of a kind")


def open_sink(config: Any, run: Path, folder: Path) -> Sink:
    """Opens the sink described by `config` for the run at `run`; `folder` stores its state for a resumed run."""
    if isinstance(config, OwnSinkConfig):
        return config.open(run, folder)
    sink: Sink = import_object(f"palestra.runs.sinks.{config.type}:{CLASSES[config.type]}")(config, run, folder)
    return sink
