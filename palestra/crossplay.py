"""Plays games between members of a population that training left out of the payoff table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from palestra.config import load, override, validate
from palestra.population_reports import CROSSPLAY, Record, read_record
from palestra.populations.scheduler import MEMBERS
from palestra.populations.tasks import Task, done_by
from palestra.runs import Run, read_lines
from palestra.setup_population import PopulationConfig, build_population

CELLS = 16  # payoff cells per task


def play_missing(
    path: Path, games: int, settings: list[str] | None = None, told: Callable[[int, int], None] = lambda done, of: None
) -> int:
    """Plays every cell of the payoff table up to `games` games, on the workers of the run's config; returns the number
    of cells played.

    Results are appended to crossplay.jsonl in the run as they arrive; a second call continues from there. `settings`
    override the config: `["backend.type=inline"]`. `told` is called with (done, total) tasks. Raises ValueError if the
    run trains no population or is being written.
    """
    config = validate(PopulationConfig, override(load(path / "config.yaml"), settings or []))
    with Run.open(path) as run:
        record = read_record(path)
        tasks = _missing(record, games)
        setup = build_population(config)
        backend = setup.backend(setup.make_worker)
        try:
            for name in dict.fromkeys(name for task in tasks for name in task.members):
                backend.share(name, path / MEMBERS / name)
            for number, done in enumerate(done_by(backend, tasks), 1):
                for cell in done.result["cells"]:
                    run.record(CROSSPLAY, cell)
                told(number, len(tasks))
        finally:
            backend.close()
    return sum(len(task.order["cells"]) for task in tasks)


def _missing(record: Record, games: int) -> list[Task]:
    """Returns tasks for the cells with fewer than `games` games, grouped by the number missing. Task names determine
    the seeds and count the existing lines, so that no game is drawn twice."""
    files = {member.name for member in record.members if member.weights}
    lacking: dict[int, list[list[str]]] = {}
    for members in record.payoffs.lacking(games):
        lacking.setdefault(games - record.payoffs.cell(members).games, []).append(list(members))
    before = len(read_lines(record.path / CROSSPLAY))
    tasks: list[Task] = []
    for more, cells in lacking.items():
        for i in range(0, len(cells), CELLS):
            some = cells[i : i + CELLS]
            names = dict.fromkeys(name for cell in some for name in cell if name in files)
            order = {"cells": some, "games": more}
            tasks.append(Task(f"crossplay/{before}-{len(tasks)}", "play", order, tuple(names)))
    return tasks
