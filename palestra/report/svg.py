"""Curves and heat maps as inline SVG. Colours are CSS variables of the page, so that charts follow light and dark mode
and print."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from palestra.report.html import escape_text

WIDTH, HEIGHT = 360, 210
LEFT, RIGHT, TOP, BOTTOM = 44, 8, 8, 30
MAX_POINTS = 400  # maximum number of points drawn of a curve


@dataclass(frozen=True)
class ChartCurve:
    """A curve of a chart: `points` are (x, y) in order, `intervals` an interval (low, high) for each. `has_markers`
    draws a dot at every point; a `is_faint` curve is drawn behind the others and has no legend entry."""

    name: str
    points: list[tuple[float, float]]
    intervals: list[tuple[float, float]] = field(default_factory=list)
    has_markers: bool = False
    is_faint: bool = False


def chart(
    title: str, curves: Sequence[ChartCurve], *, x_title: str, low: float | None = None, high: float | None = None
) -> str:
    """Returns a chart with title and legend, as an HTML figure; "" if no curve has a point. The y axis always includes
    `low` and `high`."""
    shown = [curve for curve in curves if curve.points]
    if not shown:
        return ""
    frame = AxisMap.fit(shown, low, high)
    parts = [*_grid(frame, x_title)]
    named = [curve for curve in shown if not curve.is_faint]
    for curve in sorted(shown, key=lambda curve: not curve.is_faint):
        colour = "var(--line)" if curve.is_faint else f"var(--c{named.index(curve) % 6})"
        parts += _curve(frame, curve, colour)
    named = named if len(named) > 1 or named[0].name != title else []
    key = "".join(f'<i style="background:var(--c{i % 6})"></i>{escape_text(c.name, 60)}' for i, c in enumerate(named))
    picture = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape_text(title)}">{"".join(parts)}</svg>'
    return f'<figure><figcaption>{escape_text(title)}</figcaption>{picture}<div class="key">{key}</div></figure>'


@dataclass(frozen=True)
class AxisMap:
    """Affine map from data coordinates to SVG coordinates."""

    x0: float
    x1: float
    y0: float
    y1: float

    @classmethod
    def fit(cls, curves: Sequence[ChartCurve], low: float | None, high: float | None) -> AxisMap:
        """Returns the map that fits all points and intervals, with a margin except at `low` and `high`."""
        xs = [x for curve in curves for x, _ in curve.points]
        ys = [y for curve in curves for _, y in curve.points]
        ys += [end for curve in curves for span in curve.intervals for end in span]
        ys += [end for end in (low, high) if end is not None]
        y0, y1 = min(ys), max(ys)
        room = 0.05 * (y1 - y0) or abs(y1) * 0.1 or 1.0
        y0, y1 = (y0 if y0 == low else y0 - room), (y1 if y1 == high else y1 + room)
        x0, x1 = min(xs), max(xs)
        return cls(x0, x1 if x1 > x0 else x0 + 1, y0, y1)

    def to_svg(self, x: float, y: float) -> tuple[float, float]:
        """Returns the SVG coordinates of a data point."""
        across = (x - self.x0) / (self.x1 - self.x0)
        up = (y - self.y0) / (self.y1 - self.y0)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)


def axis_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Returns about `count` round numbers (multiples of 1, 2 or 5 times a power of 10) between two values."""
    rough = (high - low) / count
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * m for m in (1, 2, 5, 10) if unit * m >= rough)
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


def format_compact(value: float) -> str:
    """Returns a compact number: 1234567 gives "1.23M", 0.00001 gives "1e-05"."""
    for size, name in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if name == 'k' else size):.3g}{name}"
    return f"{value:.4g}"


def _grid(frame: AxisMap, x: str) -> list[str]:
    parts = []
    for value in axis_ticks(frame.y0, frame.y1):
        _, y = frame.to_svg(frame.x0, value)
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="var(--line)" stroke-width=".6"/>'
        )
        parts.append(f'<text x="{LEFT - 5}" y="{y + 3:.1f}" text-anchor="end">{format_compact(value)}</text>')
    for value in axis_ticks(frame.x0, frame.x1):
        at, _ = frame.to_svg(value, frame.y0)
        parts.append(
            f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 13}" text-anchor="middle">{format_compact(value)}</text>'
        )
    middle = (LEFT + WIDTH - RIGHT) / 2
    return [*parts, f'<text x="{middle}" y="{HEIGHT - 3}" text-anchor="middle">{escape_text(x)}</text>']


