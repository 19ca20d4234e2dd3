"""One figure of several runs for a paper: vector graphics, small type, mean and band over seeds, colour-blind safe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np

from palestra.core.config import load
from palestra.core.files import replacing_file
from palestra.core.types import TEAM
from palestra.evaluation.report.charts import (
    HANDLE_CHARS,
    LEGEND_ROW_IN,
    columns_of_legend,
    curve_style,
    drawing,
    format_compact,
    new_figure,
)
from palestra.runs.headline import (
    headline_eval,
    held_out_title,
    return_half_width,
    return_keys,
    success_keys,
    training_return_label,
    training_success_label,
)
from palestra.runs.series import BANDS, Line, RunLogs, Series, align, band_bounds, moving_mean, success_bounds
from palestra.runs.settings import find_run, flatten_tree

CHARS_PER_IN = 17  # letters of a legend
SAME_END = 0.95  # of the longest curve: seeds whose steps vary in length end at about the same place
FILE_TYPES = (".svg", ".pdf", ".png")
# Keys in which runs of one experiment may differ.
IGNORED_KEYS = ("seed", "name", "tags", "sinks", "device", "checkpoint_every", "keep_every", "save_episodes_every")
Tree = dict[str, Any]


@dataclass(frozen=True)
class FigureSpec:
    """Specification of a figure: metric, band and size in inches."""

    metric: str | None = None
    """Key of the logs; None for the first that the first run has: success, return, NashConv, team return."""
    eval_name: str | None = None
    """Name of an evaluation; None for training, or, without a metric, for the evaluation that all runs have."""
    policy: str = TEAM
    """In training: the policy whose metric it is (default: the whole team)."""
    smooth_window: int = 1
    """Window of the moving mean, in log lines."""
    width: float = 3.3
    """Inches; the default is one column of a two-column paper."""
    height: float | None = None
    """Inches; None for two thirds of the width."""
    band: str = "ci"
    """The band over seeds: sd, ci (95 % interval of the mean) or range."""


@dataclass(frozen=True)
class SeedGroup:
    """The runs of one config: x [K] and one row per seed in y [R, K], both float64. `bounds` [2, K] of a single run are
    the 95 % intervals of its evaluations, if they are known."""

    label: str
    x: np.ndarray
    y: np.ndarray
    bounds: np.ndarray | None = None
    shortest: str = ""
    """The run whose curve ends first, if others go on: the group's curve ends there."""


