"""A run from Python: its logs as tables, its episodes as objects, evaluation and plots, with rich display in notebooks.

run = palestra.load_run("runs/demo")
run.evals
run.evaluate(split="test", seats={"planner": "base"}).metrics
run.trees()[0]      # displays every turn with rewards, advantages and the siblings that were tried
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from palestra.api.console import console
from palestra.api.progress import CountingBar
from palestra.core.config import Tree, load
from palestra.core.event_loop import call_outside_loop
from palestra.core.files import read_lines
from palestra.core.types import Episode
from palestra.evaluation.report.episodes import episode_html
from palestra.evaluation.report.html import details, escape_text, notebook_html
from palestra.evaluation.report.page import metric_tiles
from palestra.evaluation.report.population import payoff_figure, standings_table
from palestra.evaluation.report.population_data import PopulationRecord, read_record
from palestra.evaluation.report.run_charts import metric_charts
from palestra.evaluation.report.tables import eval_table
from palestra.runs import load_episodes, read_episodes
from palestra.runs.checkpoints import TASKS_FILE
from palestra.runs.series import RunLogs
from palestra.runs.settings import find_run, flatten_tree, read_meta

if TYPE_CHECKING:
    from palestra.evaluation.target import EvalResult


def load_run(path: str | Path) -> TrainedRun:
    """Returns the run at `path`. Raises ValueError if it is not a run."""
    return TrainedRun(find_run(path))


def evaluate(
    run: str | Path | TrainedRun,
    *,
    split: str = "test",
    seats: Mapping[str, str] | None = None,
    episodes: int = 100,
    env: Mapping[str, Any] | None = None,
    greedy: bool = True,
    checkpoint: int | None = None,
    seed: int = 0,
) -> EvalResult:
    """Plays `episodes` held-out episodes; returns the policy at each seat, the metrics and the episodes (text only).

    `run` is a run, its folder, a config, an env, or RUN:NAME, whose policy NAME then plays every seat. `seats` maps
    seats to policies of the run, "random", RUN:NAME, "base" and "expert" (text), or "script:NAME" (networks). `env`
    changes options of the env. With `greedy`, networks take their most probable action; language models sample as in
    training. `checkpoint` is the number of steps after which it was written; None: the newest. Raises ValueError
    for an unknown run, split, seat or policy, and RunFailed if every episode failed.
    """
    from palestra.core.failures import check_not_all_failed
    from palestra.evaluation import evaluate as evaluation

    what = run.path if isinstance(run, TrainedRun) else run
    changes: dict[str, Any] = {}
    if split != "test":  # on which text envs are evaluated
        changes["split"] = split
    changes |= env or {}
    choice: dict[str, Any] = {"episodes": episodes, "greedy": greedy, "checkpoint": checkpoint, "seed": seed}
    with CountingBar(f"evaluating {what}", console) as bar:
        result = call_outside_loop(partial(evaluation.evaluate, what, changes, seats, on_progress=bar.count, **choice))
    check_not_all_failed(result.episodes, "evaluate")
    return result


class TrainedRun:
    """A run directory, of a run that has ended or is still in progress.

    `metrics`, `timings` and `evals` are read from disk at each access: as pandas frames if pandas is installed, else as
    Arrow tables.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def __repr__(self) -> str:
        return f"TrainedRun({str(self.path)!r})"

    def evaluate(self, **options: Any) -> EvalResult:
        """Returns `palestra.evaluate(self, **options)`: `evaluate(split="test", seats={"pilot": "base"})`."""
        return evaluate(self, **options)

    def plot(self) -> Picture:
        """Draws the curves of the run (of a population: its payoffs) to a PNG in its folder; a notebook shows it."""
        from palestra.evaluation.report.population_plots import plot_population
        from palestra.evaluation.report.run_charts import plot_run

        if self.population is None:
            return Picture(plot_run(self.path))
        return Picture(plot_population(self.path))

    @cached_property
    def config(self) -> Tree:
        """The run's config, as a tree."""
        return load(self.path / "config.yaml")

    @cached_property
    def meta(self) -> Tree:
        """Versions, seed, command line, time of creation."""
        return read_meta(self.path, needs_config=False)

    @property
    def metrics(self) -> Any:
        """One row per step and policy."""
        return _frame(read_lines(self.path / "metrics.jsonl"))

    @property
    def timings(self) -> Any:
        """One row per line of timings.jsonl: seconds by phase."""
        return _frame(read_lines(self.path / "timings.jsonl"))

    @property
    def evals(self) -> Any:
        """One row per evaluation; step -1 is before training."""
        return _frame(read_lines(self.path / "evals.jsonl"))

    @property
    def recorded_steps(self) -> list[int]:
        """The steps whose episodes were saved, by their numbers in metrics.jsonl."""
        return sorted(int(path.stem.removeprefix("step-")) for path in (self.path / "episodes").glob("step-*.parquet"))

    def episodes(self, step: int | None = None) -> pa.Table:
        """Returns an Arrow table of one row per episode, node and seat, of one step or of all.

        Raises ValueError if `step` was not saved.
        """
        steps = [step] if step is not None else self.recorded_steps
        return pa.concat_tables([read_episodes(self._file(step)) for step in steps])

    def trees(self, step: int | None = None) -> list[Episode]:
        """Returns the episodes of a step (default: the newest saved one). Raises ValueError if `step` was not saved."""
        if step is None:
            step = max(self.recorded_steps, default=None)
        return [] if step is None else load_episodes(self._file(step))

    @property
    def population(self) -> PopulationRecord | None:
        """The population's members, payoffs and tasks; None if the run trains no population."""
        return read_record(self.path) if (self.path / TASKS_FILE).exists() else None

    def _file(self, step: int) -> Path:
        path = self.path / "episodes" / f"step-{step:06d}.parquet"
        if not path.exists():
            have = ", ".join(map(str, self.recorded_steps)) or "none"
            raise ValueError(f"{self.path} has no episodes of step {step}; it has those of: {have}")
        return path

    def _repr_html_(self) -> str:
        logs = RunLogs(self.path)
        if population := self.population:
            inside = population_html(population)
        else:
            inside = eval_table(logs) + details("curves", metric_charts(logs))
        return notebook_html(f"<h3>{escape_text(self.path.name)}</h3>{metric_tiles(logs, self.config)}{inside}")


