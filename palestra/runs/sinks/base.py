"""Sink protocol, config models of the sinks, and conversion of log lines to metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from palestra.core.config import StrictModel
from palestra.core.config.own_types import OwnTypes
from palestra.core.files import read_bytes
from palestra.runs.settings import flatten_tree

# Prefix of the metric names, by log file.
LOG_PREFIXES = {"metrics.jsonl": "", "timings.jsonl": "time/", "evals.jsonl": "eval/"}
ID_FILE = "id"  # in a sink's folder: the run's id in the tracker
Metrics = dict[str, float]


class Sink:
    """A destination for metrics. Methods raise the tracker's own exceptions."""

    def write(self, step: int, metrics: Metrics) -> None:
        """Writes metrics after `step` completed training steps, which may repeat and need not increase."""
        raise NotImplementedError

    def flush(self) -> None:
        """Sends everything written so far. Does nothing where the tracker does so by itself."""

    def close(self) -> None:
        """Sends what is left, and ends the run in the tracker."""
        raise NotImplementedError


def stored_id(folder: Path, create: Callable[[], str]) -> str:
    """Returns the run's id in a tracker, which `create` makes once and the sink's `folder` keeps for a resumed run."""
    path = folder / ID_FILE
    if not path.exists():
        path.write_text(create())
    return read_bytes(path).decode()


class TensorBoardConfig(StrictModel):
    """TensorBoard event files."""

    type: Literal["tensorboard"] = "tensorboard"
    """Kind of sink: TensorBoard."""
    folder: str | None = None
    """Folder of the event files. Null: sinks/tensorboard in the run's folder."""


class WandbConfig(StrictModel):
    """Weights & Biases."""

    type: Literal["wandb"] = "wandb"
    """Kind of sink: Weights & Biases."""
    project: str = "palestra"
    """W&B project of the run."""
    entity: str | None = None
    """W&B user or team. Null: the default entity of the account."""
    group: str | None = None
    """W&B group of the run, for example one group for all seeds of an experiment."""
    mode: Literal["online", "offline"] = "online"
    """`offline` writes to sinks/wandb in the run's folder, for a later `wandb sync`."""


class MLflowConfig(StrictModel):
    """MLflow."""

    type: Literal["mlflow"] = "mlflow"
    """Kind of sink: MLflow."""
    experiment: str = "palestra"
    """MLflow experiment of the run; created if it does not exist."""
    uri: str | None = None
    """URI of a tracking server, a database or a folder. Null: the environment variable MLFLOW_TRACKING_URI."""


class TrackioConfig(StrictModel):
    """Trackio."""

    type: Literal["trackio"] = "trackio"
    """Kind of sink: Trackio."""
    project: str = "palestra"
    """Trackio project of the run."""
    space: str | None = None
    """Hugging Face Space that shows the metrics. Null: they stay in a database on this machine."""


class PrometheusConfig(StrictModel):
    """Prometheus."""

    type: Literal["prometheus"] = "prometheus"
    """Kind of sink: Prometheus, which reads the newest values from the run's process."""
    port: int = Field(9464, ge=1, le=65535)
    """Port of /metrics."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 accepts other machines, without a key."""


class OwnSinkConfig(StrictModel):
    """Base config of a sink of one's own; `type` is "module:Class", which names the subclass."""

    type: str
    """Name of the class."""

    def open(self, run: Path, folder: Path) -> Sink:
        """Opens the sink for the run at `run`; `folder` stores its state for a resumed run."""
        raise NotImplementedError(f"{type(self).__name__} does not define open")


def _expand(value: Any) -> Any:
    return [{"type": one} if isinstance(one, str) else one for one in value] if isinstance(value, list) else value


SinkConfig = Annotated[
    TensorBoardConfig | WandbConfig | MLflowConfig | TrackioConfig | PrometheusConfig,
    Field(discriminator="type"),
    OwnTypes("sink", OwnSinkConfig),
]
SinkConfigs = Annotated[list[SinkConfig], BeforeValidator(_expand)]


class SinksConfig(StrictModel):
    """The sinks of a run."""

    sinks: SinkConfigs = []
    """Destinations of the metrics, by name (`[tensorboard]`) or with settings (`[{type: wandb, project: games}]`)."""


def metrics_of_line(log: str, line: Mapping[str, Any]) -> tuple[int, Metrics]:
    """Returns the number of completed steps of a log line, and its numbers by path: "planner/loss",
    "time/team/rollout_s", "eval/test/returns/planner"."""
    owner = line.get("policy", line.get("name", "run"))
    rest = {key: value for key, value in line.items() if key not in ("step", "policy", "name")}
    values = flatten_tree(rest, f"{LOG_PREFIXES[log]}{owner}", separator="/")
    return int(line["step"]) + 1, {name: float(x) for name, x in values.items() if isinstance(x, int | float)}


def config_as_text(tree: dict[str, Any]) -> dict[str, str]:
    """Returns a config as text by dotted path: {"policies.planner.lr": "0.001"}. Empty values are left out."""
    return {key: str(value) for key, value in flatten_tree(tree).items() if value not in (None, [], {}, "")}
