"""Columns and groups of the list of runs: settings of their configs, and runs that differ only in the seed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from palestra.core.config import Tree
from palestra.runs.headline import headline_eval, return_keys
from palestra.runs.series import band_bounds

T = TypeVar("T")
Settings = Mapping[str, Any]  # a flattened config without the keys in which seeds may differ


def experiment_id(settings: Settings) -> str:
    """Returns a text that runs share if their configs differ only in the seed."""
    return hashlib.blake2b(repr(sorted(settings.items())).encode(), digest_size=8).hexdigest()


def setting(settings: Settings, column: str) -> str:
    """Returns the values at `column`, a key or its end ("lr"), as text; "" if there is none."""
    values = [value for key, value in settings.items() if f".{key}".endswith(f".{column}") and value is not None]
    return ", ".join(dict.fromkeys(map(str, values)))


def varying_keys(runs: Sequence[Settings]) -> list[str]:
    """Returns the keys that have more than one value in these runs, sorted."""
    values: dict[str, set[str]] = {}
    for settings in runs:
        for key, value in settings.items():
            values.setdefault(key, set()).add(repr(value))
    return sorted(key for key, found in values.items() if len(found) > 1)


def main_score(evals: Mapping[str, Tree], team: Tree) -> tuple[str, float, bool] | None:
    """Returns name, value and whether it is a share of a run's main result: NashConv, or the success or return of its
    leading evaluation; None without one that is a single number."""
    if team.get("nash_conv") is not None:
        return "NashConv", team["nash_conv"], False
    name = headline_eval(list(evals))
    if not name:
        return None
    line = evals[name]
    if isinstance(line.get("success"), int | float):
        return name, line["success"], True
    if "return" in return_keys(line):
        return name, line["return"], False
    return None


def seed_groups(lines: Iterable[Tree]) -> list[Tree]:
    """Returns the groups of two and more runs, newest first, that differ only in the seed, each with the mean of their
    main results and its 95 % interval (Student's t), if they have one in common. A seed counts once, by its newest run
    with a result."""
    by_experiment: dict[str, list[Tree]] = {}
    for line in lines:
        by_experiment.setdefault(line["experiment"], []).append(line)
    groups = []
    for experiment, group in by_experiment.items():
        if experiment and len(group) > 1:
            names = [line["name"] for line in group]
            scored = [(line["seed"], line["created"], line) for line in reversed(group) if line["score"]]
            groups.append({"experiment": experiment, "runs": names, "result": mean_result(newest_by_seed(scored))})
    return groups


def newest_by_seed(runs: Iterable[tuple[Any, str, T]]) -> list[T]:
    """Returns the newest run of each seed, from seeds, times of creation and runs."""
    newest: dict[str, tuple[str, T]] = {}
    for seed, created, run in runs:
        if created >= newest.get(repr(seed), ("", run))[0]:
            newest[repr(seed)] = (created, run)
    return [run for _, run in newest.values()]


def mean_result(group: Sequence[Tree]) -> str:
    """Returns "test 85.0% [80.1%, 89.9%]" over the runs of a group; "" if fewer than two have the same result."""
    scores = [line["score"] for line in group]
    if len(scores) < 2 or len({name for name, _, _ in scores}) > 1:
        return ""
    name, _, is_share = scores[0]
    values = np.array([[value] for _, value, _ in scores])
    low, high = (float(bound[0]) for bound in band_bounds(values, "ci"))
    if is_share:
        return f"{name} {values.mean():.1%} [{max(0.0, low):.1%}, {min(1.0, high):.1%}]"
    return f"{name} {values.mean():.2f} [{low:.2f}, {high:.2f}]"
