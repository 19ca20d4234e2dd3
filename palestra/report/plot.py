"""One figure of several runs for a paper: vector graphics, small type, mean and band over seeds, colour-blind safe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from palestra.config import load
from palestra.files import read_lines
from palestra.report.run_report import COLOURS, group_lines, smooth, x_position
from palestra.types import TEAM

FILE_TYPES = (".svg", ".pdf", ".png")
BANDS = ("sd", "ci", "range")
LINE_STYLES = ("-", "--", ":", "-.")  # distinguishable without colour
# Keys that do not make another experiment.
IGNORED_KEYS = ("seed", "name", "sinks", "device", "checkpoint_every", "keep_every", "save_episodes_every")
# Student's t at 97.5 % for 1 to 10 degrees of freedom; beyond that the normal's 1.96 is used.
STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
Tree = dict[str, Any]


@dataclass(frozen=True)
class FigureSpec:
    """What is drawn, and its size in inches."""

    metric: str | None = None
    """Key of the logs; None for the first that the first run has: success, return, NashConv, team return."""
    eval_name: str | None = None
    """Name of an evaluation; None for training."""
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
    """The runs of one config: x [K] and one row per seed in y [R, K], both float64."""

    label: str
    x: np.ndarray
    y: np.ndarray


def draw_figure(runs: Sequence[Path], figure: FigureSpec, out: Path) -> list[str]:
    """Writes the figure to `out`; returns a line of text per curve: its label, its number of runs and its last value.

    Raises ValueError if a run lacks the metric, or for an unknown file type or band.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib import ticker

    if out.suffix not in FILE_TYPES:
        raise ValueError(f"{out} has none of the endings {', '.join(FILE_TYPES)}")
    if figure.band not in BANDS:
        raise ValueError(f"--band is one of {', '.join(BANDS)}, not {figure.band}")
    metric = figure.metric or default_metric(runs[0], figure)
    bundles = group_by_config(runs, figure, metric)
    size = (figure.width, figure.height or figure.width * 2 / 3)
    with plt.rc_context(_paper(size[0])):
        picture, axis = plt.subplots(figsize=size, constrained_layout=True)
        for number, bundle in enumerate(bundles):
            _curve(axis, bundle, number, figure)
        axis.set_xlabel(x_title(runs[0]))
        axis.xaxis.set_major_locator(ticker.MaxNLocator(5, integer=True))
        axis.xaxis.set_major_formatter(ticker.EngFormatter(sep=""))
        axis.set_ylabel(_named(metric, figure))
        if len(bundles) > 1:
            axis.legend(frameon=False, handlelength=1.6)
        out.parent.mkdir(parents=True, exist_ok=True)
        picture.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None, dpi=300)
        plt.close(picture)
    lines = [f"{b.label or 'all'}: {len(b.y)} runs, {metric} {b.y[:, -1].mean():.4g} at the end" for b in bundles]
    return [*lines, f"figure: {out}"]


def default_metric(run: Path, figure: FigureSpec) -> str:
    """Returns the main metric that a run has. Raises ValueError if it has none."""
    lines = _lines(run, figure)
    for metric in ("success", "return", "nash_conv", "team_return"):
        if any(line.get(metric) is not None for line in lines):
            return metric
    raise ValueError(
        f"{run} has none of success, return and nash_conv of {figure.eval_name or figure.policy}: say --metric"
    )


def group_by_config(runs: Sequence[Path], figure: FigureSpec, metric: str) -> list[SeedGroup]:
    """Groups runs by config, ignoring the keys in `IGNORED_KEYS`, in the order given."""
    trees = {run: load(run / "config.yaml") for run in runs}
    groups: dict[str, list[Path]] = {}
    for run, tree in trees.items():
        groups.setdefault(repr(_essence(tree)), []).append(run)
    labels = config_labels([_essence(trees[members[0]]) for members in groups.values()])
    names = [members[0].resolve().name for members in groups.values()]
    labels = [label or name for label, name in zip(labels, names, strict=True)] if len(groups) > 1 else names
    return [
        SeedGroup(label, *align_curves([_points(run, figure, metric) for run in members], figure.smooth_window))
        for label, members in zip(labels, groups.values(), strict=True)
    ]


def _essence(tree: Tree) -> Tree:
    return {key: value for key, value in tree.items() if key not in IGNORED_KEYS}


def config_labels(trees: Sequence[Tree]) -> list[str]:
    """Returns for each config the settings in which it differs from the others, such as "algorithm.group_size=4,
    policies.a.lr=0.001"."""
    flats = [dict(_flat(tree)) for tree in trees]
    keys = dict.fromkeys(key for flat in flats for key in flat)
    unlike = [key for key in keys if len({repr(flat.get(key)) for flat in flats}) > 1]
    short = _shortened(unlike)
    return [", ".join(f"{short[key]}={flat[key]}" for key in unlike[:4] if key in flat) for flat in flats]


