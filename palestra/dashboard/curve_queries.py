"""Curve queries: metrics of several runs on a common axis, seeds of one experiment combined."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
from pydantic import Field

from palestra.core.config import StrictModel
from palestra.core.types import TEAM
from palestra.dashboard.catalog import CatalogRun
from palestra.dashboard.run_status import experiment_config, step_seconds
from palestra.dashboard.run_table import experiment_id, newest_by_seed
from palestra.runs.metric_log import MetricLog
from palestra.runs.series import Series, align, clip_x, counter_at, smooth, thin

AXES = ("step", "env_steps", "iteration", "seconds")


class CurveQuery(StrictModel):
    """The query of /api/curves: which metrics of which runs, on which axis, smoothed and downsampled how."""

    run: list[str] = Field(min_length=1, max_length=24)
    """Names of the runs, at most 24."""
    metric: list[str] = Field(min_length=1, max_length=24)
    """Metrics as LOG/KEY, such as metrics/entropy, evals/success, timings/train_s; at most 24."""
    x: str = "step"
    """The x axis: step, env_steps, iteration or seconds."""
    points: int = Field(600, ge=10, le=4000)
    """Maximum number of points per curve."""
    window: int = Field(1, ge=1, le=100_000)
    """Number of log lines of the moving mean; evaluations are never smoothed."""
    low: float | None = None
    """Lower bound of the x axis."""
    high: float | None = None
    """Upper bound of the x axis."""
    seeds: bool = False
    """Combine runs that differ only in their seed into one curve: mean, minimum and maximum. Of runs with equal seeds
    the newest counts."""


def curves(runs: Sequence[CatalogRun], query: CurveQuery) -> list[dict[str, Any]]:
    """Returns the existing curves by metric, then run (or group of seeds), then policy or evaluation; metrics that a
    run lacks are left out. Raises ValueError for an unknown log or axis."""
    lines = []
    for metric in query.metric:
        # Evaluations are few, and each is a mean of many episodes: smoothing would only blur them.
        window = 1 if metric.startswith("evals/") else query.window
        for group in _groups(runs, query.seeds):
            for name in dict.fromkeys(chain.from_iterable(log_of_metric(run, metric).names() for run in group)):
                each = [(run, curve(run, metric, name, query.x)) for run in group]
                each = [(run, one) for run, one in each if len(one[0])]
                if each:
                    head = {"metric": metric, "name": name, "runs": [run.name for run, _ in each]}
                    lines.append(head | _curve_json([one for _, one in each], query, window))
    return lines


def _groups(runs: Sequence[CatalogRun], seeds: bool) -> list[list[CatalogRun]]:
    """Groups runs whose configs differ only in name and seed, if `seeds`: the newest run of each seed."""
    if not seeds:
        return [[run] for run in runs]
    groups: dict[str, list[tuple[Any, str, CatalogRun]]] = {}
    for run in runs:
        group = groups.setdefault(experiment_id(experiment_config(run.config)), [])
        group.append((run.config.get("seed"), str(run.meta.get("created", "")), run))
    return [newest_by_seed(group) for group in groups.values()]


def log_of_metric(run: CatalogRun, metric: str) -> MetricLog:
    """Returns the log that a metric LOG/KEY is in. Raises ValueError for an unknown log."""
    logs = run.charted_logs
    log, _, _ = metric.partition("/")
    if log not in logs:
        raise ValueError(
            f'a metric is LOG/KEY with one of the logs {", ".join(logs)}, such as metrics/entropy: "{metric}"'
        )
    return logs[log]


def curve(run: CatalogRun, metric: str, name: str, axis: str) -> Series:
    """Returns a metric of a policy or evaluation, x ascending. Raises ValueError for `axis`."""
    steps, values = log_of_metric(run, metric).column(name, metric.partition("/")[2])
    x = _axis(run, name, steps, axis)
    order = np.argsort(x, kind="stable")
    return Series(x[order], values[order])


def _axis(run: CatalogRun, name: str, steps: np.ndarray, axis: str) -> np.ndarray:
    """Returns the axis values [T] of log lines with these steps: steps done, or another counter of the run,
    interpolated linearly between its own lines. Raises ValueError for an unknown axis."""
    if axis not in AXES:
        raise ValueError(f'the axis is one of {", ".join(AXES)}, not "{axis}"')
    if axis == "seconds":
        at, values = _clock(run)
    elif axis == "iteration":
        at, values = run.metrics.column(name, "iteration")
    elif axis == "env_steps":
        at, values = run.metrics.column(TEAM, axis)
    else:
        return steps + 1
    if not len(at):
        return steps + 1
    return counter_at(steps, at, values)


def _clock(run: CatalogRun) -> Series:
    """Returns steps and the seconds elapsed after each: by the clock, else the sum of phases."""
    steps, elapsed = run.timings.column(TEAM, "elapsed_s")
    if len(steps):
        return Series(steps, elapsed)
    steps, seconds = step_seconds(run.timings)
    return Series(steps, np.cumsum(seconds))


def _curve_json(each: Sequence[Series], asked: CurveQuery, window: int) -> dict[str, Any]:
    ends = {"from": min(float(x[0]) for x, _ in each), "to": max(float(x[-1]) for x, _ in each)}
    if len(each) > 1:
        x, y = align([clip_x(Series(x, smooth(y, window)), asked.low, asked.high) for x, y in each], asked.points)
        band = {"x": x, "y": y.mean(0), "low": y.min(0), "high": y.max(0)}
        return ends | {key: json_numbers(values) for key, values in band.items()}
    (x, raw) = each[0]
    line = thin(clip_x(Series(x, smooth(raw, window)), asked.low, asked.high), asked.points)
    drawn: dict[str, Any] = ends | {"x": json_numbers(line[0]), "y": json_numbers(line[1])}
    if window > 1:
        under = thin(clip_x(Series(x, raw), asked.low, asked.high), asked.points)
        drawn["raw"] = {"x": json_numbers(under[0]), "y": json_numbers(under[1])}
    return drawn


def json_numbers(values: np.ndarray) -> list[float | None]:
    """Returns numbers as JSON values with seven digits; null for non-finite ones."""
    finite = np.isfinite(values)
    return [float(f"{value:.7g}") if ok else None for value, ok in zip(values.tolist(), finite.tolist(), strict=True)]
