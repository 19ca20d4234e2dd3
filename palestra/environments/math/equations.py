"""Linear equations and inequalities in one letter: "3x + 4 = 10", "5 - 2x < 11"."""

from __future__ import annotations

import math
import random
from fractions import Fraction

from palestra.environments.math.problem import Problem

LETTERS = "xyznkt"
FLIPPED_SIGNS = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}
MAX_DENOMINATOR = 12  # largest denominator of a solution

EquationSide = tuple[int, int, int]  # a, b, c of a(x + b) + c; if a is 0, the constant c
LinearForm = tuple[int, int]  # a, c of ax + c


def equation_problem(rng: random.Random, difficulty: int) -> Problem:
    """Draws a linear equation.

    Difficulty 1: one step. 2: two. 3: the letter on both sides, or brackets. 4: brackets, and solutions that may be
    fractions. 5: the letter in two fractions.
    """
    letter = rng.choice(LETTERS)
    if difficulty == 5:
        return _fractions(rng, letter)
    left, right = _sides(rng, difficulty)
    sides = [left, right]
    if rng.random() >= 0.7:
        sides.reverse()
    text = " = ".join(_write_side(side, letter) for side in sides)
    key = " = ".join(sorted(_write_side(side, "x") for side in sides))
    return _build_problem(text, letter, _line(left), _line(right), f"equation {key}")


def inequality_problem(rng: random.Random, difficulty: int) -> Problem:
    """Draws a linear inequality; negative factors reverse its sign.

    Difficulty 1: one step. 2: two. 3: the letter on both sides, or brackets. 4: brackets, and bounds that may be
    fractions. 5: the number of integers between two bounds.
    """
    letter = rng.choice(LETTERS)
    sign = rng.choice(tuple(FLIPPED_SIGNS))
    if difficulty == 5:
        return _between(rng, letter)
    left, right = _sides(rng, difficulty)
    text = f"{_write_side(left, letter)} {sign} {_write_side(right, letter)}"
    key = f"{_write_side(left, 'x')} {sign} {_write_side(right, 'x')}"
    if sign in (">", ">="):  # normalised to < and <=, so that mirrored inequalities share a key
        key = f"{_write_side(right, 'x')} {FLIPPED_SIGNS[sign]} {_write_side(left, 'x')}"
    (a, c), (d, f) = _line(left), _line(right)
    order = sign
    if a <= d:
        order = FLIPPED_SIGNS[sign]
    program = f'f"{letter} {order} {{{_quotient(f, c, a, d)}}}"'
    if _bound((a, c), (d, f)).denominator > 1:
        program = f"from fractions import Fraction\nprint({program})"
    question = (
        f"Solve for {letter}: {text}. Answer in the form {letter} < 3, {letter} > 3, {letter} <= 3 or {letter} >= 3."
    )
    answer = f"{letter} {order} {_bound((a, c), (d, f))}"
    return Problem(question, answer, text, program, f"inequality {key}", needs_computation=True)


def _sides(rng: random.Random, difficulty: int) -> tuple[EquationSide, EquationSide]:
    """Draws two sides with one solution: an integer, at 4 also a fraction, its denominator small."""
    max_denominator = MAX_DENOMINATOR if difficulty == 4 else 1
    while True:
        left, right = _draw_sides(rng, difficulty)
        if _line(left)[0] == _line(right)[0]:
            continue
        if _bound(_line(left), _line(right)).denominator <= max_denominator:
            return left, right


def _draw_sides(rng: random.Random, difficulty: int) -> tuple[EquationSide, EquationSide]:
    """Draws two sides. Up to difficulty 3 the right one's constant makes the solution an integer."""
    if difficulty == 1:
        x = rng.randint(1, 40)
        left: EquationSide = rng.choice(((1, 0, _number(rng, 50)), (rng.randint(2, 12), 0, 0)))
        return left, (0, 0, left[0] * x + left[2])
    x = rng.randint(-15, 15)
    if difficulty == 2:
        left = (_factor(rng, 12), 0, _number(rng, 50))
        return left, (0, 0, left[0] * x + left[2])
    if difficulty == 3 and rng.random() < 0.5:
        left = (_factor(rng, 9), _number(rng, 12), 0)
        return left, (0, 0, left[0] * (x + left[1]))
    if difficulty == 3:
        left = (_factor(rng, 12), 0, _number(rng, 50))
        a = _factor(rng, 12)
        return left, (a, 0, left[0] * x + left[2] - a * x)
    left = (_factor(rng, 9), _number(rng, 12), _number(rng, 20))
    return left, (_factor(rng, 9), _number(rng, 12), rng.choice((0, _number(rng, 20))))


