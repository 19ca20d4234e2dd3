"""A run in a notebook: its logs as Arrow tables, its episodes as objects, all with rich display.

run = palestra.load_run("runs/demo")
run.evals.to_pandas()
run.trees()[0]      # displays every turn with rewards, advantages and the siblings that were tried
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa

from palestra.config import Tree, load
from palestra.files import read_lines
from palestra.populations.scheduler import TASKS_FILE
from palestra.report.charts import RunLogs, eval_table, metric_charts
from palestra.report.episodes import episode_html
from palestra.report.html import details, escape_text
from palestra.report.page import metric_tiles
from palestra.report.population import payoff_heat_map, standings_table
from palestra.report.population_data import PopulationRecord, read_record
from palestra.report.style import STYLE
from palestra.runs import load_episodes, read_episodes
from palestra.types import Episode


def load_run(path: str | Path) -> RunFrames:
    """Returns the run at `path`. Raises ValueError if it is not a run."""
    path = Path(path)
    if not (path / "config.yaml").is_file():
        raise ValueError(f"{path} is not a run: it has no config.yaml; `palestra runs` lists the runs there are")
    return RunFrames(path)


class RunFrames:
    """The contents of a run directory. Tables are read from disk at each access, since a run may still be in
    progress."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __repr__(self) -> str:
        return f"RunFrames({str(self.path)!r})"

    @cached_property
    def config(self) -> Tree:
        """The run's config, as a tree."""
        return load(self.path / "config.yaml")

    @cached_property
    def meta(self) -> Tree:
        """Versions, seed, command line, time of creation."""
        found: Tree = json.loads((self.path / "meta.json").read_text(encoding="utf-8"))
        return found

    @property
    def metrics(self) -> pa.Table:
        """One row per step and policy."""
        return lines_to_table(read_lines(self.path / "metrics.jsonl"))

    @property
    def timings(self) -> pa.Table:
        """One row per line of timings.jsonl: seconds by phase."""
        return lines_to_table(read_lines(self.path / "timings.jsonl"))

    @property
    def evals(self) -> pa.Table:
        """One row per evaluation; step -1 is before training."""
        return lines_to_table(read_lines(self.path / "evals.jsonl"))

    @property
    def recorded_steps(self) -> list[int]:
        """The steps whose episodes were saved, counted from 0."""
        return sorted(int(path.stem.removeprefix("step-")) for path in (self.path / "episodes").glob("step-*.parquet"))

    def episodes(self, step: int | None = None) -> pa.Table:
        """Returns one row per episode, node and seat, of one step or of all. Raises ValueError if `step` was not
        saved."""
        return pa.concat_tables(
            [read_episodes(self._file(n)) for n in ([step] if step is not None else self.recorded_steps)]
        )

    def trees(self, step: int | None = None) -> list[Episode]:
        """Returns the episodes of a step (default: the newest saved one). Raises ValueError if `step` was not saved."""
        kept = self.recorded_steps
        if step is None and not kept:
            return []
        return load_episodes(self._file(kept[-1] if step is None else step))

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
        logs, population = RunLogs(self.path), self.population
        inside = (
            population_html(population) if population else eval_table(logs) + details("curves", metric_charts(logs))
        )
        return _dressed(f"<h3>{escape_text(self.path.name)}</h3>{metric_tiles(logs, self.config)}{inside}")


def lines_to_table(lines: list[Tree]) -> pa.Table:
    """Returns log lines as a table with the union of their keys; nested keys are joined: "returns.planner"."""
    rows = [dict(_flat(line)) for line in lines]
    return pa.table(
        {key: _column([row.get(key) for row in rows]) for key in dict.fromkeys(k for row in rows for k in row)}
    )


def _flat(line: Mapping[str, Any], name: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in line.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}{key}.")
        else:
            yield f"{name}{key}", value


def _column(values: list[Any]) -> pa.Array:
    """An Arrow array of one type; of text if the types differ."""
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
    return payoff_heat_map(record) + ranks


def _dressed(inside: str) -> str:
    return f'<div class="palestra"><style>{STYLE}</style>{inside}</div>'


# Set here because the modules of these classes may not import HTML code.
setattr(Episode, "_repr_html_", lambda self: _dressed(episode_html(self)))  # noqa: B010 (mypy: not a field)
setattr(PopulationRecord, "_repr_html_", lambda self: _dressed(population_html(self)))  # noqa: B010