@dataclass(frozen=True)
class Picture:
    """A PNG file that a notebook displays."""

    path: Path

    def _repr_png_(self) -> bytes:
        return self.path.read_bytes()


def _frame(lines: list[Tree]) -> Any:
    """Returns log lines as a pandas frame if pandas is installed, else as an Arrow table."""
    table = lines_to_table(lines)
    return table.to_pandas() if find_spec("pandas") else table


def lines_to_table(lines: list[Tree]) -> pa.Table:
    """Returns log lines as a table with the union of their keys; nested keys are joined: "returns.planner"."""
    rows = [{key: value for key, value in flatten_tree(line).items() if value != {}} for line in lines]
    return pa.table({key: _column([row.get(key) for row in rows]) for key in dict.fromkeys(chain.from_iterable(rows))})


def _column(values: list[Any]) -> pa.Array:
    """Returns an Arrow array of one type; of text if the types differ."""
    try:
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return pa.array([None if value is None else str(value) for value in values])


def population_html(record: PopulationRecord) -> str:
    """Returns payoffs and standings of a population as HTML, as far as games were played."""
    try:
        ranks = standings_table(record)
    except ValueError as error:  # no games, or of more than two seats
        ranks = f"<p class=soft>No standings: {escape_text(error)}</p>"
    return payoff_figure(record) + ranks


# Set here because the modules of these classes may not import HTML code.
setattr(Episode, "_repr_html_", lambda self: notebook_html(episode_html(self)))  # noqa: B010 (mypy: not a field)
setattr(PopulationRecord, "_repr_html_", lambda self: notebook_html(population_html(self)))  # noqa: B010
