"""Which problems an env plays: generated, from a file, or of reasoning-gym's tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from palestra.envs.problems.files import from_file
from palestra.envs.problems.generate import DIFFICULTIES, KINDS, generated
from palestra.envs.problems.problem import Kind, Problem
from palestra.envs.problems.reasoning import check_tasks, reasoning_problem
from palestra.envs.text.splits import Split


@dataclass(frozen=True)
class Source:
    """Options that say where problems come from; None where not given.

    Raises ValueError where options of two sources are mixed, or name what there is not.
    """

    kinds: Sequence[Kind] | None
    difficulty: int | Sequence[int] | None
    path: Path | None
    columns: Mapping[str, str] | None
    reasoning: Sequence[str] | None
    split: Split | Literal["all"]

    def __post_init__(self) -> None:
        ours = self.kinds is not None or self.difficulty is not None
        if ours + (self.path is not None) + (self.reasoning is not None) > 1:
            raise ValueError(
                "kinds and difficulty are for generated problems, path and columns for a file, reasoning for "
                "reasoning-gym's tasks: give the options of one of the three"
            )
        if self.columns is not None and self.path is None:
            raise ValueError("columns: names columns of a file: give its path too")
        if self.split == "all" and self.path is None:
            raise ValueError("split: all uses a file whole: give its path, or one of the splits base, train, dev, test")
        self._check()

    @property
    def generated(self) -> bool:
        return self.path is None and self.reasoning is None

    def problem(self, seed: int) -> Problem:
        """The problem of the split that `seed` names. A file's are taken in its order, one seed after the other."""
        if self.path is not None:
            problems = from_file(self.path, self.columns, self.split)
            return problems[seed % len(problems)]
        assert self.split != "all"
        if self.reasoning is not None:
            return reasoning_problem(seed, tuple(self.reasoning), self.split)
        return generated(seed, self._kinds, self._levels, self.split)

    def _check(self) -> None:
        if self.path is not None:
            from_file(self.path, self.columns, self.split)
        if self.reasoning is not None:
            check_tasks(self.reasoning)
        if unknown := [kind for kind in self._kinds if kind not in KINDS]:
            raise ValueError(f"kinds: there is no kind {unknown[0]}; there are {', '.join(KINDS)}")
        if not self._kinds:
            raise ValueError(f"kinds: names none; give at least one of {', '.join(KINDS)}")
        if not self._levels or any(level not in DIFFICULTIES for level in self._levels):
            raise ValueError(f"difficulty: {self.difficulty} is not one or several of 1 to 5")

    @property
    def _kinds(self) -> tuple[Kind, ...]:
        return tuple(KINDS if self.kinds is None else self.kinds)

    @property
    def _levels(self) -> tuple[int, ...]:
        level = 3 if self.difficulty is None else self.difficulty
        return (level,) if isinstance(level, int) else tuple(level)