def draw_figure(runs: Sequence[Path], figure: FigureSpec, out: Path) -> list[str]:
    """Writes the figure to `out`; returns a line of text per curve: its label, its number of runs and its last value.

    Raises ValueError if a run lacks the metric or is there twice, or for an unknown file type or band.
    """
    if out.suffix not in FILE_TYPES:
        raise ValueError(f"{out} has none of the endings {', '.join(FILE_TYPES)}")
    if figure.band not in BANDS:
        raise ValueError(f"--band is one of {', '.join(BANDS)}, not {figure.band}")
    logs = [RunLogs(find_run(run)) for run in runs]
    figure = with_default_eval(logs, figure)
    if other := [run for run in logs if run.x_title != logs[0].x_title]:
        raise ValueError(
            f"{logs[0].path} counts {logs[0].x_title} and {other[0].path} {other[0].x_title}: draw one figure for each"
        )
    metric = figure.metric or default_metric(logs[0], figure)
    groups = group_by_config(logs, figure, metric)
    chars = int(CHARS_PER_IN * figure.width) - HANDLE_CHARS
    labels = [fill(group.label, chars) for group in groups if len(groups) > 1]
    columns = columns_of_legend(labels, chars)
    rows = -(-sum(label.count("\n") + 1 for label in labels) // columns)
    height = figure.height or figure.width * 2 / 3 + LEGEND_ROW_IN * rows
    with drawing(**_paper(figure.width)):
        picture = new_figure(figure.width, height, layout="constrained")
        axis = picture.subplots()
        _draw(axis, groups, figure, logs[0].x_title, _y_title(metric, figure, logs[0].config))
        if labels:
            picture.legend(axis.get_lines(), labels, loc="outside lower center", ncols=columns, handlelength=1.6)
        out.parent.mkdir(parents=True, exist_ok=True)
        with replacing_file(out) as place:
            metadata = {"Date": None} if out.suffix == ".svg" else {}
            picture.savefig(place, format=out.suffix[1:], dpi=300, metadata=metadata)
    return [*(_last_value(group, metric, logs[0].x_title) for group in groups), f"figure: {out}"]


def _last_value(group: SeedGroup, metric: str, x_title: str) -> str:
    place = "at the end"
    if group.shortest:
        place = f"at {group.x[-1]:,.0f} {x_title}, where {group.shortest} ends and others go on"
    return f"{group.label or 'all'}: {len(group.y)} runs, {metric} {group.y[:, -1].mean():.4g} {place}"


def with_default_eval(logs: Sequence[RunLogs], figure: FigureSpec) -> FigureSpec:
    """Returns the figure with the evaluation with the most points that all runs have, of several the leading one, if it
    names neither a metric nor a policy nor an evaluation. Without such an evaluation it stays as it is."""
    if figure.metric or figure.eval_name or figure.policy != TEAM:
        return figure

    def points(name: str) -> int:
        return min(len(run.evals.get(name, [])) for run in logs)

    most = max(map(points, logs[0].evals), default=0)
    return replace(figure, eval_name=headline_eval([name for name in logs[0].evals if points(name) == most > 0]))


def default_metric(logs: RunLogs, figure: FigureSpec) -> str:
    """Returns the main metric that a run has; of opponents, that of the first. Raises ValueError if it has none."""
    lines = _lines(logs, figure)
    for metric in (*success_keys(*lines), *return_keys(*lines), "nash_conv", "team_return"):
        if any(line.get(metric) is not None for line in lines):
            return metric
    raise ValueError(
        f"{logs.path} has none of success, return and nash_conv of {figure.eval_name or figure.policy}: pass --metric"
    )


def group_by_config(runs: Sequence[RunLogs], figure: FigureSpec, metric: str) -> list[SeedGroup]:
    """Groups runs by config, ignoring the keys in `IGNORED_KEYS`, in the order given. Raises ValueError if the runs of
    one config have no step in common, or two of them the same seed."""
    groups: dict[str, list[RunLogs]] = {}
    trees: dict[str, Tree] = {}
    seeds: dict[tuple[str, str], Path] = {}
    for run in runs:
        config = load(run.path / "config.yaml")
        tree = {key: value for key, value in config.items() if key not in IGNORED_KEYS}
        seed = config.get("seed")
        other = seeds.setdefault((repr(tree), repr(seed)), run.path)
        if other is not run.path:
            raise ValueError(
                f"{other} and {run.path} have one config and one seed, {seed}: the band would count them as two seeds; "
                "leave one out"
            )
        groups.setdefault(repr(tree), []).append(run)
        trees[repr(tree)] = tree
    labels = config_labels(list(trees.values())) if len(groups) > 1 else [""]
    return [
        _seed_group(label or members[0].path.resolve().name, members, figure, metric)
        for label, members in zip(labels, groups.values(), strict=True)
    ]


def _seed_group(label: str, runs: Sequence[RunLogs], figure: FigureSpec, metric: str) -> SeedGroup:
    each = [_series(run, figure, metric) for run in runs]
    x, y = align([Series(x, moving_mean(y, figure.smooth_window)) for x, y in each])
    if not len(x):
        raise ValueError("the runs of one config have no step in common: draw them one by one")
    ends = [found.x[-1] for found in each]
    shortest = runs[int(np.argmin(ends))].path.name if x[-1] < SAME_END * max(ends) else ""
    bounds = None
    if len(runs) == 1 and figure.eval_name and figure.smooth_window == 1:
        bounds = _bounds(runs[0], figure, metric)
    return SeedGroup(label, x, y, bounds, shortest)


def _bounds(run: RunLogs, figure: FigureSpec, metric: str) -> np.ndarray | None:
    """Returns the 95 % intervals [2, K] of a run's evaluations; None if a line lacks what is needed."""
    known = [line for line in _lines(run, figure) if line.get(metric) is not None]
    spans = [line | {"low": span[0], "high": span[1]} for line in known if (span := _interval(line, metric))]
    if not spans or len(spans) < len(known):
        return None
    return align([run.series(spans, "low"), run.series(spans, "high")])[1]


def _interval(line: Line, metric: str) -> tuple[float, float] | None:
    if metric in success_keys(line) and "episodes" in line:
        return success_bounds(line, metric)
    if metric == "return" and (half := return_half_width(line)) is not None:
        return line[metric] - half, line[metric] + half
    return None


def config_labels(trees: Sequence[Tree]) -> list[str]:
    """Returns the settings in which each config differs from the others: "algorithm.group_size=4"."""
    flats = [flatten_tree(tree) for tree in trees]
    keys = dict.fromkeys(chain.from_iterable(flats))
    unlike = [key for key in keys if len({repr(flat.get(key)) for flat in flats}) > 1]
    short = _shorten_keys(unlike)
    return [", ".join(f"{short[key]}={flat[key]}" for key in unlike[:4] if key in flat) for flat in flats]


def _shorten_keys(keys: Sequence[str]) -> dict[str, str]:
    """Returns keys by their last component where that is unique."""
    last = [key.rsplit(".", 1)[-1] for key in keys]
    names = {key: key for key in keys}
    names |= {key: end for key, end in zip(keys, last, strict=True) if last.count(end) == 1 and end != "type"}
    return names


def _lines(run: RunLogs, figure: FigureSpec) -> list[Line]:
    """Returns the log lines of the figure's evaluation or policy. Raises ValueError if there are none."""
    log = "metrics.jsonl"
    groups = run.by_policy
    if figure.eval_name:
        log = "evals.jsonl"
        groups = run.evals
    wanted = figure.eval_name or figure.policy
    if wanted not in groups:
        have = ", ".join(groups) or "nothing"
        raise ValueError(f'{run.path}/{log} has no "{wanted}"; it has: {have}')
    return groups[wanted]


def _series(run: RunLogs, figure: FigureSpec, metric: str) -> Series:
    """Returns the metric of a run. Raises ValueError if no line has it."""
    lines = _lines(run, figure)
    found = run.series(lines, metric)
    if not len(found.x):
        keys = ", ".join(key for key, value in flatten_tree(lines[-1]).items() if isinstance(value, int | float))
        raise ValueError(f"{run.path} has no metric {metric} of {figure.eval_name or figure.policy}; it has: {keys}")
    return found


# ---- drawing


def _draw(axis: Any, groups: Sequence[SeedGroup], figure: FigureSpec, x_title: str, y_title: str) -> None:
    from matplotlib import ticker

    for number, group in enumerate(groups):
        colour, style = curve_style(number)
        is_short = len(group.x) <= 12
        marker = "o" if is_short else None
        axis.plot(group.x, group.y.mean(0), style, color=colour, marker=marker, markersize=2.5)
        bounds = band_bounds(group.y, figure.band) if len(group.y) > 1 else group.bounds
        if bounds is not None and is_short and len(group.y) == 1:
            axis.vlines(group.x, *bounds, color=colour, linewidth=0.8)
        elif bounds is not None:
            axis.fill_between(group.x, *bounds, color=colour, alpha=0.2, linewidth=0)
    axis.set_xlabel(x_title)
    axis.xaxis.set_major_locator(ticker.MaxNLocator(5, integer=True))
    axis.xaxis.set_major_formatter(format_compact)
    axis.set_ylabel(y_title)


def _y_title(metric: str, figure: FigureSpec, config: Tree) -> str:
    words = metric.replace("_", " ").replace("nash conv", "NashConv")
    if figure.eval_name:
        return held_out_title(config, figure.eval_name, words)
    labels = {"success": training_success_label(config), "return": training_return_label(config)}
    words = labels.get(metric, words)
    return words if figure.policy == TEAM else f"{words}, {figure.policy}"


def _paper(width: float) -> dict[str, Any]:
    """Returns the matplotlib settings for a paper: black ink on white, 8 point type as in captions."""
    black = dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), "black")
    return black | {
        "font.size": 8 if width < 5 else 9,
        "axes.grid": True,
        "grid.color": "#B0B0B0",
        "grid.alpha": 0.25,
        "grid.linewidth": 0.5,
        "lines.linewidth": 1.2,
        "xtick.major.size": 3.5,
        "ytick.major.size": 3.5,
    }
