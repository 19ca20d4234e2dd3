"""Where tasks are done: what a config may say of it, and the backend that this means."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from palestra.backends.inline import Inline
from palestra.backends.local import Local
from palestra.config import Strict
from palestra.populations.tasks import Backend, MakeWorker


class BackendConfig(Strict):
    """Where tasks are done: `inline`, in this process and thread; `local`, by processes on this machine; `ray`, by
    actors on the cluster at `address` (none: one that is started here).

    `workers` is how many (0: one for each CPU of this machine), `threads` those of each local one. `placement` sets
    Ray's workers apart for a kind of task, with the resources they need: {train: {workers: 2, num_gpus: 1}}."""

    type: Literal["inline", "local", "ray"] = "local"
    workers: int = Field(0, ge=0, le=4096)
    threads: int = Field(1, ge=1, le=1024)
    address: str | None = None
    placement: dict[str, dict[str, Any]] = {}

    @model_validator(mode="after")
    def _fits(self) -> Self:
        given = "address" if self.address else "placement" if self.placement else ""
        if given and self.type != "ray":
            raise ValueError(f"{given} is for backend type ray, not {self.type}: say --backend ray, or leave it out")
        return self

    @property
    def count(self) -> int:
        """How many workers there are, but for those set apart."""
        return 1 if self.type == "inline" else self.workers or os.cpu_count() or 1


class PopulationBackendConfig(BackendConfig):
    """The backend that runs a population's tasks.

    The plan gets results in the order in which it named the tasks, so that a run is the same, byte for byte, with any
    number of workers. With `as_completed` it gets each as soon as it is there: no worker waits for a slower one, and
    two runs of one seed differ wherever the order of completion decides who is trained against whom."""

    as_completed: bool = False


class LoopConfig(BackendConfig):
    """Where episodes are played and, on Ray, weights are trained, in a run of language agents. With `inline` both are
    in this process.

    A step's episodes are cut into `slices` (0: two for each worker), which workers take as they are free; equal slices
    give equal runs. `placement` is of `train` (the actors that hold the weights in training, among which learners are
    dealt round; one, without anything said) and `play`. A copy of a learner is kept here every `copy_every` of its
    optimizer steps: what is lost with its actor is trained again from there."""

    slices: int = Field(0, ge=0, le=1_000_000)
    copy_every: int = Field(1, ge=1)

    @model_validator(mode="after")
    def _placed(self) -> Self:
        if unknown := sorted(set(self.placement) - {"train", "play"}):
            raise ValueError(f"placement.{unknown[0]} is of nothing that this run does: there are train and play")
        if self.type == "inline" and self.workers > 1:
            raise ValueError(
                f"workers: {self.workers} play in processes of their own: say type: local (--backend local) or ray"
            )
        return self


def open_backend(config: BackendConfig, make_worker: MakeWorker, workers: int | None = None) -> Backend:
    """The backend that `config` describes, with as many `workers` beside those set apart as it says by default. Raises
    ValueError where Ray is asked for and not installed."""
    workers = config.count if workers is None else workers
    if config.type == "inline":
        return Inline(make_worker)
    if config.type == "local":
        return Local(make_worker, workers, config.threads)
    must_have_ray()
    from palestra.backends.ray.workers import RayBackend

    return RayBackend(make_worker, workers, config.address, config.placement)


def must_have_ray() -> None:
    """Raises ValueError where Ray is not installed."""
    if find_spec("ray") is None:
        raise ValueError("--backend ray needs Ray: pip install 'palestra[ray]'; --backend local does without")
