"""What a sink is, which there are, and what a run's logs say to one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Protocol

from pydantic import BeforeValidator, Field

from palestra.config import Strict

LOGS = {
    "metrics.jsonl": "",
    "timings.jsonl": "time/",
    "evals.jsonl": "eval/",
}  # and what their figures' names begin with
Figures = dict[str, float]


class Sink(Protocol):
    """Takes figures by the number of training steps that were over; steps may come again, and need not rise.

    What it raises is the tracker's own.
    """

    def write(self, step: int, figures: Figures) -> None: ...
    def flush(self) -> None:
        """Everything written so far is out of this process."""

    def close(self) -> None: ...


class TensorBoard(Strict):
    """Event files in `folder` (default: the run's sinks/tensorboard)."""

    type: Literal["tensorboard"] = "tensorboard"
    folder: str | None = None


class Wandb(Strict):
    """Weights & Biases. `mode: offline` keeps all in the run's sinks/wandb, for `wandb sync`."""

    type: Literal["wandb"] = "wandb"
    project: str = "palestra"
    entity: str | None = None
    group: str | None = None
    tags: list[str] = []
    mode: Literal["online", "offline"] = "online"


class MLflow(Strict):
    """MLflow. `uri` is a tracking server, a database or a folder (default: what MLFLOW_TRACKING_URI says)."""

    type: Literal["mlflow"] = "mlflow"
    experiment: str = "palestra"
    uri: str | None = None


class Trackio(Strict):
    """Trackio. `space` is a Space of the Hugging Face hub to show it on; without it all stays on this machine."""

    type: Literal["trackio"] = "trackio"
    project: str = "palestra"
    space: str | None = None


def _typed(value: Any) -> Any:
    return [{"type": one} if isinstance(one, str) else one for one in value] if isinstance(value, list) else value


SinkConfig = Annotated[TensorBoard | Wandb | MLflow | Trackio, Field(discriminator="type")]
Sinks = Annotated[list[SinkConfig], BeforeValidator(_typed)]


class SinksConfig(Strict):
    """Where the figures go, by name (`[tensorboard]`) or with settings (`[{type: wandb, project: games}]`)."""

    sinks: Sinks = []


def figures_of(log: str, line: Mapping[str, Any]) -> tuple[int, Figures]:
    """The steps that were over, and a log line's numbers by name: "planner/loss", "time/team/rollout_s",
    "eval/test/returns/planner". What is no number is left out."""
    whose = line.get("policy", line.get("name", "run"))
    rest = {key: value for key, value in line.items() if key not in ("step", "policy", "name")}
    return int(line["step"]) + 1, dict(_flat(f"{LOGS[log]}{whose}", rest))


def _flat(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(f"{name}/{key}", inner)
    elif isinstance(value, int | float):
        yield name, float(value)


def flat_config(tree: Mapping[str, Any], name: str = "") -> dict[str, str]:
    """A config's settings by their paths: {"policies.planner.lr": "0.001"}; what is empty is left out."""
    found: dict[str, str] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            found |= flat_config(value, f"{name}{key}.")
        elif value not in (None, [], ""):
            found[f"{name}{key}"] = str(value)
    return found
