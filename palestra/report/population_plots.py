"""Plots of a population's run: NashConv, payoffs, best responses, mixtures and learners' metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from palestra.files import replacing_file
from palestra.populations.tasks import TrainTask
from palestra.report.population_data import JSONLine, PopulationRecord, read_record
from palestra.report.run_report import COLOURS, group_lines
from palestra.types import TEAM

MAX_AXIS_LABELS = 24  # maximum number of members whose names fit on an axis
MIXTURE_COLORMAP = "magma_r"


def plot_population(path: str | Path, target: Path | None = None) -> Path:
    """Writes the plots of the run at `path` as one PNG (default: population.png in it) and returns its path.

    Raises ValueError if the run trains no population.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    record = read_record(path)
    target = target or record.path / "population.png"
    panels = [panel for panel in _panels(record) if panel is not None]
    rows = max(1, -(-len(panels) // 3))
    figure, axes = plt.subplots(rows, 3, figsize=(13, 3.9 * rows), constrained_layout=True, squeeze=False)
    for axis, panel in zip(axes.flat, panels, strict=False):
        panel(axis)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    figure.suptitle(record.path.name)
    with replacing_file(target) as place:  # replaces a symbolic link instead of writing through it
        figure.savefig(place, dpi=120)
    plt.close(figure)
    return target


Panel = Callable[[Any], None]
"""Draws into a matplotlib axes."""


def _panels(record: PopulationRecord) -> Iterable[Panel | None]:
    """Yields the panels in order; None for those without data."""
    points = nash_conv_points(record)
    for key, title in (("env_steps", "env steps"), ("games", "games played for payoffs"), ("seconds", "seconds")):
        drawn = [(point[key], point["nash_conv"]) for point in points if key in point]
        yield _curve(drawn, title) if len({x for x, _ in drawn}) > 1 else None
    met = len(record.payoffs.seats) == 2 and not np.isnan(record.payoffs.mean()[0]).all()
    yield _heat(record) if met else None
    yield _graph(record) if met else None
    for player, rows in mixtures_by_player(record).items():
        yield _mixture(player, rows)
    learners = [name for name in group_lines(record.metrics, "policy") if name != TEAM]
    for key, title in (("worst_win_rate", "win rate against the worst of its judges"), ("rating", "rating")):
        yield _lines(record, learners, key, title)
    for setting in searched_settings(record):
        yield _lines(record, learners, setting, f"{setting}, as evolved")


# ---- data


def nash_conv_points(record: PopulationRecord) -> list[dict[str, float]]:
    """Returns the measured NashConv values, each with `env_steps` and `games` so far and `seconds` since the start,
    where known."""
    counts = {line["iteration"]: line for line in record.metrics if line["policy"] == TEAM and "env_steps" in line}
    seconds = {line["step"]: line["elapsed_s"] for line in record.timings}
    found = []
    for line in record.metrics:
        if line["policy"] == TEAM and line.get("nash_conv") is not None:
            count = counts.get(line["iteration"], {}) | line  # its own counts take precedence
            point: dict[str, float] = {key: count[key] for key in ("env_steps", "games") if key in count}
            if line["step"] in seconds:
                point["seconds"] = seconds[line["step"]]
            found.append({"nash_conv": line["nash_conv"], **point})
    return found


def mixtures_by_player(record: PopulationRecord) -> dict[str, list[dict[str, float]]]:
    """Returns the mixtures by player, one for each meta-strategy; without meta-strategies, opponents by learner, one
    for each slice."""
    found: dict[str, list[dict[str, float]]] = {}
    for line in record.metrics:
        if mix := {key.removeprefix("mix/"): p for key, p in line.items() if key.startswith("mix/")}:
            found.setdefault(line["policy"], []).append(mix)
    if found:
        return found
    for task in _train_tasks(record):
        if task.learner.startswith("main_"):
            rest = {name: p * (1 - task.self_play) for name, p in task.opponents.mixes[task.player].items()}
            found.setdefault(task.learner, []).append({"itself": task.self_play, **rest})
    return {learner: rows for learner, rows in found.items() if not learner.startswith("main_exploiter")}


def searched_settings(record: PopulationRecord) -> list[str]:
    """Returns the settings that population-based training searches."""
    return list(dict.fromkeys(key for task in _train_tasks(record) for key in task.settings))


def _train_tasks(record: PopulationRecord) -> list[TrainTask]:
    return [done.task for done in record.tasks if isinstance(done.task, TrainTask)]


# ---- panels


def _curve(points: list[tuple[float, float]], title: str) -> Panel:
    def draw(axis: Any) -> None:
        xs, ys = zip(*points, strict=True)
        axis.plot(xs, ys, "o-", color=COLOURS[0], markersize=3)
        axis.set_yscale("log")
        axis.set_xlabel(title)
        axis.set_title("NashConv", fontsize=10)
        axis.grid(alpha=0.25)

    return draw


def _heat(record: PopulationRecord) -> Panel:
    """Payoff heat map: returns of the first seat's members (rows) against the second's."""
    table = record.payoffs
    earned = table.mean()[0]

    def draw(axis: Any) -> None:
        top = np.nanmax(np.abs(earned)) or 1.0
        image = axis.imshow(earned, cmap="RdBu", vmin=-top, vmax=top)
        axis.figure.colorbar(image, ax=axis, shrink=0.8)
        for names, ticks, labels, turn in (
            (table.members[table.seats[0]], axis.set_yticks, axis.set_yticklabels, 0),
            (table.members[table.seats[1]], axis.set_xticks, axis.set_xticklabels, 90),
        ):
            fits = len(names) <= MAX_AXIS_LABELS
            ticks(range(len(names)) if fits else [])
            labels(names if fits else [], rotation=turn, fontsize=6)
        axis.set_title("return of the row's member against the column's", fontsize=10)

    return draw


def _graph(record: PopulationRecord) -> Panel:
    """Graph with an arrow from each member to the best response to it."""
    names, answers = best_responses(record)
    angle = 2 * np.pi * np.arange(len(names)) / max(len(names), 1)
    at = np.stack([np.sin(angle), np.cos(angle)], 1)

    def draw(axis: Any) -> None:
        for i, j in answers:
            axis.annotate(
                "", at[j], at[i], arrowprops={"arrowstyle": "->", "color": "#666666", "lw": 0.8, "shrinkB": 5}
            )
        axis.scatter(*at.T, c=np.arange(len(names)), cmap="viridis", zorder=3, s=30)
        for name, (x, y) in zip(names if len(names) <= MAX_AXIS_LABELS else [], at, strict=False):
            axis.text(1.12 * x, 1.12 * y, name, fontsize=6, ha="center", va="center")
        axis.set_xlim(-1.4, 1.4)
        axis.set_ylim(-1.3, 1.3)
        axis.set_axis_off()
        axis.set_title("from each member to the best answer to it", fontsize=10)

    return draw


def best_responses(record: PopulationRecord) -> tuple[list[str], list[tuple[int, int]]]:
    """Returns the members of a two-seat game, and pairs of numbers: each member and the other member that earns most
    against it."""
    table = record.payoffs
    (one, other), (first, second) = table.seats, table.mean()
    if one == other:
        names = table.members[one]
        earned = np.where(np.eye(len(names), dtype=bool), np.nan, second)
        return names, _best(earned, 0, 0)
    mine, theirs = table.members[one], table.members[other]
    pairs = [*_best(second, 0, len(mine)), *[(len(mine) + j, i) for j, i in _best(first.T, 0, 0)]]
    return [*mine, *theirs], pairs


def _best(earned: np.ndarray, first: int, offset: int) -> list[tuple[int, int]]:
    """Returns for each row the column with the largest value, if any is known."""
    known = [(i, row) for i, row in enumerate(earned) if not np.isnan(row).all()]
    return [(first + i, offset + int(np.nanargmax(row))) for i, row in known]


def _mixture(player: str, rows: list[dict[str, float]]) -> Panel:
    """Heat map of probabilities: members upwards, iterations or slices to the right."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    shares = np.array([[row.get(name, 0.0) for row in rows] for name in names])

    def draw(axis: Any) -> None:
        image = axis.imshow(
            shares, cmap=MIXTURE_COLORMAP, vmin=0, vmax=1, aspect="auto", origin="lower", interpolation="nearest"
        )
        axis.figure.colorbar(image, ax=axis, shrink=0.8)
        fits = len(names) <= MAX_AXIS_LABELS
        axis.set_yticks(range(len(names)) if fits else [])
        axis.set_yticklabels(names if fits else [], fontsize=6)
        axis.set_xlabel("iteration")
        axis.set_title(f"mixture of {player}", fontsize=10)

    return draw


def _lines(record: PopulationRecord, learners: list[str], key: str, title: str) -> Panel | None:
    """Curves of one metric, one for each learner, over its slices."""
    curves: dict[str, list[JSONLine]] = {
        name: [line for line in lines if line.get(key) is not None]
        for name, lines in group_lines(record.metrics, "policy").items()
        if name in learners
    }
    if not any(curves.values()):
        return None

    def draw(axis: Any) -> None:
        for number, (name, lines) in enumerate(curves.items()):
            style = {"color": COLOURS[number % len(COLOURS)], "linewidth": 1.0, "label": name}
            axis.plot([line["iteration"] for line in lines], [line[key] for line in lines], **style)
        axis.set_xlabel("slice")
        axis.set_title(title, fontsize=10)
        axis.grid(alpha=0.25)
        if len(curves) <= 8:
            axis.legend(fontsize=6)

    return draw
