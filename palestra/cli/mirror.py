"""`palestra fetch`, and what other commands do with copies of runs in object stores."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from palestra.api.console import console, print_line, user_errors

MIB = 2**20


def fetch(
    url: Annotated[str, typer.Argument(help="a run in a store: s3://bucket/runs/demo")],
    root: Annotated[Path, typer.Option(help="the folder that holds runs")] = Path("runs"),
    max_gib: Annotated[float, typer.Option(min=0, help="refuse a run with more GiB")] = 100,
) -> None:
    """Download a run from an object store.

    Its checkpoints are compared with their checksums.

    Examples:

        palestra fetch s3://bucket/runs/demo
        palestra fetch file:///mnt/shared/runs/demo --root elsewhere
    """
    with user_errors(url):
        fetch_and_print(url, root, max_gib)


def fetch_and_print(url: str, root: Path, max_gib: float = 100) -> Path:
    """Brings a run from a store and prints which state that is; returns its folder."""
    from palestra.runs.mirror.fetch import fetch_run

    path, state, is_new, passed_over = fetch_run(url, root, max_gib)
    for line in passed_over:
        print_line(line)
    if is_new:
        print_line(f"fetched {path}: the run after {state.text} ({state.num_bytes / MIB:,.1f} MiB)")
    else:
        print_line(f"{path} is there already, and not behind its mirror ({state.text})")
    return path


def send_to_store(run: Path, url: str, settings: list[str], follow: bool) -> None:
    """Sends a run to its copy in a store and prints the state that the copy then has."""
    with user_errors(run):
        from palestra.core.config import override, validate
        from palestra.runs.mirror.config import MirrorConfig
        from palestra.runs.mirror.copy import send_state

        config = validate(MirrorConfig, override({"url": url}, settings))
        state = send_state(run, config, follow=follow, warn=print_line)
        print_line(f"{config.url.rstrip('/')}/{run.name} has the run after {state}")


def print_mirrored(url: str) -> None:
    """Prints the runs in a store's folder of runs."""
    with user_errors(url):
        from palestra.runs.mirror.fetch import list_mirrored

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        for title in ("run", "done", "mirrored at", "MiB"):
            table.add_column(title, overflow="fold")
        for name, copy in list_mirrored(url):
            if isinstance(copy, ValueError):
                print_line(f"{name} cannot be read: {copy}")
                continue
            table.add_row(name, copy.text, copy.time, f"{copy.num_bytes / MIB:,.1f}")
        console.print(table if table.row_count else f"no runs in {url}")
