"""Tables and a picture of the ledger. Intervals are computed as in `palestra grid`: percentiles of a bootstrap that
resamples seeds within each task (palestra/api/experiments/statistics.py)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from palestra.api.experiments.statistics import Estimate, estimate, estimate_improvement, mean_score
from results.algorithms.jobs import chosen_rate
from results.algorithms.methods import METHODS, TASKS, UNTRAINED, Method, Task, find_method
from results.algorithms.runs import TUNING, Job, Line

Ledger = dict[Job, Line]
HEAD = ["", "seeds", "mean", "95 %", "above untrained", "answers to the bar", "KL", "entropy", "answers", "CPU-s", "lr"]
CLOCK = "clock-s, GPU"  # a further column of tasks that may run on a GPU; their CPU-s are of runs on the CPU


def counted(task: Task, method: Method, have: Ledger) -> list[Line]:
    """Returns the runs that count, by seed: those at the chosen learning rate, or the lowest where none was chosen,
    without tuning seeds."""
    runs = [have[job] for job in sorted(have) if job[:2] == (task.name, method.name) and job.seed not in TUNING]
    for rate in (chosen_rate(task, method, have), task.rates[0]):
        if own := [line for line in runs if line["rate"] == rate]:
            return own
    return []


def untrained(task: Task, have: Ledger) -> float:
    return float(have[Job(task.name, UNTRAINED.name, 0.0, 0)]["score"])


def scores(lines: Sequence[Line]) -> np.ndarray:
    return np.asarray([line["score"] for line in lines])


def bounds(value: Estimate, digits: int = 3) -> str:
    return "–" if value.interval is None else "[{:.{d}f}, {:.{d}f}]".format(*value.interval, d=digits)


def row(task: Task, method: Method, have: Ledger) -> str:
    lines = counted(task, method, have)
    value = estimate(mean_score, [scores(lines)])
    better = "–" if value.interval is None else "yes" if value.interval[0] > untrained(task, have) else "**no**"
    reached = [line["to_bar"] for line in lines if line["to_bar"] is not None]
    to_bar = f"{np.mean(reached):,.0f} ({len(reached)} of {len(lines)})" if reached else "never"
    cells = [method.name, str(len(lines)), f"{value.value:.3f}", bounds(value), better, to_bar]
    cells += [_mean(lines, "kl", 2), _mean(lines, "entropy", 2), _mean(lines, "answers", 0)]
    on_gpu = [line for line in lines if line.get("device", "cpu") != "cpu"]
    cells += [_mean([line for line in lines if line not in on_gpu], "cpu", 0), f"{lines[0]['rate']:g}"]
    return _line([*cells, _mean(on_gpu, "clock", 0)] if task.on_device else cells)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")


def _mean(lines: Sequence[Line], key: str, digits: int) -> str:
    values = [line[key] for line in lines if key in line]
    return f"{np.mean(values):,.{digits}f}" if values else "–"


def table(task: Task, have: Ledger) -> str:
    """Returns the table of a task, the highest mean first; "" without runs."""
    own = [method for method in METHODS if task.name in method.tasks and counted(task, method, have)]
    if not own:
        return ""
    own.sort(key=lambda method: -float(scores(counted(task, method, have)).mean()))
    start = f"Untrained: {untrained(task, have):.3f}. The bar on dev: {task.bar:g}."
    title = f"### {task.name}: {task.scored}"
    head = [*HEAD, CLOCK] if task.on_device else HEAD
    rows = [row(task, method, have) for method in own]
    return "\n".join([title, "", start, "", _line(head), f"|{'---|' * len(head)}", *rows, ""])


def over_tasks(have: Ledger) -> str:
    """Returns the table of methods that have runs on all tasks: scores normalised between the untrained base (0) and
    the best method of the task (1), and the probability that a run of the method scores above one of GRPO."""
    tasks = [task for task in TASKS if counted(task, find_method(task, "GRPO"), have)]
    every = [name for name in _names() if all(_runs(task, name, have) for task in tasks)]
    if len(tasks) < 2:
        return ""
    scaled = {name: [_scaled(task, scores(_runs(task, name, have)), have) for task in tasks] for name in every}
    rows = []
    for name in sorted(every, key=lambda name: -mean_score(scaled[name])):
        mean, chance = estimate(mean_score, scaled[name]), estimate_improvement(scaled[name], scaled["GRPO"])
        against = "–" if name == "GRPO" else f"{chance.value:.2f} {bounds(chance, 2)}"
        rows.append(f"| {name} | {mean.value:.2f} {bounds(mean, 2)} | {against} |")
    title = f"### Over {', '.join(task.name for task in tasks)}"
    return "\n".join([title, "", "| | mean of normalised scores | above GRPO |", "|---|---|---|", *rows, ""])


def _names() -> list[str]:
    return list(dict.fromkeys(method.name for method in METHODS))


def _runs(task: Task, name: str, have: Ledger) -> list[Line]:
    own = [method for method in METHODS if method.name == name and task.name in method.tasks]
    return counted(task, own[0], have) if own else []


def _scaled(task: Task, values: np.ndarray, have: Ledger) -> np.ndarray:
    best = max(float(scores(runs).mean()) for name in _names() if (runs := _runs(task, name, have)))
    start = untrained(task, have)
    return (values - start) / (best - start)


def draw(have: Ledger, target: Path) -> None:
    """Draws the score on dev over the number of sampled answers: means over seeds, one panel for each task."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    tasks = [task for task in TASKS if any(counted(task, m, have) for m in METHODS if task.name in m.tasks)]
    figure, axes = plt.subplots(1, len(tasks), figsize=(6.5 * len(tasks), 5.2), constrained_layout=True, squeeze=False)
    colours = plt.get_cmap("tab20").colors
    for task, axis in zip(tasks, axes[0], strict=True):
        for number, name in enumerate(_names()):
            if runs := _runs(task, name, have):
                points = np.mean([line["curve"] for line in runs], 0)
                style = "-" if number < len(colours) else "--"
                axis.plot(points[:, 0], points[:, 1], style, color=colours[number % len(colours)], label=name)
        axis.axhline(task.bar, color="black", linewidth=0.6, linestyle=":")
        axis.set(title=task.name, xlabel="answers sampled in training", ylabel=f"{task.scored}, on dev")
        axis.grid(alpha=0.25)
        axis.legend(fontsize=7, ncol=2)
    figure.savefig(target, dpi=110)
    plt.close(figure)
