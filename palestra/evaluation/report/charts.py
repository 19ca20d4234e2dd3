"""Charts by matplotlib: curves and heat maps as plain data, drawn into axes, with the look that all figures share.

Figures are made without pyplot: no backend is chosen for the process, and no figure stays in its memory. matplotlib is
imported where something is drawn.
"""

from __future__ import annotations

import base64
import io
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from palestra.core.files import replacing_file
from palestra.evaluation.report.html import block, escape_text, visible_text
from palestra.runs.series import Series, thin

COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"]  # Okabe & Ito (2008): colour-blind safe
LINE_STYLES = ("-", "--", ":", "-.")  # distinguishable without colour
# text and axes; grid and what stands behind the curves
INK = "#59626D"
GRID = "#D5DAE0"
MAX_POINTS = 400  # points drawn of a curve
MAX_LEGEND = 12  # curves that a legend names
LEGEND_CHARS = 64  # characters in a row of a legend
HANDLE_CHARS = 7  # characters as wide as the line beside a label
LEGEND_ROW_IN = 0.15
LEGEND_BELOW = {"loc": "upper center", "bbox_to_anchor": (0.5, 0), "borderaxespad": 4.6, "columnspacing": 1.4}
MAX_AXIS_LABELS = 24  # names that fit on an axis of a panel
MAX_LABEL_CHARS = 24
PANEL_COLUMNS = 3  # of a picture of several panels
SETTINGS = {
    "axes.edgecolor": GRID,
    "axes.formatter.useoffset": False,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "figure.facecolor": "#FFFFFF",
    "font.size": 8,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "svg.fonttype": "none",  # letters stay letters
    "svg.hashsalt": "palestra",  # makes equal figures equal byte for byte
    "pdf.fonttype": 42,
    "text.parse_math": False,  # the names of a run's policies may have a $
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.pad": 5.0,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
}

# of a dark page: --soft, --line and --paper
DARK_INK = "#9AA5B1"
DARK_GRID = "#3A424C"
DARK_PAPER = "#14181D"
DARK_SETTINGS = {
    "axes.edgecolor": DARK_GRID,
    "axes.facecolor": DARK_PAPER,
    "axes.labelcolor": DARK_INK,
    "axes.titlecolor": DARK_INK,
    "figure.facecolor": DARK_PAPER,
    "grid.color": DARK_GRID,
    "legend.labelcolor": DARK_INK,
    "text.color": DARK_INK,
    "xtick.color": DARK_INK,
    "ytick.color": DARK_INK,
}
PAGE_FIGURE_IN = (4.4, 3.3)  # width and height of a chart on a page


@dataclass(frozen=True)
class ChartCurve:
    """A curve of a chart. `intervals` [T, 2] are the lower and upper bound at each point. `has_markers` draws a dot at
    every point; a `is_faint` curve is drawn behind the others and has no legend entry."""

    name: str
    series: Series
    intervals: np.ndarray | None = None
    has_markers: bool = False
    is_faint: bool = False

    @cached_property
    def thinned_series(self) -> Series:
        """The points that are drawn, at most about `MAX_POINTS`."""
        return thin(self.series, MAX_POINTS)

    @property
    def has_dots(self) -> bool:
        """True if dots are drawn: one known value alone would make no line."""
        return self.has_markers or int(np.isfinite(self.thinned_series.y).sum()) == 1


