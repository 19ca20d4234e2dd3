"""Programming problems: the question, hidden tests, and a reference solution."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from palestra.environments.code.test_runner import ProgramKind, ProgramSpec, ProgramTest
from palestra.envs.support.splits import Split, split_of_text

PROGRAM_DIFFICULTIES = (1, 2, 3, 4, 5)
SplitOrAll = Split | Literal["all"]


@dataclass(frozen=True)
class ProgramProblem:
    """One problem. `question` states it, `short_question` does so in few words; `examples` are shown to the policy,
    `tests` are hidden.

    `split_key` identifies the problem and decides its split. `reference` is a complete program, None if unknown. Unless
    `exact`, a tuple may be a list.
    """

    id: str
    question: str
    short_question: str
    split_key: str
    kind: ProgramKind
    tests: tuple[ProgramTest, ...]
    examples: tuple[ProgramTest, ...] = ()
    reference: str | None = None
    entry: str = ""
    preamble: str = ""
    starter: str = ""
    difficulty: int = 3
    exact: bool = True

    def program_from(self, answer: str, kind: ProgramKind) -> ProgramSpec:
        """Returns an answer as a runnable program of this problem."""
        return ProgramSpec(answer, kind, self.entry, self.preamble, self.exact)

    def kind_for_test(self, case: ProgramTest) -> ProgramKind:
        """Returns how a case is run: with an expected value as a call, also beside assertions."""
        if self.kind == "assertion" and case.expected_output:
            return "function"
        return self.kind


def select_problems(
    problems: Sequence[ProgramProblem], split: SplitOrAll, difficulties: Sequence[int], source: str
) -> tuple[ProgramProblem, ...]:
    """Returns the problems of a split and of these difficulties.

    Raises ValueError, naming their source `source`, if there are none.
    """
    graded = [problem for problem in problems if problem.difficulty in difficulties]
    selected = tuple(problem for problem in graded if split == "all" or split_of_text(problem.split_key) == split)
    if not selected:
        raise ValueError(
            f'none of the {len(problems)} problems in {source} is of split "{split}" and of difficulty '
            f"{', '.join(map(str, difficulties))}: give other difficulties, a larger file, or split: all"
        )
    return selected


def draw_program(problems: Sequence[ProgramProblem], seed: int) -> ProgramProblem:
    """Returns the problem that `seed` selects."""
    return random.Random(f"program {seed}").choice(problems)
