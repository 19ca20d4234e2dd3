"""The source of an env's tasks, and the documents that belong to them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from palestra.envs.text.splits import Split
from palestra.envs.tooling import drills, puzzles
from palestra.envs.tooling.facts import FactQuestions
from palestra.envs.tooling.library import OURS, Index, open_index
from palestra.envs.tooling.scratch import Library, Nothing
from palestra.envs.tooling.tasks import KINDS, Kind, Task, draw_task, read_tasks

WorldName = Literal["corpus", "drills"]
Propose = Callable[[random.Random], Task | None]


@dataclass(frozen=True)
class World:
    """`task(seed)` returns the instance for a seed; `library` is searched if a task has none of its own."""

    kinds: tuple[Kind, ...]
    task: Callable[[int], Task]
    library: Library


def open_world(
    name: WorldName, kinds: Sequence[Kind] | None, documents: Path | None, tasks: Path | None, split: Split
) -> World:
    """Returns the source of tasks that the env's options select.

    Raises ValueError for options that exclude each other, and for a split without tasks.
    """
    if name == "drills" and (documents or tasks):
        raise ValueError("world: drills makes its own documents and tasks: leave documents and tasks out")
    if tasks and kinds:
        raise ValueError("tasks: is a list of questions of your own, which has no kinds: give one or the other")
    if kinds is not None and not kinds:
        raise ValueError(f"kinds: is empty; give some of {', '.join(KINDS)}")
    library = open_index((documents or OURS).resolve()) if name == "corpus" else Nothing()
    if tasks:
        return World((), _given(tasks.resolve(), split), library)
    chosen = tuple(kinds or (KINDS if name == "corpus" else drills.KINDS))
    makers = _makers(name, chosen, library)

    def propose(rng: random.Random) -> Task | None:
        return makers[rng.choice(chosen)](rng)

    return World(chosen, lambda seed: draw_task(seed, propose, split, f"{', '.join(chosen)} in {name}"), library)


def _given(path: Path, split: Split) -> Callable[[int], Task]:
    given = read_tasks(path)[split]
    if not given:
        raise ValueError(f'{path} has no task of split "{split}": write "split": "{split}" into some of its lines')
    return lambda seed: random.Random(f"tools {seed}").choice(given)


def _makers(name: WorldName, kinds: Sequence[Kind], library: Library) -> Mapping[Kind, Propose]:
    if name == "drills":
        if unknown := [kind for kind in kinds if kind not in drills.KINDS]:
            raise ValueError(f"world: drills has no tasks of kind {unknown[0]}; it has {', '.join(drills.KINDS)}")
        return {kind: _drill(kind) for kind in kinds}
    makers: dict[Kind, Propose] = {"compute": puzzles.compute, "files": puzzles.files, "program": puzzles.program}
    if {"lookup", "lookup_compute"} & {*kinds}:
        assert isinstance(library, Index)
        about = _questions(library)
        makers |= {"lookup": about.lookup, "lookup_compute": about.lookup_compute}
    return makers


def _drill(kind: Kind) -> Propose:
    return lambda rng: drills.drill(kind, rng)


@cache
def _questions(index: Index) -> FactQuestions:
    return FactQuestions(index.documents)
