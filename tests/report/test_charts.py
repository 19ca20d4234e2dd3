"""Charts on a page: their SVG elements. test_page_browser.py tests their appearance."""

from __future__ import annotations

import re

import numpy as np
import pytest

from palestra.report.charts import Chart, ChartCurve, HeatMap, tick_labels
from palestra.report.inline_svg import chart_html, heat_map_html
from palestra.runs.series import Series

HOSTILE = "</text></svg><script>alert(1)</script>$\\frac\x00\u202e"


def curve(name, ys, **options):
    y = np.array(ys, float)
    return ChartCurve(name, Series(np.arange(len(y), dtype=float), y), **options)


def test_empty_chart_is_empty():
    assert chart_html(Chart("t", [curve("a", [])], "x")) == ""
    assert chart_html(Chart("t", [curve("a", [np.nan])], "x")) == ""
    assert heat_map_html(HeatMap("t", np.full((2, 2), np.nan), ["a", "b"], ["a", "b"])) == ""


def test_curves_are_paths_and_points_are_dots():
    line = chart_html(Chart("t", [curve("a", [1, 2, 3])], "x"))
    assert 'stroke="var(--c0)"' in line and "<circle" not in line and ">x</text>" in line
    point = chart_html(Chart("t", [curve("a", [7])], "x"))
    assert point.count("<circle") == 1 and "<title>a: 7 at 0</title>" in point


def test_value_between_missing_ones_is_drawn():
    assert chart_html(Chart("t", [curve("a", [np.nan, 5, np.nan])], "x")).count("<circle") == 1


def test_markers_have_their_value_as_title():
    known = curve("dev", [0.25, np.nan, 0.75], intervals=np.array([[0.2, 0.3], [0, 0], [0.7, 0.8]]), has_markers=True)
    html = chart_html(Chart("t", [curve("", [0, 1, 0], is_faint=True), known], "x", low=0.0, high=1.0))
    assert re.findall("<title>(.*?)</title>", html) == ["dev: 0.25 at 0", "dev: 0.75 at 2"]


def test_charts_have_no_ids_links_or_styles():
    """No ids, no links and no styles: they would conflict with other charts on the page, or load something."""
    html = chart_html(Chart("t", [curve("a", [1, 2], has_markers=True)], "x"))
    html += heat_map_html(HeatMap("h", np.array([[1.0]]), ["a"], ["b"]))
    assert not re.search(r" id=|href|url\(|<style|<defs|<metadata", html)


def test_charts_are_deterministic():
    def drawn():
        heat = HeatMap("h", np.array([[1.0, -1.0]]), ["a"], ["b", "c"])
        return chart_html(Chart("t", [curve("a", [1, 3, 2], has_markers=True)], "x")) + heat_map_html(heat)

    assert drawn() == drawn()


def test_long_curves_are_thinned():
    rng = np.random.default_rng(0)
    html = chart_html(Chart("t", [curve("a", rng.normal(size=100_000))], "x"))
    assert len(html) < 20_000


def test_names_are_escaped():
    html = chart_html(Chart(HOSTILE, [curve(HOSTILE, [1]), curve("b", [2])], HOSTILE))
    html += heat_map_html(HeatMap(HOSTILE, np.array([[1.0, -1.0]]), [HOSTILE], ["b" * 99, "中文"]))
    assert "<script" not in html and "\x00" not in html and "\u202e" not in html and "中文" in html
    assert html.count("<svg") == html.count("</svg>") == 2


def test_repeated_colours_differ_in_line_style():
    html = chart_html(Chart("t", [curve(f"p{i}", [i, i + 1]) for i in range(8)], "x"))
    assert html.count("stroke-dasharray") == 2 and html.count("border-top-style:dashed") == 2


def test_cells_are_coloured_by_sign_and_size():
    html = heat_map_html(HeatMap("h", np.array([[1.0, -0.5], [np.nan, 0.0]]), ["a", "b"], ["c", "d"]))
    cell = r'<path [^>]*?fill="(none|var\(--c\d\))"(?: fill-opacity="([\d.]+)")?[^>]*><title>(.*?)</title>'
    cells = re.findall(cell, html)
    assert cells == [
        ("var(--c0)", "", "a / c: 1"),
        ("var(--c1)", "0.5", "a / d: -0.5"),
        ("none", "", "b / d: 0"),
    ]
    assert "from -1 (orange) over 0 (blank) to 1 (blue)" in html


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([0, 0.5, 1], ["0", "0.5", "1"]),
        ([0, 20_000, 1_500_000], ["0", "20k", "1.5M"]),
        ([0, 1e-5], ["0", "1e-05"]),
        ([0.99991, 0.99992], ["0.99991", "0.99992"]),
    ],
)
def test_tick_labels_are_short_and_distinct(values, labels):
    assert tick_labels(values) == labels
