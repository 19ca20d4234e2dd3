"""`palestra runs`: the runs of a folder, and the alarms of a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table

from palestra.api.console import console, print_line, styled_text
from palestra.cli.mirror import print_mirrored
from palestra.runs.mirror import is_store_url

if TYPE_CHECKING:
    from palestra.dashboard.catalog import CatalogRun

Root = Annotated[Path, typer.Option(help="the folder that holds runs")]


def runs(
    root: Annotated[
        str, typer.Option(help="the folder that holds runs, here or in a store (s3://bucket/runs)")
    ] = "runs",
) -> None:
    """List the runs in a folder: status, env, algorithm, newest held-out result and alarms. Below are the errors of
    those that failed.

    The held-out result is the newest of the evaluation `test`, or else of the first one; for a population it is
    NashConv. Of a folder in an object store, the newest whole state of each run is listed.
    """
    if is_store_url(root):
        return print_mirrored(root)
    from palestra.dashboard.catalog import UNREADABLE
    from palestra.dashboard.run_status import list_entry, run_alarms
    from palestra.runs.system_metrics import held_locks

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))  # narrow: eight columns in 80 letters
    for title in ("run", "begun", "status", "env", "algorithm", "done", "held-out", "alarms"):
        table.add_column(title, overflow="fold")
    locks = held_locks()
    entries: list[dict[str, Any]] = []
    for config in sorted(Path(root).glob("*/config.yaml")):
        try:
            run = _open(config.parent)
            alarms = dict.fromkeys(alarm.name for alarm in run_alarms(run))
            entries.append(list_entry(run, locks) | {"alarms": ", ".join(alarms)})
        except UNREADABLE as error:
            print_line(f"{config.parent.name} cannot be read: {type(error).__name__}: {error}")
    entries.sort(key=lambda entry: entry["created"])
    for entry in entries:
        table.add_row(
            entry["name"],
            entry["created"][:10],
            entry["status"],
            entry["env"],
            entry["algorithm"],
            _progress(entry),
            entry["headline"] or "-",
            styled_text((entry["alarms"], "yellow")),
        )
    console.print(table if table.row_count else f"no runs in {root}/")
    for entry in entries:
        if entry["status"] == "failed":
            print_line(f"{entry['name']} failed: {entry['error']}")


def _progress(entry: dict[str, Any]) -> str:
    """Formats what a run has done: "3/20 steps"."""
    unit = {"population": "iterations", "networks": "env steps"}.get(entry["kind"], "steps")
    return f"{entry['done']:,.0f}/{entry['total']:,.0f} {unit}" if entry["total"] else f"{entry['steps']:,} {unit}"


def print_alarms(path: Path) -> None:
    """Prints the alarms of a run, as in the dashboard."""
    from palestra.dashboard.run_status import run_alarms

    for alarm in run_alarms(_open(path)):
        about = f" ({alarm.policy})" if alarm.policy else ""
        console.print(styled_text((f"alarm: {alarm.name}{about}:", "yellow"), f" {alarm.message}"), soft_wrap=True)


def _open(path: Path) -> CatalogRun:
    """The run with the logs read that raise alarms."""
    from palestra.dashboard.catalog import CatalogRun

    run = CatalogRun(path.parent, path.name)
    run.refresh(run.metrics, run.evals)
    return run
