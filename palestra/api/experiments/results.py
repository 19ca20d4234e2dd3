"""Results of a grid: the score of each finished run, aggregate statistics, a figure and a page."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from palestra.api.experiments.grid import GridCell, GridConfig, cell_name
from palestra.api.experiments.schedule import finished_cells
from palestra.api.experiments.statistics import (
    STATISTICS,
    Estimate,
    Scores,
    estimate,
    estimate_improvement,
    performance_profile,
    profile_bounds,
)
from palestra.core.files import atomic_write, replacing_file
from palestra.evaluation.report.charts import (
    LEGEND_BELOW,
    LEGEND_ROW_IN,
    columns_of_legend,
    curve_style,
    drawing,
    new_figure,
)
from palestra.runs.checkpoints import TASKS_FILE
from palestra.runs.headline import headline_eval, return_keys, success_keys
from palestra.runs.series import Line, RunLogs, series_of

RESULTS_FILE = "results.json"
PAGE_FILE = "results.md"
FIGURE_FILE = "results.svg"
FEW_SEEDS = 5  # with fewer, percentile intervals of a bootstrap contain the true mean in about 85 % of cases or less
LABELS = {"iqm": "IQM", "mean": "mean", "median": "median", "optimality_gap": "optimality gap (less is better)"}
PROFILE_LEGEND_CHARS = 56  # letters in a row of the legend of performance profiles


@dataclass(frozen=True)
class GridResults:
    """Results of the finished cells: `values[algorithm][task][seed]` of the metric, and the name of the metric by task.
    `unscored` names the finished cells whose last value is not a number, as after a divergence: they have no value."""

    grid: GridConfig
    values: dict[str, dict[str, dict[int, float]]]
    metrics: dict[str, str]
    unscored: list[str] = field(default_factory=list)

    def scores(self, algorithm: str) -> list[np.ndarray] | None:
        """Returns normalised scores of each task [N], in the order of the grid; None if a task has no finished run."""
        runs = self.values[algorithm]
        if any(not runs[task] for task in self.grid.tasks):
            return None
        return [np.array(list(map(task.normalise, runs[name].values()))) for name, task in self.grid.tasks.items()]

    @property
    def complete(self) -> dict[str, list[np.ndarray]]:
        """Normalised scores of the algorithms that have a finished run of every task."""
        return {name: scores for name in self.grid.algorithms if (scores := self.scores(name)) is not None}

    @property
    def missing(self) -> list[str]:
        """Names of the cells that are not finished."""
        without = [cell_name(*key) for key in self.grid.keys if key[2] not in self.values[key[1]][key[0]]]
        return [name for name in without if name not in self.unscored]


def collect_results(grid: GridConfig, root: Path) -> GridResults:
    """Returns the scores of the finished runs of a grid in `root`. Raises ValueError if a run lacks the evaluation or
    metric of its task."""
    unscored: list[str] = []
    values: dict[str, dict[str, dict[int, float]]] = {a: {t: {} for t in grid.tasks} for a in grid.algorithms}
    metrics: dict[str, str] = {}
    done = finished_cells(root)
    for task, algorithm, seed in grid.keys:
        name = cell_name(task, algorithm, seed)
        if name in done:
            spec = grid.tasks[task]
            try:
                metrics[task], values[algorithm][task][seed] = final_value(RunLogs(root / name), spec.eval, spec.metric)
            except NotANumber:
                unscored.append(name)
    return GridResults(grid, values, metrics, unscored)


class NotANumber(ValueError):
    """The last value of a run's metric is NaN or infinite, which logs have as null."""


def final_value(logs: RunLogs, evaluation: str | None, metric: str | None) -> tuple[str, float]:
    """Returns the name of a metric and its value in the last line of an evaluation of a run. `evaluation` None is the
    headline one; `metric` None is success, or without it return. A population has no evaluations: its value is its last
    `nash_conv`.

    Raises NotANumber if the last line has no number for it, and ValueError if there is no such evaluation or metric.
    """
    if (logs.path / TASKS_FILE).exists():
        lines = [line for line in logs.team if "nash_conv" in line]
        what = "its last assessment"
        if not lines:
            raise ValueError(f"{logs.path} has measured no nash_conv: set population.nash_conv_every above 0")
        return "nash_conv", _last_value(logs, lines, "nash_conv", what)
    name = evaluation or headline_eval(list(logs.evals))
    if name not in logs.evals:
        raise ValueError(f"{logs.path} has no evaluation to score: add evals: to the config, or name one with eval:")
    lines = logs.evals[name]
    wanted = metric or _default_metric(logs, name)
    if any(wanted in line for line in lines) or len(series_of(lines, wanted).y):
        return wanted, _last_value(logs, lines, wanted, f"the last evaluation {name}")
    raise ValueError(f"{logs.path}: evaluation {name} has no {wanted}: name its metric with metric:")


