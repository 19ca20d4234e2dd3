"""The section of docs/results-games.md on tasks of the literature: the rows of the grid `literature` beside published
returns."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from palestra.api.experiments.grid import load_grid
from results.ledger import Ledger, Line, provenance
from results.pages import interval, table, wrapped

GRID = Path(__file__).parents[1] / "grid" / "configs" / "literature.yaml"


@dataclass(frozen=True)
class PublishedTask:
    """A task as a publication names it, and how its scale of returns comes from ours: `scale * value + shift`.

    `returns`: the publication's maximum returns by algorithm, each with its 95 % half-width.
    """

    title: str
    scale: float
    shift: float
    digits: int
    returns: dict[str, tuple[float, float]]


# Papoudakis et al. (2021), table 3: maximum returns with shared parameters.
PUBLISHED = {
    "spread": PublishedTask(
        "MPE simple_spread",
        scale=6,
        shift=-75,
        digits=1,
        returns={
            "vdn": (-131.03, 1.85),
            "qmix": (-126.62, 2.96),
            "mappo": (-133.54, 3.08),
        },
    ),
    "lbf_8x8_2p_2f_coop": PublishedTask(
        "LBF 8x8-2p-2f-coop",
        scale=2,
        shift=0,
        digits=2,
        returns={
            "vdn": (1.00, 0.0),
            "qmix": (0.96, 0.07),
            "mappo": (1.00, 0.0),
        },
    ),
    "lbf_15x15_3p_5f": PublishedTask(
        "LBF 15x15-3p-5f",
        scale=3,
        shift=0,
        digits=2,
        returns={
            "vdn": (0.15, 0.02),
            "qmix": (0.09, 0.04),
            "mappo": (0.77, 0.02),
        },
    ),
}
HEADS = ("task", "algorithm", "at the end", "best evaluation", "seeds", "env steps", "CPU minutes a run", "published")


INTRODUCTION = """Tasks of Papoudakis et al. (2021, [arXiv:2006.07869](https://arxiv.org/abs/2006.07869)), in its
scale of returns, the sum over the team. Value methods have its 2 million env steps, PPO 6 of its 20 million. One
setting of each method for all tasks ([literature.yaml](../results/grid/configs/literature.yaml)), chosen on other
seeds; there, settings were chosen for each env. `at the end`: the last evaluation of 200 held-out games, mean and 95 %
interval (Student's t) over seeds. `best evaluation`: the highest mean over seeds at any evaluation, as in the
publication, whose table 3 is quoted (maximum returns, shared parameters; from memory, since the paper could not be
opened where this was written). A value method plays greedily; PPO draws its moves. Rows are made by `python
results/grid/run.py literature`."""


def literature_section() -> list[str]:
    """Returns the lines of the section: its text, the table, and where the rows come from. None before any row is
    published."""
    lines = list(Ledger("grid", str, name="literature").published.values())
    if not lines:
        return []
    grid = load_grid(GRID)
    rows = []
    for task in grid.tasks:
        for algorithm in grid.algorithms:
            cells = [line for line in lines if (line["task"], line["algorithm"]) == (task, algorithm)]
            if cells:
                rows.append(_row(PUBLISHED[task], algorithm, cells))
    return ["## Tasks of the literature", "", *wrapped(INTRODUCTION), "", *table(HEADS, rows), "", provenance(lines)]


def _row(task: PublishedTask, algorithm: str, lines: list[Line]) -> list[str]:
    scores = [_in_their_scale(task, line["value"]) for line in lines]
    curves = np.array([[value for _, value in line["curve"]] for line in lines])
    best = _in_their_scale(task, float(curves.mean(axis=0).max()))
    steps = lines[0]["curve"][-1][0]
    minutes = np.mean([line["cpu"] for line in lines]) / 60
    mean, half_width = task.returns[algorithm]
    return [
        task.title,
        algorithm,
        interval(scores, task.digits),
        f"{best:.{task.digits}f}",
        str(len(lines)),
        f"{steps:,}",
        f"{minutes:.1f}",
        f"{mean:.2f} ± {half_width:.2f}",
    ]


def _in_their_scale(task: PublishedTask, value: float) -> float:
    return task.scale * value + task.shift
