"""Writes docs/results.md and its plots from the published rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import ttest_ind

from results.ledger import provenance
from results.pages import half_interval, moving_mean, read_notes, table, wrapped

Result = dict[str, Any]
NOTES = Path(__file__).parent / "notes.md"
TITLES = {"plan_path": "Plan-Path", "sokoban": "Sokoban, 4x4 inside", "sokoban_large": "Sokoban, 6x6 inside"}
# Success in percent in arXiv:2510.11062, of Qwen3-1.7B and Qwen3-8B, by our name for the method.
PAPER_MODELS = ("paper, 1.7B", "paper, 8B")
PAPER: dict[str, dict[str, tuple[float, float]]] = {
    "single agent, one turn": {"sokoban": (0, 9), "plan_path": (5, 12)},
    "single agent, one turn + GRPO": {"sokoban": (3, 14), "plan_path": (11, 47)},
    "team, untrained": {"sokoban": (0, 16), "plan_path": (10, 71)},
    "team + AT-GRPO, shared": {"sokoban": (10, 96), "plan_path": (96, 93)},
    "team + AT-GRPO, per role": {"sokoban": (11.5, 98), "plan_path": (97, 96)},
}
BARS = (
    "single agent, one turn",
    "single agent, one turn + GRPO",
    "single agent, multi-turn + GRPO",
    "single agent, multi-turn + AT-GRPO",
    "team, untrained",
    "team + GRPO, equal samples",
    "team + AT-GRPO, shared",
    "team + AT-GRPO, per role",
)
CURVES = (
    "team + GRPO, equal samples",
    "AT-GRPO, random continuation",
    "team + AT-GRPO, shared",
    "team + AT-GRPO, per role",
)
CURVES_SAY = """Mean of the seeds and the range between them. These are training rollouts: with AT-GRPO play continues
from the best of eight siblings (or from a random one), so its success here is that of a search; the tables above
are of play without branching. A step is one seat's answer; a turn has two."""
COLOURS = ("#999999", "#E69F00", "#56B4E9", "#D55E00")


def write_report(results: Sequence[Result], order: Sequence[str], target: Path) -> None:
    """Writes the page `target`: the tables, with methods in `order`, and the notes; and its plots beside it."""
    test = counted(results)
    games = [g for g in TITLES if any(r["game"] == g for r in test)]
    methods = [method for method in order if any(r["method"] == method for r in test)]
    bars = target.with_name(f"{target.stem}-paper.png")
    draw_bars(test, games, bars)
    lines = ["# Results", "", f"![Success by method, beside the paper's]({bars.name})", ""]
    for game in games:
        lines += [*wrapped(compared(test, game)), ""]
    lines += [*HEAD.format(n=test[0]["episodes"]).splitlines(), "", *wrapped(provenance(test)), ""]
    lines += table(["", *(TITLES[g] for g in games)], [[m, *(score(test, g, m) for g in games)] for m in methods])
    for game in games:
        lines += ["", f"## {TITLES[game]}: what it took", ""]
        lines += table(
            ["", "steps an episode", "answers sampled", "CPU-s", "learning rate (chosen on dev)"],
            [[m, *costs([r for r in test if (r["game"], r["method"]) == (game, m)])] for m in methods],
        )
    lines += ["", "## Over training", "", *CURVES_SAY.splitlines(), ""]
    for game in games:
        picture = target.with_name(f"{target.stem}-{game}.png")
        curves = [r for r in test if r["game"] == game and r.get("curve")]
        if curves:  # else the picture stays: it has curves that no ledger has
            draw(curves, picture)
        if picture.exists():
            lines.append(f"![{TITLES[game]}: success and steps an episode over training]({picture.name})")
    lines += ["", read_notes(NOTES).strip()]
    target.write_text("\n".join(lines) + "\n")


HEAD = """Made by `python results/reproduction/run.py --report` from the published rows; script, configs, notes and rows
are in [results/reproduction/](../results/reproduction/). `make reproduce` measures them again, some twelve hours of
one core, and prints both; `--only` takes single rows. Success on {n:.0f} held-out test layouts by play
without branching at temperature 1, mean over seeds with its 95 % interval (Student's t; a spread between runs,
not only between layouts). All on shipped bases of 1.05 million parameters. Every trained method may
sample as many answers as any other; games that end early need fewer, so the tables below have their number."""


