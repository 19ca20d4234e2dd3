"""Tasks without a library: large sums, files to read and write, and work for a program."""

from __future__ import annotations

import math
import random
from bisect import bisect_left, bisect_right
from functools import cache
from itertools import chain

from palestra.core.chat import ToolCall
from palestra.environments.tools.calculator import evaluate
from palestra.environments.tools.tasks import ToolRequirement, ToolTask, calculation, file_content

MAX_PRIME = 100_000
ITEMS = (  # noqa: SIM905
    "anchors barrels candles drums envelopes feathers gloves hammers inkpots jars kettles lanterns mirrors nails oars "
    "paddles quills ropes saddles tiles umbrellas vases whistles yokes zithers bolts chisels ladders masts pulleys"
).split()


def compute_task(rng: random.Random) -> ToolTask:
    """Draws arithmetic with large operands, most of them of five to nine digits."""
    a, b, c = (rng.randint(10 ** rng.randint(5, 7), 10**8) for _ in range(3))
    small = rng.randint(11, 60)
    modulus = rng.randint(10_000, 99_999)
    expression = rng.choice((
        f"{a} * {b} + {c}",
        f"({a} + {b}) * {c}",
        f"{a} * {modulus} - {b} * {small}",
        f"{a} ** {small} % {modulus}",
        f"{a} * {b} // {modulus}",
    ))  # fmt: skip
    answer = str(evaluate(expression))
    question = f"What is {expression}? (** is a power, % a remainder, // a division rounded down.)"
    needs = ((calculation(expression, answer),),)
    return ToolTask("compute", question, expression, answer, f"compute {expression}", needs)


def files_task(rng: random.Random) -> ToolTask:
    """Draws a task on numbers in files: sum them, find the largest, or write their sum to a file."""
    return rng.choice((_column, _most, _total))(rng)


def _column(rng: random.Random) -> ToolTask:
    rows = _stock(rng, 16)
    text = _table(rows)
    answer = str(sum(rows.values()))
    question = "The file stock.csv lists items and how many of each are in stock. How many items are in stock in all?"
    work = calculation(" + ".join(map(str, rows.values())), answer)
    needs = ((file_content("stock.csv", text),), (work,))
    return ToolTask("files", question, "sum stock.csv", answer, f"files sum {text}", needs, {"stock.csv": text})


def _most(rng: random.Random) -> ToolTask:
    rows = _stock(rng, 26)
    text = _table(rows)
    question = "The file stock.csv lists items and how many of each are in stock. Of which item are there most?"
    answer = max(rows, key=lambda item: rows[item])
    needs = ((file_content("stock.csv", text),),)
    return ToolTask("files", question, "most stock.csv", answer, f"files most {text}", needs, {"stock.csv": text})


def _total(rng: random.Random) -> ToolTask:
    files = {path: [rng.randint(1000, 99_999) for _ in range(6)] for path in ("north.txt", "south.txt")}
    texts = {path: "\n".join(map(str, numbers)) for path, numbers in files.items()}
    numbers = list(chain.from_iterable(files.values()))
    answer = str(sum(numbers))
    question = (
        "The files north.txt and south.txt hold a number in each line. Write the sum of all of them, and nothing else, "
        "to the file total.txt; then say that you are done."
    )
    reads = tuple(file_content(path, text) for path, text in texts.items())
    needs = (reads, (calculation(" + ".join(map(str, numbers)), answer),))
    key = f"files total {texts}"
    return ToolTask(
        "files", question, "north.txt + south.txt to total.txt", answer, key, needs, texts, output_file="total.txt"
    )


def program_task(rng: random.Random) -> ToolTask:
    """Draws a task of hundreds of simple steps."""
    question, short, source, answer = rng.choice((_primes, _digits, _recurrence, _collatz))(rng)
    need = ToolRequirement((str(answer),), (ToolCall("python", {"code": source}),))
    return ToolTask("program", question, short, str(answer), f"program {short}", ((need,),))


ProgramPuzzle = tuple[str, str, str, int]


def _primes(rng: random.Random) -> ProgramPuzzle:
    low = rng.randint(10_000, MAX_PRIME - 2500)
    high = low + rng.randint(800, 2500)
    source = f"print(sum(n for n in range({low}, {high} + 1) if all(n % d for d in range(2, int(n**0.5) + 1))))"
    primes = _all_primes()
    total = sum(primes[bisect_left(primes, low) : bisect_right(primes, high)])
    return f"What is the sum of all primes from {low} to {high}?", f"primes {low} {high}", source, total


@cache
def _all_primes() -> list[int]:
    """Returns all primes up to `MAX_PRIME`, by the sieve of Eratosthenes."""
    sieve = bytearray([1]) * (MAX_PRIME + 1)
    for n in range(2, math.isqrt(MAX_PRIME) + 1):
        if sieve[n]:
            sieve[n * n :: n] = bytes(len(range(n * n, MAX_PRIME + 1, n)))
    return [n for n in range(2, MAX_PRIME + 1) if sieve[n]]


def _digits(rng: random.Random) -> ProgramPuzzle:
    base = rng.randint(3, 97)
    power = rng.randint(1500, 2500)
    source = f"import sys\nsys.set_int_max_str_digits(0)\nprint(sum(map(int, str({base}**{power}))))"
    total = 0
    rest = base**power
    while rest:  # in parts: Python does not convert integers of more than 4,300 digits
        rest, part = divmod(rest, 10**1000)
        total += sum(map(int, str(part)))
    return (
        f"What is the sum of the decimal digits of {base} to the power {power}?",
        f"digits {base} {power}",
        source,
        total,
    )


def _recurrence(rng: random.Random) -> ProgramPuzzle:
    times = rng.randint(200, 400)
    start = rng.randint(2, 999)
    factor = rng.randint(100, 999)
    plus = rng.randint(100, 999)
    modulus = rng.randint(20_000, 99_999)
    x = start
    for _ in range(times):
        x = (factor * x + plus) % modulus
    source = f"x = {start}\nfor _ in range({times}):\n    x = ({factor} * x + {plus}) % {modulus}\nprint(x)"
    question = (
        f"Start with {start}. {times} times, multiply by {factor}, add {plus} and take the remainder of a division by "
        f"{modulus}. Which number do you end with?"
    )
    return question, f"{start} * {factor} + {plus} % {modulus} times {times}", source, x


def _collatz(rng: random.Random) -> ProgramPuzzle:
    low = rng.randint(500, 50_000)
    high = low + rng.randint(20, 60)
    steps = 0
    for start in range(low, high + 1):
        n = start
        while n > 1:
            n = 3 * n + 1 if n % 2 else n // 2
            steps = steps + 1
    source = (
        f"steps = 0\nfor n in range({low}, {high} + 1):\n    while n > 1:\n        n = 3 * n + 1 if n % 2 else n // 2\n"
        "        steps += 1\nprint(steps)"
    )
    question = (
        "From a number n, a step goes to n / 2 if n is even and to 3n + 1 if it is odd. How many steps does it take in "
        f"all to bring each of the numbers from {low} to {high} to 1?"
    )
    return question, f"collatz {low} {high}", source, steps


def _stock(rng: random.Random, size: int) -> dict[str, int]:
    return dict(zip(rng.sample(ITEMS, size), rng.sample(range(1000, 9999), size), strict=True))


def _table(rows: dict[str, int]) -> str:
    return "\n".join(["item,count", *(f"{item},{count}" for item, count in rows.items())])
