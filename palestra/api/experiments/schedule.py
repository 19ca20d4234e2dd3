"""Runs the cells of a grid, several at a time, each in its own process; continues where an earlier call ended."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from palestra.api.experiments.grid import GridCell, GridTask
from palestra.core.config import Tree, allow_modules_in, dump, load, parse
from palestra.core.failures import one_line
from palestra.core.files import JsonlWriter, read_lines, remove_path, to_json_line
from palestra.parallel.processes import StoppableProcess, exit_reason, exit_with_parent, leave_signals_to_parent
from palestra.runs.settings import flatten_tree

if TYPE_CHECKING:
    from palestra.api.run import LaunchRequest

CELLS_FILE = "cells.jsonl"  # a line for each cell that ended
LOGS = "logs"  # folder with the output of each run
# exit codes of a cell
FAILED = 1
STOPPED = 3
NO_FOLDER = 4
POLL_S = 0.1
Status = Literal["done", "failed", "stopped"]


class CellProcess(Protocol):
    """A process that trains a cell: `exitcode` is None while it runs."""

    @property
    def exitcode(self) -> int | None: ...
    def stop(self) -> None: ...
    def kill(self) -> None: ...


@dataclass(frozen=True)
class CellResult:
    """Status of a cell that ended, its wall time in this call, and why it failed ("" if not)."""

    cell: GridCell
    status: Status
    seconds: float
    reason: str = ""


def check_cells(cells: Sequence[GridCell], root: Path, tasks: Mapping[str, GridTask] | None = None) -> None:
    """Raises ValueError if the config of a cell has a mistake or lacks the evaluation that its task in `tasks` scores,
    or its run in `root` was made with other settings."""
    from palestra.api.run import run_request

    for cell in cells:
        try:
            request = run_request(cell.tree, name=cell.name, root=root)
            request.check()
            if tasks:
                check_score(request, tasks[cell.task])
        except ValueError as error:
            raise ValueError(f"{cell.name}: {error}") from error
        stored = root / cell.name / "config.yaml"
        if stored.is_file() and (change := _first_difference(load(stored), request)):
            raise ValueError(
                f"{root / cell.name} was made with other settings: {change}. Remove that run, or give the grid another "
                "name"
            )


def check_score(request: LaunchRequest, task: GridTask) -> None:
    """Raises ValueError if a run will have nothing to score."""
    if request.kind.name == "population":
        if task.eval or task.metric not in (None, "nash_conv"):
            raise ValueError("a population is scored by its last nash_conv: leave out the task's eval: and metric:")
        if not getattr(request.config.population, "nash_conv_every", 0):
            raise ValueError("a population is scored by its last nash_conv: set population.nash_conv_every above 0")
        return
    names = list(request.config.evals)
    if not names:
        raise ValueError("the config has no evaluation to score: add one, such as evals: {test: {episodes: 100}}")
    if task.eval and task.eval not in names:
        raise ValueError(f"eval: the config has no evaluation {task.eval}; it has {', '.join(names)}")


def _first_difference(stored: Tree, request: LaunchRequest) -> str:
    """Returns the first setting in which a run differs from the grid; null equals a missing key."""
    old = flatten_tree(stored)
    new = flatten_tree(parse(dump(request.config)))
    for key in dict.fromkeys([*new, *old]):
        if old.get(key) != new.get(key):
            return f"{key} is {old.get(key)} there and {new.get(key)} in the grid"
    return ""


def finished_cells(root: Path) -> set[str]:
    """Returns the names of the cells that are done and whose run still exists."""
    return {name for name, status in _statuses(root).items() if status == "done" and (root / name).is_dir()}


def _statuses(root: Path) -> dict[str, str]:
    """Returns the last status of each cell that ended."""
    return {line["cell"]: line["status"] for line in read_lines(root / CELLS_FILE)}


def run_cells(
    cells: Sequence[GridCell],
    root: Path,
    workers: int,
    stop_requested: Callable[[], bool] = lambda: False,
    start: Callable[..., CellProcess] = StoppableProcess,
) -> Iterator[CellResult]:
    """Trains the cells that are not done, `workers` at a time, and yields the result of each when it ends.

    A run that exists in `root` is resumed. A failed cell does not stop the others. Once `stop_requested` returns True,
    no further cell is started, and running ones end after their current step, with a checkpoint. `start` starts the
    process of a cell, by default on this machine; other machines must share `root` and the working directory.
    """
    done = finished_cells(root)
    before = _statuses(root)
    waiting = [cell for cell in cells if cell.name not in done]
    (root / LOGS).mkdir(parents=True, exist_ok=True)
    for cell in waiting:
        if before.get(cell.name) == "done":  # its run was removed, and is trained again
            _record(CellResult(cell, "stopped", 0.0), root)
    stopping = False
    running = dict[str, tuple[GridCell, CellProcess, float]]()
    try:
        while running or (waiting and not stopping):
            if not stopping and stop_requested():
                stopping = True
                for _, process, _ in running.values():
                    process.stop()
            while waiting and len(running) < workers and not stopping:
                cell = waiting.pop(0)
                process = start(_train_cell, (cell.tree, cell.name, root.resolve(), Path.cwd()))
                running[cell.name] = cell, process, time.monotonic()
            for name, (cell, process, begun) in list(running.items()):
                if process.exitcode is not None:
                    del running[name]
                    result = _result(cell, process.exitcode, time.monotonic() - begun, root)
                    _record(result, root)
                    yield result
            time.sleep(POLL_S)
    finally:
        for _, process, _ in running.values():
            process.kill()


def _result(cell: GridCell, code: int, seconds: float, root: Path) -> CellResult:
    if code == 0:
        return CellResult(cell, "done", seconds)
    if code == STOPPED:
        return CellResult(cell, "stopped", seconds)
    if code == NO_FOLDER:
        where = f"the node that was to train it has no {root.resolve()} or no {Path.cwd()}"
        return CellResult(cell, "failed", seconds, f"{where}: a grid on Ray needs a file system that all nodes share")
    log = root / LOGS / f"{cell.name}.txt"
    reason = exit_reason(code)
    if code == FAILED and log.exists():
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        reason = [reason, *lines][-1]
    return CellResult(cell, "failed", seconds, reason)


def _record(result: CellResult, root: Path) -> None:
    line = {"cell": result.cell.name, "status": result.status, "seconds": round(result.seconds, 1)}
    with closing(JsonlWriter(root / CELLS_FILE)) as file:
        file.write(to_json_line(line))
        file.fsync()


def _train_cell(tree: dict[str, Any], name: str, root: Path, folder: Path, stop: Event) -> None:
    """Trains one cell in this process, in the working directory `folder`, with its output in a file. Exits with 0,
    `FAILED`, `STOPPED` or `NO_FOLDER`."""
    exit_with_parent()
    leave_signals_to_parent()
    if not (root / LOGS).is_dir() or not folder.is_dir():
        sys.exit(NO_FOLDER)
    os.chdir(folder)
    log = os.open(root / LOGS / f"{name}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    allow_modules_in(folder)
    try:
        code = 0 if _train(tree, name, root, stop) else STOPPED
    except Exception as error:  # the process ends here, and any error becomes the cell's result
        traceback.print_exc()
        print(one_line(error), file=sys.stderr)
        code = FAILED
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code)


def _train(tree: dict[str, Any], name: str, root: Path, stop: Event) -> bool:
    """Returns False if the run was stopped early. Raises RunFailed if nothing was learned."""
    from palestra.api.run import open_run, run_request
    from palestra.core.failures import RunFailed
    from palestra.evaluation.report.run_report import explain_no_update
    from palestra.runs.loop import Callback

    class StopOnEvent(Callback):
        @property
        def stop_requested(self) -> bool:  # type: ignore[override]
            return stop.is_set()

    path = root / name
    if path.exists() and not (path / "config.yaml").exists():
        remove_path(path)  # an earlier process was killed while it created the run
    resume = path if path.exists() else None
    with open_run(run_request(tree, resume=resume, name=name, root=root)) as opened:
        finished = bool(opened.train([StopOnEvent()]))
        if finished and (why := explain_no_update(path)):
            raise RunFailed(why)
    return finished
