"""Plots of a population's run: NashConv, payoffs, best responses, mixtures and learners' metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from palestra.core.types import TEAM
from palestra.evaluation.report.charts import MAX_AXIS_LABELS, Chart, ChartCurve, HeatMap, save_panels, shorten
from palestra.evaluation.report.population_data import PopulationRecord, read_record
from palestra.runs.series import group_lines, series_of

MAX_MEMBERS = 80  # newest members shown in a heat map
LEARNER_CHARTS = [  # metric, title
    ("value", "what the learner wins"),
    ("worst_win_rate", "win rate against the worst of its judges"),
    ("rating", "rating"),
]
Panel = Callable[[Any], None]
"""Draws into matplotlib axes."""


def plot_population(path: str | Path, target: Path | None = None) -> Path:
    """Writes the plots of the run at `path` as one PNG (default: population.png in it) and returns its path.

    Raises ValueError if the run trains no population.
    """
    record = read_record(path)
    target = target or record.path / "population.png"
    save_panels(target, record.path.name, list(_panels(record)))
    return target


def _panels(record: PopulationRecord) -> Iterator[Panel]:
    """Yields the panels for which the run has data."""
    for chart in nash_conv_charts(record):
        yield chart.draw
    if heat := payoff_heat_map(record):
        yield replace(heat, is_square=True).draw
        yield partial(_draw_best_responses, record)
    for heat in mixture_heat_maps(record):
        yield replace(heat, x_title="iteration").draw
    for chart in learner_charts(record):
        yield chart.draw


# ---- charts, of the page and of the picture


def nash_conv_charts(record: PopulationRecord) -> Iterator[Chart]:
    """Yields NashConv over each count that grew: games, env steps, seconds. The scale is logarithmic if NashConv fell
    to less than a tenth, but not to zero (1e-16 counts as zero)."""
    points = nash_conv_points(record)
    for key, title in (("games", "games played for payoffs"), ("env_steps", "env steps"), ("seconds", "seconds")):
        series = series_of(points, "nash_conv", key)
        if len(set(series.x)) > 1:
            is_log = bool(1e-6 < series.y.min() / max(series.y.max(), 1e-300) < 0.1)
            curve = ChartCurve("NashConv", series, has_markers=True)
            yield Chart("NashConv", [curve], title, low=None if is_log else 0.0, is_log=is_log)


def payoff_heat_map(record: PopulationRecord) -> HeatMap | None:
    """Returns the newest members' payoffs, first seat by second; None unless two seats have known ones."""
    payoffs = record.payoffs
    if len(payoffs.seats) != 2 or np.isnan(mean := payoffs.mean()[0]).all():
        return None
    rows, columns = (payoffs.members[seat][-MAX_MEMBERS:] for seat in payoffs.seats)
    return HeatMap("what the row's member earns from the column's", mean[-MAX_MEMBERS:, -MAX_MEMBERS:], rows, columns)


def mixture_heat_maps(record: PopulationRecord) -> Iterator[HeatMap]:
    """Yields for each player the probabilities of its newest members, upwards, by iteration or slice."""
    for player, rows in mixtures_by_player(record).items():
        names = list(dict.fromkeys(chain.from_iterable(rows)))[-MAX_MEMBERS:]
        shares = np.array([[row.get(name, 0.0) for row in rows] for name in names])
        numbers = [str(i) for i in range(len(rows))]
        yield HeatMap(f"mixture of {player}, by iteration", shares, names, numbers, 1.0, row_zero_below=True)


def learner_charts(record: PopulationRecord) -> Iterator[Chart]:
    """Yields each metric that learners have, with a curve of each of them over its iterations or slices."""
    learners = {name: lines for name, lines in group_lines(record.metrics, "policy").items() if name != TEAM}
    titles = dict(LEARNER_CHARTS) | {key: f"{key}, as evolved" for key in searched_settings(record)}
    for key, title in titles.items():
        curves = [ChartCurve(name, series_of(lines, key, "iteration")) for name, lines in learners.items()]
        if (chart := Chart(title, curves, "iteration")).has_values:
            yield chart


