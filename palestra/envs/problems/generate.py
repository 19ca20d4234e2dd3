"""Generated math problems: five kinds and five difficulties, correct by construction."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import lru_cache, partial

from palestra.envs.problems.arithmetic import arithmetic
from palestra.envs.problems.equations import equation, inequality
from palestra.envs.problems.problem import Kind, Problem, draw_problem
from palestra.envs.problems.steps import multi_step
from palestra.envs.problems.words import word
from palestra.envs.text.splits import Split

KINDS: dict[Kind, Callable[[random.Random, int], Problem]] = {
    "arithmetic": arithmetic,
    "equation": equation,
    "inequality": inequality,
    "word": word,
    "multi_step": multi_step,
}
DIFFICULTIES = range(1, 6)


@lru_cache(maxsize=16_384)  # tree search resets the same seed many times
def generated(seed: int, kinds: tuple[Kind, ...], difficulties: tuple[int, ...], split: Split) -> Problem:
    """Returns the problem of `split` for `seed`; kinds and difficulties are drawn uniformly."""
    what = f"kinds {', '.join(kinds)} at difficulty {', '.join(map(str, difficulties))}"
    return draw_problem(seed, partial(_proposed, kinds, difficulties), split, what)


def _proposed(kinds: Sequence[Kind], difficulties: Sequence[int], rng: random.Random) -> Problem:
    return KINDS[rng.choice(kinds)](rng, rng.choice(difficulties))
