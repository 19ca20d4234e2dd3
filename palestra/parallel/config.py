"""Config of a backend, and the function that opens it."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from palestra.core.config import StrictModel
from palestra.parallel.inline import InlineBackend
from palestra.parallel.local import LocalBackend
from palestra.parallel.tasks import Backend, WorkerFactory

COPY_EVERY = 16  # optimizer steps between two copies of a learner's state


class BackendConfig(StrictModel):
    """The backend that runs tasks."""

    type: Literal["inline", "local", "ray"] = "local"
    """`inline`: this process and thread. `local`: worker processes on this machine. `ray`: actors on a Ray cluster."""
    workers: int = Field(0, ge=0, le=4096)
    """Number of workers, without those reserved in `placement`; 0: one for each CPU of this machine."""
    torch_threads: int = Field(1, ge=1, le=1024)
    """Threads of each `local` worker."""
    address: str | None = None
    """Address of the Ray cluster (`ray` only). Without one, a cluster is started on this machine."""
    placement: dict[str, dict[str, Any]] = {}
    """Ray workers reserved for one kind of task, with the resources of each: {train: {workers: 2, num_gpus: 1}} (`ray`
    only)."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        given = "address" if self.address else "placement" if self.placement else ""
        if given and self.type != "ray":
            raise ValueError(f"{given} is for backend type ray, not {self.type}: pass --backend ray, or leave it out")
        return self

    @property
    def num_workers(self) -> int:
        """Number of workers, without those reserved in `placement`."""
        return 1 if self.type == "inline" else self.workers or os.cpu_count() or 1

    @property
    def ray_tasks_at_once(self) -> int | None:
        """Number of tasks that Ray workers run at a time; None: as many as there are workers."""
        return None


class PopulationBackendConfig(BackendConfig):
    """The backend that runs a population's tasks."""

    as_completed: bool = False
    """False: the plan gets results in the order in which it created the tasks, and a run is identical, byte for byte,
    for any number of workers. True: it gets each result at once; no worker waits for a slower one, but two runs of one
    seed differ where the order of completion decides which policies are trained against each other."""
    tasks_at_once: int = Field(0, ge=0, le=4096)
    """Tasks that run at a time on a Ray cluster that is started on this machine; 0: one for each CPU. The other workers
    wait, because more tasks than CPUs interrupt each other. Set it higher if tasks wait for something else than a CPU,
    such as a remote endpoint (`ray` without `address` only)."""

    @model_validator(mode="after")
    def _counts_own_cpus(self) -> Self:
        if self.tasks_at_once and (self.type != "ray" or self.address):
            raise ValueError(
                f"tasks_at_once: {self.tasks_at_once} is for a Ray cluster that is started on this machine (type: ray "
                "without address); elsewhere it is the number of workers: set workers, and leave tasks_at_once out"
            )
        return self

    @property
    def ray_tasks_at_once(self) -> int | None:
        return None if self.address else self.tasks_at_once or os.cpu_count() or 1

    @property
    def num_at_once(self) -> int:
        """Number of tasks that run at a time, without those of workers in `placement`."""
        limit = self.ray_tasks_at_once if self.type == "ray" else None
        return min(self.num_workers, limit or self.num_workers)


class RolloutBackendConfig(BackendConfig):
    """The backend that plays episodes and, on Ray, trains weights, in a run of language agents. With `inline` both
    happen in this process.

    `placement` has two kinds: `train`, the actors that hold the weights in training (learners are assigned to them in
    turn; one actor by default), and `play`, the workers that play episodes, in place of `workers`.
    """

    slices: int = Field(0, ge=0, le=1_000_000)
    """Parts into which a step's episodes are divided; free workers take the next one. 0: two for each worker. Runs with
    equal `slices` are equal."""
    copy_every: int = Field(COPY_EVERY, ge=1)
    """Optimizer steps of a learner between two copies of its state (weights and optimizer) to this process, beside the
    copies at checkpoints. Later steps are repeated if its actor is lost: a larger value copies less often but repeats
    more."""

    @model_validator(mode="after")
    def _check_placement(self) -> Self:
        if unknown := sorted(set(self.placement) - {"train", "play"}):
            raise ValueError(f"placement.{unknown[0]} is unknown; valid keys are train and play")
        if self.type == "inline" and self.workers > 1:
            raise ValueError(
                f"workers: {self.workers} play in processes of their own: set type: local (--backend local) or ray"
            )
        return self


def open_backend(config: BackendConfig, make_worker: WorkerFactory, workers: int | None = None) -> Backend:
    """Opens the backend that `config` describes, with `workers` (default: `config.num_workers`) beside those in
    `placement`.

    Raises ValueError if the backend is Ray and Ray is not installed.
    """
    workers = config.num_workers if workers is None else workers
    if config.type == "inline":
        return InlineBackend(make_worker)
    if config.type == "local":
        return LocalBackend(make_worker, workers, config.torch_threads)
    require_ray()
    from palestra.parallel.ray.workers import RayBackend

    return RayBackend(make_worker, workers, config.address, config.placement, at_once=config.ray_tasks_at_once)


def require_ray() -> None:
    """Raises ValueError if Ray is not installed."""
    if find_spec("ray") is None:
        raise ValueError("--backend ray needs Ray: pip install 'palestra[ray]'; --backend local does without")
