"""Parses answers in Python's notation, nested lists and formulas, into plain data. Evaluates nothing.

The grammar is a whitelist: an answer with any other character or name does not parse (None). What is left is parsed by
Python. A formula becomes a tree
of JSON lists: ["number", "2.5"], ["name", "x"], ["sin", tree], ["**", base, exponent], ["negative", tree],
["terms", ["+", tree], ["-", tree], ...] and ["factors", ["*", tree], ["/", tree], ...].
"""

from __future__ import annotations

import ast
import operator
import re
import string
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

Formula = list[Any]

MAX_TOKENS = 4000
MAX_DEPTH = 50  # nested brackets; and half of the nested operations
MAX_EXPONENT = 64  # of powers in `evaluate_exact`
MAX_BITS = 4096  # of intermediate results in `evaluate_exact`
MAX_DIGITS = 1000  # of a number literal

FUNCTIONS = frozenset(
    "sin cos tan sec csc cot asin acos atan sinh cosh tanh exp log ln sqrt abs Abs".split()  # noqa: SIM905
)
VARIABLE_NAMES = frozenset(string.ascii_letters) - frozenset("INOQS") | {"pi"}  # SymPy gives these five another meaning

_SPACE = r"[ \t\r\n]*"
_STRING = r"'[^'\\\n]*'|\"[^\"\\\n]*\""
_NUMBER = r"[0-9]+(?:\.[0-9]+)?"
_TOKEN = re.compile(rf"{_SPACE}({_STRING}|{_NUMBER}|[A-Za-z]+|\*\*|[-+*/()\[\],])")

_EXACT: dict[str, Callable[[Fraction, Fraction], Fraction]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}


class _ParseError(Exception):
    """Raised for text outside the grammar or beyond a limit."""


_SYNTAX_ERRORS = (_ParseError, SyntaxError, ValueError, TypeError, RecursionError, MemoryError)


def parse_value(text: str) -> Any:
    """Returns the nested list, string or number that `text` denotes; None if it does not parse. Tuples become lists."""
    try:
        return _as_lists(ast.literal_eval(_parse(text)[0]))
    except _SYNTAX_ERRORS:
        return None


def parse_formula(text: str) -> Formula | None:
    """Returns the formula that `text` denotes; None if it does not parse.

    A formula consists of numbers, letters, + - * / **, parentheses and the functions in `FUNCTIONS`.
    """
    try:
        return _formula(*_parse(text))
    except _SYNTAX_ERRORS:
        return None


def evaluate_exact(formula: Formula) -> Fraction | None:
    """Returns the exact value of a formula of integers.

    None if it holds anything else, has no value, or an intermediate result exceeds `MAX_BITS`.
    """
    try:
        return _exact(formula)
    except (_ParseError, ZeroDivisionError):
        return None


def formula_integers(formula: Formula) -> list[int]:
    """Returns the numbers in a formula of integers, in the order they are written."""
    kind, *arguments = formula
    if kind == "number":
        return [int(arguments[0])]
    return [number for argument in arguments if isinstance(argument, list) for number in formula_integers(argument)]


def _parse(text: str) -> tuple[ast.expr, str]:
    """Returns Python's syntax tree of a text of known tokens, and the source that it was parsed from."""
    tokens = _tokens(text)
    if not tokens:
        raise _ParseError
    source = f"({' '.join(tokens)})"  # brackets, so that "1, 2" is a tuple
    return ast.parse(source, mode="eval").body, source


def _tokens(text: str) -> list[str]:
    """Returns the tokens of a text. Raises _ParseError for any other text, for operands without an operator between
    them, such as those that Python reads as `1e5` or `b"x"`, and for nesting that is too deep."""
    tokens = list[str]()
    place = depth = 0
    end = len(text.rstrip())
    while place < end:
        found = _TOKEN.match(text, place)
        if not found or len(tokens) >= MAX_TOKENS:
            raise _ParseError
        token = found[1]
        depth += (token in "([") - (token in ")]")
        is_known = token in FUNCTIONS | VARIABLE_NAMES if token.isalpha() else len(token) <= MAX_DIGITS
        if not is_known or not 0 <= depth <= MAX_DEPTH or (tokens and _is_operand(tokens[-1]) and _is_operand(token)):
            raise _ParseError
        tokens.append(token)
        place = found.end()
    return tokens


def _is_operand(token: str) -> bool:
    return token[0].isalnum() or token[0] in "'\""


def _as_lists(value: Any) -> Any:
    return [_as_lists(part) for part in value] if isinstance(value, list | tuple) else value


def _formula(node: ast.expr, source: str, depth: int = 0) -> Formula:
    if depth > 2 * MAX_DEPTH:
        raise _ParseError
    inner = partial(_formula, source=source, depth=depth + 1)
    match node:
        case ast.Constant(value=int() | float()):
            return ["number", source[node.col_offset : node.end_col_offset]]
        case ast.Name(id=name) if name in VARIABLE_NAMES:
            return ["name", name]
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return inner(operand)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return ["negative", inner(operand)]
        case ast.BinOp(op=ast.Pow(), left=base, right=exponent):
            return ["**", inner(base), inner(exponent)]
        case ast.BinOp(op=ast.Add() | ast.Sub()):
            return ["terms", *_chain(node, {ast.Add: "+", ast.Sub: "-"}, inner)]
        case ast.BinOp(op=ast.Mult() | ast.Div()):
            return ["factors", *_chain(node, {ast.Mult: "*", ast.Div: "/"}, inner)]
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in FUNCTIONS:
            return [name, inner(argument)]
    raise _ParseError


def _chain(node: ast.expr, signs: dict[type, str], inner: Callable[[ast.expr], Formula]) -> list[Formula]:
    """Returns the operands of operators of one precedence, each with the sign before it."""
    chained: list[Formula] = []
    while isinstance(node, ast.BinOp) and type(node.op) in signs:
        chained.append([signs[type(node.op)], inner(node.right)])
        node = node.left
    first = next(iter(signs.values()))
    return [[first, inner(node)], *reversed(chained)]


def _exact(formula: Formula) -> Fraction:
    kind, *parts = formula
    if kind == "number" and parts[0].isdigit() and len(parts[0]) <= MAX_DIGITS:
        return Fraction(parts[0])
    if kind == "negative":
        return -_exact(parts[0])
    if kind == "**":
        return _check_bound(_power(*map(_exact, parts)))
    if kind not in ("terms", "factors"):
        raise _ParseError
    value = Fraction(kind == "factors")
    for sign, part in parts:
        value = _check_bound(_EXACT[sign](value, _exact(part)))
    return value


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or abs(exponent) > MAX_EXPONENT:
        raise _ParseError
    return base ** int(exponent)


def _check_bound(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise _ParseError
    return value
