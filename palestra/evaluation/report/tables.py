"""HTML tables of the report, from a run's logs: evaluations, metrics of each policy, seconds by phase."""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import Any

from palestra.core.types import TEAM
from palestra.evaluation.report.html import escape_text, format_number, html_table
from palestra.runs.headline import eval_label, format_return, format_seat_return, paid_seats, return_keys, success_keys
from palestra.runs.series import Line, RunLogs, end_windows, mean_of, success_interval, valid_instances
from palestra.text.rollouts.sample_metrics import sample_rows


def eval_table(logs: RunLogs) -> str:
    """Returns a table of each evaluation's metrics before and after training, as HTML."""
    rows: list[list[str]] = []
    for name, lines in logs.evals.items():
        after = lines[-1]
        for what, format_value in _columns(after):
            before = "-"
            if lines[0]["step"] < 0 and len(lines) > 1:
                before = format_value(lines[0])
            instances = f"{valid_instances(after):.0f}"
            rows.append([eval_label(logs.config, name), what, instances, before, format_value(after)])
    return html_table(["evaluation", "metric", "instances", "before", "after"], rows, css_class="words")


def _columns(line: Line) -> list[tuple[str, Any]]:
    """Returns the rows of an evaluation: title, and a function from a log line to the formatted value."""
    columns: list[tuple[str, Any]] = [
        (f"{what} [95 % interval]", partial(success_interval, key=key)) for key, what in success_keys(line).items()
    ]
    columns += [(name, partial(sample_cell, name)) for name, _ in sample_rows(line)]
    if "return" in return_keys(line):
        columns.append(("return", format_return))
    columns += [(f"return of {seat}", partial(format_seat_return, seat=seat)) for seat in paid_seats(line)]
    columns.append(("steps an episode", lambda line: format_number(line.get("steps_per_episode"), 1)))
    if line.get("failed"):
        columns.append(("failed", lambda line: format_number(line.get("failed"), 0)))
    return columns


def sample_cell(name: str, line: Line) -> str:
    """Returns the text of a metric of several samples; "-" for a line without it."""
    return dict(sample_rows(line)).get(name, "-")


def policy_table(logs: RunLogs) -> str:
    """Returns a table of each policy's metrics at both ends of the run, as HTML, and which log lines are averaged."""
    rows = []
    windows = {}
    for name, lines in logs.policies.items():
        first, last, windows[name] = end_windows(lines)
        for key in dict.fromkeys(chain.from_iterable(lines)):
            ends = [mean_of(first, key), mean_of(last, key)]
            if key not in ("step", "policy", "iteration") and ends != [None, None]:
                rows.append([f"{name}: {key}", *(format_number(end, 4, "g") for end in ends)])
    table = html_table(["metric", "first", "last"], rows)
    if rows:
        table += _window_note(windows)
    return table


def _window_note(windows: dict[str, str]) -> str:
    notes = list(dict.fromkeys(windows.values()))
    if len(notes) > 1:
        notes = [f"{name}: {which}" for name, which in windows.items()]
    return f"<p class=soft>{escape_text('; '.join(notes))}</p>"


def time_table(logs: RunLogs) -> str:
    """Returns a table of the seconds by phase, or by kind of task, as HTML; shares are of all timed seconds."""
    spent: dict[str, list[float]] = {}
    for line in logs.timings:
        if line.get("policy") != TEAM:
            continue
        if "kind" in line:
            spent.setdefault(str(line["kind"]), []).append(line["seconds"])
            continue
        for key, value in line.items():
            if key.endswith("_s") and not key.endswith(("_per_s", "_cpu_s", "elapsed_s")) and value is not None:
                spent.setdefault(key.removesuffix("_s"), []).append(value)
    total = sum(map(sum, spent.values())) or 1.0
    rows = [[what, len(some), f"{sum(some):.1f}", f"{sum(some) / total:.0%}"] for what, some in spent.items()]
    return html_table(["phase", "times", "seconds", "share"], rows)
