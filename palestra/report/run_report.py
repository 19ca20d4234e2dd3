"""Learning curves and summary tables of a run, from its directory."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from palestra.files import replacing_file
from palestra.runs import read_lines
from palestra.types import TEAM

COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"]  # Okabe & Ito (2008): colour-blind safe
PANELS = [  # (metric, title): the first four that the run has are drawn
    ("entropy", "entropy of the policy (nats)"),
    ("kl", "KL from the sampling policy"),
    ("zero_std_fraction", "groups without differences (share)"),
    ("invalid", "invalid answers (share)"),
    ("value_loss", "loss of the critic"),
    ("clip_fraction", "moves whose gradient the clip removed (share)"),
    ("td_loss", "loss of the action values"),
    ("grad_norm", "norm of the gradient"),
    ("policy_loss", "loss of the policy"),
]


SUMMARY_ROWS = [
    ("local_reward", "local reward"),
    ("return", "return in training"),
    ("invalid", "invalid answers"),
    ("entropy", "entropy"),
]


def plot_run(path: str | Path, out: Path | None = None) -> Path:
    """Writes the learning curves of the run at `path` as a PNG (default: curves.png in it) and returns its path."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    path = Path(path)
    out = out or path / "curves.png"
    by_policy = group_lines(read_lines(path / "metrics.jsonl"), "policy")
    figure, axes = plt.subplots(2, 3, figsize=(12, 6.4), constrained_layout=True)
    exams = group_lines(read_lines(path / "evals.jsonl"), "name")
    team, games = by_policy.get(TEAM, []), any("return" in lines[-1] for lines in exams.values())
    games = games or any("return" in line for line in by_policy.get(TEAM, []))
    if games:
        _returns(axes[0, 0], team, exams)
        _curves(axes[0, 1], by_policy, "return", "return of a game, in training")
    else:
        known = any("success" in line for lines in [team, *exams.values()] for line in lines)
        (_success if known else _seats)(axes[0, 0], team, exams)
        _rewards(axes[0, 1], by_policy)
    told = {key for name, lines in _policies(by_policy) for line in lines for key in line}
    drawn = [panel for panel in PANELS if panel[0] in told][:4]
    for axis, (key, title) in zip(axes.flat[2:], drawn, strict=False):
        _curves(axis, by_policy, key, title)
    for axis in axes.flat[2 + len(drawn) :]:
        axis.set_visible(False)
    for axis in axes.flat:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_xlabel("joint steps of all games" if games else "training step")
    figure.suptitle(path.name)
    with replacing_file(out) as place:  # replaces a symbolic link instead of writing through it
        figure.savefig(place, dpi=120)
    plt.close(figure)
    return out


def group_lines(lines: list[dict[str, Any]], key: str) -> dict[str, list[dict[str, Any]]]:
    """Groups log lines by their value of `key`, in order."""
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        groups[line[key]].append(line)
    return dict(groups)


def smooth(values: list[float], window: int = 9) -> np.ndarray:
    """Returns the centred moving mean [T] float64 over `window` values, over fewer at the ends."""
    kernel = np.ones(min(window, max(1, len(values))))
    return np.convolve(values, kernel, "same") / np.convolve(np.ones(len(values)), kernel, "same")


def _success(axis: Any, team: list[dict[str, Any]], exams: dict[str, list[dict[str, Any]]]) -> None:
    if team:
        values = [line["success"] for line in team]
        steps = [line["step"] + 1 for line in team]
        axis.plot(steps, values, color="#BBBBBB", linewidth=0.8)
        axis.plot(steps, smooth(values), color="#666666", label="training layouts (best of siblings goes on)")
    for (name, lines), colour in zip(exams.items(), COLOURS, strict=False):
        steps = [line["step"] + 1 for line in lines]
        axis.plot(steps, [line["success"] for line in lines], "o-", color=colour, label=f"{name} layouts, plain play")
    axis.set_ylim(0, 1.02)
    axis.set_title("success", fontsize=10)
    _legend(axis, loc="lower right")


def _seats(axis: Any, team: list[dict[str, Any]], exams: dict[str, list[dict[str, Any]]]) -> None:
    """Plots each seat's return in evaluations, for envs that report no success."""
    shown = [(name, seat, lines) for name, lines in exams.items() for seat in lines[-1]["returns"]]
    for (name, seat, lines), colour in zip(shown, COLOURS, strict=False):
        values = [line["returns"][seat] for line in lines]
        axis.plot([line["step"] + 1 for line in lines], values, "o-", color=colour, label=f"{name}: {seat}")
    axis.set_title("return of each seat, in evaluations", fontsize=10)
    _legend(axis, loc="lower right")


def _returns(axis: Any, team: list[dict[str, Any]], exams: dict[str, list[dict[str, Any]]]) -> None:
    """Plots success if the env reports it, else the return, in training and in evaluations."""
    key = "success" if any("success" in line for lines in [team, *exams.values()] for line in lines) else "return"
    known = [line for line in team if key in line]
    if known:
        axis.plot(
            [x_position(line, team) for line in known],
            smooth([line[key] for line in known]),
            "#666666",
            label="training",
        )
    for (name, lines), colour in zip(exams.items(), COLOURS, strict=False):
        shown = [line for line in lines if key in line]
        axis.plot(
            [x_position(line, team) for line in shown], [line[key] for line in shown], "o-", color=colour, label=name
        )
    axis.set_title(f"{key} of all seats", fontsize=10)
    _legend(axis, loc="lower right")


