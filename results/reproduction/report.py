"""Writes docs/results.md and its plots from the published rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from results.ledger import provenance
from results.pages import interval, moving_mean, read_notes, table, wrapped

Result = dict[str, Any]
NOTES = Path(__file__).parent / "notes.md"
TITLES = {"plan_path": "Plan-Path", "sokoban": "Sokoban"}
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
    seeds = max(len(r.get("seeds", [0])) for r in test)
    lines = [*HEAD.format(n=test[0]["episodes"], seeds=seeds).splitlines(), "", *wrapped(provenance(test)), ""]
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
        lines.append(f"![{TITLES[game]}: success and steps an episode over training]({picture.name})")
    lines += ["", read_notes(NOTES).strip()]
    target.write_text("\n".join(lines) + "\n")


HEAD = """# Results

Made by `python results/reproduction/run.py --report` from the published rows; script, configs, notes and rows are in
[results/reproduction/](../results/reproduction/). `make reproduce` measures them again, about three hours of one core,
and prints both; `--only` takes single rows. Success on {n:.0f} held-out test layouts by play
without branching at temperature 1, mean over {seeds} seeds with its 95 % interval (Student's t; a spread between runs,
not only between layouts). All on the shipped base of 1.05 million parameters, LoRA rank 8. Every trained method may
sample as many answers as any other; games that end early need fewer, so the tables below have their number."""


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
    own = [r for r in results if (r["game"], r["method"]) == (game, method)]
    if len(own) == 1 and "half" in own[0]:
        return f"{100 * own[0]['success']:.1f} ± {100 * own[0]['half']:.1f}"
    return interval([100 * r["success"] for r in own], 1) if own else "–"


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