# ---- data


def nash_conv_points(record: PopulationRecord) -> list[dict[str, float]]:
    """Returns the NashConv values with `env_steps`, `games` and `seconds` so far, where known."""
    counts = {line["iteration"]: line for line in record.metrics if line["policy"] == TEAM and "env_steps" in line}
    seconds = {line["step"]: line["elapsed_s"] for line in record.timings}
    points = []
    for line in record.metrics:
        if line["policy"] == TEAM and line.get("nash_conv") is not None:
            count = counts.get(line["iteration"], {}) | line  # its own counts take precedence
            point: dict[str, float] = {key: count[key] for key in ("env_steps", "games") if key in count}
            if line["step"] in seconds:
                point["seconds"] = seconds[line["step"]]
            points.append({"nash_conv": line["nash_conv"], **point})
    return points


def mixtures_by_player(record: PopulationRecord) -> dict[str, list[dict[str, float]]]:
    """Returns each player's meta-strategies; without any, the opponents of each learner's slices."""
    mixtures: dict[str, list[dict[str, float]]] = {}
    for line in record.metrics:
        if mix := {key.removeprefix("mix/"): p for key, p in line.items() if key.startswith("mix/")}:
            mixtures.setdefault(line["policy"], []).append(mix)
    if mixtures:
        return mixtures
    for task in record.train_tasks:
        if task.learner.startswith("main_"):
            rest = {name: p * (1 - task.self_play) for name, p in task.opponents.mixes[task.player].items()}
            mixtures.setdefault(task.learner, []).append({"itself": task.self_play, **rest})
    return {learner: rows for learner, rows in mixtures.items() if not learner.startswith("main_exploiter")}


def searched_settings(record: PopulationRecord) -> list[str]:
    """Returns the settings that population-based training searches."""
    return list(dict.fromkeys(chain.from_iterable(task.settings for task in record.train_tasks)))


# ---- best responses


def _draw_best_responses(record: PopulationRecord, axis: Any) -> None:
    """Draws an arrow from each member to the best response to it."""
    names, answers = best_responses(record)
    angle = 2 * np.pi * np.arange(len(names)) / max(len(names), 1)
    at = np.stack([np.sin(angle), np.cos(angle)], 1)
    for i, j in answers:
        arrow = {"arrowstyle": "->", "color": "#666666", "lw": 0.8, "shrinkB": 5}
        axis.annotate("", at[j], at[i], arrowprops=arrow)
    axis.scatter(*at.T, c=np.arange(len(names)), cmap="viridis", zorder=3, s=30)
    if len(names) > MAX_AXIS_LABELS:
        names = []
    for name, (x, y) in zip(names, at, strict=False):
        side = "center"
        if abs(x) >= 0.1:
            side = "left" if x > 0 else "right"
        axis.text(1.1 * x, 1.1 * y, shorten(name), fontsize=6, ha=side, va="center")
    axis.set_xlim(-1.7, 1.7)
    axis.set_ylim(-1.3, 1.3)
    axis.set_axis_off()
    axis.set_title("from each member to the best answer to it", fontsize=10)


def best_responses(record: PopulationRecord) -> tuple[list[str], list[tuple[int, int]]]:
    """Returns the members of a two-seat game, and pairs of each and the one that earns most against it."""
    table = record.payoffs
    (one, other), (first, second) = table.seats, table.mean()
    if one == other:
        names = table.members[one]
        earned = np.where(np.eye(len(names), dtype=bool), np.nan, second)
        return names, list(_best_columns(earned))
    mine = table.members[one]
    theirs = table.members[other]
    answers = [(i, len(mine) + j) for i, j in _best_columns(second)]
    answers += [(len(mine) + j, i) for j, i in _best_columns(first.T)]
    return [*mine, *theirs], answers


def _best_columns(earned: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yields each row with a known value, and the column of its largest one."""
    for i, row in enumerate(earned):
        if not np.isnan(row).all():
            yield i, int(np.nanargmax(row))
