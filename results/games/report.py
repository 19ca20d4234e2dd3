"""Writes docs/results-games.md and its curves from the published rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from palestra.core.config import load
from results.games.tasks import TASKS, Task
from results.ledger import provenance
from results.pages import interval, read_notes

NOTES = Path(__file__).parent / "notes.md"  # the text of the page

HEAD = """Made by `python results/games/run.py --report` from the published rows; without `--report` it measures them
again, two and a half hours of one core, and prints both. Each config is trained with several seeds and scored at the
end on held-out seeds: means with 95 % intervals (Student's t). CPU seconds are those of rollouts and updates, on one
core of a machine that other programs used too. Script, notes and the scores and curves of all runs are in
[results/games/](../results/games/)."""


def row(task: Task, lines: list[dict[str, Any]]) -> str:
    """A row of the page's table."""
    bar, steps = f"{'≤' if task.low else '≥'} {task.bar:g}", int(load(task.config)["env_steps"])
    link = f"[{task.name}](../palestra/data/configs/games/{task.name}.yaml)"
    if not lines:
        return f"| {link} | {task.scored} | not run | {bar} | | | {steps:,} |"
    scores, cpu = [line["score"] for line in lines], np.mean([line["cpu"] for line in lines])
    count = sum(map(task.reached, scores))
    verdict = "yes" if count == len(scores) else "**no**" if count == 0 else "**not always**"
    cells = [link, task.scored, interval(scores, 3), bar, f"{verdict}: {count} of {len(scores)}", f"{cpu:.0f}"]
    return f"| {' | '.join([*cells, f'{steps:,}'])} |"


def write_report(results: list[dict[str, Any]], target: Path) -> None:
    """Writes the page: the table, the curves, the sources of the bars, and the notes."""
    lines = ["# What is learned in vectorised games", "", HEAD, ""]
    lines += [provenance(results), ""]
    lines += ["| config | scored | mean of the seeds | bar | seeds reach it | CPU-s | env steps |", f"|{'---|' * 7}"]
    lines += [row(task, [line for line in results if line["task"] == task.name]) for task in TASKS]
    lines += ["", f"![curves]({target.stem}.png)", "", "## Where the bars come from", ""]
    lines += [f"- {task.name}: {task.why}." for task in TASKS]
    lines += ["", read_notes(NOTES).rstrip()]
    target.write_text("\n".join(lines) + "\n")
    draw(results, target.with_suffix(".png"))


def draw(results: list[dict[str, Any]], target: Path) -> None:
    """Draws the curve of each run, and the bars."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    shown = [task for task in TASKS if any(line["task"] == task.name for line in results)]
    rows = -(-len(shown) // 4)
    figure, axes = plt.subplots(rows, 4, figsize=(14, 2.9 * rows), constrained_layout=True, squeeze=False)
    seeds: dict[int, Any] = {}
    for axis in axes.flat[len(shown) :]:
        axis.axis("off")
    for axis, task in zip(axes.flat, shown, strict=False):
        for line in (line for line in results if line["task"] == task.name):
            steps, values = zip(*line["curve"], strict=True)
            style = {"color": f"C{line['seed']}", "marker": "o", "markersize": 2.5, "linewidth": 1}
            (seeds[line["seed"]],) = axis.plot(np.array(steps) / 1000, values, label=f"seed {line['seed']}", **style)
        axis.axhline(task.bar, color="black", linestyle=":", linewidth=1)
        axis.set_title(f"{task.name}: {task.scored}", fontsize=9)
        axis.set_xlabel("thousand joint steps", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.locator_params(axis="x", nbins=6)
        axis.grid(alpha=0.25)
    lines = [seeds[seed] for seed in sorted(seeds)]
    figure.legend(handles=lines, loc="outside lower center", ncols=len(lines), fontsize=8)
    figure.savefig(target, dpi=110)
    plt.close(figure)
