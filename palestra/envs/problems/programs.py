"""Programming problems: the question, hidden tests, and a reference solution."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from palestra.envs.problems.trials import Case, Code, Kind
from palestra.envs.text.splits import Split, split_of_text

GRADES = (1, 2, 3, 4, 5)
Part = Split | Literal["all"]


@dataclass(frozen=True)
class ProgramProblem:
    """One problem. `question` states it, `short` does so in few words; `examples` are shown to the policy, `tests` are
    hidden.

    `key` identifies the problem and decides its split. `reference` is a complete program, None if unknown. Unless
    `exact`, a tuple may be a list.
    """

    id: str
    question: str
    short: str
    key: str
    kind: Kind
    tests: tuple[Case, ...]
    examples: tuple[Case, ...] = ()
    reference: str | None = None
    entry: str = ""
    preamble: str = ""
    starter: str = ""
    difficulty: int = 3
    exact: bool = True

    def code(self, answer: str, kind: Kind) -> Code:
        """Returns an answer as a runnable program of this problem."""
        return Code(answer, kind, self.entry, self.preamble, self.exact)

    def kind_of(self, case: Case) -> Kind:
        """Returns how a case is run: one with an expected value is a function call, even if the hidden tests are
        assertions.
        """
        return "function" if self.kind == "assertion" and case.expected else self.kind


def choose(
    problems: Sequence[ProgramProblem], part: Part, grades: Sequence[int], name: str
) -> tuple[ProgramProblem, ...]:
    """Returns the problems of a split and of these difficulties.

    Raises ValueError, naming their source `name`, if there are none.
    """
    graded = [problem for problem in problems if problem.difficulty in grades]
    found = tuple(problem for problem in graded if part == "all" or split_of_text(problem.key) == part)
    if not found:
        raise ValueError(
            f'none of the {len(problems)} problems in {name} is of split "{part}" and of difficulty '
            f"{', '.join(map(str, grades))}: give other difficulties, a larger file, or split: all"
        )
    return found


def draw(problems: Sequence[ProgramProblem], seed: int) -> ProgramProblem:
    """Returns the problem that `seed` selects."""
    return random.Random(f"program {seed}").choice(problems)
