"""Joins a Ray cluster, or starts one on this machine with the resources that a run's actors need."""

from __future__ import annotations

import logging
import math
import os
import pickle
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import ray

from palestra.parallel.processes import pickling_error

PLACEMENT_OPTIONS = ("workers", "num_cpus", "num_gpus", "resources", "accelerator_type")
PLACEMENT_TIMEOUT_S = 600.0  # seconds to wait for the first actor: a cluster may have to scale up


class ActorResources(NamedTuple):
    """A number of actors, and the resources of each as Ray options."""

    num_actors: int
    options: dict[str, Any]


def parse_placement(kind: str, placement: Mapping[str, Any]) -> ActorResources:
    """Returns the actors reserved for one kind of task. Raises ValueError if `placement` is invalid."""
    if unknown := [name for name in placement if name not in PLACEMENT_OPTIONS]:
        raise ValueError(f'placement.{kind} has "{unknown[0]}"; there are {", ".join(PLACEMENT_OPTIONS)}')
    actors = placement.get("workers", 1)
    if actors < 1:
        raise ValueError(f"placement.{kind}.workers is {actors}: leave {kind} out to have the other workers do it")
    return ActorResources(
        actors, {"num_cpus": 1} | {name: need for name, need in placement.items() if name != "workers"}
    )


def join_cluster(address: str | None, needs: Sequence[ActorResources]) -> bool:
    """Joins the cluster at `address`; without an address, starts one here with enough CPUs for these actors.

    Returns False, and joins nothing, if this process is in a Ray cluster already; True means the caller must call
    `leave_cluster`.
    """
    if ray.is_initialized():
        return False
    if address is not None:
        ray.init(address=address, logging_level=logging.WARNING)
        return True
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault(
        "RAY_worker_niceness", "0"
    )  # with Ray's default of 15, workers get little CPU time beside other programs
    own: Counter[str] = Counter()  # user-defined resources, which no machine has by default
    for actors, options in needs:
        own.update({name: need * actors for name, need in options.get("resources", {}).items()})
    cpus = math.ceil(sum(actors * options["num_cpus"] for actors, options in needs))
    ray.init(
        "local", num_cpus=max(cpus, 1), resources=dict(own), include_dashboard=False, logging_level=logging.WARNING
    )
    return True


def leave_cluster() -> None:
    """Leaves the cluster; a cluster that was started here ends."""
    ray.shutdown()


def placement_error(purpose: str, options: Mapping[str, Any]) -> ValueError:
    """Returns the error for actors that could not be placed within `PLACEMENT_TIMEOUT_S` seconds."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return ValueError(
        f"no worker for {purpose} in {PLACEMENT_TIMEOUT_S:g} s: one needs {dict(options)}, the cluster's nodes have "
        f"{nodes}; ask for less in placement, or add a node"
    )


def put_factory(make: Callable[[], object]) -> ray.ObjectRef[Any]:
    """Puts the function that builds a worker in the object store. Raises ValueError if it cannot be pickled."""
    try:
        return ray.put(make)
    except (TypeError, pickle.PicklingError) as error:
        raise pickling_error(error, "a worker") from error
