"""Processes on the nodes of a Ray cluster, each with an event by which it is asked to stop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError

from palestra.parallel.processes import StoppableProcess
from palestra.parallel.ray.cluster import ActorResources, join_cluster, leave_cluster

RESOURCES = {"num_cpus": "CPU", "num_gpus": "GPU"}  # options of Ray, and what its clusters call them
LOST = -9  # exit code of a process whose actor or node was lost


class _ProcessActor:
    """Actor that starts the process on its node. Both end together."""

    def start(self, target: Callable[..., object], arguments: Iterable[Any]) -> None:
        self._process = StoppableProcess(target, arguments)

    def exitcode(self) -> int | None:
        return self._process.exitcode

    def stop(self) -> None:
        self._process.stop()


class RayProcess:
    """Like `StoppableProcess`, on a node of the cluster: runs `target(*arguments, stop)` once a node has the resources
    `options` (Ray's, such as num_cpus) free."""

    def __init__(self, target: Callable[..., object], arguments: Iterable[Any], options: Mapping[str, Any]) -> None:
        kind: Any = ray.remote(_ProcessActor)
        self._actor = kind.options(scheduling_strategy="SPREAD", **options).remote()
        self._actor.start.remote(target, tuple(arguments))
        self._asked = self._actor.exitcode.remote()
        self._code: int | None = None

    @property
    def exitcode(self) -> int | None:
        """The process's exit code as last reported by its actor; None while it waits or runs, `LOST` if the actor or
        its node died."""
        if self._code is None and ray.wait([self._asked], timeout=0)[0]:
            try:
                self._code = ray.get(self._asked)
            except RayError:
                self._code = LOST
            if self._code is None:
                self._asked = self._actor.exitcode.remote()
            else:
                self.kill()
        return self._code

    def stop(self) -> None:
        """Sets the event, once the process runs."""
        self._actor.stop.remote()

    def kill(self) -> None:
        """Ends the actor and with it the process."""
        with suppress(RayError):
            ray.kill(self._actor)


def max_processes(options: Mapping[str, float]) -> int:
    """Returns how many processes with `options` the cluster has the CPUs and GPUs for, at least 1."""
    has = ray.cluster_resources()
    fits = [has.get(name, 0) // options[option] for option, name in RESOURCES.items() if options.get(option)]
    return max(1, int(min(fits, default=1)))


@contextmanager
def ray_processes(address: str | None, options: Mapping[str, Any], workers: int) -> Iterator[Callable[..., RayProcess]]:
    """Joins the cluster at `address`, or starts one on this machine for `workers` processes; yields a function that
    starts a process with `options`, and leaves at the end."""
    joined = join_cluster(address, [ActorResources(workers, dict(options))])
    try:
        yield partial(RayProcess, options=options)
    finally:
        if joined:
            leave_cluster()
