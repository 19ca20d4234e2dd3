"""Joining a Ray cluster, or starting one on this machine that has what the actors of a run need."""

from __future__ import annotations

import logging
import math
import os
import pickle
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import ray

from palestra.backends.waiting import unsendable

OPTIONS = ("workers", "num_cpus", "num_gpus", "resources", "accelerator_type")
PATIENCE = 600.0  # seconds without one actor where one is waited for: a cluster may have to grow first


class Needs(NamedTuple):
    """So many actors, each with these resources, in Ray's own terms."""

    actors: int
    options: dict[str, Any]


def needs_of(kind: str, placement: Mapping[str, Any]) -> Needs:
    """What `placement` sets apart for a kind of task. Raises ValueError for a placement that is not one."""
    if unknown := [name for name in placement if name not in OPTIONS]:
        raise ValueError(f'placement.{kind} has "{unknown[0]}"; there are {", ".join(OPTIONS)}')
    actors = placement.get("workers", 1)
    if actors < 1:
        raise ValueError(f"placement.{kind}.workers is {actors}: leave {kind} out to have the other workers do it")
    return Needs(actors, {"num_cpus": 1} | {name: need for name, need in placement.items() if name != "workers"})


def join(address: str | None, needs: Sequence[Needs]) -> bool:
    """Joins the cluster at `address`, or without one starts one here that has the CPUs which these actors need. A Ray
    that this process has joined already is used as it is; False then: who joined is to leave."""
    if ray.is_initialized():
        return False
    if address is not None:
        ray.init(address=address, logging_level=logging.WARNING)
        return True
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 leaves workers little beside any other work here
    own: Counter[str] = Counter()  # resources of the user's naming, which no machine has by itself
    for actors, options in needs:
        own.update({name: need * actors for name, need in options.get("resources", {}).items()})
    cpus = math.ceil(sum(actors * options["num_cpus"] for actors, options in needs))
    ray.init(
        "local", num_cpus=max(cpus, 1), resources=dict(own), include_dashboard=False, logging_level=logging.WARNING
    )
    return True


def leave() -> None:
    """Leaves the cluster; one that was started here ends."""
    ray.shutdown()


def no_room(what: str, options: Mapping[str, Any]) -> ValueError:
    """The error to raise where for `PATIENCE` seconds no actor could be placed."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return ValueError(
        f"no worker for {what} in {PATIENCE:g} s: one needs {dict(options)}, the cluster's nodes have {nodes}; ask for "
        "less in placement, or add a node"
    )


def put(make: Callable[[], object]) -> ray.ObjectRef:
    """What makes a worker, where actors find it. Raises ValueError where it cannot be sent."""
    try:
        return ray.put(make)
    except (TypeError, pickle.PicklingError) as error:
        raise unsendable(error) from error