def _default_metric(logs: RunLogs, name: str) -> str:
    """Returns success, or without it return. Raises ValueError where each team has its own: the mean over opponents may
    be 0 whatever they learn."""
    lines = logs.evals[name]
    for keys, whole in ((success_keys(*lines), "success"), (return_keys(*lines), "return")):
        if whole in keys:
            return whole
        if keys:
            raise ValueError(
                f"{logs.path}: evaluation {name} has a value for each team: name one with metric: {' or '.join(keys)}"
            )
    return "success or return"


def _last_value(logs: RunLogs, lines: Sequence[Line], metric: str, what: str) -> float:
    values = series_of(lines[-1:], metric).y
    if not np.isfinite(values).all() or not len(values):
        raise NotANumber(f"{logs.path}: {what} has no number for {metric}: it was NaN or infinite, or missing")
    return float(values[-1])


def write_results(results: GridResults, data: dict[str, Any], root: Path) -> list[Path]:
    """Writes results.json, the page and, once an algorithm has a finished run of every task, the figure; returns the
    files, the page last."""
    files = [root / RESULTS_FILE]
    atomic_write(files[0], (json.dumps(data, indent=1) + "\n").encode())
    if results.complete:
        draw_results(results.complete, root / FIGURE_FILE)
        files.append(root / FIGURE_FILE)
    files.append(root / PAGE_FILE)
    atomic_write(files[-1], results_page(results, data).encode())
    return files


def results_data(results: GridResults) -> dict[str, Any]:
    """Returns values, aggregates, probabilities of improvement and missing cells for JSON."""
    complete = results.complete
    return {
        "grid": results.grid.name,
        "metrics": results.metrics,
        "values": results.values,
        "aggregates": {
            algorithm: {name: estimate(statistic, scores)._asdict() for name, statistic in STATISTICS.items()}
            for algorithm, scores in complete.items()
        },
        "probability_of_improvement": {
            f"{ours} > {theirs}": estimate_improvement(complete[ours], complete[theirs])._asdict()
            for ours, theirs in itertools.permutations(complete, 2)
        },
        "missing": results.missing,
        "unscored": results.unscored,
    }


# ---- the page


def results_page(results: GridResults, data: dict[str, Any]) -> str:
    """Returns the results as a page in Markdown."""
    lines = [f"# {results.grid.name}", "", *results_section(results, data, FIGURE_FILE)]
    return "\n".join(lines) + "\n"


