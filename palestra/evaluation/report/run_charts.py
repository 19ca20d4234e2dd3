"""The charts of a run, from its logs: success, returns, rewards, and the metrics of its policies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from palestra.core.types import TEAM
from palestra.evaluation.report.charts import Chart, ChartCurve, figures_html, save_panels
from palestra.runs.headline import (
    TEAM_SUCCESS,
    held_out_label,
    paid_seats,
    return_half_width,
    return_keys,
    success_keys,
    training_return_label,
    training_success_label,
)
from palestra.runs.metric_catalog import metric_label
from palestra.runs.series import Line, RunLogs, Series, smooth, success_bounds

MAX_PANELS = 6  # charts of `plot_run`
POLICY_CHARTS = (
    "entropy",
    "kl",
    "zero_std_fraction",
    "invalid",
    "value_loss",
    "clip_fraction",
    "td_loss",
    "grad_norm",
    "policy_loss",
    "local_reward",
    "tokens",
)
SPEEDS = ("tokens_per_s", "env_steps_per_s")


def plot_run(path: str | Path) -> Path:
    """Writes the first charts of the run at `path` to curves.png in it, and returns that path."""
    path = Path(path)
    out = path / "curves.png"
    charts = list(islice(run_charts(RunLogs(path)), MAX_PANELS))
    legend = max((chart.legend_height for chart in charts), default=0.0)
    save_panels(out, path.name, [chart.draw for chart in charts], 3.4 + legend)
    return out


def metric_charts(logs: RunLogs) -> str:
    """Returns all charts of the run as HTML; "" if there are none."""
    return figures_html(run_charts(logs))


def run_charts(logs: RunLogs) -> Iterator[Chart]:
    """Yields the charts for which the run has values, the most informative first."""
    charts = [_success(logs), _returns(logs), _rewards(logs)]
    charts.append(_of_policies(logs, "return", training_return_label(logs.config)))
    charts += [_of_policies(logs, name, metric_label(name)) for name in POLICY_CHARTS]
    return (chart for chart in [*charts, _speed(logs)] if chart.has_values)


def _success(logs: RunLogs) -> Chart:
    evals = [_success_curve(logs, name, key) for name, lines in logs.evals.items() for key in success_keys(*lines)]
    training = training_success_label(logs.config)
    curves = list(evals)
    for key, what in success_keys(*logs.team).items():
        curves += _smoothed_curves(f"{training}{what.removeprefix('success')}", logs.series(logs.team, key))
    title = "held-out success, with 95 % intervals" if evals else training
    return Chart(title, curves, logs.x_title, low=0.0, high=1.0)


def _success_curve(logs: RunLogs, name: str, key: str) -> ChartCurve:
    known = [line for line in logs.evals[name] if key in line]
    spans = np.array([success_bounds(line, key) for line in known])
    label = held_out_label(logs.config, name)
    if key != "success":
        label += f": {key.removeprefix(TEAM_SUCCESS)}"
    return ChartCurve(label, logs.series(known, key), spans, has_markers=True)


def _returns(logs: RunLogs) -> Chart:
    """Returns the chart of the team's return, and of each seat's own where language agents have several."""
    curves: list[ChartCurve] = []
    for name, lines in logs.evals.items():
        for key, what in return_keys(*lines).items():
            half = return_half_width if key == "return" else lambda _: None
            points = [{**line, "half": half(line) or 0.0} for line in lines if key in line]
            label = f"{held_out_label(logs.config, name)}{what.removeprefix('return')}"
            curves.append(_with_interval(logs, label, points, key))
        seats = paid_seats(lines[-1])
        if "team_return" in lines[-1] and len(seats) > 1:
            curves += [_seat_return(logs, name, lines, seat) for seat in seats]
    for key, what in return_keys(*logs.team).items():
        label = f"{training_return_label(logs.config)}{what.removeprefix('return')}"
        curves += _smoothed_curves(label, logs.series(logs.team, key))
    return Chart("returns, with 95 % intervals", curves, logs.x_title)


def _seat_return(logs: RunLogs, name: str, lines: Sequence[Line], seat: str) -> ChartCurve:
    points = [
        {"step": line["step"], "own": line["returns"][seat], "half": line.get("returns_ci95", {}).get(seat) or 0.0}
        for line in lines
        if line.get("returns", {}).get(seat) is not None
    ]
    return _with_interval(logs, f"{held_out_label(logs.config, name)}: {seat}", points, "own")


def _with_interval(logs: RunLogs, name: str, lines: Sequence[Line], key: str) -> ChartCurve:
    """Returns the curve of `key` with an interval, of which the lines have `half` the width."""
    series = logs.series(lines, key)
    half = logs.series(lines, "half").y
    return ChartCurve(name, series, np.stack([series.y - half, series.y + half], 1), has_markers=True)


def _rewards(logs: RunLogs) -> Chart:
    """Returns the chart of each policy's reward per answer, team and local rewards together."""
    curves = []
    for name, lines in logs.policies.items():
        paid = [line for line in lines if "team_reward" in line and "local_reward" in line]
        team, local = (logs.series(paid, key) for key in ("team_reward", "local_reward"))
        curves.append(ChartCurve(name, Series(team.x, smooth(team.y + local.y))))
    return Chart("reward per answer (team + local)", curves, logs.x_title)


def _of_policies(logs: RunLogs, key: str, title: str) -> Chart:
    each = {name: logs.series(lines, key) for name, lines in logs.policies.items()}
    return Chart(title, [ChartCurve(name, Series(x, smooth(y))) for name, (x, y) in each.items()], logs.x_title)


def _speed(logs: RunLogs) -> Chart:
    team = [line for line in logs.timings if line.get("policy") == TEAM]
    curves = [ChartCurve(metric_label(key, "timings"), logs.series(team, key)) for key in SPEEDS]
    known = [curve for curve in curves if len(curve.series.x)]
    return Chart(known[0].name if len(known) == 1 else "throughput", known, logs.x_title, low=0.0)


def _smoothed_curves(name: str, raw: Series) -> list[ChartCurve]:
    """Returns the moving mean of a series, and behind it the series itself."""
    return [ChartCurve("", raw, is_faint=True), ChartCurve(name, Series(raw.x, smooth(raw.y)))]