def _curve(frame: AxisMap, curve: ChartCurve, colour: str) -> list[str]:
    every = max(1, math.ceil(len(curve.points) / MAX_POINTS))
    kept = [*range(0, len(curve.points), every)]
    if kept[-1] != len(curve.points) - 1:
        kept.append(len(curve.points) - 1)
    places = [frame.to_svg(*curve.points[i]) for i in kept]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    width = 1 if curve.is_faint else 1.8
    parts = [
        f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="{width}" stroke-linejoin="round"/>'
    ]
    for i, (low, high) in enumerate(curve.intervals):
        x, top = frame.to_svg(curve.points[i][0], high)
        _, foot = frame.to_svg(curve.points[i][0], low)
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top:.1f}" y2="{foot:.1f}" stroke="{colour}" stroke-width="1"/>'
        )
    if curve.has_markers or len(places) == 1:
        for i, (x, y) in zip(kept, places, strict=True):
            at, value = map(format_compact, curve.points[i][:2])
            told = f"{escape_text(curve.name, 60)}: {value} at {at}"
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{colour}"><title>{told}</title></circle>')
    return parts


def heat_map(
    title: str, values: np.ndarray, rows: Sequence[str], columns: Sequence[str], *, max_value: float | None = None
) -> str:
    """Returns a heat map of values [R, C] float as an HTML figure: blue above zero, orange below, scaled by the largest
    magnitude (or `max_value`). NaN cells stay empty; each cell has a tooltip with its value."""
    known = values[~np.isnan(values)]
    if not len(known):
        return ""
    largest = max_value or float(np.abs(known).max()) or 1.0
    size = max(4.0, min(26.0, 300 / max(1, len(columns))))
    named = size >= 11
    left, head = (5.6 * _longest(rows) + 8, 4.6 * _longest(columns) + 8) if named else (8.0, 8.0)
    wide, high = left + size * len(columns) + (3.2 * _longest(columns) if named else 8), head + size * len(rows) + 8
    parts = [_square(left + j * size, head + i * size, size, float(value), largest, f"{rows[i]} / {columns[j]}")
             for i, line in enumerate(values) for j, value in enumerate(line) if not np.isnan(value)]  # fmt: skip
    if named:
        for i, name in enumerate(rows):
            parts.append(
                f'<text x="{left - 4}" y="{head + (i + 0.65) * size:.1f}" '
                f'text-anchor="end">{escape_text(_brief(name))}</text>'
            )
        for j, name in enumerate(columns):
            x, y = left + (j + 0.65) * size, head - 4
            parts.append(f'<text transform="translate({x:.1f} {y}) rotate(-50)">{escape_text(_brief(name))}</text>')
    box = f'viewBox="0 0 {wide:.0f} {high:.0f}" style="max-width:{1.4 * wide:.0f}px"'
    picture = f'<svg {box} role="img" aria-label="{escape_text(title)}">'
    span = "0 (blank)" if known.min() >= 0 else f"{format_compact(-largest)} (orange) over 0 (blank)"
    scale = f'<div class="key">from {span} to {format_compact(largest)} (blue)</div>'
    return f"<figure><figcaption>{escape_text(title)}</figcaption>{picture}{''.join(parts)}</svg>{scale}</figure>"


def _brief(name: str) -> str:
    return name if len(name) <= 16 else f"{name[:15]}…"


def _longest(names: Sequence[str]) -> int:
    return min(16, max(map(len, names), default=0))


def _square(x: float, y: float, size: float, value: float, largest: float, name: str) -> str:
    colour = "var(--c0)" if value >= 0 else "var(--c1)"
    strength = min(1.0, abs(value) / largest)
    told = f"<title>{escape_text(name, 80)}: {format_compact(value)}</title>"
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{size - 0.6:.1f}" height="{size - 0.6:.1f}" fill="{colour}" '
        f'fill-opacity="{strength:.3f}" stroke="var(--line)" stroke-width=".4">{told}</rect>'
    )
