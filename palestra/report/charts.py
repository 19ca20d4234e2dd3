"""Charts and tables of the report, from a run's logs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from palestra.files import read_lines
from palestra.report.html import format_number, html_table
from palestra.report.run_report import PANELS, group_lines, smooth, wilson_interval, x_position
from palestra.report.svg import ChartCurve, chart
from palestra.types import TEAM

Line = dict[str, Any]
EXTRA_PANELS = [
    ("tokens", "tokens of an answer"),
    ("local_reward", "own reward of an answer"),
    ("return", "return in training"),
]
STEPS_TITLE, JOINT_STEPS_TITLE = "training steps", "joint steps of all games"


class RunLogs:
    """The logs of a run, read once: lines of the whole team, lines by policy, evaluations by name, timings."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = read_lines(path / "metrics.jsonl")
        by_policy = group_lines(self.metrics, "policy")
        self.team = by_policy.pop(TEAM, [])
        self.policies = by_policy
        self.evals = group_lines(read_lines(path / "evals.jsonl"), "name")
        self.timings = read_lines(path / "timings.jsonl")

    @property
    def x_title(self) -> str:
        """Title of the x axis: joint steps if the run counts them, else training steps."""
        return JOINT_STEPS_TITLE if self.team and "env_steps" in self.team[-1] else STEPS_TITLE

    def points(self, lines: Sequence[Line], key: str, *, window: int = 1) -> list[tuple[float, float]]:
        """Returns (x, y) of a metric for the lines that have it, smoothed by a moving mean over `window` lines."""
        known = [line for line in lines if isinstance(line.get(key), int | float)]
        if not known:
            return []
        values = smooth([float(line[key]) for line in known], window)
        return [(x_position(line, self.team), float(value)) for line, value in zip(known, values, strict=True)]


def metric_charts(logs: RunLogs) -> str:
    """Returns all curves for which the run has metrics, as HTML; "" if there are none."""
    drawn = [_success(logs), _returns(logs)]
    for key, title in [*EXTRA_PANELS, *PANELS]:
        window = max(1, min(9, len(logs.team) // 8))
        curves = [ChartCurve(name, logs.points(lines, key, window=window)) for name, lines in logs.policies.items()]
        drawn.append(chart(title, curves, x_title=logs.x_title))
    speed = [ChartCurve(name, logs.points(lines, key)) for name, lines, key in _speeds(logs)]
    drawn.append(chart("done in a second", speed, x_title=logs.x_title, low=0.0))
    return f'<div class="charts">{"".join(drawn)}</div>' if any(drawn) else ""


def _success(logs: RunLogs) -> str:
    window = max(1, min(9, len(logs.team) // 4))
    curves = [ChartCurve("", logs.points(logs.team, "success"), is_faint=True)]
    curves.append(ChartCurve("in training", logs.points(logs.team, "success", window=window)))
    for name, lines in logs.evals.items():
        known = [line for line in lines if "success" in line]
        spans = [wilson_interval(line["success"] * line["episodes"], line["episodes"]) for line in known]
        curves.append(ChartCurve(f"evaluation {name}", logs.points(known, "success"), spans, has_markers=True))
    return chart("success, evaluations with 95 % intervals", curves, x_title=logs.x_title, low=0.0, high=1.0)


def _returns(logs: RunLogs) -> str:
    """The team's return; for evaluations without one, the return of each seat."""
    curves = [ChartCurve("in training", logs.points(logs.team, "team_return", window=5))]
    for name, lines in logs.evals.items():
        if any("return" in line for line in lines):
            curves.append(ChartCurve(f"evaluation {name}", logs.points(lines, "return"), has_markers=True))
            continue
        for seat in lines[-1].get("returns", {}):
            own = [line | {"own": line["returns"].get(seat)} for line in lines if "returns" in line]
            halves = [line.get("returns_ci95", {}).get(seat, 0.0) for line in own]
            points = logs.points(own, "own")
            spans = [(y - half, y + half) for (_, y), half in zip(points, halves, strict=False)]
            curves.append(ChartCurve(f"{name}: {seat}", points, spans, has_markers=True))
    return chart("returns, of evaluations by seat with 95 % intervals", curves, x_title=logs.x_title)


def _speeds(logs: RunLogs) -> list[tuple[str, list[Line], str]]:
    team = [line for line in logs.timings if line.get("policy") == TEAM]
    return [(key.removesuffix("_per_s").replace("_", " "), team, key) for key in ("tokens_per_s", "env_steps_per_s")]


def eval_table(logs: RunLogs) -> str:
    """Returns a table of each evaluation's metrics before and after training, as HTML."""
    rows: list[list[str]] = []
    for name, lines in logs.evals.items():
        before = lines[0] if lines[0]["step"] < 0 and len(lines) > 1 else None
        after = lines[-1]
        for what, tell in _told(after):
            rows.append([name, what, f"{after['episodes']:.0f}", tell(before) if before else "-", tell(after)])
    return html_table(["evaluation", "metric", "episodes", "before", "after"], rows, css_class="words")


def _told(line: Line) -> list[tuple[str, Any]]:
    """Returns the rows of an evaluation: title, and a function from a log line to the formatted value."""
    found: list[tuple[str, Any]] = [("success [95 % interval]", _share)] if "success" in line else []
    found += [("return", lambda line: format_number(line.get("return")))] if "return" in line else []
    found += [(f"return of {seat}", partial(_own, seat)) for seat in line.get("returns", {})]
    found += [("steps an episode", lambda line: format_number(line.get("steps_per_episode"), 1))]
    return found + ([("failed", lambda line: format_number(line.get("failed"), 0))] if line.get("failed") else [])


def _share(line: Line) -> str:
    low, high = wilson_interval(line["success"] * line["episodes"], line["episodes"])
    return f"{line['success']:.1%} [{low:.1%}, {high:.1%}]"


def _own(seat: str, line: Line) -> str:
    half = line.get("returns_ci95", {}).get(seat)
    return format_number(line.get("returns", {}).get(seat)) + (f" ± {half:.2f}" if half is not None else "")


def policy_table(logs: RunLogs) -> str:
    """Returns a table of each policy's metrics, as HTML: means over the first and the last tenth of the run."""
    rows = []
    for name, lines in logs.policies.items():
        part = max(1, len(lines) // 10)
        for key in dict.fromkeys(key for line in lines for key in line):
            ends = [_mean(some, key) for some in (lines[:part], lines[-part:])]
            if key not in ("step", "policy", "iteration") and ends[0] is not None:
                rows.append([f"{name}: {key}", *(_short(end) for end in ends)])
    return html_table(["figure", "first tenth", "last tenth"], rows)


def _mean(lines: Sequence[Line], key: str) -> float | None:
    values = [line[key] for line in lines if isinstance(line.get(key), int | float)]
    return sum(values) / len(values) if values else None


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


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
    whole = sum(map(sum, spent.values())) or 1.0
    rows = [[what, len(some), f"{sum(some):.1f}", f"{sum(some) / whole:.0%}"] for what, some in spent.items()]
    return html_table(["phase", "times", "seconds", "share"], rows)
