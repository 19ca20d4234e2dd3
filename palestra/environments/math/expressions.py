"""Arithmetic expression trees: exact values, infix and Python notation; and the value of Python arithmetic."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from palestra.envs.support.safe_eval import ARITHMETIC, AllowedParts, safe_eval

ExpressionTree = int | tuple[str, "ExpressionTree", "ExpressionTree"]  # ("+", 12, ("*", 7, 2))
PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2, "^": 3}  # operator precedence
MAX_MAGNITUDE = 10**18  # absolute value of results in `evaluate`

_EXACT: dict[str, Callable[[Fraction, Fraction], Fraction]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "^": operator.pow,
}


def _check_magnitude(number: Any) -> Any:
    if abs(number) > MAX_MAGNITUDE:
        raise ValueError("too large")
    return number


_PYTHON = AllowedParts(
    ARITHMETIC
    | {
        ast.FloorDiv: operator.floordiv,
        ast.Mod: operator.mod,
        ast.Lt: operator.lt,
        ast.Gt: operator.gt,
        ast.Eq: operator.eq,
        ast.NotEq: operator.ne,
    },
    _check_magnitude,
)


def evaluate_tree(tree: ExpressionTree) -> Fraction:
    """Returns the exact value of a tree. Raises ZeroDivisionError if it divides by zero."""
    if isinstance(tree, int):
        return Fraction(tree)
    sign, left, right = tree
    return Fraction(_EXACT[sign](evaluate_tree(left), evaluate_tree(right)))


def to_infix(tree: ExpressionTree) -> str:
    """Returns a tree in infix notation with the necessary brackets: "12 + 7 * (3 - 1)"."""
    return _infix(tree, {sign: f" {sign} " for sign in "+-*/"} | {"^": "^"})


def canonical_form(tree: ExpressionTree) -> str:
    """Returns a text that is equal for trees that differ only in the order or grouping of sums and products."""
    if isinstance(tree, int):
        return str(tree)
    sign, left, right = tree
    if sign == "*":
        return f"(* {' '.join(sorted(_factors(tree)))})"
    if sign in "+-":
        return f"({' '.join(sorted(_terms(tree, '+')))})"
    return f"({sign} {canonical_form(left)} {canonical_form(right)})"


def to_python(tree: ExpressionTree) -> str:
    """Returns a tree as a Python expression of the same value: with //, or with `Fraction` if need be."""
    if divides_evenly(tree):
        return _infix(tree, {"+": "+", "-": "-", "*": "*", "/": "//", "^": "**"})
    return _infix(tree, {"+": "+", "-": "-", "*": "*", "/": "/", "^": "**"}, leaf="Fraction({})")


def divides_evenly(tree: ExpressionTree) -> bool:
    """True if no division in a tree leaves a remainder."""
    if isinstance(tree, int):
        return True
    return evaluate_tree(tree).denominator == 1 and divides_evenly(tree[1]) and divides_evenly(tree[2])


def _factors(tree: ExpressionTree) -> list[str]:
    if isinstance(tree, int) or tree[0] != "*":
        return [canonical_form(tree)]
    return [*_factors(tree[1]), *_factors(tree[2])]


def _terms(tree: ExpressionTree, sign: str) -> list[str]:
    """Returns the signed terms of a flattened sum: +5, -3 and +2 for 5 - (3 - 2)."""
    if isinstance(tree, int) or tree[0] not in "+-":
        return [f"{sign}{canonical_form(tree)}"]
    other = sign
    if tree[0] == "-":
        other = {"+": "-", "-": "+"}[sign]
    return [*_terms(tree[1], sign), *_terms(tree[2], other)]


def _infix(tree: ExpressionTree, signs: Mapping[str, str], leaf: str = "{}") -> str:
    if isinstance(tree, int):
        if tree < 0 and leaf == "{}":
            return f"({tree})"
        return leaf.format(tree)
    sign, left, right = tree
    before = _infix(left, signs, leaf)
    after = _infix(right, signs, leaf if sign != "^" else "{}")
    if not isinstance(left, int) and (PRECEDENCE[left[0]] < PRECEDENCE[sign] or sign == "^"):
        before = f"({before})"
    if not isinstance(right, int) and (
        PRECEDENCE[right[0]] < PRECEDENCE[sign] or (PRECEDENCE[right[0]] == PRECEDENCE[sign] and sign != "+")
    ):
        after = f"({after})"
    return f"{before}{signs[sign]}{after}"


def evaluate(source: str, names: Mapping[str, int] | None = None) -> int | float | bool:
    """Returns the value of a Python expression of numbers, `names` and + - * / // % < > == !=, as Python computes it.

    Raises SyntaxError and ZeroDivisionError as Python does, and ValueError if it holds anything else or an intermediate
    result exceeds 10^18.
    """
    return safe_eval(source, _PYTHON, names or {})
