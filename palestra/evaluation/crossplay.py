"""Plays the games between members of a population that the payoff table lacks after training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from itertools import chain
from pathlib import Path

from palestra.core.config import load, override
from palestra.evaluation.report.population_data import PopulationRecord, read_record
from palestra.parallel.config import open_backend
from palestra.parallel.tasks import Backend, run_tasks
from palestra.populations.build.build import PopulationConfig, build_population, sides_of_run
from palestra.populations.build.validation import validate_population
from palestra.populations.payoffs import MemberProfile
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
        record = read_record(path, sides_of_run(config).owners)
        tasks = _missing_tasks(record, games)
        names = chain.from_iterable(task.members for task in tasks)
        with open_workers(config, record.folders(names)) as backend:
            for number, done in enumerate(run_tasks(backend, tasks), 1):
                for members, cell in played_cells(done.task, done.result):
                    run.append_line(CROSSPLAY_FILE, crossplay_line(members, cell))
                on_progress(number, len(tasks))
    return sum(len(task.cells) for task in tasks)


@contextmanager
def open_workers(config: PopulationConfig, folders: Mapping[str, Path]) -> Iterator[Backend]:
    """Context with the workers of a population's config, which know the members whose weights are in `folders`."""
    with closing(open_backend(config.backend, build_population(config).make_worker)) as backend:
        for name, folder in folders.items():
            backend.add_member(name, folder)
        yield backend


def _missing_tasks(record: PopulationRecord, games: int) -> list[PlayTask]:
    """Returns tasks for the cells with fewer than `games` games, grouped by the number missing. The name of
    a task contains the number of existing lines, so that no game is played twice."""
    lacking: dict[int, list[MemberProfile]] = {}
    for members in record.payoffs.cells_below(games):
        lacking.setdefault(games - record.payoffs.cell(members).games, []).append(members)
    before = len(read_lines(record.path / CROSSPLAY_FILE))
    tasks: list[PlayTask] = []
    for more, cells in lacking.items():
        for i in range(0, len(cells), CELLS_PER_TASK):
            name = f"crossplay/{before}-{len(tasks)}"
            some = tuple(cells[i : i + CELLS_PER_TASK])
            members = record.with_weights(chain.from_iterable(some))
            tasks.append(PlayTask(name, cells=some, games_per_cell=more, members=members))
    return tasks