def x_position(line: dict[str, Any], team: list[dict[str, Any]]) -> float:
    """Returns the x position of a log line: joint steps if the run counts them, else training steps."""
    steps = line["step"] + 1
    per_step = team[-1]["env_steps"] / (team[-1]["step"] + 1) if team and "env_steps" in team[-1] else 1
    return float(steps * per_step)


def _rewards(axis: Any, by_policy: dict[str, list[dict[str, Any]]]) -> None:
    """Plots each policy's reward per answer, team and local parts together."""
    for (name, lines), colour in zip(_policies(by_policy), COLOURS, strict=False):
        values = [line["team_reward"] + line["local_reward"] for line in lines]
        axis.plot([line["step"] + 1 for line in lines], smooth(values), color=colour, label=name)
    axis.set_title("reward of an answer (team + local)", fontsize=10)
    _legend(axis)


def _curves(axis: Any, by_policy: dict[str, list[dict[str, Any]]], key: str, title: str) -> None:
    for (name, lines), colour in zip(_policies(by_policy), COLOURS, strict=False):
        points = [(line.get("env_steps", line["step"] + 1), line[key]) for line in lines if line.get(key) is not None]
        if points:
            steps, values = zip(*points, strict=True)
            axis.plot(steps, smooth(list(values)), color=colour, label=name)
    axis.set_title(title, fontsize=10)
    _legend(axis)


def _legend(axis: Any, **options: Any) -> None:
    """Adds a legend if there is a label."""
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=7, **options)


def _policies(by_policy: dict[str, list[dict[str, Any]]]) -> list[tuple[str, list[dict[str, Any]]]]:
    return [(name, lines) for name, lines in by_policy.items() if name != TEAM]


def summary_table(path: str | Path) -> Table:
    """Returns a table of what a run learned: evaluations before and after, and each policy's metrics (mean of the first
    and last ten lines)."""
    path = Path(path)
    table = Table(title="what was learned", title_justify="left")
    for heading, justify in (("", "left"), ("before", "right"), ("after", "right")):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    for name, lines in group_lines(read_lines(path / "evals.jsonl"), "name").items():
        first, last = lines[0], lines[-1]
        n = f"{last['episodes']:.0f}"
        if "success" in last:
            table.add_row(f"{name}: success of {n}", success_interval(first), success_interval(last), style="bold")
        if "return" in last:
            table.add_row(f"{name}: return, mean of {n}", *(f"{x['return']:.2f}" for x in (first, last)), style="bold")
        if ("return" in last or "success" not in last) and len(set(last["returns"].values())) > 1:
            for seat in last["returns"]:
                table.add_row(f"{name}: return of {seat}", *(f"{x['returns'][seat]:.2f}" for x in (first, last)))
        table.add_row(f"{name}: steps an episode", *(f"{x['steps_per_episode']:.1f}" for x in (first, last)))
    for name, lines in _policies(group_lines(read_lines(path / "metrics.jsonl"), "policy")):
        table.add_section()
        for key, label in SUMMARY_ROWS:
            ends = [_mean(part, key) for part in (lines[:10], lines[-10:])]
            if not all(map(np.isnan, ends)):
                table.add_row(f"{name}: {label}", *(f"{value:.2f}" for value in ends))
    return table


def explain_no_update(path: Path) -> str:
    """Returns why no step of a language-model run made an update, and what to do; "" if one did or no policy learns."""
    by_policy = group_lines(read_lines(path / "metrics.jsonl"), "policy")
    lines = [line for _, own in _policies(by_policy) for line in own if "updates" in line]
    if not lines or any(line["updates"] for line in lines):
        return ""
    team = by_policy.get(TEAM, [])
    flat, success = _mean(lines, "zero_std_fraction"), _mean(team, "success")
    why = "the episodes hold nothing that the algorithm learns from"
    fix = "let the env pay more, imitate other answers (algorithm.imitate), or give other data"
    if flat > 0:
        why = f"in {flat:.0%} of the groups all answers earn the same, so that no advantage differs from 0"
        fix = "raise algorithm.group_size or the sampling temperature, or pay for part of the task in the env"
    if success >= 0.95:
        why, fix = f"{why}, at a success of {success:.0%}", "the task is solved already: make it harder"
    return f"no update was made in {len(team)} steps: {why}. To change this, {fix}"


def success_interval(line: dict[str, Any]) -> str:
    """Returns the success rate with its 95 % Wilson interval (Wilson, 1927), as text."""
    low, high = wilson_interval(line["success"] * line["episodes"], line["episodes"])
    return f"{line['success']:.1%} [{low:.1%}, {high:.1%}]"


def wilson_interval(successes: float, n: float, z: float = 1.96) -> tuple[float, float]:
    """Returns the score interval of a proportion (Wilson, 1927), 95 % by default. 8 of 10 gives (0.49, 0.94)."""
    if n == 0:
        return 0.0, 1.0
    share, spread = successes / n, z * z / n
    centre = (share + spread / 2) / (1 + spread)
    half = z / (1 + spread) * (share * (1 - share) / n + spread / (4 * n)) ** 0.5
    return max(0.0, centre - half), min(1.0, centre + half)


def _mean(lines: list[dict[str, Any]], key: str) -> float:
    values = [line[key] for line in lines if line.get(key) is not None]
    return float(np.mean(values)) if values else float("nan")
