"""A question with one answer (`Problem`), and drawing problems of a split."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from palestra.envs.support.splits import Split, first_of_split, split_of_text

ProblemKind = Literal["arithmetic", "sum", "equation", "inequality", "word", "multi_step"]
MAX_DRAWS = 2000  # draws per problem


@dataclass(frozen=True)
class Problem:
    """One math problem. `split_key` identifies its content and decides its split: "7 + 12" and "12 + 7" have the same
    key, as have two stories that differ only in names and things.

    `short_question` is the question in as few words as possible; `solution_program` is Python that prints the answer,
    or an expression for it. With `needs_computation` the answer must be computed: 12/4 is not an answer to "12 / 4".
    `reasoning_entry` is set for problems that a reasoning-gym scorer grades: the task's name, and the index of the
    problem in its data set.
    """

    question: str
    answer: str
    short_question: str
    solution_program: str
    split_key: str
    needs_computation: bool = False
    reasoning_entry: tuple[str, int] | None = None


def draw_problem(seed: int, propose: Callable[[random.Random], Problem], split: Split, description: str) -> Problem:
    """Returns the first problem of `split` among those that `propose` draws from `seed`.

    Raises ValueError, naming the request `description`, if 2,000 draws contain none.
    """
    rng = random.Random(f"problem {seed}")
    lacking = f'no problem of split "{split}" in {MAX_DRAWS} draws of {description}: there are too few such problems'
    return first_of_split(
        (propose(rng) for _ in range(MAX_DRAWS)), split, lambda problem: split_of_text(problem.split_key), lacking
    )
