"""Generated math problems: five kinds and five difficulties, correct by construction."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import lru_cache, partial

from palestra.environments.math.arithmetic import arithmetic_problem, sum_problem
from palestra.environments.math.equations import equation_problem, inequality_problem
from palestra.environments.math.multi_step import multi_step_problem
from palestra.environments.math.problem import Problem, ProblemKind, draw_problem
from palestra.environments.math.word_problems import word_problem
from palestra.envs.support.splits import Split

PROBLEM_GENERATORS: dict[ProblemKind, Callable[[random.Random, int], Problem]] = {
    "arithmetic": arithmetic_problem,
    "sum": sum_problem,
    "equation": equation_problem,
    "inequality": inequality_problem,
    "word": word_problem,
    "multi_step": multi_step_problem,
}
DEFAULT_KINDS = tuple(kind for kind in PROBLEM_GENERATORS if kind != "sum")  # sums are easier than their difficulty
DIFFICULTIES = range(1, 6)


@lru_cache(maxsize=16_384)  # tree search resets the same seed many times
def generate_problem(seed: int, kinds: tuple[ProblemKind, ...], difficulties: tuple[int, ...], split: Split) -> Problem:
    """Returns the problem of `split` for `seed`; kinds and difficulties are drawn uniformly. Beside `sum`, the kind
    `arithmetic` has no plain sums: the two kinds decide by different keys which split a sum belongs to."""
    what = f"kinds {', '.join(kinds)} at difficulty {', '.join(map(str, difficulties))}"
    return draw_problem(seed, partial(_proposed, kinds, difficulties), split, what)


def _proposed(kinds: Sequence[ProblemKind], difficulties: Sequence[int], rng: random.Random) -> Problem:
    kind, difficulty = rng.choice(kinds), rng.choice(difficulties)
    if kind == "arithmetic" and "sum" in kinds:
        return arithmetic_problem(rng, difficulty, sums=False)
    return PROBLEM_GENERATORS[kind](rng, difficulty)