def results_section(results: GridResults, data: dict[str, Any], figure: str) -> list[str]:
    """Returns the lines of the page below its heading; `figure` is the path of the figure relative to the page."""
    grid = results.grid
    seeds = f"{len(grid.seeds)} seeds" if len(grid.seeds) > 1 else "one seed"
    lines = [f"{len(grid.tasks)} tasks, {len(grid.algorithms)} algorithms, {seeds}."]
    if results.missing:
        lines += ["", f"{len(results.missing)} runs are not finished: {', '.join(results.missing[:8])} ..."]
    if results.unscored:
        names = ", ".join(results.unscored)
        lines += ["", f"Left out, since the last value of their metric is not a number: {names}."]
    if data["aggregates"]:
        lines += [
            "",
            "Normalised scores (0 and 1 are the ends of each task's `score_range`) over all tasks and seeds, with 95 %",
            "intervals of a stratified bootstrap (Agarwal et al., 2021).",
        ]
        if 1 < len(grid.seeds) < FEW_SEEDS:
            lines.append(f"Of {seeds} a bootstrap makes too narrow intervals.")
        lines += [
            "",
            f"![aggregates and performance profiles]({figure})",
            "",
            *markdown_table(
                ["algorithm", *(LABELS[name] for name in STATISTICS)],
                [[algorithm, *map(format_estimate, e.values())] for algorithm, e in data["aggregates"].items()],
            ),
        ]
    if pairs := data["probability_of_improvement"]:
        complete = list(data["aggregates"])
        cells = {key: f"{pair['value']:.2f}" for key, pair in pairs.items()}
        rows = [[ours, *(cells.get(f"{ours} > {theirs}", "") for theirs in complete)] for ours in complete]
        lines += [
            "",
            "Probability that a run of the row's algorithm scores above one of the column's, on a random task:",
            "",
            *markdown_table(["", *complete], rows),
        ]
    heads = [f"{task} ({metric})" for task, metric in results.metrics.items()]
    rows = [
        [algorithm, *(format_values(list(results.values[algorithm][task].values())) for task in results.metrics)]
        for algorithm in grid.algorithms
    ]
    lines += ["", "Last evaluation of each task, mean and standard deviation over seeds:", ""]
    return [*lines, *markdown_table(["algorithm", *heads], rows)]


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a table."""
    return [f"| {' | '.join(row)} |" for row in [heads, ["---"] * len(heads), *rows]]


def format_estimate(estimate: dict[str, Any]) -> str:
    """Formats an estimate with its interval: "0.82 [0.75, 0.88]"."""
    value, bounds = Estimate(**estimate)
    if bounds is None:
        return f"{value:.3f}"
    return f"{value:.3f} [{bounds[0]:.3f}, {bounds[1]:.3f}]"


def format_values(values: Sequence[float]) -> str:
    """Formats values over seeds: "-21.4 ± 0.3 (5)", or "-" if there is none."""
    if not values:
        return "-"
    mean = f"{np.mean(values):.4g}"
    if len(values) > 1:
        mean += f" ± {np.std(values, ddof=1):.3g}"
    return f"{mean} ({len(values)})"


# ---- the figure


def draw_results(scores: Mapping[str, Scores], path: Path) -> None:
    """Writes an SVG of the aggregates with their intervals, and of the performance profiles."""
    with drawing():
        rows = -(-len(scores) // columns_of_legend(list(scores), PROFILE_LEGEND_CHARS))
        figure = new_figure(9.2, 1.9 + 0.28 * len(scores) + LEGEND_ROW_IN * rows, layout="constrained")
        axes = figure.subplots(1, 3, width_ratios=[1, 1, 1.5])
        _draw_estimates(axes[0], "iqm", scores)
        _draw_estimates(axes[1], "optimality_gap", scores, with_names=False)
        _draw_profiles(axes[2], scores)
        with replacing_file(path) as place:
            figure.savefig(place, format="svg", metadata={"Date": None})


def _draw_estimates(axis: Any, name: str, scores: Mapping[str, Scores], *, with_names: bool = True) -> None:
    for row, (_, task_scores) in enumerate(scores.items()):
        value, bounds = estimate(STATISTICS[name], task_scores)
        colour = curve_style(row)[0]
        if bounds is not None:
            axis.plot(bounds, [row, row], color=colour, linewidth=6, alpha=0.35, solid_capstyle="butt")
        axis.plot([value], [row], "|", color=colour, markersize=12, markeredgewidth=2)
    axis.set_yticks(range(len(scores)), list(scores) if with_names else [""] * len(scores))
    axis.set_ylim(len(scores) - 0.5, -0.5)
    axis.set_xlabel("normalised score")
    axis.set_title(LABELS[name])
    axis.grid(axis="x")


def _draw_profiles(axis: Any, scores: Mapping[str, Scores]) -> None:
    every = np.concatenate(list(chain.from_iterable(scores.values())))
    thresholds = np.linspace(min(0.0, every.min()), max(1.0, every.max()), 201)
    for number, (name, by_task) in enumerate(scores.items()):
        colour, style = curve_style(number)
        axis.step(thresholds, performance_profile(by_task, thresholds), style, color=colour, label=name, where="post")
        if min(len(task) for task in by_task) > 1:
            axis.fill_between(thresholds, *profile_bounds(by_task, thresholds), color=colour, alpha=0.15, linewidth=0)
    axis.set_xlabel("normalised score \N{GREEK SMALL LETTER TAU}")
    axis.set_ylabel("share of runs above \N{GREEK SMALL LETTER TAU}")
    axis.set_title("performance profiles")
    axis.grid()
    axis.legend(ncols=columns_of_legend(list(scores), PROFILE_LEGEND_CHARS), **LEGEND_BELOW)


def describe_cell(cell: GridCell, root: Path, grid: GridConfig) -> str:
    """Returns the metric and the last value of a finished cell, "return -21.42", or why it has none."""
    task = grid.tasks[cell.task]
    try:
        metric, value = final_value(RunLogs(root / cell.name), task.eval, task.metric)
    except ValueError as error:  # the other cells are still being trained
        return f"without a score: {error}"
    return f"{metric} {value:.4g}"
