"""Pairs of features that a run of language agents cannot have together: one table of reasons and remedies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Conflict(NamedTuple):
    """Two features by their names in `TextConfig.features_in_use`, why they exclude each other, and what to do."""

    first: str
    second: str
    reason: str
    remedy: str = "leave one of them out"


CONFLICTS = (
    Conflict("parallel", "staleness", "one divides each step among processes, the other plays ahead of training"),
    Conflict("parallel", "engine", "the first divides training among processes, and a server trains"),
    Conflict("parallel", "sampler", "the first divides the answers among processes, and other processes answer"),
    Conflict("parallel", "backend", "the first divides the episodes among processes, and other processes play"),
    Conflict("engine", "sampler", "the server samples, too"),
    Conflict("engine", "backend", "a server trains and samples, and processes of this run would, too"),
    Conflict("sampler", "backend", "the first answers in other processes, the second plays whole episodes there"),
    Conflict("in_flight_updates", "engine", "weights are replaced in this process's sampler, and a server answers"),
    Conflict("in_flight_updates", "sampler", "weights are replaced in this process's sampler, and others answer"),
    Conflict("in_flight_updates", "backend", "weights are replaced in this process's sampler, and others answer"),
    Conflict(
        "staleness",
        "refill",
        "the first plays ahead of training, the second plays more episodes once those of the step are known",
        "set staleness: 0, or flat_groups: skip",
    ),
    Conflict(
        "staleness",
        "full model",
        "episodes are played while weights are trained, and a full model has no second copy to play with",
        "set staleness: 0, or type: lora",
    ),
    Conflict(
        "fsdp",
        "stored reference",
        "the first shards the weights that the second stores whole",
        "set parallel: ddp, or reference: none",
    ),
    Conflict("fsdp", "quantize", "both divide the weights", "set parallel: ddp, or quantize: null"),
    Conflict(
        "fsdp",
        "whole weights",
        "these need whole weights of the base, and each process has only a part of them",
        "set parallel: ddp, or leave these keys out",
    ),
    Conflict(
        "backend",
        "person",
        "worker processes cannot reach the person at this terminal",
        "set backend: {type: inline}",
    ),
)


def check_conflicts(used: Mapping[str, str]) -> None:
    """Raises ValueError with the reason and the remedy if a run uses two features that exclude each other. `used` has
    its features, each as its config writes it: {"staleness": "staleness: 2"}."""
    for first, second, reason, remedy in CONFLICTS:
        if first in used and second in used:
            raise ValueError(f"{used[first]} and {used[second]} exclude each other: {reason}; {remedy}")
