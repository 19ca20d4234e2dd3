"""Charts as inline SVG of an HTML page, drawn by matplotlib.

matplotlib's SVG is rewritten: colours become CSS variables of the page, so that charts follow light and dark mode and
print; letters stay text in the page's font; points and cells have tooltips; there are no ids, links or styles.
"""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from palestra.report.charts import (
    COLOURS,
    GRID,
    INK,
    LINE_STYLES,
    Chart,
    HeatMap,
    curve_style,
    draw_cells,
    draw_chart,
    drawing,
    format_compact,
    label_cells,
    new_figure,
    shorten,
)
from palestra.report.html import escape_text

WIDTH, HEIGHT = 360, 210  # units of the SVG of a chart; one is a pixel at full size, and a point for matplotlib
LEFT, RIGHT, TOP, BOTTOM = 44, 10, 8, 34  # margins of the axes, for tick labels and the x title
FONT_SIZE = 10  # as in the page's style of SVG text
LETTER, LINE = 6.5, 13  # width of a wide letter and height of a line of that size
CSS_COLOURS = {colour.lower(): f"var(--c{i})" for i, colour in enumerate(COLOURS)}
CSS_COLOURS |= {INK.lower(): "var(--soft)", GRID.lower(): "var(--line)"}
BORDER_STYLES = dict(zip(LINE_STYLES, ("solid", "dashed", "dotted", "double"), strict=True))
KEPT_STYLES = ("fill", "fill-opacity", "stroke", "stroke-width", "stroke-dasharray", "text-anchor")
CELL_CHARS = 16  # letters of a name beside a heat map
NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")
COMMAND = re.compile(r" ?([A-Za-z]) ?")
Tooltips = Mapping[str, Sequence[str]]


def chart_html(chart: Chart) -> str:
    """Returns a chart with title and legend as an HTML figure; "" if no curve has a value."""
    if not chart.shown:
        return ""
    with drawing(**{"font.size": FONT_SIZE}):
        figure = new_figure(WIDTH / 72, HEIGHT / 72)
        axis = figure.add_axes((0, 0, 1, 1))
        draw_chart(axis, chart)
        longest = max((len(label.get_text()) for label in axis.get_yticklabels()), default=0)
        left, bottom = max(LEFT, LETTER * longest + 8) / WIDTH, BOTTOM / HEIGHT
        axis.set_position((left, bottom, 1 - left - RIGHT / WIDTH, 1 - bottom - TOP / HEIGHT))
        picture = figure_svg(figure, chart.title, _point_tooltips(chart))
    named = chart.named if len(chart.named) > 1 or chart.named[0].name != chart.title else []
    return _html(chart.title, picture, "".join(_legend_entry(i, curve.name) for i, curve in enumerate(named)))


def _legend_entry(number: int, name: str) -> str:
    css = f"border-top-color:var(--c{number % len(COLOURS)})"
    border = BORDER_STYLES[curve_style(number)[1]]
    css += f";border-top-style:{border}" if border != "solid" else ""
    return f'<span><i style="{css}"></i>{escape_text(name, 60)}</span> '


def _point_tooltips(chart: Chart) -> Tooltips:
    return {
        f"curve {number}": [
            f"{curve.name}: {format_compact(y)} at {format_compact(x)}"
            for x, y in zip(*curve.drawn, strict=True)
            if np.isfinite(y)
        ]
        for number, curve in enumerate(chart.named)
        if curve.has_dots
    }