def compared(results: Sequence[Result], game: str) -> str:
    """A sentence on a game: the best team and the best single agent, and the interval of their difference if their
    seeds are known. Empty before both have rows."""
    own: dict[str, list[float]] = {}
    for result in results:
        if result["game"] == game and result["method"] in BARS:
            own.setdefault(result["method"], []).append(100 * result["success"])
    kinds = [[method for method in own if method.startswith(kind)] for kind in ("team +", "single agent")]
    if not all(kinds):
        return ""
    team, single = (max(kind, key=lambda method: float(np.mean(own[method]))) for kind in kinds)
    told = f"**{TITLES[game]}**: {team} solves {score(results, game, team)} %, the best single agent of those measured "
    told += f"({single}) {score(results, game, single)} %"
    if min(len(own[team]), len(own[single])) > 1:
        low, high = ttest_ind(own[team], own[single], equal_var=False).confidence_interval()
        told += f": a difference of {np.mean(own[team]) - np.mean(own[single]):.1f} points [{low:.1f}, {high:.1f}]"
    return f"{told}."


def counted(results: Sequence[Result]) -> list[Result]:
    """The results that the page shows: of a method's results those of single seeds, unless only the mean of more seeds
    is known."""
    found = []
    for game, method in dict.fromkeys((r["game"], r["method"]) for r in results):
        own = [r for r in results if (r["game"], r["method"]) == (game, method)]
        means = [r for r in own if "seeds" in r]
        single = [r for r in own if "seeds" not in r]
        found += means if means and len(single) < len(means[0]["seeds"]) else single
    return found


def score(results: Sequence[Result], game: str, method: str) -> str:
    """A method's mean success in percent over its seeds, with the half-width of its 95 % interval."""
    mean, half = mean_and_half([r for r in results if (r["game"], r["method"]) == (game, method)])
    return "–" if np.isnan(mean) else f"{mean:.1f}" if np.isnan(half) else f"{mean:.1f} ± {half:.1f}"


def mean_and_half(own: Sequence[Result]) -> tuple[float, float]:
    """Success in percent and the half-width of its 95 % interval over seeds; NaN if they are not known."""
    if not own:
        return np.nan, np.nan
    if len(own) == 1:
        return 100 * own[0]["success"], 100 * own[0].get("half", np.nan)
    values = [100 * r["success"] for r in own]
    return float(np.mean(values)), half_interval(values)


def costs(results: Sequence[Result]) -> list[str]:
    if not results:
        return ["–"] * 4
    turns = f"{np.mean([r['turns'] for r in results]):.1f}"
    if not results[0].get("answers"):
        return [turns, "–", "–", "–"]
    means = [np.mean([r[key] for r in results]) for key in ("answers", "cpu")]
    return [turns, f"{means[0]:,.0f}", f"{means[1]:.0f}", f"{results[0]['rate']:g}"]


def draw(results: Sequence[Result], target: Path) -> None:
    """Draws success and steps per episode over training: means over seeds, with the range between seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), constrained_layout=True)
    for method, colour in zip(CURVES, COLOURS, strict=True):
        curves = [np.array(r["curve"]) for r in results if r["method"] == method and r.get("curve")]
        if not curves:
            continue
        length = min(len(c) for c in curves)
        for axis, column in zip(axes, (1, 2), strict=True):
            values = np.stack([moving_mean(c[:length, column]) for c in curves])
            axis.plot(values.mean(0), color=colour, label=method)
            axis.fill_between(range(length), values.min(0), values.max(0), color=colour, alpha=0.2)
    for axis, title in zip(axes, ("success in training rollouts", "steps an episode"), strict=True):
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("training step")
        axis.grid(alpha=0.25)
    axes[0].legend(fontsize=7)
    figure.savefig(target, dpi=120)
    plt.close(figure)


def draw_bars(results: Sequence[Result], games: Sequence[str], target: Path) -> None:
    """Draws success by method: ours with 95 % intervals, beside the paper's where it has the method."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(games), figsize=(11, 4.2), sharey=True, constrained_layout=True, squeeze=False)
    places = np.arange(len(BARS))
    for axis, game in zip(axes[0], games, strict=True):
        for number, (name, colour) in enumerate(zip(PAPER_MODELS, ("#dddddd", "#aaaaaa"), strict=True)):
            values = [PAPER.get(method, {}).get(game, (np.nan, np.nan))[number] for method in BARS]
            axis.barh(places + 0.27 * number, values, 0.27, color=colour, label=name)
        own = [mean_and_half([r for r in results if (r["game"], r["method"]) == (game, method)]) for method in BARS]
        means, halves = zip(*own, strict=True)
        axis.barh(places + 0.54, means, 0.27, xerr=halves, color="#D55E00", capsize=2, label="palestra, 1M")
        axis.set_title(f"{TITLES[game]}: success, %", fontsize=10)
        axis.set_xlim(0, 100)
        axis.grid(axis="x", alpha=0.25)
    axes[0][0].set_yticks(places + 0.27, BARS)
    axes[0][0].invert_yaxis()
    axes[0][-1].legend(fontsize=8)
    figure.savefig(target, dpi=120)
    plt.close(figure)
