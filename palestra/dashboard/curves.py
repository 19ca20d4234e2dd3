"""Curves for display: smoothed over all points, then downsampled to what the screen's pixels can show."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

Curve = tuple[np.ndarray, np.ndarray]  # x [T] ascending, y [T], both float64


def moving_mean(y: np.ndarray, window: int) -> np.ndarray:
    """Returns the centred moving mean [T] of y [T] over `window` points, over fewer at the ends; NaN values are
    skipped. [0, 3, 6] with window 3 gives [1.5, 3, 4.5]."""
    if window <= 1 or len(y) < 2:
        return y
    before, after = (window - 1) // 2, window // 2
    at = np.arange(len(y))
    first, last = np.maximum(at - before, 0), np.minimum(at + after + 1, len(y))
    sums = np.concatenate([[0.0], np.cumsum(np.nan_to_num(y))])
    known = np.concatenate([[0], np.cumsum(~np.isnan(y))])
    return (sums[last] - sums[first]) / np.maximum(known[last] - known[first], 1)


def clip_x(curve: Curve, low: float | None, high: float | None) -> Curve:
    """Returns the part of a curve with low <= x <= high, with one more point at either side so that lines reach the
    border."""
    x, y = curve
    first = 0 if low is None else max(0, int(np.searchsorted(x, low)) - 1)
    last = len(x) if high is None else min(len(x), int(np.searchsorted(x, high, "right")) + 1)
    return x[first:last], y[first:last]


def downsample(curve: Curve, points: int) -> Curve:
    """Returns a curve of about `points` points at most: the minimum and maximum of each bucket, so that no spike is
    lost."""
    x, y = curve
    if len(x) <= points:
        return curve
    edges = np.linspace(0, len(x), points // 2 + 1).astype(int)
    kept: list[int] = [0, len(x) - 1]
    for first, last in pairwise(edges):
        part = y[first:last]
        if not np.isnan(part).all():
            kept += [first + int(np.nanargmin(part)), first + int(np.nanargmax(part))]
    order = np.unique(kept)
    return x[order], y[order]


def mean_band(curves: Sequence[Curve], points: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns x, mean, minimum and maximum over several curves (each [K] float64, K <= `points`), on the x range that
    all of them cover."""
    curves = [curve for curve in curves if len(curve[0])]
    if not curves:
        return (np.zeros(0),) * 4
    low, high = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    grid = np.unique(np.concatenate([x for x, _ in curves]))
    grid = grid[(grid >= low) & (grid <= high)]
    if len(grid) > points:
        grid = np.linspace(low, high, points)
    rows = np.stack([np.interp(grid, x, y) for x, y in curves])
    return grid, rows.mean(axis=0), rows.min(axis=0), rows.max(axis=0)
