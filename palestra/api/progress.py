"""Progress bars of training runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, Self

from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column

from palestra.api.console import PlainConsole, styled_text
from palestra.core.types import NO_REWARD, TEAM, Episode, Metrics
from palestra.parallel.tasks import TaskResult
from palestra.populations import scheduler
from palestra.runs.headline import (
    eval_label,
    format_episodes,
    format_eval,
    format_returns,
    format_success,
    returns_by_name,
    shows_return,
    success_by_name,
    success_keys,
    training_return_label,
    training_success_label,
)
from palestra.runs.loop import Callback

CHART_INTERVAL_S = 5.0  # seconds between drawings of a chart after steps
EMA_DECAY = 0.9  # weight of the old value in the running mean that is displayed


class _Bar:
    """Context that shows a bar of `columns`. Where it does not move, in a file, a pipe, or a notebook without
    ipywidgets, a line says the same in every ten seconds without another line."""

    def __init__(self, *columns: ProgressColumn, console: PlainConsole, is_transient: bool = False) -> None:
        has_none = console.is_jupyter and find_spec("ipywidgets") is None  # in which Rich draws none
        self.moves = not has_none and (console.is_terminal or console.is_jupyter)
        options: dict[str, Any] = {"transient": is_transient, "disable": has_none or (is_transient and not self.moves)}
        self.bar = Progress(*columns, console=console, refresh_per_second=4, **options)
        self._stack = ExitStack()
        self._busy = console.busy(lambda: "" if self.moves else self.status())

    def status(self) -> str:
        """Returns what the bar shows, as text."""
        task = self.bar.tasks[0]
        what = task.description
        if task.total:
            what += f" {task.completed:.0f}/{task.total:.0f}"
        return ", ".join(filter(None, [what.rstrip(), *task.fields.values()]))

    def __enter__(self) -> Self:
        self._stack.enter_context(self._busy)
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()
        self._stack.close()


class CountingBar(_Bar):
    """A bar of something that is not a run, which vanishes at its end; on stderr, unless `console` is given."""

    def __init__(self, what: str, console: PlainConsole | None = None) -> None:
        self.console = console or PlainConsole(stderr=True)
        columns = (*Progress.get_default_columns(), MofNCompleteColumn())
        super().__init__(*columns, console=self.console, is_transient=True)
        self.task = self.bar.add_task(what, total=None)

    def count(self, done: int, total: int) -> None:
        """Shows that `done` of `total` parts are done."""
        is_first = self.bar.tasks[0].total is None
        self.bar.update(self.task, completed=done, total=total)
        if is_first and not self.moves:
            self.console.print(self.status(), soft_wrap=True)

    def say(self, what: str) -> None:
        """Shows what is done now."""
        self.bar.update(self.task, description=escape(what))


class ProgressBar(_Bar, Callback):
    """A rich progress bar over training steps, with the newest held-out evaluation and the running success rate or
    return of training, and what the step is at. Evaluations are printed above it. `config` is the resolved config of
    the run."""

    def __init__(self, steps: int, start: int, config: Mapping[str, Any], console: PlainConsole) -> None:
        self.console = console
        self.config = config
        columns = (
            TextColumn("training"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[now]}", markup=False, table_column=Column()),
            TextColumn("{task.fields[held_out]}", style="bold", markup=False, table_column=Column()),
            TextColumn("{task.fields[trained]}", markup=False, table_column=Column()),
            TextColumn("{task.fields[failed]}", markup=False),
            TimeElapsedColumn(table_column=Column(no_wrap=True)),
            TextColumn("left"),
            TimeRemainingColumn(compact=True, elapsed_when_finished=False, table_column=Column(no_wrap=True)),
        )
        super().__init__(*columns, console=console)
        empty: dict[str, Any] = {"now": "starting", "held_out": "", "trained": "", "failed": ""}
        self.task = self.bar.add_task("training", total=steps, completed=start, **empty)
        self._values: dict[str, float] = {}
        self._is_success = False  # whether `_values` are success rates, else returns
        self._failed = 0

    def on_episode(self, episode: Episode) -> None:
        errors = [node.error for node in episode.nodes if node.error not in (None, NO_REWARD)]
        error = episode.error or next(iter(errors), None)
        if error is not None:
            if not self._failed:
                what = "an episode" if episode.error else "a part of an episode"
                self.console.print(styled_text((f"{what} failed (instance {episode.seed}):", "yellow"), f" {error}"))
            self._failed += 1

    def on_progress(self, what: str, done: int, total: int) -> None:
        if total:
            what += f" {done}/{total}"
        self.bar.update(self.task, now=what)

    def on_step(self, step: int, metrics: Mapping[str, Metrics]) -> None:
        team = metrics[TEAM]
        rates = success_by_name(team)
        if rates and not self._is_success:
            self._is_success = True
            self._values.clear()
        if self._is_success:
            self._smooth(rates)
            value = format_success(self._values, 0)
            label = training_success_label(self.config)
        else:
            self._smooth(returns_by_name(team))
            value = format_returns(self._values)
            label = training_return_label(self.config)
        failed = f"· failed {self._failed}" if self._failed else ""
        self.bar.update(self.task, completed=step + 1, now="", trained=f"{label} {value or '-'}", failed=failed)

    def _smooth(self, values: Mapping[str, float]) -> None:
        """Adds values to their moving averages; there are none if no episode ended since the last log line."""
        if values and self._values.keys().isdisjoint(values):  # a stage that counts other returns
            self._values.clear()
        for name, now in values.items():
            self._values[name] = EMA_DECAY * self._values.get(name, now) + (1 - EMA_DECAY) * now

    def on_eval(self, step: int, name: str, metrics: Mapping[str, Any]) -> None:
        when = "before training" if step < 0 else f"after {step + 1} training steps"
        label = eval_label(self.config, name)
        self.bar.update(self.task, now="", held_out=f"{label} {format_eval(metrics)}")
        shown = [(title, f"{metrics[key]:.1%}") for key, title in success_keys(metrics).items()]
        if not shown or shows_return(metrics):
            shown += [(name, f"{value:.2f}") for name, value in returns_by_name(metrics).items()]
        texts: list[str | tuple[str, str]] = [f"{label} {when}:"]
        for what, value in shown:
            texts += [f" {what} ", (value, "bold"), ","]
        if shown:
            texts.pop()  # the comma after the last
        size = f" of {format_episodes(metrics)}"
        if "steps_per_episode" in metrics:
            size += f", mean length {metrics['steps_per_episode']:.1f}"
        self.console.print(styled_text(*texts, size), soft_wrap=True)


class LiveChart(Callback):
    """The first chart of a run in a notebook's cell, drawn anew every few seconds."""

    def __init__(self, path: Path) -> None:
        from IPython.display import HTML, display  # there in every notebook

        self.path = path
        self.new_output = HTML
        self.output: Any = display(HTML(""), display_id=True)
        self.drawn_at = 0.0

    def on_step(self, step: int, metrics: Mapping[str, Metrics]) -> None:
        if time.monotonic() - self.drawn_at >= CHART_INTERVAL_S:
            self.draw()

    def on_eval(self, step: int, name: str, metrics: Mapping[str, Any]) -> None:
        self.draw()

    def draw(self) -> None:
        """Draws what is logged so far."""
        from palestra.evaluation.report.charts import figures_html
        from palestra.evaluation.report.html import notebook_html
        from palestra.evaluation.report.run_charts import run_charts
        from palestra.runs.series import RunLogs

        self.output.update(self.new_output(notebook_html(figures_html(islice(run_charts(RunLogs(self.path)), 1)))))
        self.drawn_at = time.monotonic()


