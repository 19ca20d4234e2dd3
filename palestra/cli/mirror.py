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
    generation: Annotated[
        int | None, typer.Option(help="an earlier state, by its number in manifests/ (default: the newest whole one)")
    ] = None,
    max_gib: Annotated[float, typer.Option(min=0, help="refuse a run with more GiB")] = 100,
) -> None:
    """Download a run from an object store. Each object is compared with its checksum.

    Examples:

        palestra fetch s3://bucket/runs/demo

        palestra fetch file:///mnt/shared/runs/demo --root elsewhere
    """
    with user_errors(url):
        fetch_and_print(url, root, generation, max_gib)


def fetch_and_print(url: str, root: Path, generation: int | None = None, max_gib: float = 100) -> Path:
    """Brings a run from a store and prints which state that is; returns its folder."""
    from palestra.runs.mirror.fetch import GIB, fetch_run
    from palestra.runs.mirror.store import check_store_url

    path, manifest, is_new, passed_over = fetch_run(check_store_url(url), root, generation, max_gib * GIB)
    for line in passed_over:
        print_line(line)
    whole = f"{manifest.num_bytes / MIB:,.1f} MiB, generation {manifest.generation}"
    print_line(
        f"fetched {path}: the run after {manifest.state} ({whole})"
        if is_new
        else f"{path} is there already, and not behind its mirror ({manifest.state})"
    )
    return path


def send_to_store(run: Path, url: str, settings: list[str], follow: bool) -> None:
    """Sends a run to its copy in a store and prints the state that the copy then has."""
    with user_errors(run):
        from palestra.core.config import override, validate
        from palestra.runs.mirror.config import MirrorConfig
        from palestra.runs.mirror.follow import send_state
        from palestra.runs.mirror.store import check_store_url

        config = validate(MirrorConfig, override({"url": check_store_url(url)}, settings))
        state = send_state(run, config, follow=follow, warn=print_line)
        print_line(f"{config.url.rstrip('/')}/{run.name} has the run after {state}")


def print_mirrored(url: str) -> None:
    """Prints the runs in a store's folder of runs."""
    with user_errors(url):
        from palestra.runs.mirror.fetch import list_mirrored
        from palestra.runs.mirror.store import check_store_url

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        for title in ("run", "done", "mirrored at", "MiB", "generation"):
            table.add_column(title, overflow="fold")
        for name, manifest, damage in list_mirrored(check_store_url(url)):
            if manifest is None:
                print_line(f"{name} cannot be read: {damage}")
                continue
            size = f"{manifest.num_bytes / MIB:,.1f}"
            table.add_row(name, manifest.state, manifest.time, size, str(manifest.generation))
        console.print(table if table.row_count else f"no runs in {url}")
