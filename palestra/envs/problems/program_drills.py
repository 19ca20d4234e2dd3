"""Synthetic programs for small models: one short expression of a list `xs`, specified in a few words, graded by rules.

"keep even each times 3 then plus 2" is `[x*3+2 for x in xs if x%2==0]`. An instance is a chain of up to five parts:
a filter, two arithmetic steps, an order or a slice, a sum or a count. Its difficulty is their number.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

from palestra.envs.problems.programs import Part, ProgramProblem
from palestra.envs.problems.trials import Case
from palestra.envs.text.splits import first_of_split

TESTS = 8  # hidden tests of a problem
TRIES = 20_000  # draws per problem
MOST, LARGEST = 100, 10**6  # limits for a tester's list: its length, and the absolute value of its numbers
Numbers = Sequence[int]


class Piece(NamedTuple):
    """One part: its text, short and long, its code, and its function. `{}` in `code` stands for the operand."""

    few: str
    many: str
    code: str
    does: Callable[[Any], Any]


def _by(operation: Callable[[Any, int], Any], k: int) -> Callable[[Any], Any]:
    return lambda x: operation(x, k)


def _keeps() -> list[Piece]:
    """Returns the filters."""
    even = Piece("even", "even", "{}%2==0", lambda x: x % 2 == 0)
    odd = Piece("odd", "odd", "{}%2==1", lambda x: x % 2 == 1)
    above = [Piece(f"above {k}", f"greater than {k}", f"{{}}>{k}", _by(operator.gt, k)) for k in range(1, 10)]
    below = [Piece(f"below {k}", f"less than {k}", f"{{}}<{k}", _by(operator.lt, k)) for k in range(2, 10)]
    return [even, odd, *above, *below]


def _firsts() -> list[Piece]:
    """Returns the first arithmetic steps."""
    times = [Piece(f"times {k}", f"multiply it by {k}", f"{{}}*{k}", _by(operator.mul, k)) for k in range(2, 10)]
    return [*times, Piece("squared", "square it", "{}**2", _by(operator.pow, 2))]


def _seconds() -> list[Piece]:
    """Returns the second arithmetic steps."""
    plus = [Piece(f"plus {k}", f"add {k}", f"{{}}+{k}", _by(operator.add, k)) for k in range(1, 10)]
    minus = [Piece(f"minus {k}", f"subtract {k}", f"{{}}-{k}", _by(operator.sub, k)) for k in range(1, 10)]
    return [*plus, *minus]


def _orders() -> list[Piece]:
    """Returns slices and orders."""
    first = [Piece(f"first {k}", f"take the first {k}", f"{{}}[:{k}]", _by(_first, k)) for k in (1, 2, 3)]
    last = [Piece(f"last {k}", f"take the last {k}", f"{{}}[-{k}:]", _by(_last, k)) for k in (1, 2, 3)]
    turned = Piece("reversed", "reverse their order", "{}[::-1]", lambda made: made[::-1])
    return [*first, *last, turned, Piece("sorted", "sort them, smallest first", "sorted({})", sorted)]


def _first(made: list[int], k: int) -> list[int]:
    return made[:k]


def _last(made: list[int], k: int) -> list[int]:
    return made[-k:]


def _ends() -> list[Piece]:
    """Returns the reductions."""
    return [
        Piece("sum", "add them all up", "sum({})", sum),
        Piece("count", "say how many there are", "len({})", len),
    ]


SLOTS: tuple[list[Piece], ...] = (_keeps(), _firsts(), _seconds(), _orders(), _ends())


@dataclass(frozen=True)
class Drill:
    """A chain of parts, at most one for each slot."""

    keep: Piece | None
    first: Piece | None
    second: Piece | None
    order: Piece | None
    end: Piece | None

    @property
    def parts(self) -> list[Piece]:
        return [part for part in (self.keep, self.first, self.second, self.order, self.end) if part]

    @property
    def short(self) -> str:
        steps = " then ".join(part.few for part in (self.first, self.second) if part)
        said = [f"keep {self.keep.few}" if self.keep else "", f"each {steps}" if steps else ""]
        return " ".join(filter(None, [*said, *(part.few for part in (self.order, self.end) if part)]))

    @property
    def question(self) -> str:
        steps = " and then ".join(part.many for part in (self.first, self.second) if part)
        said = [
            f"keep only those that are {self.keep.many}" if self.keep else "",
            f"for each, {steps}" if steps else "",
        ]
        tasks = [*filter(None, said), *(part.many for part in (self.order, self.end) if part)]
        return f"`xs` is a list of integers. Start from its numbers: {'; then '.join(tasks)}."

    @property
    def code(self) -> str:
        written, each = "xs", "x"
        for part in filter(None, (self.first, self.second)):
            each = part.code.format(each)
        if each != "x" or self.keep:
            condition = f" if {self.keep.code.format('x')}" if self.keep else ""
            written = f"[{each} for x in xs{condition}]"
        for part in filter(None, (self.order, self.end)):
            written = part.code.format(written)
        return written

    def of(self, xs: Numbers) -> Any:
        """Returns the result of the chain for a list."""
        made = [x for x in xs if not self.keep or self.keep.does(x)]
        for step in filter(None, (self.first, self.second)):
            made = [step.does(x) for x in made]
        for part in filter(None, (self.order, self.end)):
            made = part.does(made)
        return made

    def gives(self, xs: Any) -> Any:
        """Returns the result for an untrusted input: None if `xs` is no list of a few small integers."""
        few = isinstance(xs, list) and len(xs) <= MOST and all(type(x) is int and abs(x) <= LARGEST for x in xs)
        return self.of(xs) if few else None


def draw_drill(seed: int, part: Part, grades: Sequence[int]) -> Drill:
    """Returns the program of split `part` for `seed`: first a difficulty is drawn uniformly from `grades`, then its
    parts.

    Raises ValueError if 20,000 draws contain none.
    """
    rng = random.Random(f"drill {seed}")
    draws = (_propose(rng, rng.choice(grades)) for _ in range(TRIES))
    lacking = f'no drill of split "{part}" in {TRIES} draws of difficulty {", ".join(map(str, grades))}'
    return first_of_split(draws, part, lambda drill: drill.short, lacking)


def _propose(rng: random.Random, grade: int) -> Drill:
    filled = set(rng.sample(range(len(SLOTS)), grade))
    return Drill(*(rng.choice(pieces) if slot in filled else None for slot, pieces in enumerate(SLOTS)))


@lru_cache(maxsize=16_384)
def drill_problem(drill: Drill) -> ProgramProblem:
    """Returns the chain as a problem. Its tests are deterministic."""
    rng = random.Random(f"tests {drill.short}")
    lists = [[rng.randrange(13) for _ in range(rng.randint(3, 6))] for _ in range(TESTS - 1)]
    tests = tuple(Case(f"({xs!r},)", repr(drill.of(xs))) for xs in [*lists, []])
    return ProgramProblem(
        id=drill.short,
        question=drill.question,
        short=drill.short,
        key=drill.short,
        kind="expression",
        tests=tests,
        reference=drill.code,
        difficulty=len(drill.parts),
    )


def all_drills(grades: Sequence[int]) -> list[Drill]:
    """Returns every chain of these difficulties."""
    chains = (Drill(*pieces) for pieces in product(*([None, *slot] for slot in SLOTS)))
    return [drill for drill in chains if len(drill.parts) in grades]
