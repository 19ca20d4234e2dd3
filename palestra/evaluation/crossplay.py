"""Plays the games between members of a population that the payoff table lacks after training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from palestra.core.config import load, override
from palestra.evaluation.report.population_data import PopulationRecord, read_record
from palestra.parallel.tasks import run_tasks
from palestra.populations.build.build import build_population, players_by_seat
from palestra.populations.build.validation import validate_population
from palestra.populations.payoffs import MemberProfile
from palestra.populations.scheduler import MEMBERS_DIR
from palestra.populations.task_json import CROSSPLAY_FILE, crossplay_line
from palestra.populations.tasks import PlayTask, played_cells
from palestra.runs import Run, find_run, read_lines

CELLS_PER_TASK = 16  # payoff cells per task


def play_missing_cells(
    path: Path,
    games: int,
    settings: list[str] | None = None,
    on_progress: Callable[[int, int], None] = lambda done, of: None,
) -> int:
    """Plays games until every cell of the payoff table has `games` games, on the workers of the run's config; returns
    the number of cells played.

    Results are appended to crossplay.jsonl in the run as they arrive; a second call continues from there. `settings`
    override the config: `["backend.type=inline"]`. `on_progress` is called with (done, total) tasks. Raises
    ValueError if the run trains no population or is being written.
    """
    config = validate_population(override(load(find_run(path) / "config.yaml"), settings or []))
    with Run.open(path) as run:
        record = read_record(path, players_by_seat(config))
        tasks = _missing(record, games)
        setup = build_population(config)
        backend = setup.open_backend(setup.make_worker)
        try:
            for name in dict.fromkeys(name for task in tasks for name in task.members):
                backend.add_member(name, path / MEMBERS_DIR / name)
            for number, done in enumerate(run_tasks(backend, tasks), 1):
                for members, cell in played_cells(done.task, done.result):
                    run.append_line(CROSSPLAY_FILE, crossplay_line(members, cell))
                on_progress(number, len(tasks))
        finally:
            backend.close()
    return sum(len(task.cells) for task in tasks)


def _missing(record: PopulationRecord, games: int) -> list[PlayTask]:
    """Returns tasks for the cells with fewer than `games` games, grouped by the number missing. A task's name
    determines its seeds; it contains the number of existing lines, so that no game is played twice."""
    files = {member.name for member in record.members if member.weights}
    lacking: dict[int, list[MemberProfile]] = {}
    for members in record.payoffs.cells_below(games):
        lacking.setdefault(games - record.payoffs.cell(members).games, []).append(members)
    before = len(read_lines(record.path / CROSSPLAY_FILE))
    tasks: list[PlayTask] = []
    for more, cells in lacking.items():
        for i in range(0, len(cells), CELLS_PER_TASK):
            some = cells[i : i + CELLS_PER_TASK]
            names = tuple(dict.fromkeys(name for cell in some for name in cell if name in files))
            tasks.append(
                PlayTask(f"crossplay/{before}-{len(tasks)}", cells=tuple(some), games_per_cell=more, members=names)
            )
    return tasks
