"""The source of an env's tasks, and the documents that belong to them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Literal

from palestra.environments.tools import puzzles, synthetic_world
from palestra.environments.tools.facts import FactQuestions
from palestra.environments.tools.library import BUILT_IN_CORPUS, DocumentIndex, open_index
from palestra.environments.tools.tasks import TASK_KINDS, TaskKind, ToolTask, draw_task, read_tasks
from palestra.environments.tools.tool_state import EmptyLibrary, Library
from palestra.envs.support.splits import Split

WorldName = Literal["corpus", "drills"]
TaskGenerator = Callable[[random.Random], ToolTask | None]


@dataclass(frozen=True)
class TaskSource:
    """`task(seed)` returns the instance for a seed; `library` is searched if a task has none of its own."""

    kinds: tuple[TaskKind, ...]
    task: Callable[[int], ToolTask]
    library: Library


def open_task_source(
    name: WorldName, kinds: Sequence[TaskKind] | None, documents: Path | None, tasks: Path | None, split: Split
) -> TaskSource:
    """Returns the source of tasks that the env's options select.

    Raises ValueError for options that exclude each other, and for a split without tasks.
    """
    if name == "drills" and (documents or tasks):
        raise ValueError("task_source: drills makes its own documents and tasks: leave documents and tasks out")
    if tasks and kinds:
        raise ValueError("tasks: is a list of questions of your own, which has no kinds: give one or the other")
    if kinds is not None and not kinds:
        raise ValueError(f"kinds: is empty; give some of {', '.join(TASK_KINDS)}")
    library = open_index((documents or BUILT_IN_CORPUS).resolve()) if name == "corpus" else EmptyLibrary()
    if tasks:
        return TaskSource((), _draw_from_file(tasks.resolve(), split), library)
    chosen = tuple(kinds or (TASK_KINDS if name == "corpus" else synthetic_world.SYNTHETIC_TASK_KINDS))
    makers = _makers(name, chosen, library)

    def propose(rng: random.Random) -> ToolTask | None:
        return makers[rng.choice(chosen)](rng)

    return TaskSource(chosen, lambda seed: draw_task(seed, propose, split, f"{', '.join(chosen)} in {name}"), library)


def _draw_from_file(path: Path, split: Split) -> Callable[[int], ToolTask]:
    tasks = read_tasks(path)[split]
    if not tasks:
        raise ValueError(f'{path} has no task of split "{split}": write "split": "{split}" into some of its lines')
    return lambda seed: random.Random(f"tools {seed}").choice(tasks)


def _makers(name: WorldName, kinds: Sequence[TaskKind], library: Library) -> Mapping[TaskKind, TaskGenerator]:
    if name == "drills":
        if unknown := [kind for kind in kinds if kind not in synthetic_world.SYNTHETIC_TASK_KINDS]:
            raise ValueError(
                f"task_source: drills has no tasks of kind {unknown[0]}; it has "
                f"{', '.join(synthetic_world.SYNTHETIC_TASK_KINDS)}"
            )
        return {kind: partial(synthetic_world.draw_synthetic_task, kind) for kind in kinds}
    makers: dict[TaskKind, TaskGenerator] = {
        "compute": puzzles.compute_task,
        "files": puzzles.files_task,
        "program": puzzles.program_task,
    }
    if {"lookup", "lookup_compute"} & {*kinds}:
        assert isinstance(library, DocumentIndex)
        about = _questions(library)
        makers |= {"lookup": about.lookup, "lookup_compute": about.lookup_compute}
    return makers


@cache
def _questions(index: DocumentIndex) -> FactQuestions:
    return FactQuestions(index.documents)
