"""Charts on a page: matplotlib's SVG as images for light and dark pages; test_page_browser.py looks at them."""

import base64
import re
import xml.etree.ElementTree as ET

import numpy as np

from palestra.evaluation.report.charts import (
    COLOURS,
    DARK_PAPER,
    Chart,
    ChartCurve,
    HeatMap,
    figure_html,
)
from palestra.runs.series import Series

HOSTILE = "</text></svg><script>alert(1)</script>$\\frac\x00\u202e"


def curve(name, ys, **options):
    y = np.array(ys, float)
    return ChartCurve(name, Series(np.arange(len(y), dtype=float), y), **options)


def pictures(html):
    """The SVG texts of a figure: dark, then light."""
    return [base64.b64decode(data).decode() for data in re.findall(r"data:image/svg\+xml;base64,([\w+/=]+)", html)]


def texts(svg):
    return ["".join(element.itertext()) for element in ET.fromstring(svg).iterfind(".//{*}text")]


def curve_markers(svg, number=0):
    """The markers of the `number`-th curve."""
    group = next(g for g in ET.fromstring(svg).iterfind(".//{*}g") if g.get("id") == f"curve {number}")
    return len(group.findall(".//{*}use"))


def test_empty_chart_is_empty():
    assert figure_html(Chart("t", [curve("a", [])], "x")) == ""
    assert figure_html(Chart("t", [curve("a", [np.nan])], "x")) == ""
    assert figure_html(HeatMap("t", np.full((2, 2), np.nan), ["a", "b"], ["a", "b"])) == ""


def test_a_figure_is_drawn_for_light_and_for_dark_pages():
    html = figure_html(Chart("losses", [curve("a", [1, 2, 3])], "x"))
    dark, light = pictures(html)
    assert html.index("prefers-color-scheme: dark") < html.index("<img ") and 'alt="losses"' in html
    assert DARK_PAPER.lower() in dark and DARK_PAPER.lower() not in light
    for svg in (dark, light):
        assert COLOURS[0].lower() in svg and {"losses", "x"} <= set(texts(svg))


def test_curves_are_lines_and_single_points_are_dots():
    _, line = pictures(figure_html(Chart("t", [curve("a", [1, 2, 3])], "x")))
    assert curve_markers(line) == 0
    for values in ([7], [np.nan, 5, np.nan]):
        _, point = pictures(figure_html(Chart("t", [curve("a", values)], "x")))
        assert curve_markers(point) == 1


def test_markers_are_drawn_where_values_are_known():
    known = curve("dev", [0.25, np.nan, 0.75], intervals=np.array([[0.2, 0.3], [0, 0], [0.7, 0.8]]), has_markers=True)
    _, svg = pictures(figure_html(Chart("t", [curve("", [0, 1, 0], is_faint=True), known], "x", low=0.0, high=1.0)))
    assert curve_markers(svg) == 2


def test_charts_are_deterministic():
    def drawn():
        heat = HeatMap("h", np.array([[1.0, -1.0]]), ["a"], ["b", "c"])
        return figure_html(Chart("t", [curve("a", [1, 3, 2], has_markers=True)], "x")) + figure_html(heat)

    assert drawn() == drawn()


def test_long_curves_are_thinned():
    rng = np.random.default_rng(0)
    html = figure_html(Chart("t", [curve("a", rng.normal(size=100_000))], "x"))
    assert len(html) < 80_000


def test_names_are_escaped():
    html = figure_html(Chart(HOSTILE, [curve(HOSTILE, [1]), curve("b", [2])], HOSTILE))
    html += figure_html(HeatMap(HOSTILE, np.array([[1.0, -1.0]]), [HOSTILE], ["b" * 99, "中文"]))
    assert "<script" not in html and "\x00" not in html and "\u202e" not in html
    drawn = pictures(html)
    assert len(drawn) == 4 and "中文" in drawn[-1]
    for svg in drawn:  # well-formed, and without scripts
        assert not ET.fromstring(svg).findall(".//{*}script")


def test_repeated_colours_differ_in_line_style_and_curves_have_a_legend():
    _, svg = pictures(figure_html(Chart("t", [curve(f"p{i}", [i, i + 1]) for i in range(8)], "x")))
    assert svg.count("stroke-dasharray: 5.55,2.4") == 2 * 2  # the seventh and eighth curve, and their legend entries
    assert {f"p{i}" for i in range(8)} <= set(texts(svg))


def test_cells_are_coloured_by_sign_and_size():
    _, svg = pictures(figure_html(HeatMap("h", np.array([[1.0, -0.5], [np.nan, 0.0]]), ["a", "b"], ["c", "d"])))
    cells = re.findall(r'style="fill: (#\w{6}); stroke: #d5dae0', svg)
    half = "#eaaf80"  # between COLOURS[1] and the paper
    assert cells == [COLOURS[0].lower(), half, "#fefeff"]  # the unknown cell is not drawn
    assert {"a", "b", "c", "d", "h"} <= set(texts(svg))


def test_nearly_equal_values_have_distinct_tick_labels():
    _, svg = pictures(figure_html(Chart("c", [curve("a", [0.99991, 0.99992])], "step")))
    labels = [text for text in texts(svg) if text.startswith("0.9999")]
    assert len(labels) > 2 and len(set(labels)) == len(labels)
    _, svg = pictures(figure_html(Chart("c", [curve("a", [1e-3, 20_000])], "step", is_log=True)))
    assert {"0.001", "10k"} <= set(texts(svg))
