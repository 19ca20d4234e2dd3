"""`palestra grid`: trains every algorithm on every task with every seed, and compares them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from palestra.api.console import console, interruptible, print_line, styled_text, user_errors
from palestra.cli.runs import Root

if TYPE_CHECKING:
    from palestra.api.experiments.grid import GridCell, GridConfig
    from palestra.api.experiments.schedule import CellProcess, CellResult

GridBackend = Literal["local", "ray"]


def grid(  # noqa: PLR0913 - a parameter for each option
    file: Annotated[Path, typer.Argument(help="a YAML file of tasks, algorithms and seeds")],
    workers: Annotated[int | None, typer.Option(min=1, help="runs at a time (default: 1; with Ray, all CPUs)")] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="train only the cells that match: `--only 'spread-*' --only '*-ppo-0'`")
    ] = None,
    root: Root = Path("runs"),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="check all configs, list the cells, and stop")] = False,
    results: Annotated[bool, typer.Option("--results", help="write the results of what is finished, and stop")] = False,
    backend: Annotated[
        GridBackend, typer.Option(help="where runs are trained: on this machine, or on the nodes of a Ray cluster")
    ] = "local",
    address: Annotated[
        str | None, typer.Option(help="address of the Ray cluster, such as auto (default: start one on this machine)")
    ] = None,
    num_cpus: Annotated[float, typer.Option(min=0, help="CPUs that Ray reserves for a run")] = 1,
    num_gpus: Annotated[float, typer.Option(min=0, help="GPUs that Ray reserves for a run")] = 0,
) -> None:
    """Train every algorithm on every task with every seed, and compare them.

    Each cell of the grid is a run in ROOT/NAME. Finished cells are skipped and interrupted ones resumed, so the same
    command continues after Ctrl-C, SIGTERM or a crash. At the end results.json, results.md and results.svg are written
    there: interquartile means, optimality gaps, performance profiles and probabilities of improvement, with intervals
    over seeds.

    Examples:

        palestra grid configs/grids/matrix_games.yaml --workers 4
        palestra grid configs/grids/matrix_games.yaml --only '*-qmix-*'
        palestra grid configs/grids/matrix_games.yaml --results
        palestra grid configs/grids/matrix_games.yaml --backend ray --address auto
    """
    with user_errors(), interruptible("; the same command continues"), console.busy(lambda: f"grid {file}"):
        from palestra.api.experiments.grid import grid_cells, load_grid
        from palestra.api.experiments.schedule import check_cells, finished_cells
        from palestra.core.config.shipped import find_config

        path = find_config(file)
        config = load_grid(path)
        folder = root / config.name
        cells = grid_cells(config, path.parent, only or [])
        if results:
            return _print_results(config, folder)
        check_cells(cells, folder, config.tasks)
        done = finished_cells(folder)
        left = [cell for cell in cells if cell.name not in done]
        print_line(f"grid {config.name}: {len(cells)} cells, {len(cells) - len(left)} done, in {folder}")
        if dry_run:
            for cell in cells:
                print_line(f"{'done' if cell.name in done else 'to do'}  {cell.name}")
            return
        with _processes(backend, address, {"num_cpus": num_cpus, "num_gpus": num_gpus}, workers) as (start, at_once):
            _run(config, left, folder, at_once, start)


@contextmanager
def _processes(
    backend: GridBackend, address: str | None, options: dict[str, float], workers: int | None
) -> Iterator[tuple[Callable[..., CellProcess], int]]:
    """Yields the function that starts a run's process, and the number of runs at a time. Raises ValueError if Ray is
    requested but not installed, or its options are given without it."""
    from palestra.parallel.config import require_ray
    from palestra.parallel.processes import StoppableProcess

    if backend == "local":
        if address is not None or options != {"num_cpus": 1, "num_gpus": 0}:
            raise ValueError("--address, --num-cpus and --num-gpus are for --backend ray: add it, or leave them out")
        yield StoppableProcess, workers or 1
        return
    require_ray()
    from palestra.parallel.ray.process import max_processes, ray_processes

    with ray_processes(address, options, workers or os.cpu_count() or 1) as start:
        yield start, workers or max_processes(options)


def _run(
    config: GridConfig, cells: list[GridCell], folder: Path, workers: int, start: Callable[..., CellProcess]
) -> None:
    """Trains the cells and writes the results. Raises RunFailed if a cell failed."""
    from palestra.api.experiments.schedule import LOGS, run_cells
    from palestra.api.interrupt import StopOnInterrupt
    from palestra.api.progress import CountingBar
    from palestra.core.failures import RunFailed

    ended: list[CellResult] = []
    with StopOnInterrupt() as interrupted, CountingBar(f"grid {config.name}", console) as bar:
        bar.count(0, len(cells))
        for result in run_cells(cells, folder, workers, interrupted, start):
            ended.append(result)
            print_line(f"[{len(ended)}/{len(cells)}] {_describe(result, folder, config)}")
            bar.count(len(ended), len(cells))
    _print_results(config, folder)
    if failed := [result.cell.name for result in ended if result.status == "failed"]:
        raise RunFailed(f"{len(failed)} cells failed: {', '.join(failed)}; what they printed is in {folder / LOGS}")
    if len(ended) < len(cells) or any(result.status == "stopped" for result in ended):
        print_line("stopped; the same command continues")


def _describe(result: CellResult, folder: Path, config: GridConfig) -> str:
    from palestra.api.experiments.results import describe_cell

    about = describe_cell(result.cell, folder, config) if result.status == "done" else result.reason
    return f"{result.cell.name} {result.status} after {result.seconds:.0f} s {about}".rstrip()


def _print_results(config: GridConfig, folder: Path) -> None:
    from rich import box
    from rich.table import Table

    from palestra.api.experiments.results import LABELS, collect_results, format_estimate, results_data, write_results

    if not folder.is_dir():
        raise ValueError(f"{folder} does not exist: train the grid first, with `palestra grid` without --results")
    results = collect_results(config, folder)
    data = results_data(results)
    files = write_results(results, data, folder)
    if aggregates := data["aggregates"]:
        table = Table("algorithm", *(LABELS[name] for name in ("iqm", "optimality_gap")), box=box.SIMPLE_HEAD)
        for algorithm, stats in aggregates.items():
            table.add_row(styled_text(algorithm), *(format_estimate(stats[name]) for name in ("iqm", "optimality_gap")))
        console.print(table)
    print_line(f"results of {len(config.keys) - len(results.missing)} of {len(config.keys)} cells: {files[-1]}")
