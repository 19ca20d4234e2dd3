"""Charts and tables of the report, from a run's logs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from palestra.files import read_lines
from palestra.report.parts import figure, table
from palestra.report.svg import Curve, chart
from palestra.reports import PANELS, at, series, smooth, wilson
from palestra.types import TEAM

Line = dict[str, Any]
MORE = [
    ("tokens", "tokens of an answer"),
    ("local_reward", "own reward of an answer"),
    ("return", "return in training"),
]
STEPS, GAMES = "training steps", "joint steps of all games"


class Logs:
    """The logs of a run, read once: lines of the whole team, lines by policy, evaluations by name, timings."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = read_lines(path / "metrics.jsonl")
        by_policy = series(self.metrics, "policy")
        self.team = by_policy.pop(TEAM, [])
        self.policies = by_policy
        self.exams = series(read_lines(path / "evals.jsonl"), "name")
        self.timings = read_lines(path / "timings.jsonl")

    @property
    def axis(self) -> str:
        """Title of the x axis: joint steps if the run counts them, else training steps."""
        return GAMES if self.team and "env_steps" in self.team[-1] else STEPS

    def points(self, lines: Sequence[Line], key: str, *, window: int = 1) -> list[tuple[float, float]]:
        """Returns (x, y) of a metric for the lines that have it, smoothed by a moving mean over `window` lines."""
        known = [line for line in lines if isinstance(line.get(key), int | float)]
        if not known:
            return []
        values = smooth([float(line[key]) for line in known], window)
        return [(at(line, self.team), float(value)) for line, value in zip(known, values, strict=True)]


def charts(logs: Logs) -> str:
    """Returns all curves for which the run has metrics, as HTML; "" if there are none."""
    drawn = [_success(logs), _returns(logs)]
    for key, title in [*MORE, *PANELS]:
        window = max(1, min(9, len(logs.team) // 8))
        curves = [Curve(name, logs.points(lines, key, window=window)) for name, lines in logs.policies.items()]
        drawn.append(chart(title, curves, x=logs.axis))
    speed = [Curve(name, logs.points(lines, key)) for name, lines, key in _speeds(logs)]
    drawn.append(chart("done in a second", speed, x=logs.axis, low=0.0))
    return f'<div class="charts">{"".join(drawn)}</div>' if any(drawn) else ""


def _success(logs: Logs) -> str:
    window = max(1, min(9, len(logs.team) // 4))
    curves = [Curve("", logs.points(logs.team, "success"), faint=True)]
    curves.append(Curve("in training", logs.points(logs.team, "success", window=window)))
    for name, lines in logs.exams.items():
        known = [line for line in lines if "success" in line]
        spans = [wilson(line["success"] * line["episodes"], line["episodes"]) for line in known]
        curves.append(Curve(f"exam {name}", logs.points(known, "success"), spans, marked=True))
    return chart("success, exams with 95 % intervals", curves, x=logs.axis, low=0.0, high=1.0)


def _returns(logs: Logs) -> str:
    """The team's return; for evaluations without one, the return of each seat."""
    curves = [Curve("in training", logs.points(logs.team, "team_return", window=5))]
    for name, lines in logs.exams.items():
        if any("return" in line for line in lines):
            curves.append(Curve(f"exam {name}", logs.points(lines, "return"), marked=True))
            continue
        for seat in lines[-1].get("returns", {}):
            own = [line | {"own": line["returns"].get(seat)} for line in lines if "returns" in line]
            halves = [line.get("returns_half", {}).get(seat, 0.0) for line in own]
            points = logs.points(own, "own")
            spans = [(y - half, y + half) for (_, y), half in zip(points, halves, strict=False)]
            curves.append(Curve(f"{name}: {seat}", points, spans, marked=True))
    return chart("returns, of exams by seat with 95 % intervals", curves, x=logs.axis)


def _speeds(logs: Logs) -> list[tuple[str, list[Line], str]]:
    team = [line for line in logs.timings if line.get("policy") == TEAM]
    return [(key.removesuffix("_per_s").replace("_", " "), team, key) for key in ("tokens_per_s", "env_steps_per_s")]


def exam_table(logs: Logs) -> str:
    """Returns a table of each evaluation's metrics before and after training, as HTML."""
    rows: list[list[str]] = []
    for name, lines in logs.exams.items():
        before = lines[0] if lines[0]["step"] < 0 and len(lines) > 1 else None
        after = lines[-1]
        for what, tell in _told(after):
            rows.append([name, what, f"{after['episodes']:.0f}", tell(before) if before else "-", tell(after)])
    return table(["exam", "figure", "episodes", "before", "after"], rows, kind="words")


def _told(line: Line) -> list[tuple[str, Any]]:
    """Returns the rows of an evaluation: title, and a function from a log line to the formatted value."""
    found: list[tuple[str, Any]] = [("success [95 % interval]", _share)] if "success" in line else []
    found += [("return", lambda line: figure(line.get("return")))] if "return" in line else []
    found += [(f"return of {seat}", partial(_own, seat)) for seat in line.get("returns", {})]
    found += [("steps an episode", lambda line: figure(line.get("steps_per_episode"), 1))]
    return found + ([("failed", lambda line: figure(line.get("failed"), 0))] if line.get("failed") else [])


def _share(line: Line) -> str:
    low, high = wilson(line["success"] * line["episodes"], line["episodes"])
    return f"{line['success']:.1%} [{low:.1%}, {high:.1%}]"


def _own(seat: str, line: Line) -> str:
    half = line.get("returns_half", {}).get(seat)
    return figure(line.get("returns", {}).get(seat)) + (f" ± {half:.2f}" if half is not None else "")


def policy_table(logs: Logs) -> str:
    """Returns a table of each policy's metrics, as HTML: means over the first and the last tenth of the run."""
    rows = []
    for name, lines in logs.policies.items():
        part = max(1, len(lines) // 10)
        for key in dict.fromkeys(key for line in lines for key in line):
            ends = [_mean(some, key) for some in (lines[:part], lines[-part:])]
            if key not in ("step", "policy", "iteration") and ends[0] is not None:
                rows.append([f"{name}: {key}", *(_short(end) for end in ends)])
    return table(["figure", "first tenth", "last tenth"], rows)


def _mean(lines: Sequence[Line], key: str) -> float | None:
    values = [line[key] for line in lines if isinstance(line.get(key), int | float)]
    return sum(values) / len(values) if values else None


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def time_table(logs: Logs) -> str:
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
    return table(["phase", "times", "seconds", "share"], rows)
