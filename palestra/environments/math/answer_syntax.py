"""Parses answers in Python's notation, nested lists and formulas, into plain data. Evaluates nothing.

The grammar is a whitelist: an answer with any other character or name does not parse (None). A formula becomes a tree
of JSON lists: ["number", "2.5"], ["name", "x"], ["sin", tree], ["**", base, exponent], ["negative", tree],
["terms", ["+", tree], ["-", tree], ...] and ["factors", ["*", tree], ["/", tree], ...].
"""

from __future__ import annotations

import operator
import re
import string
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

Formula = list[Any]

MAX_TOKENS = 4000
MAX_DEPTH = 50  # nested brackets, signs and powers
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


def parse_value(text: str) -> Any:
    """Returns the nested list, string or number that `text` denotes; None if it does not parse. Tuples become lists."""
    return _read(text, _Reader.values)


def parse_formula(text: str) -> Formula | None:
    """Returns the formula that `text` denotes; None if it does not parse.

    A formula consists of numbers, letters, + - * / **, parentheses and the functions in `FUNCTIONS`.
    """
    tree: Formula | None = _read(text, _Reader.sum)
    return tree


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
    kind, *parts = formula
    if kind == "number":
        return [int(parts[0])]
    return [number for part in parts if isinstance(part, list) for number in formula_integers(part)]


def _read(text: str, rule: Callable[[_Reader], Any]) -> Any:
    try:
        reader = _Reader(_tokens(text))
        found = rule(reader)
        reader.expect("")
    except _ParseError:
        return None
    return found


def _tokens(text: str) -> list[str]:
    tokens, place, end = list[str](), 0, len(text.rstrip())
    while place < end:
        found = _TOKEN.match(text, place)
        if not found or len(tokens) >= MAX_TOKENS:
            raise _ParseError
        tokens.append(found[1])
        place = found.end()
    return tokens


class _Reader:
    """Recursive-descent parser over `tokens`, with Python's operator precedence."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self.tokens, self.place, self.depth = [*tokens, ""], 0, 0

    @property
    def next(self) -> str:
        return self.tokens[self.place]

    def take(self) -> str:
        self.place += 1
        return self.tokens[self.place - 1]

    def expect(self, token: str) -> None:
        if self.next != token:
            raise _ParseError
        self.place += 1

    def inside(self, rule: Callable[[], Any]) -> Any:
        """Returns the tree that `rule` parses, one nesting level deeper."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise _ParseError
        found = rule()
        self.depth -= 1
        return found

    # ---- lists

    def values(self) -> Any:
        first = self.value()
        return first if not self.next else [first, *self.items("", after_comma=True)]

    def value(self) -> Any:
        token = self.take()
        if token in ("[", "("):
            return self.inside(lambda: self.items("]" if token == "[" else ")"))
        if token and token[0] in "'\"":
            return token[1:-1]
        if token == "-":
            return -_number(self.take())
        return _number(token)

    def items(self, end: str, *, after_comma: bool = False) -> list[Any]:
        """Parses comma-separated values up to `end` and consumes it; an empty `end` is the end of the text."""
        found: list[Any] = []
        if after_comma:
            self.expect(",")
        while self.next != end:
            found.append(self.value())
            if self.next != end:
                self.expect(",")
        if end:
            self.take()
        return found

    # ---- formulas

    def sum(self) -> Formula:
        return self.chain("terms", "+-", self.product)

    def product(self) -> Formula:
        return self.chain("factors", "*/", self.signed_power)

    def chain(self, kind: str, signs: str, part: Callable[[], Formula]) -> Formula:
        first = part()
        chained: Formula = [kind, [signs[0], first]]
        while self.next and self.next in signs:
            chained.append([self.take(), part()])
        return chained if len(chained) > 2 else first

    def signed_power(self) -> Formula:
        if self.next not in ("+", "-"):
            return self.power()
        sign = self.take()
        inner: Formula = self.inside(self.signed_power)
        return ["negative", inner] if sign == "-" else inner

    def power(self) -> Formula:
        base = self.atom()
        if self.next != "**":
            return base
        self.take()
        return ["**", base, self.inside(self.signed_power)]

    def atom(self) -> Formula:
        token = self.take()
        if token == "(":
            return self.bracketed_sum()
        if token[:1].isdigit():
            return ["number", token]
        if token in FUNCTIONS:
            self.expect("(")
            return [token, self.bracketed_sum()]
        if token in VARIABLE_NAMES:
            return ["name", token]
        raise _ParseError

    def bracketed_sum(self) -> Formula:
        inner: Formula = self.inside(self.sum)
        self.expect(")")
        return inner


def _number(token: str) -> int | float:
    if not token[:1].isdigit() or len(token) > MAX_DIGITS:
        raise _ParseError
    return float(token) if "." in token else int(token)


def _exact(formula: Formula) -> Fraction:
    kind, *parts = formula
    if kind == "number" and parts[0].isdigit() and len(parts[0]) <= MAX_DIGITS:
        return Fraction(parts[0])
    if kind == "negative":
        return -_exact(parts[0])
    if kind == "**":
        return _check_bits(_power(*map(_exact, parts)))
    if kind not in ("terms", "factors"):
        raise _ParseError
    value = Fraction(kind == "factors")
    for sign, part in parts:
        value = _check_bits(_EXACT[sign](value, _exact(part)))
    return value


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or abs(exponent) > MAX_EXPONENT:
        raise _ParseError
    return base ** int(exponent)


def _check_bits(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise _ParseError
    return value
