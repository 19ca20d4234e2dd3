"""Writes docs/results-peers.md and its curves from the published rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from results.ledger import Line, provenance
from results.pages import half_interval, interval, read_notes, table, wrapped
from results.peers.tasks import PACKAGES, TASKS, Task

NOTES = Path(__file__).parent / "notes.md"  # the text of the page
HEADS = ("task", "package", "seeds", "mean of all evaluations", "last evaluation", "CPU-s", "times palestra's")
COLOURS = {"palestra": "C0", "BenchMARL": "C1", "plain PyTorch": "C2"}
HEAD = """Made by `python results/peers/run.py --report` from the published rows; without `--report` it measures them
again and prints both. The same tasks are trained with the same settings in palestra, in BenchMARL 1.5.2, and, by MAPPO,
with a [script](../bench/peers/plain_mappo.py) of PyTorch alone. The return is that of an agent in a game that is played
greedily, a mean of {games:,} held-out games; behind ± is the 95 % interval of the mean over seeds (Student's t). CPU
seconds are those of rollouts and updates, in one thread; start-up and evaluations are left out. Evaluations before
training are in the ledger alone. Script, notes and all
curves are in [results/peers/](../results/peers/)."""


def write_report(results: Sequence[Line], target: Path) -> None:
    """Writes the page: the tables, the curves, and the notes."""
    trained = [task for task in TASKS if task.spec.algorithm != "random"]
    lines = ["# Beside BenchMARL and a plain script", ""]
    lines += [*wrapped(HEAD.format(games=trained[0].spec.eval_games)), "", *wrapped(provenance(results)), ""]
    lines += table(HEADS, [row for task in trained for row in task_rows(task, results)])
    lines += ["", f"![curves]({target.stem}.png)", "", "Uniform actions have the same return in all three:", ""]
    lines += table(("scenario", *PACKAGES), [random_row(task, results) for task in TASKS if task not in trained])
    lines += ["", read_notes(NOTES).rstrip()]
    target.write_text("\n".join(lines) + "\n")
    draw(trained, results, target.with_suffix(".png"))


def lines_of(task: Task, package: str, results: Sequence[Line]) -> list[Line]:
    """Returns the rows of all seeds."""
    return [line for line in results if line["task"] == task.name and line["package"] == package]


def task_rows(task: Task, results: Sequence[Line]) -> list[list[str]]:
    """Returns the rows of a task in the page's table, one for each package."""
    rows = []
    ours = [line["cpu"] for line in lines_of(task, "palestra", results)]
    for package in task.packages:
        lines = lines_of(task, package, results)
        if not lines:
            rows.append([task.title, package, "not run", *[""] * (len(HEADS) - 3)])
            continue
        values = np.array([[value for _, _, value in line["curve"]] for line in lines])
        cpu = [line["cpu"] for line in lines]
        returns = [interval(part.tolist(), 2) for part in (values[:, 1:].mean(1), values[:, -1])]
        spent = [interval(cpu, 1), f"{np.mean(cpu) / np.mean(ours):.2f}" if ours else ""]
        rows.append([task.title, package, str(len(lines)), *returns, *spent])
    return rows


def random_row(task: Task, results: Sequence[Line]) -> list[str]:
    """Returns the returns of uniform actions in a scenario, by package."""
    cells = []
    for package in PACKAGES:
        scores = [f"{line['score']:.2f}" for line in lines_of(task, package, results)]
        cells.append(" ".join(scores) or "not run")
    return [task.title, *cells]


def draw(tasks: Sequence[Task], results: Sequence[Line], target: Path) -> None:
    """Draws the mean curve of each package in training with the interval over seeds: above against env steps, below
    against CPU seconds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, len(tasks), figsize=(4.2 * len(tasks), 6), constrained_layout=True, squeeze=False)
    for column, task in zip(axes.T, tasks, strict=True):
        for package in task.packages:
            curves = np.array([line["curve"][1:] for line in lines_of(task, package, results)])  # [seeds, points, 3]
            if not len(curves):
                continue
            steps, cpu_s, values = curves.mean(0).T
            half = np.array([half_interval(at.tolist()) for at in curves[..., 2].T]) if len(curves) > 1 else 0 * values
            for axis, x in zip(column, (steps / 1000, cpu_s), strict=True):
                axis.plot(x, values, color=COLOURS[package], marker="o", markersize=2.5, label=package)
                axis.fill_between(x, values - half, values + half, color=COLOURS[package], alpha=0.15, linewidth=0)
        for axis, label in zip(column, ("thousand env steps", "CPU seconds"), strict=True):
            axis.set_xlabel(label, fontsize=9)
            axis.grid(alpha=0.25)
            axis.tick_params(labelsize=8)
        column[0].set_title(task.title, fontsize=10)
    axes[0, 0].set_ylabel("held-out return")
    axes[1, 0].set_ylabel("held-out return")
    axes[0, 0].legend(fontsize=8)
    figure.savefig(target, dpi=110)
    plt.close(figure)
