"""Synthetic programs for small models: one short expression of a list `xs`, specified in a few words, graded by rules.

"keep even each times 3 then plus 2" is `[x*3+2 for x in xs if x%2==0]`. An instance is a chain of up to five parts:
a filter, two arithmetic steps, an order or a slice, a sum or a count. Its difficulty is their number.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

from palestra.environments.code.programs import ProgramProblem, SplitOrAll
from palestra.environments.code.test_runner import ProgramTest
from palestra.envs.support.splits import first_of_split, split_of_text

NUM_TESTS = 8  # hidden tests of a problem, besides those that tell it from shorter chains
MAX_LISTS = 200  # lists drawn to tell a chain from a shorter one
MAX_DRAWS = 20_000  # draws per problem
# limits for a tester's list: its length, and the absolute value of its numbers
MAX_LIST_LENGTH = 100
MAX_ABS_VALUE = 10**6
Numbers = Sequence[int]


class ProgramStep(NamedTuple):
    """One part: its text, short and long, its code, and its function. `{}` in `code` stands for the operand."""

    short_text: str
    long_text: str
    code: str
    apply: Callable[[Any], Any]


def _by(operation: Callable[[Any, int], Any], k: int) -> Callable[[Any], Any]:
    return lambda x: operation(x, k)


def _filters() -> list[ProgramStep]:
    even = ProgramStep("even", "even", "{}%2==0", lambda x: x % 2 == 0)
    odd = ProgramStep("odd", "odd", "{}%2==1", lambda x: x % 2 == 1)
    above = [ProgramStep(f"above {k}", f"greater than {k}", f"{{}}>{k}", _by(operator.gt, k)) for k in range(1, 10)]
    below = [ProgramStep(f"below {k}", f"less than {k}", f"{{}}<{k}", _by(operator.lt, k)) for k in range(2, 10)]
    return [even, odd, *above, *below]


def _first_maps() -> list[ProgramStep]:
    times = [ProgramStep(f"times {k}", f"multiply it by {k}", f"{{}}*{k}", _by(operator.mul, k)) for k in range(2, 10)]
    return [*times, ProgramStep("squared", "square it", "{}**2", _by(operator.pow, 2))]


def _second_maps() -> list[ProgramStep]:
    plus = [ProgramStep(f"plus {k}", f"add {k}", f"{{}}+{k}", _by(operator.add, k)) for k in range(1, 10)]
    minus = [ProgramStep(f"minus {k}", f"subtract {k}", f"{{}}-{k}", _by(operator.sub, k)) for k in range(1, 10)]
    return [*plus, *minus]


def _orders() -> list[ProgramStep]:
    first = [ProgramStep(f"first {k}", f"take the first {k}", f"{{}}[:{k}]", _by(_first, k)) for k in (1, 2, 3)]
    last = [ProgramStep(f"last {k}", f"take the last {k}", f"{{}}[-{k}:]", _by(_last, k)) for k in (1, 2, 3)]
    turned = ProgramStep("reversed", "reverse their order", "{}[::-1]", lambda numbers: numbers[::-1])
    return [*first, *last, turned, ProgramStep("sorted", "sort them, smallest first", "sorted({})", sorted)]


def _first(numbers: list[int], k: int) -> list[int]:
    return numbers[:k]


def _last(numbers: list[int], k: int) -> list[int]:
    return numbers[-k:]


def _reductions() -> list[ProgramStep]:
    return [
        ProgramStep("sum", "add them all up", "sum({})", sum),
        ProgramStep("count", "say how many there are", "len({})", len),
    ]


STEP_CHOICES: tuple[list[ProgramStep], ...] = (_filters(), _first_maps(), _second_maps(), _orders(), _reductions())


@dataclass(frozen=True)
class SyntheticProgram:
    """A chain of parts, at most one for each slot."""

    filter_step: ProgramStep | None
    first_map: ProgramStep | None
    second_map: ProgramStep | None
    order_step: ProgramStep | None
    reduce_step: ProgramStep | None

    @property
    def active_steps(self) -> list[ProgramStep]:
        return [
            step
            for step in (self.filter_step, self.first_map, self.second_map, self.order_step, self.reduce_step)
            if step
        ]

    @property
    def short_question(self) -> str:
        steps = " then ".join(step.short_text for step in (self.first_map, self.second_map) if step)
        tasks = []
        if self.filter_step:
            tasks.append(f"keep {self.filter_step.short_text}")
        if steps:
            tasks.append(f"each {steps}")
        tasks += [step.short_text for step in (self.order_step, self.reduce_step) if step]
        return " ".join(tasks)

    @property
    def question(self) -> str:
        steps = " and then ".join(step.long_text for step in (self.first_map, self.second_map) if step)
        tasks = []
        if self.filter_step:
            tasks.append(f"keep only those that are {self.filter_step.long_text}")
        if steps:
            tasks.append(f"for each, {steps}")
        tasks += [step.long_text for step in (self.order_step, self.reduce_step) if step]
        return f"`xs` is a list of integers. Start from its numbers: {'; then '.join(tasks)}."

    @property
    def code(self) -> str:
        written = "xs"
        each = "x"
        for step in filter(None, (self.first_map, self.second_map)):
            each = step.code.format(each)
        if each != "x" or self.filter_step:
            condition = f" if {self.filter_step.code.format('x')}" if self.filter_step else ""
            written = f"[{each} for x in xs{condition}]"
        for step in filter(None, (self.order_step, self.reduce_step)):
            written = step.code.format(written)
        return written

    def run(self, xs: Numbers) -> Any:
        """Returns the result of the chain for a list."""
        result = [x for x in xs if not self.filter_step or self.filter_step.apply(x)]
        for step in filter(None, (self.first_map, self.second_map)):
            result = [step.apply(x) for x in result]
        for step in filter(None, (self.order_step, self.reduce_step)):
            result = step.apply(result)
        return result

    def run_checked(self, xs: Any) -> Any:
        """Returns the result for an untrusted input: None if `xs` is not a list of a few small integers."""
        few = (
            isinstance(xs, list)
            and len(xs) <= MAX_LIST_LENGTH
            and all(type(x) is int and abs(x) <= MAX_ABS_VALUE for x in xs)
        )
        if not few:
            return None
        return self.run(xs)


def draw_synthetic_program(seed: int, split: SplitOrAll, difficulties: Sequence[int]) -> SyntheticProgram:
    """Returns the program of split `split` for `seed`: first a difficulty is drawn uniformly from `difficulties`, then
    its parts.

    Raises ValueError if 20,000 draws contain none.
    """
    rng = random.Random(f"drill {seed}")
    draws = (_propose(rng, rng.choice(difficulties)) for _ in range(MAX_DRAWS))
    lacking = f'no drill of split "{split}" in {MAX_DRAWS} draws of difficulty {", ".join(map(str, difficulties))}'
    return first_of_split(draws, split, lambda drill: split_of_text(drill.short_question), lacking)


def _propose(rng: random.Random, grade: int) -> SyntheticProgram:
    steps: list[ProgramStep | None] = [None] * len(STEP_CHOICES)
    for slot in sorted(rng.sample(range(len(STEP_CHOICES)), grade)):
        steps[slot] = rng.choice(STEP_CHOICES[slot])
    return SyntheticProgram(*steps)


@lru_cache(maxsize=16_384)
def synthetic_problem(program: SyntheticProgram) -> ProgramProblem:
    """Returns the chain as a problem. Its tests are deterministic."""
    rng = random.Random(f"tests {program.short_question}")
    lists = [_random_list(rng, 6) for _ in range(NUM_TESTS - 1)]
    lists = _told_apart(program, [*lists, []], rng)
    tests = tuple(ProgramTest(f"({xs!r},)", repr(program.run(xs))) for xs in lists)
    return ProgramProblem(
        id=program.short_question,
        question=program.question,
        short_question=program.short_question,
        split_key=program.short_question,
        kind="expression",
        tests=tests,
        reference=program.code,
        difficulty=len(program.active_steps),
    )


def _random_list(rng: random.Random, longest: int) -> list[int]:
    return [rng.randrange(13) for _ in range(rng.randint(3, longest))]


def _told_apart(program: SyntheticProgram, lists: list[list[int]], rng: random.Random) -> list[list[int]]:
    """Returns the lists, with one more for each shorter chain that has the same results on all of them."""
    for field in fields(program):
        lacking = replace(program, **{field.name: None})
        if lacking.active_steps != program.active_steps and all(lacking.run(xs) == program.run(xs) for xs in lists):
            drawn = (_random_list(rng, 10) for _ in range(MAX_LISTS))
            lists = [*lists, *islice((xs for xs in drawn if lacking.run(xs) != program.run(xs)), 1)]
    return lists