def heat_map_html(heat: HeatMap) -> str:
    """Returns a heat map with title and scale as an HTML figure; "" if no cell has a value. Of small cells,
    every k-th row and column is named."""
    known = heat.values[np.isfinite(heat.values)]
    if not len(known):
        return ""
    size = max(4.0, min(26.0, 300 / len(heat.columns), 420 / len(heat.rows)))
    across, down = size * len(heat.columns), size * len(heat.rows)
    row_chars, column_chars = _longest(heat.rows), _longest(heat.columns)
    turn = 50 if LETTER * column_chars + 2 > max(size, 20) else 0
    left = LETTER * row_chars + 12
    top, right = (5.5 * column_chars + 16, 4.5 * column_chars + 8) if turn else (22, 16)
    wide, high = left + across + right, top + down + 8
    max_columns = across // (LINE if turn else LETTER * column_chars + 6)
    with drawing(**{"font.size": FONT_SIZE}):
        figure = new_figure(wide / 72, high / 72)
        axis = figure.add_axes((left / wide, 8 / high, across / wide, down / high))
        draw_cells(axis, heat)
        label_cells(axis, heat, max(1, int(down // LINE)), max(1, int(max_columns)), chars=CELL_CHARS, turn=turn)
        axis.xaxis.tick_top()
        picture = figure_svg(figure, heat.title, {"cells": list(_cell_tooltips(heat))}, max_width=1.4 * wide)
    span = "0 (blank)" if known.min() >= 0 else f"{format_compact(-heat.scale)} (orange) over 0 (blank)"
    return _html(heat.title, picture, f"from {span} to {format_compact(heat.scale)} (blue)")


def _cell_tooltips(heat: HeatMap) -> Iterator[str]:
    for i, j in zip(*np.nonzero(np.isfinite(heat.values)), strict=True):
        yield f"{heat.rows[i]} / {heat.columns[j]}: {format_compact(heat.values[i, j])}"


def _longest(names: Sequence[str]) -> int:
    return min(CELL_CHARS, max(map(len, names), default=0))


def _html(title: str, picture: str, key: str) -> str:
    return f'<figure><figcaption>{escape_text(title)}</figcaption>{picture}<div class="key">{key}</div></figure>'


# ---- from matplotlib's SVG to that of the page


def figure_svg(figure: Any, title: str, tooltips: Tooltips, *, max_width: float | None = None) -> str:
    """Returns a matplotlib figure as an SVG element. `tooltips` are the texts of the points, or of the shapes, of the
    artist with this gid, in the order drawn; `max_width` is in pixels."""
    file = io.BytesIO()
    figure.savefig(file, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    root = ET.fromstring(file.getvalue())
    shapes = {path.get("id", ""): path.get("d", "") for path in root.iterfind(".//{*}defs/{*}path")}
    parts = "".join(_Converter(shapes, tooltips).elements(root, ""))
    style = f' style="max-width:{max_width:.0f}px"' if max_width else ""
    box = f'viewBox="{root.get("viewBox")}"{style}'
    return f'<svg {box} role="img" stroke-linejoin="round" aria-label="{escape_text(title)}">{parts}</svg>'


class _Converter:
    """Rewrites the elements of one SVG. `shapes` are its defined paths by id, each used at several places."""

    def __init__(self, shapes: Mapping[str, str], tooltips: Tooltips) -> None:
        self.shapes = shapes
        self.left = {gid: iter(texts) for gid, texts in tooltips.items()}

    def elements(self, parent: ET.Element, gid: str) -> Iterator[str]:
        """Yields the drawn elements below `parent`, which belongs to the artist `gid`, without their groups."""
        for element in parent:
            tag = element.tag.rpartition("}")[2]
            if tag == "g":
                own = element.get("id", "")
                yield from self.elements(element, own if own in self.left else gid)
            elif tag == "path":
                yield from self._path(element, gid)
            elif tag == "use":
                yield self._use(element, gid)
            elif tag == "text":
                place = "".join(f' {key}="{_rounded(element.get(key, ""))}"' for key in ("x", "y"))
                turn = _rounded(element.get("transform", ""))
                turn = f' transform="{turn}"' if turn and not turn.startswith(("rotate(-0 ", "rotate(0 ")) else ""
                yield f"<text{place}{turn}{_style(element, without='fill')}>{escape_text(element.text)}</text>"

    def _path(self, element: ET.Element, gid: str) -> Iterator[str]:
        style = _style(element)
        if 'fill="none"' in style and "stroke=" not in style:
            return  # the background
        tooltip = self._tooltip(gid) if not gid.startswith("curve") else ""
        yield _closed("path", f' d="{_path_data(element.get("d", ""))}"{style}', tooltip)

    def _use(self, element: ET.Element, gid: str) -> str:
        x, y, style = _rounded(element.get("x", "0")), _rounded(element.get("y", "0")), _style(element)
        if gid.startswith("curve"):
            return _closed("circle", f' cx="{x}" cy="{y}" r="2.4"{style}', self._tooltip(gid))
        href = next(value for key, value in element.attrib.items() if key.endswith("href"))
        path = _path_data(self.shapes[href.removeprefix("#")])
        return _closed("path", f' d="{path}" transform="translate({x} {y})"{style}', self._tooltip(gid))

    def _tooltip(self, gid: str) -> str:
        return next(self.left.get(gid, iter(())), "")


def _closed(tag: str, attributes: str, tooltip: str) -> str:
    inside = f"<title>{escape_text(shorten(tooltip, 160))}</title>" if tooltip else ""
    return f"<{tag}{attributes}>{inside}</{tag}>" if inside else f"<{tag}{attributes}/>"


def _rounded(text: str) -> str:
    """Returns SVG data with its numbers rounded to tenths: a report has tens of thousands."""
    return NUMBER.sub(lambda found: f"{float(found[0]):.1f}".removesuffix(".0"), text)


def _path_data(data: str) -> str:
    """Returns path data with rounded numbers, without the spaces that it does not need."""
    return COMMAND.sub(r"\1", _rounded(" ".join(data.split())))


def _style(element: ET.Element, without: str = "") -> str:
    """Returns the element's style as attributes, with the page's colours."""
    pairs = (part.split(":", 1) for part in element.get("style", "").split(";") if ":" in part)
    style = {key.strip(): value.strip() for key, value in pairs}
    kept = [(key, style[key]) for key in KEPT_STYLES if key in style and key != without]
    return "".join(f' {key}="{CSS_COLOURS.get(value, value)}"' for key, value in kept)
