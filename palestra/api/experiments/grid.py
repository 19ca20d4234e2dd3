"""The file of a grid: tasks x algorithms x seeds. Each cell is one run."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

from pydantic import Field, model_validator

from palestra.core.config import RunName, StrictModel, Tree, load, merge, validate
from palestra.core.config.shipped import find_config

Changes = dict[str, Any]


class GridTask(StrictModel):
    """A task of a grid: the config of a run, the evaluation and metric that are its score, and the scale of that."""

    config: str
    """The YAML config to start from: a path, relative to the file that names it or to the working directory, or a
    shipped one such as `configs/games/spread_mappo.yaml`."""
    changes: Changes = Field(default_factory=dict)
    """Changes of the config, a tree like the config's own; mappings are merged, other values replaced. The changes of
    an algorithm are made after these."""
    eval: str | None = None
    """Name of the evaluation that is scored, at its last step. Default: `test`, else the config's first."""
    metric: str | None = None
    """Metric of that evaluation; default: `success`, else `return`. A population has no evaluations: its score is its
    last `nash_conv`."""
    score_range: tuple[float, float] = (0.0, 1.0)
    """Values of the metric that count as 0 and as 1, such as those of random and of optimal play. The first may be
    larger than the second, for metrics where less is better."""
    algorithms: dict[str, Changes] = Field(default_factory=dict)
    """Further changes for single algorithms on this task, such as learning rates tuned on it."""

    @model_validator(mode="after")
    def _has_a_scale(self) -> Self:
        if self.score_range[0] == self.score_range[1]:
            raise ValueError("both ends of score_range are equal: name the values that count as 0 and as 1")
        return self

    def normalise(self, value: float) -> float:
        """Returns a value's score: linear, 0 and 1 at the ends of `score_range`."""
        zero, one = self.score_range
        return (value - zero) / (one - zero)


class GridConfig(StrictModel):
    """A grid of runs: every algorithm on every task with every seed."""

    name: RunName
    """Name of the grid; its runs lie in a folder of this name."""
    tasks: dict[str, GridTask] = Field(min_length=1)
    """Tasks by name."""
    algorithms: dict[str, Changes] = Field(min_length=1)
    """Algorithms by name: changes of a task's config. `algorithm` is replaced as a whole, everything else merged."""
    seeds: Annotated[list[int], Field(min_length=1)] = [0, 1, 2, 3, 4]
    """Seeds of each algorithm on each task."""

    @model_validator(mode="after")
    def _knows_its_algorithms(self) -> Self:
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds: {self.seeds} has a seed twice")
        for name, task in self.tasks.items():
            if unknown := set(task.algorithms) - set(self.algorithms):
                known = ", ".join(self.algorithms)
                raise ValueError(f"tasks.{name}.algorithms changes {min(unknown)}, but algorithms: has only {known}")
        self._check_changes()
        names = [cell_name(*key) for key in self.keys]
        if double := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"two cells of the grid would be the run {double}: give tasks and algorithms other names")
        return self

    def _check_changes(self) -> None:
        """Raises ValueError for changes that a cell would not have."""
        places = {f"tasks.{name}.changes": task.changes for name, task in self.tasks.items()}
        places |= {f"algorithms.{name}": changes for name, changes in self.algorithms.items()}
        for name, task in self.tasks.items():
            places |= {f"tasks.{name}.algorithms.{own}": changes for own, changes in task.algorithms.items()}
        if seeded := [place for place, changes in places.items() if "seed" in changes]:
            raise ValueError(f"{seeded[0]} sets seed, which differs by cell: list the seeds in seeds:")
        if not all("algorithm" in changes for changes in self.algorithms.values()):
            return
        for name, task in self.tasks.items():
            if "algorithm" in task.changes:
                own = f"tasks.{name}.algorithms.{next(iter(self.algorithms))}"
                raise ValueError(
                    f"tasks.{name}.changes sets algorithm, which all of algorithms: replace as a whole: set it in {own}"
                )

    @property
    def keys(self) -> list[tuple[str, str, int]]:
        """Task, algorithm and seed of each cell, seed by seed, so that all are begun early."""
        cells = product(self.seeds, self.tasks, self.algorithms)
        return [(task, algorithm, seed) for seed, task, algorithm in cells]


class GridCell(NamedTuple):
    """One run of a grid, and its config."""

    task: str
    algorithm: str
    seed: int
    tree: Tree

    @property
    def name(self) -> str:
        return cell_name(self.task, self.algorithm, self.seed)


def cell_name(task: str, algorithm: str, seed: int) -> str:
    """Returns the name of a cell's run: "spread-mappo-0"."""
    return f"{task}-{algorithm}-{seed}"


def load_grid(path: Path) -> GridConfig:
    """Returns the validated grid of a YAML file. Raises ValueError if the file has a mistake."""
    tree = load(path)
    if "policies" in tree or "population" in tree:
        raise ValueError(f"{path} is the config of a run, not a grid of several: palestra train {path}")
    grid = validate(GridConfig, tree)
    assert isinstance(grid, GridConfig)
    return grid


def grid_cells(grid: GridConfig, folder: Path, only: Sequence[str] = ()) -> list[GridCell]:
    """Returns the cells of a grid whose file lies in `folder`, or those whose names match a pattern of `only`, such as
    "spread-*". Raises ValueError if a config cannot be read, or a pattern matches nothing."""
    trees = {}
    for name, task in grid.tasks.items():
        path = folder / task.config
        if not path.is_file():
            path = find_config(Path(task.config))
        trees[name] = load(path)
    cells = [
        GridCell(task, algorithm, seed, _cell_tree(grid, trees[task], task, algorithm) | {"seed": seed})
        for task, algorithm, seed in grid.keys
    ]
    for pattern in only:
        if not any(fnmatchcase(cell.name, pattern) for cell in cells):
            raise ValueError(f'no cell of the grid matches "{pattern}": their names are like {cells[0].name}')
    return [cell for cell in cells if not only or any(fnmatchcase(cell.name, pattern) for pattern in only)]


def _cell_tree(grid: GridConfig, tree: Tree, task: str, algorithm: str) -> Tree:
    """Returns the config of a cell: the task's, then the changes of the algorithm, whose `algorithm` replaces the
    task's, then those of the algorithm on this task."""
    task_spec = grid.tasks[task]
    changes = grid.algorithms[algorithm]
    start = merge(tree, task_spec.changes)
    if "algorithm" in changes:
        start.pop("algorithm", None)
    return merge(merge(start, changes), task_spec.algorithms.get(algorithm, {}))
