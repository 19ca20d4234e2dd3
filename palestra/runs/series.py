"""Series of a run: its metrics and evaluations over training, read from its logs, smoothed, thinned and compared.

A step has the number that metrics.jsonl gives it, counted from 0; -1 is before training. The x axis counts what was
done when a value was logged, training steps or env steps: the line of step 0 is at x = 1, an evaluation before training
at 0.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.special import stdtrit

from palestra.core.config import Tree, load
from palestra.core.files import read_lines
from palestra.core.types import TEAM
from palestra.runs.settings import flatten_tree

Line = dict[str, Any]
BANDS = ("sd", "ci", "range")
MAX_WINDOW_LINES = 10  # log lines of the windows of `end_windows`


class Series(NamedTuple):
    """A metric over training: x [T] ascending and y [T], both float64. Unknown values of y are NaN."""

    x: np.ndarray
    y: np.ndarray


# ---- reading


class RunLogs:
    """The logs of the run at `path`, each read once, when first used. Raises DamagedFile for a line that is not a JSON
    object."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def config(self) -> Tree:
        """The resolved config; {} if there is none."""
        path = self.path / "config.yaml"
        if not path.is_file() or not path.stat().st_size:
            return {}
        return load(path)

    @cached_property
    def metrics(self) -> list[Line]:
        return read_lines(self.path / "metrics.jsonl")

    @cached_property
    def timings(self) -> list[Line]:
        return read_lines(self.path / "timings.jsonl")

    @cached_property
    def by_policy(self) -> dict[str, list[Line]]:
        """The lines of metrics.jsonl by policy; those of the whole team are under `TEAM`."""
        return group_lines(self.metrics, "policy")

    @cached_property
    def evals(self) -> dict[str, list[Line]]:
        """The lines of evals.jsonl by evaluation."""
        return group_lines(read_lines(self.path / "evals.jsonl"), "name")

    @property
    def team(self) -> list[Line]:
        """The lines of the whole team."""
        return self.by_policy.get(TEAM, [])

    @property
    def policies(self) -> dict[str, list[Line]]:
        """The lines of metrics.jsonl by policy, without those of the whole team."""
        return {name: lines for name, lines in self.by_policy.items() if name != TEAM}

    @cached_property
    def env_steps(self) -> Series:
        """Steps, and the env steps done after each; empty if the run counts none."""
        found = series_of(self.team, "env_steps")
        if len(found.y) and found.y[-1] > 0:
            return found
        return Series(np.zeros(0), np.zeros(0))

    @property
    def x_title(self) -> str:
        """Title of the x axis of `series`."""
        return "env steps" if len(self.env_steps.x) else "training steps done"

    def series(self, lines: Iterable[Line], key: str) -> Series:
        """Returns a metric of these lines over env steps if the run counts them, else over training steps done."""
        steps, values = series_of(lines, key)
        if len(self.env_steps.x):
            return Series(counter_at(steps, *self.env_steps), values)
        return Series(steps + 1, values)


def group_lines(lines: Iterable[Line], key: str) -> dict[str, list[Line]]:
    """Groups log lines by their value of `key`, in order."""
    groups: dict[str, list[Line]] = defaultdict(list)
    for line in lines:
        groups[line[key]].append(line)
    return dict(groups)


def series_of(lines: Iterable[Line], key: str, x_key: str = "step") -> Series:
    """Returns `key` over `x_key` where both are numbers; `returns.red` is an inner key."""
    points = [(x, y) for line in lines if _is_number(y := _inner(line, key)) and _is_number(x := line.get(x_key))]
    x, y = np.array(points, float).reshape(-1, 2).T
    return Series(x, np.where(np.isfinite(y), y, np.nan))