@dataclass(frozen=True)
class Chart:
    """Curves on common axes. The y axis includes `low` and `high`; `is_log` makes it logarithmic."""

    title: str
    curves: Sequence[ChartCurve]
    x_title: str
    low: float | None = None
    high: float | None = None
    is_log: bool = False

    @property
    def curves_with_values(self) -> list[ChartCurve]:
        return [curve for curve in self.curves if np.isfinite(curve.series.y).any()]

    @property
    def has_values(self) -> bool:
        return bool(self.curves_with_values)

    @property
    def legend_curves(self) -> list[ChartCurve]:
        """The curves that have a legend entry: the colour of the i-th is `COLOURS[i % 6]`."""
        return [curve for curve in self.curves_with_values if not curve.is_faint]

    @property
    def legend_labels(self) -> list[str]:
        """The labels of the legend; none for a single curve or for too many."""
        if not 1 < len(self.legend_curves) <= MAX_LEGEND:
            return []
        return [shorten(curve.name, LEGEND_CHARS) for curve in self.legend_curves]

    @property
    def legend_columns(self) -> int:
        """The number of labels in a row of the legend."""
        return columns_of_legend(self.legend_labels, LEGEND_CHARS)

    @property
    def legend_height(self) -> float:
        """The height of the legend, in inches."""
        return LEGEND_ROW_IN * -(-len(self.legend_labels) // self.legend_columns)

    @property
    def size(self) -> tuple[float, float]:
        """Width and height on a page, in inches."""
        width, height = PAGE_FIGURE_IN
        return width, height + self.legend_height

    def draw(self, axis: Any) -> None:
        """Draws the chart into matplotlib axes: curves, grid, title and, of several curves, a legend below them."""
        for curve in self.curves_with_values:
            if curve.is_faint:
                axis.plot(*curve.thinned_series, color=_grid_colour(), linewidth=1.0)
        for number, curve in enumerate(self.legend_curves):
            _draw_curve(axis, curve, number)
        if self.is_log:
            axis.set_yscale("log")
        axis.grid(True)
        axis.set_axisbelow(True)
        axis.margins(x=0.02, y=0.06)
        _set_limits(axis, self)
        axis.set_xlabel(shorten(self.x_title, 60))
        axis.set_title(visible_text(self.title), wrap=True)
        if self.legend_labels:
            handles = [line for line in axis.get_lines() if line.get_gid()]
            axis.legend(handles, self.legend_labels, ncols=self.legend_columns, **LEGEND_BELOW)


@dataclass(frozen=True)
class HeatMap:
    """Values [R, C] float64 as coloured cells: blue above zero, orange below, scaled by the largest magnitude or
    `max_value`. NaN cells stay empty. `row_zero_below` has the first row at the bottom, `is_square` square cells."""

    title: str
    values: np.ndarray
    rows: Sequence[str]
    columns: Sequence[str]
    max_value: float | None = None
    row_zero_below: bool = False
    is_square: bool = False
    x_title: str = ""

    @property
    def has_values(self) -> bool:
        return bool(np.isfinite(self.values).any())

    @property
    def size(self) -> tuple[float, float]:
        """Width and height on a page, in inches."""
        width, height = PAGE_FIGURE_IN
        return width, height + 0.05 * min(len(self.rows), MAX_AXIS_LABELS)

    @property
    def scale(self) -> float:
        """The magnitude that has the full colour."""
        known = self.values[np.isfinite(self.values)]
        return self.max_value or float(np.abs(known).max(initial=0.0)) or 1.0

    def draw(self, axis: Any) -> None:
        """Draws the heat map with names, title and a colour bar: cell (i, j) is the unit square at (j, i)."""
        import matplotlib
        from matplotlib.colors import LinearSegmentedColormap

        above = COLOURS[0]
        below = COLOURS[1]
        paper = matplotlib.rcParams["figure.facecolor"]
        shades = [paper, above]
        lowest = 0.0
        if (self.values < 0).any():
            shades = [below, paper, above]
            lowest = -self.scale
        colours = LinearSegmentedColormap.from_list("cells", shades)
        known = np.ma.masked_invalid(self.values)
        grid = {"edgecolors": _grid_colour(), "linewidth": 0.4}
        cells = axis.pcolormesh(known, cmap=colours, vmin=lowest, vmax=self.scale, **grid)
        if not self.row_zero_below:
            axis.invert_yaxis()
        for spine in axis.spines.values():
            spine.set_visible(False)
        _label_cells(self.rows, axis.set_yticks, 0)
        _label_cells(self.columns, axis.set_xticks, 90 if max(map(len, self.columns)) > 2 else 0)
        axis.tick_params(labelsize=6)
        if self.is_square:
            axis.set_aspect("equal")
        axis.set_xlabel(self.x_title)
        axis.set_title(visible_text(self.title), wrap=True)
        axis.figure.colorbar(cells, ax=axis, shrink=0.8)


def _label_cells(names: Sequence[str], set_ticks: Callable[..., Any], turn: int) -> None:
    """Names at most `MAX_AXIS_LABELS` rows or columns, all of them or every k-th, turned by `turn` degrees."""
    named = range(0, len(names), -(-len(names) // MAX_AXIS_LABELS))
    set_ticks([k + 0.5 for k in named], [shorten(names[k]) for k in named], rotation=turn)


# ---- figures


@contextmanager
def drawing(**settings: Any) -> Iterator[None]:
    """Context in which matplotlib draws and saves figures with `SETTINGS` and these in addition."""
    import matplotlib

    with matplotlib.rc_context(SETTINGS | settings), warnings.catch_warnings():
        # Names may have letters that the font lacks: boxes in a PNG, drawn by the reader's own fonts in an SVG.
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
        yield


def new_figure(width: float, height: float, **options: Any) -> Any:
    """Returns an empty matplotlib figure of a size in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), **options)


def save_panels(path: Path, title: str, panels: Sequence[Callable[[Any], None]], height: float = 3.4) -> None:
    """Writes a PNG of panels in rows of `PANEL_COLUMNS`, each `height` inches high; each panel draws into the
    matplotlib axes that it is given. Replaces a symbolic link at `path` instead of writing through it."""
    rows = max(1, -(-len(panels) // PANEL_COLUMNS))
    with drawing():
        figure = new_figure(4.2 * PANEL_COLUMNS, height * rows, layout="constrained")
        axes = figure.subplots(rows, PANEL_COLUMNS, squeeze=False)
        for axis, panel in zip(axes.flat, panels, strict=False):
            panel(axis)
        for axis in axes.flat[len(panels) :]:
            axis.set_visible(False)
        figure.suptitle(title)
        with replacing_file(path) as place:
            figure.savefig(place, dpi=120, format="png")


# ---- curves


def curve_style(number: int) -> tuple[str, str]:
    """Returns colour and line style of the curve of this number: six colours, each in four styles."""
    return COLOURS[number % len(COLOURS)], LINE_STYLES[number // len(COLOURS) % len(LINE_STYLES)]


def columns_of_legend(labels: Sequence[str], chars: int) -> int:
    """Returns how many columns of these labels fit into a row of `chars` characters, at least one."""
    widest = max(map(len, labels), default=0) + HANDLE_CHARS
    return max(1, min(len(labels), (chars + HANDLE_CHARS) // widest))


def figure_html(figure: Chart | HeatMap) -> str:
    """Returns a figure as HTML: an SVG for light and one for dark pages; "" if it has no values."""
    if not figure.has_values:
        return ""
    light, dark = (_svg_uri(figure, settings) for settings in ({}, DARK_SETTINGS))
    return (
        f'<figure><picture><source media="screen and (prefers-color-scheme: dark)" srcset="{dark}">'
        f'<img src="{light}" alt="{escape_text(figure.title)}"></picture></figure>'
    )


def figures_html(figures: Iterable[Chart | HeatMap]) -> str:
    """Returns charts and heat maps side by side, as HTML; "" if none has values."""
    return block("charts", "".join(map(figure_html, figures)))


def _svg_uri(figure: Chart | HeatMap, settings: dict[str, Any]) -> str:
    file = io.BytesIO()
    with drawing(**settings):
        picture = new_figure(*figure.size, layout="constrained")
        figure.draw(picture.subplots())
        picture.savefig(file, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return f"data:image/svg+xml;base64,{base64.b64encode(file.getvalue()).decode()}"


def _grid_colour() -> str:
    import matplotlib

    return str(matplotlib.rcParams["grid.color"])


def _draw_curve(axis: Any, curve: ChartCurve, number: int) -> None:
    colour, style = curve_style(number)
    if curve.intervals is not None:  # one path with gaps
        gaps = np.full(len(curve.intervals), np.nan)
        xs = np.repeat(curve.series.x, 3)
        ys = np.column_stack([curve.intervals, gaps]).ravel()
        axis.plot(xs, ys, color=colour, linewidth=1.0, clip_on=False)
    marker = "o" if curve.has_dots else None
    axis.plot(
        *curve.thinned_series, style, color=colour, linewidth=1.5, marker=marker, markersize=4, clip_on=False,
        gid=f"curve {number}",
    )  # fmt: skip


def _set_limits(axis: Any, chart: Chart) -> None:
    """Includes `low` and `high` in the y axis, without a margin beyond them, and puts ticks at round numbers."""
    from matplotlib import ticker

    bottom, top = axis.get_ylim()
    if not chart.is_log:
        known = np.concatenate([curve.series.y for curve in chart.curves_with_values] or [np.zeros(1)])
        lowest = np.nanmin(known)
        highest = np.nanmax(known)
        if highest - lowest < 1e-6 * abs(highest):  # equal values, but for rounding
            bottom = lowest - 0.1 * abs(highest)
            top = highest + 0.1 * abs(highest)
        if chart.low is not None and lowest >= chart.low:
            bottom = chart.low
        if chart.high is not None and highest <= chart.high:
            top = chart.high
        axis.set_ylim(bottom, top)
        axis.yaxis.set_major_locator(ticker.MaxNLocator(5, steps=[1, 2, 5, 10]))
    else:
        axis.yaxis.set_major_formatter(format_compact)
        axis.yaxis.set_minor_formatter(ticker.NullFormatter())
    axis.xaxis.set_major_locator(ticker.MaxNLocator(5, integer=True, steps=[1, 2, 5, 10]))
    axis.xaxis.set_major_formatter(format_compact)


def format_compact(value: float, _position: int | None = None) -> str:
    """Returns a compact number: 1234567 gives "1.235M", 0.00001 gives "1e-05". A formatter of matplotlib's ticks."""
    for least, size, name in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= least:
            return f"{value / size:.4g}{name}"
    return f"{value:.4g}"


def shorten(name: str, chars: int = MAX_LABEL_CHARS) -> str:
    """Returns a name as one line of at most `chars` characters: start and end, where members' names differ."""
    name = " ".join(visible_text(name).split())
    if len(name) <= chars:
        return name
    end = chars // 2
    return f"{name[: chars - end - 1]}…{name[-end:]}"
