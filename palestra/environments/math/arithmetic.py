"""Arithmetic problems: "12 + 7 * 2". From two operands at difficulty 1 to six, with powers and fractions, at 5."""

from __future__ import annotations

import random

from palestra.environments.math.expressions import (
    ExpressionTree,
    canonical_form,
    divides_evenly,
    evaluate_tree,
    to_infix,
    to_python,
)
from palestra.environments.math.problem import Problem

OPERAND_COUNTS = {3: (3, 4), 4: (4, 5), 5: (5, 6)}  # numbers in the expression, by difficulty
MAX_RESULTS = {3: 10**4, 4: 10**6, 5: 10**6}  # absolute value of the result, by difficulty


def arithmetic_problem(rng: random.Random, difficulty: int, *, sums: bool = True) -> Problem:
    """Draws an arithmetic problem; without `sums` none that only adds, as those of `sum_problem` do.

    Difficulty 1: two numbers below 100 (a product of two below 10). 2: three numbers, at most one product. 3: brackets,
    and divisions without remainder. 4: numbers below 1,000, some negative. 5: powers, and results that are fractions.
    """
    while True:
        tree = _tree(rng, difficulty)
        if _fits(tree, difficulty) and (sums or not _only_adds(tree)):
            return problem_from_tree(
                tree, f"Work out {to_infix(tree)}.", to_infix(tree), f"arithmetic {canonical_form(tree)}"
            )


def sum_problem(rng: random.Random, difficulty: int) -> Problem:
    """Draws a sum of `difficulty` + 1 numbers from 2 to 99, in any order of one split."""
    numbers = [rng.randint(2, 99) for _ in range(difficulty + 1)]
    short = " + ".join(map(str, numbers))
    key = f"sum {sorted(numbers)}"
    program = short.replace(" ", "")
    return Problem(f"What is {short}?", str(sum(numbers)), short, program, key, needs_computation=True)


def problem_from_tree(tree: ExpressionTree, question: str, short: str, key: str) -> Problem:
    """Returns the problem whose answer is the value of `tree`."""
    program = to_python(tree)
    if not divides_evenly(tree):
        program = f"from fractions import Fraction\nprint({program})"
    return Problem(question, str(evaluate_tree(tree)), short, program, key, needs_computation=True)


def _tree(rng: random.Random, difficulty: int) -> ExpressionTree:
    if difficulty == 1:
        sign = rng.choice("++--*")
        most = 9 if sign == "*" else 99
        return sign, rng.randint(0, most), rng.randint(0, most)
    if difficulty == 2:
        return _triple(rng)
    return _grow_tree(rng, rng.choice(OPERAND_COUNTS[difficulty]), difficulty)


def _triple(rng: random.Random) -> ExpressionTree:
    if rng.random() < 0.2:
        return "*", rng.randint(2, 9), rng.randint(10, 99)
    one = rng.choice("+-")
    two = rng.choice("+-")
    if rng.random() < 0.5:
        return two, (one, rng.randint(0, 99), rng.randint(0, 99)), rng.randint(0, 99)
    product: ExpressionTree = ("*", rng.randint(2, 9), rng.randint(2, 9))
    single = rng.randint(0, 99)
    return (one, single, product) if rng.random() < 0.5 else (one, product, single)


def _grow_tree(rng: random.Random, operands: int, difficulty: int) -> ExpressionTree:
    """Returns a tree of `operands` numbers, split at random; a pair may be a division, a single number a power."""
    if operands == 1:
        return _operand(rng, difficulty)
    if operands == 2 and rng.random() < 0.3:
        by = rng.randint(2, 12)
        if difficulty == 5 and rng.random() < 0.5:
            return "/", rng.randint(1, 50), by
        return "/", by * rng.randint(2, 30), by
    left = rng.randint(1, operands - 1)
    return rng.choice("+-*"), _grow_tree(rng, left, difficulty), _grow_tree(rng, operands - left, difficulty)


def _operand(rng: random.Random, difficulty: int) -> ExpressionTree:
    if difficulty == 5 and rng.random() < 0.2:
        return "^", rng.randint(2, 12), rng.randint(2, 3)
    if difficulty == 3:
        return rng.randint(2, 50)
    number = rng.choice((rng.randint(2, 20), rng.randint(2, 20), rng.randint(21, 999)))
    return -number if rng.random() < 0.15 else number


def _only_adds(tree: ExpressionTree) -> bool:
    return isinstance(tree, int) or (tree[0] == "+" and all(map(_only_adds, tree[1:])))


def _fits(tree: ExpressionTree, difficulty: int) -> bool:
    """True if the result is not negative (difficulty 1, 2), or within bounds, as is its denominator."""
    worth = evaluate_tree(tree)
    if difficulty <= 2:
        return worth >= 0
    return abs(worth) <= MAX_RESULTS[difficulty] and worth.denominator <= 1000