def _inner(line: Line, key: str) -> Any:
    if key in line or "." not in key:
        return line.get(key)
    return flatten_tree(line).get(key)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def counter_at(steps: np.ndarray, logged_at: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Returns a counter [T] after these steps [T]: linear between the lines that log it, from 0."""
    return np.interp(steps, np.concatenate([[-1.0], logged_at]), np.concatenate([[0.0], counts]))


# ---- smoothing and thinning


def moving_mean(y: np.ndarray, window: int) -> np.ndarray:
    """Returns the centred moving mean [T] of y [T] over `window` points, over fewer at the ends. At the start the
    window stays centred, so that the first value is kept: what a run began with is not mixed with what it learned.
    Values that are not finite are skipped; a window without any other is NaN. [0, 3, 6] with window 3 gives
    [0, 3, 4.5]."""
    if window <= 1 or len(y) < 2:
        return y
    at = np.arange(len(y))
    before = np.minimum((window - 1) // 2, at)
    after = np.minimum(window // 2, at)
    first = at - before
    last = np.minimum(at + after + 1, len(y))
    is_known = np.isfinite(y)
    sums = np.concatenate([[0.0], np.cumsum(np.where(is_known, y, 0.0))])
    known = np.concatenate([[0], np.cumsum(is_known)])
    count = known[last] - known[first]
    return np.where(count > 0, (sums[last] - sums[first]) / np.maximum(count, 1), np.nan)


def smooth(y: np.ndarray, window: int = 9) -> np.ndarray:
    """Returns the moving mean [T] of y [T] over `window` points, at most a quarter of all: a wider window would flatten
    a short run."""
    return moving_mean(y, min(window, len(y) // 4))


def clip_x(series: Series, low: float | None, high: float | None) -> Series:
    """Returns the part of a series with low <= x <= high, with one more point at either side so that lines reach the
    border."""
    x, y = series
    first = 0
    last = len(x)
    if low is not None:
        first = max(0, int(np.searchsorted(x, low)) - 1)
    if high is not None:
        last = min(len(x), int(np.searchsorted(x, high, "right")) + 1)
    return Series(x[first:last], y[first:last])


def thin(series: Series, points: int) -> Series:
    """Returns a series of about `points` points at most: the minimum and maximum of each bucket, so that no spike is
    lost."""
    x, y = series
    if len(x) <= points:
        return series
    edges = np.linspace(0, len(x), points // 2 + 1).astype(int)
    kept: list[int] = [0, len(x) - 1]
    for first, last in pairwise(edges):
        part = y[first:last]
        if not np.isnan(part).all():
            kept += [first + int(np.nanargmin(part)), first + int(np.nanargmax(part))]
    order = np.unique(kept)
    return Series(x[order], y[order])


# ---- comparing


def align(each: Sequence[Series], points: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Returns x [K] and y [R, K] of R series on one axis: the range that all of them cover, linearly interpolated at
    every x that one of them has, or at `points` equal distances if these are more. Empty series are left out; K is 0
    if the others have no range in common."""
    known = [series for series in each if len(series.x)]
    if not known:
        return np.zeros(0), np.zeros((len(each), 0))
    low = max(x[0] for x, _ in known)
    high = min(x[-1] for x, _ in known)
    grid = np.unique(np.concatenate([x for x, _ in known]))
    grid = grid[(grid >= low) & (grid <= high)]
    if points is not None and len(grid) > points:
        grid = np.linspace(low, high, points)
    return grid, np.stack([np.interp(grid, x, y) for x, y in known])


def band_bounds(y: np.ndarray, band: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the lower and upper bound [K] of the band around the mean of y [R, K], R > 1: standard deviation, 95 %
    interval of the mean (Student's t), or range."""
    mean = y.mean(0)
    sd = y.std(0, ddof=1)
    if band == "range":
        return y.min(0), y.max(0)
    half = stdtrit(len(y) - 1, 0.975) * sd / len(y) ** 0.5 if band != "sd" else sd
    return mean - half, mean + half


def end_windows(lines: Sequence[Line]) -> tuple[Sequence[Line], Sequence[Line], str]:
    """Returns the first and the last log lines of a run, and a text that names them.

    Each window has at most `MAX_WINDOW_LINES` lines and at most a third of all, so that the two never meet; of fewer
    than six lines they are the first and the last line. One line alone is the last: nothing came before it.
    """
    size = max(1, min(MAX_WINDOW_LINES, len(lines) // 3))
    if len(lines) < 2:
        return lines[:0], lines, "the only line"
    which = f"means of the first and last {size} lines" if size > 1 else "first and last line"
    return lines[:size], lines[-size:], f"{which} of {len(lines)}"


def mean_of(lines: Sequence[Line], key: str) -> float | None:
    """Returns the mean of a metric over the lines that have it as a number; None if none has."""
    values = [line[key] for line in lines if _is_number(line.get(key))]
    return sum(values) / len(values) if values else None


def wilson_interval(successes: float, n: float, z: float = 1.96) -> tuple[float, float]:
    """Returns the score interval of a proportion (Wilson, 1927), 95 % by default. 8 of 10 gives (0.49, 0.94)."""
    if n == 0:
        return 0.0, 1.0
    share = successes / n
    spread = z * z / n
    centre = (share + spread / 2) / (1 + spread)
    half = z / (1 + spread) * (share * (1 - share) / n + spread / (4 * n)) ** 0.5
    return max(0.0, centre - half), min(1.0, centre + half)


def valid_instances(line: Mapping[str, Any]) -> float:
    """Returns the number of instances over which an evaluation's success is a mean: those of its episodes that did not
    fail, or `instances` if these repeat some. Where each instance has several samples, `failed` counts samples, and a
    failed one is a part of an instance: samples of one instance are not independent."""
    if "instances" in line:
        return float(line["instances"])
    return max(0.0, float(line["episodes"] - line.get("failed", 0.0) / line.get("samples", 1.0)))


def success_bounds(line: Mapping[str, Any], key: str = "success") -> tuple[float, float]:
    """Returns the 95 % Wilson interval of the success rate `key` of an evaluation."""
    n = valid_instances(line)
    return wilson_interval(line[key] * n, n)


def success_interval(line: Line, key: str = "success") -> str:
    """Returns the success rate `key` of an evaluation with its 95 % Wilson interval, as text; "-" without one."""
    if key not in line:
        return "-"
    low, high = success_bounds(line, key)
    return f"{line[key]:.1%} [{low:.1%}, {high:.1%}]"