class PopulationBar(_Bar, scheduler.PlanCallback):
    """Progress bar of a population, with the metrics of `summary`; calls `callback.on_step`."""

    def __init__(self, summary: Callable[[], Mapping[str, float]], callback: Callback, console: PlainConsole) -> None:
        self.summary = summary
        self.callback = callback
        columns = (
            TextColumn("training"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[what]}", markup=False),
            TimeElapsedColumn(),
        )
        super().__init__(*columns, console=console)
        self.task = self.bar.add_task("training", total=None, what="the first task")

    def on_task_done(self, number: int, done: TaskResult, lines: Mapping[str, Metrics]) -> None:
        metrics = self.summary()
        completed = max(0, int(metrics.get("iteration", 0)))
        self.bar.update(self.task, completed=completed, total=metrics.get("iterations"), what=format_summary(metrics))
        self.callback.on_step(number, lines)


def format_summary(metrics: Mapping[str, float]) -> str:
    """Formats a summary as text: "21 members, 40,000 games, 1,200,000 steps, NashConv 0.016"."""
    words = [f"{int(metrics['members'])} members"]
    if games := metrics.get("games"):
        words.append(f"{int(games):,} games")
    if steps := metrics.get("env_steps"):
        words.append(f"{steps:,.0f} steps")
    if "nash_conv" in metrics:
        words.append(f"NashConv {metrics['nash_conv']:.3f}")
    return ", ".join(words)
