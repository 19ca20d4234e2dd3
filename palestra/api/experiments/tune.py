"""The file of a hyperparameter search: a config, the settings to choose with their ranges, and the score.

The search scores an evaluation on development instances, of runs with their own seeds. The settings that it finds are
then trained and reported with other seeds and on test instances, for example by a grid.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from palestra.api.experiments.grid import TaskConfig, load_base_config
from palestra.core.config import RunName, StrictModel, Tree, load, merge, validate
from palestra.runs.headline import DEV_EVAL, HEADLINE_EVAL

Choice = bool | int | float | str | None
Params = dict[str, Any]


class Range(StrictModel):
    """Numbers from `low` to `high`, both included: whole numbers if both ends are written as such."""

    low: int | float
    """Smallest value."""
    high: int | float
    """Largest value."""
    log: bool = False
    """Draw uniformly in the logarithm, for settings such as learning rates whose range spans orders of magnitude."""
    step: int | float | None = Field(None, gt=0)
    """Distance between the values. Null: 1 for whole numbers; other numbers are continuous."""

    @model_validator(mode="after")
    def _has_an_order(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"low: {self.low} is not below high: {self.high}")
        if self.log and self.low <= 0:
            raise ValueError(f"low: {self.low} has no logarithm: set log: false, or a low above 0")
        if self.log and self.step is not None:
            raise ValueError("log and step exclude each other: remove one")
        if self.is_whole and isinstance(self.step, float):
            raise ValueError(f"step: {self.step} between whole numbers: write low and high with a point, as 1.0")
        return self

    @property
    def is_whole(self) -> bool:
        """True if the values are whole numbers."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    @property
    def extremes(self) -> list[Choice]:
        """The ends of the range: if the config accepts them, it accepts all values between."""
        return [self.low, self.high]

    def contains(self, value: Any) -> bool:
        """Returns whether a setting may have this value."""
        if isinstance(value, bool) or not isinstance(value, int if self.is_whole else int | float):
            return False
        return self.low <= value <= self.high


class Choices(StrictModel):
    """Some values to choose from."""

    choices: Annotated[list[Choice], Field(min_length=2)]
    """The values: text, numbers, true, false or null."""

    @property
    def extremes(self) -> list[Choice]:
        """All values."""
        return self.choices

    def contains(self, value: Any) -> bool:
        """Returns whether a setting may have this value."""
        return any(value == choice and type(value) is type(choice) for choice in self.choices)


class TuneConfig(TaskConfig):
    """A hyperparameter search of `trials` trials. Each trial chooses the settings in `space` and trains a run with each
    of `seeds`; its score is the mean over these runs."""

    name: RunName
    """Name of the search; its runs lie in a folder of this name."""
    space: dict[str, Range | Choices] = Field(min_length=1)
    """Settings by dotted key, as in `--set`, with their ranges or choices."""
    trials: int = Field(20, ge=1, le=100_000)
    """Number of trials. It is the only key that may change later: a larger number continues the search."""
    seeds: Annotated[list[int], Field(min_length=1)] = [1000]
    """Seeds of the runs of a trial; they should differ from the seeds of the results to be reported."""
    direction: Literal["maximize", "minimize"] = "maximize"
    """Whether more or less of the metric is better."""
    sampler: Literal["tpe", "random"] = "tpe"
    """`tpe`: the tree-structured Parzen estimator (Bergstra et al., 2011), after ten random trials; `random`: uniform
    draws."""
    seed: int = 0
    """Seed of the choice of settings."""

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds: {self.seeds} has a seed twice")
        if "seed" in self.space:
            raise ValueError("space.seed: a seed is not a hyperparameter: list the seeds of a trial in seeds")
        for key in self.space:
            if not all(key.split(".")):
                raise ValueError(f"space.{key}: write a dotted key of the config, such as policies.agent.lr")
            if inner := next((other for other in self.space if other.startswith(f"{key}.")), None):
                raise ValueError(f"space has {key} and also {inner}, a part of it: remove one")
        return self

    def is_better(self, value: float, other: float) -> bool:
        """Returns whether a score is better than another."""
        return value > other if self.direction == "maximize" else value < other


def load_tuning(path: Path) -> TuneConfig:
    """Returns the validated search of a YAML file. Raises ValueError if the file has a mistake."""
    config = validate(TuneConfig, load(path))
    assert isinstance(config, TuneConfig)
    return config


def base_tree(config: TuneConfig, folder: Path) -> Tree:
    """Returns the config that every trial changes. `folder` is the folder of the search's file."""
    return merge(load_base_config(config, folder), config.changes)


def apply_params(tree: Tree, params: Params) -> Tree:
    """Returns a config with the settings of a trial."""
    for key, value in params.items():
        *path, last = key.split(".")
        change: Tree = {last: value}
        for name in reversed(path):
            change = {name: change}
        tree = merge(tree, change)
    return tree


def neighbours(config: TuneConfig, start: Params) -> Iterator[tuple[str, Params]]:
    """Yields, for each extreme value of each setting, its name and the settings `start` with this value."""
    for key, values in config.space.items():
        for value in values.extremes:
            yield f"space.{key} = {value}", start | {key: value}


def scored_eval(config: TuneConfig, tree: Tree) -> str | None:
    """Returns the name of the evaluation that is scored, None for a population, which is scored by its last
    `nash_conv`. Raises ValueError if the evaluation plays test instances or is missing."""
    if tree.get("population"):
        if config.direction == "maximize":
            raise ValueError(
                "a population is scored by its nash_conv, of which less is better: set direction: minimize"
            )
        return None
    evals = tree.get("evals") or {}
    default = DEV_EVAL if DEV_EVAL in evals else next((name for name in evals if name != HEADLINE_EVAL), None)
    name = config.eval or default
    if name is None or name not in evals:
        known = f"it has {', '.join(evals)}" if evals else "it has none"
        raise ValueError(
            f"the search needs {f'the evaluation {name}' if name else 'an evaluation of development instances'} in the "
            f"config: {known}. Add one by changes, such as evals: {{dev: {{episodes: 100}}}}"
        )
    options = (evals[name] or {}).get("env") or {}
    if options.get("split", name) == HEADLINE_EVAL:
        raise ValueError(
            f"evals.{name} plays test instances: settings that are chosen on them cannot be measured on them. "
            "Set env: {split: dev}"
        )
    return name