def _shortened(keys: Sequence[str]) -> dict[str, str]:
    """Returns keys by their last component where that is unique."""
    last = [key.rsplit(".", 1)[-1] for key in keys]
    return {key: end if last.count(end) == 1 and end != "type" else key for key, end in zip(keys, last, strict=True)}


def _flat(tree: Mapping[str, Any], name: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in tree.items():
        found += _flat(value, f"{name}{key}.") if isinstance(value, Mapping) and value else [(f"{name}{key}", value)]
    return found


def _lines(run: Path, figure: FigureSpec) -> list[Tree]:
    if not (run / "config.yaml").is_file():
        raise ValueError(f"{run} is not a run: it has no config.yaml; `palestra runs` lists the runs there are")
    log, key = ("evals.jsonl", "name") if figure.eval_name else ("metrics.jsonl", "policy")
    told = group_lines(read_lines(run / log), key)
    wanted = figure.eval_name or figure.policy
    if wanted not in told:
        have = ", ".join(told) or "nothing"
        raise ValueError(f'{run}/{log} has no "{wanted}"; it has: {have}')
    return told[wanted]


def _points(run: Path, figure: FigureSpec, metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns x [K] and y [K] float64 of a run; a metric with a dot, such as `returns.planner`, is a nested key. Raises
    ValueError if no line has it."""
    team = group_lines(read_lines(run / "metrics.jsonl"), "policy").get(TEAM, [])
    found = [
        (x_position(line, team), value) for line in _lines(run, figure) if (value := _at(line, metric)) is not None
    ]
    if not found:
        keys = ", ".join(key for key, value in _flat(_lines(run, figure)[-1]) if isinstance(value, int | float))
        raise ValueError(f"{run} has no figure {metric} of {figure.eval_name or figure.policy}; it has: {keys}")
    x, y = np.array(found, float).T
    return x, y


def _at(line: Tree, metric: str) -> float | None:
    value = dict(_flat(line)).get(metric)
    return float(value) if isinstance(value, int | float) else None


def x_title(run: Path) -> str:
    """Returns the title of the x axis."""
    team = group_lines(read_lines(run / "metrics.jsonl"), "policy").get(TEAM, [])
    return "joint steps" if team and "env_steps" in team[-1] else "training step"


def align_curves(curves: Sequence[tuple[np.ndarray, np.ndarray]], window: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns x [K] and y [R, K] of several seeds on one axis: the range that all cover, linearly interpolated. Raises
    ValueError if they have no step in common."""
    x = max((x for x, _ in curves), key=len)
    x = x[(x >= max(own[0] for own, _ in curves)) & (x <= min(own[-1] for own, _ in curves))]
    if not len(x):
        raise ValueError("the runs of one config have no step in common: draw them one by one")
    return x, np.stack([np.interp(x, own, smooth(list(y), window)) for own, y in curves])


def band_bounds(y: np.ndarray, band: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the lower and upper bound [K] of the band around the mean of y [R, K], R > 1: standard deviation, 95 %
    interval of the mean (Student's t), or range."""
    mean, sd = y.mean(0), y.std(0, ddof=1)
    if band == "range":
        return y.min(0), y.max(0)
    t = STUDENT_T[len(y) - 2] if len(y) - 2 < len(STUDENT_T) else 1.96
    half = sd if band == "sd" else t * sd / len(y) ** 0.5
    return mean - half, mean + half


def _curve(axis: Any, bundle: SeedGroup, number: int, figure: FigureSpec) -> None:
    colour, style = COLOURS[number % len(COLOURS)], LINE_STYLES[number // len(COLOURS) % len(LINE_STYLES)]
    marker = "o" if len(bundle.x) <= 12 else None
    axis.plot(bundle.x, bundle.y.mean(0), style, color=colour, label=bundle.label, marker=marker, markersize=2.5)
    if len(bundle.y) > 1:
        axis.fill_between(bundle.x, *band_bounds(bundle.y, figure.band), color=colour, alpha=0.2, linewidth=0)


def _named(metric: str, figure: FigureSpec) -> str:
    words = metric.replace("_", " ").replace("nash conv", "NashConv")
    return (
        f"{words} ({figure.eval_name})"
        if figure.eval_name
        else words
        if figure.policy == TEAM
        else f"{words}, {figure.policy}"
    )


def _paper(width: float) -> dict[str, Any]:
    """Matplotlib settings: 8 point type, as in captions; text stays text in vector files."""
    return {
        "font.size": 8 if width < 5 else 9,
        "axes.linewidth": 0.6,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.alpha": 0.25,
        "grid.linewidth": 0.5,
        "lines.linewidth": 1.2,
        "legend.fontsize": 7,
        "svg.fonttype": "none",
        "svg.hashsalt": "palestra",  # makes equal figures equal byte for byte
        "pdf.fonttype": 42,
    }
