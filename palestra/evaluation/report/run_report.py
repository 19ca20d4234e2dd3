"""Summary table of a run for the terminal, with the likely reason if it learned nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from rich.table import Table

from palestra.evaluation.report.html import format_number
from palestra.evaluation.report.tables import sample_cell
from palestra.runs.headline import (
    eval_label,
    paid_seats,
    return_keys,
    shows_return,
    success_keys,
    training_return_label,
    training_success_label,
)
from palestra.runs.series import RunLogs, end_windows, mean_of, success_interval, valid_instances
from palestra.text.rollouts.sample_metrics import sample_rows

SUMMARY_ROWS = [("local_reward", "local reward"), ("invalid", "invalid answers"), ("entropy", "entropy")]


def summary_table(path: str | Path) -> Table:
    """Returns a table of what a run learned: evaluations before and after, and each policy's metrics at both ends of
    the run, with a row that names the log lines that are averaged. A single evaluation is in the column of the time at
    which it was played."""
    logs = RunLogs(Path(path))
    table = Table(title="what was learned", title_justify="left")
    for heading, justify in (("", "left"), ("before", "right"), ("after", "right")):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    for key, lines in logs.evals.items():
        _add_eval_rows(table, eval_label(logs.config, key), lines)
    rates = success_keys(*logs.team)
    if rates:
        begin, end, which = end_windows(logs.team)
        table.add_section()
    for key, what in rates.items():
        ends = [mean_of(lines, key) for lines in (begin, end)]
        label = f"{training_success_label(logs.config)}{what.removeprefix('success')}, {which}"
        table.add_row(label, *(format_number(value, 1, "%") for value in ends), style="dim")
    for name, lines in logs.policies.items():
        begin, end, which = end_windows(lines)
        table.add_section()
        table.add_row(f"{name}: {which}", style="dim")
        for key, label in [("return", training_return_label(logs.config)), *SUMMARY_ROWS]:
            ends = [mean_of(begin, key), mean_of(end, key)]
            if ends != [None, None]:
                table.add_row(f"{name}: {label}", *map(format_number, ends))
    return table


def _add_eval_rows(table: Table, name: str, lines: Sequence[dict[str, Any]]) -> None:
    last = lines[-1]
    n = f"{valid_instances(last):.0f}"
    for rate, what in success_keys(last).items():
        of_team = what.removeprefix("success")
        cells = _ends(lines, partial(success_interval, key=rate))
        table.add_row(f"{name}: success of {n}{of_team}", *cells, style="bold")
    for title, _ in sample_rows(last):
        sampled = _ends(lines, partial(sample_cell, title))
        table.add_row(f"{name}: {title} of {n}", *sampled)
    if shows_return(last):
        for key, what in return_keys(last).items():
            table.add_row(f"{name}: {what}, mean of {n}", *_ends(lines, partial(_number, key, 2)), style="bold")
    if shows_return(last) and len(set(last["returns"].values())) > 1:
        for seat in paid_seats(last):
            table.add_row(f"{name}: return of {seat}", *_ends(lines, lambda x, of=seat: _number(of, 2, x["returns"])))
    table.add_row(f"{name}: steps an episode", *_ends(lines, partial(_number, "steps_per_episode", 1)))
    if any(line.get("failed") for line in lines):
        table.add_row(f"{name}: failed episodes", *_ends(lines, partial(_number, "failed", 0)))


def _number(key: str, digits: int, line: dict[str, Any]) -> str:
    """Formats a metric; "-" without one, as if all episodes failed."""
    return format_number(line.get(key), digits)


def _ends(lines: Sequence[dict[str, Any]], text: Callable[..., str]) -> tuple[str, str]:
    """Returns the texts of an evaluation before (step -1) and after training; "-" for one not played."""
    if len(lines) > 1:
        return text(lines[0]), text(lines[-1])
    if lines[0]["step"] < 0:
        return text(lines[0]), "-"
    return "-", text(lines[0])


def explain_no_update(path: Path) -> str:
    """Returns why no step of a language-model run made an update, and what to do; "" if one did or no policy learns."""
    logs = RunLogs(path)
    lines = [line for line in chain.from_iterable(logs.policies.values()) if "updates" in line]
    if not lines or any(line["updates"] for line in lines):
        return ""
    flat = mean_of(lines, "zero_std_fraction") or 0.0
    success = mean_of(logs.team, "success") or 0.0
    why = "the episodes hold nothing that the algorithm learns from"
    fix = "let the env pay more, imitate other answers (algorithm.imitate), or give other data"
    if flat > 0:
        why = f"in {flat:.0%} of the groups all answers earn the same, so that no advantage differs from 0"
        fix = "raise algorithm.group_size or the sampling temperature, or pay for part of the task in the env"
    if success >= 0.95:
        why = f"{why}, at a {training_success_label(logs.config)} of {success:.0%}"
        fix = "the task is solved already: make it harder"
    return f"no update was made in {len(logs.team)} steps: {why}. To change this, {fix}"