def _factor(rng: random.Random, most: int) -> int:
    return rng.choice((-1, 1, 1)) * rng.randint(2, most)


def _number(rng: random.Random, most: int) -> int:
    return rng.choice((-1, 1)) * rng.randint(1, most)


def _line(side: EquationSide) -> LinearForm:
    a, b, c = side
    return a, a * b + c


def _bound(left: LinearForm, right: LinearForm) -> Fraction:
    """Returns the solution: the value at which both sides are equal."""
    return Fraction(right[1] - left[1], left[0] - right[0])


def _quotient(f: int, c: int, a: int, d: int) -> str:
    """Returns a Python expression for (f - c) / (a - d), exact."""
    over = _difference(f, c)
    under = _difference(a, d)
    if (f - c) % (a - d):
        return f"Fraction({over},{under})"
    if a - d == 1:
        return over
    if c:
        over = f"({over})"
    if d:
        under = f"({under})"
    return f"{over}//{under}"


def _difference(one: int, other: int) -> str:
    if other == 0:
        return str(one)
    return f"{one}{-other:+d}"


def _build_problem(text: str, letter: str, left: LinearForm, right: LinearForm, key: str) -> Problem:
    bound = _bound(left, right)
    program = _quotient(right[1], left[1], left[0], right[0])
    if bound.denominator > 1:
        program = f"from fractions import Fraction\nprint({program})"
    return Problem(f"Solve for {letter}: {text}.", str(bound), text, program, key, needs_computation=True)


def _write_side(side: EquationSide, letter: str) -> str:
    a, b, c = side
    if a == 0:
        return str(c)
    factor = {1: "", -1: "-"}.get(a, str(a))
    if b:
        letter = f"({letter}{_write_addend(b)})"
    return f"{factor}{letter}{_write_addend(c)}"


def _write_addend(number: int) -> str:
    if number == 0:
        return ""
    sign = "+" if number > 0 else "-"
    return f" {sign} {abs(number)}"


def _fractions(rng: random.Random, letter: str) -> Problem:
    """Draws (x + b)/m + (x + d)/n = e, with m and n different."""
    while True:
        m, n = sorted(rng.sample(range(2, 10), 2))
        b = _number(rng, 9)
        d = _number(rng, 9)
        e = _number(rng, 12)
        left = (m + n, n * b + m * d)
        right = (0, e * m * n)
        if _bound(left, right).denominator <= MAX_DENOMINATOR:
            text = f"({letter}{_write_addend(b)})/{m} + ({letter}{_write_addend(d)})/{n} = {e}"
            return _build_problem(text, letter, left, right, f"equation fractions {m} {n} {b} {d} {e}")


def _between(rng: random.Random, letter: str) -> Problem:
    """Draws low < ax + c <= high, each sign < or <=, and asks for the number of integers x."""
    a = _factor(rng, 9)
    c = _number(rng, 30)
    signs = (rng.choice(("<", "<=")), rng.choice(("<", "<=")))
    low = rng.randint(-80, 60)
    high = low + rng.randint(15, 120)
    least = low if signs[0] == "<=" else low + 1
    most = high if signs[1] == "<=" else high - 1
    ends = sorted((Fraction(least - c, a), Fraction(most - c, a)))
    count = math.floor(ends[1]) - math.ceil(ends[0]) + 1
    text = f"{low} {signs[0]} {_write_side((a, 0, c), letter)} {signs[1]} {high}"
    program = f"sum({low} {signs[0]} {a}*{letter}{c:+d} {signs[1]} {high} for {letter} in range(-200,200))"
    question = f"How many integers {letter} are there with {text}?"
    key = f"inequality {low} {signs[0]} {a} {c} {signs[1]} {high}"
    return Problem(question, str(count), f"how many {text}", program, key, needs_computation=True)
