"""A calculator for untrusted text, with functions and large integers (see safe_eval.py)."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from palestra.envs.support.safe_eval import ARITHMETIC, AllowedParts, NotAllowed, safe_eval

MAX_EXPRESSION_CHARS = 400  # characters of an expression
MAX_INTEGER_BITS = 4096  # of an integer: about 1,200 digits
MAX_ROUND_DIGITS = 100  # of `round`

Number = int | float

_PARTS = re.compile(r"[A-Za-z]+|[^0-9.,+\-*/%() \t]")
_CONSTANTS: dict[str, float] = {"pi": math.pi, "e": math.e}


def calculator(expression: str) -> str:
    """Works out an arithmetic expression exactly, such as (48211 - 12002) * 3 or sqrt(2) ** 5.

    expression: numbers with + - * / // % ** and brackets, and sqrt abs round floor ceil min max log exp sin cos tan
    """
    return format_number(evaluate(expression))


def evaluate(expression: str) -> Number:
    """Returns the value of the expression. Raises ValueError, with the reason, if it is invalid or too large."""
    if len(expression) > MAX_EXPRESSION_CHARS:
        raise ValueError(f"the expression has {len(expression)} characters: give at most {MAX_EXPRESSION_CHARS}")
    if "^" in expression:
        raise ValueError("write powers as **, for example 2 ** 10")
    if unknown := [part for part in _PARTS.findall(expression) if part not in _KNOWN]:
        raise ValueError(f"{unknown[0][:20]!r} is no arithmetic; there is: + - * / // % ** ( ) {' '.join(_KNOWN)}")
    try:
        return safe_eval(expression, _ALLOWED, _CONSTANTS)
    except NotAllowed as error:
        if isinstance(error.node, ast.Tuple):
            raise ValueError("write numbers without commas, for example 48211") from None
        raise ValueError(
            "only numbers, signs, brackets and functions are arithmetic, for example (2 + 3) * sqrt(5)"
        ) from None
    except SyntaxError:
        raise ValueError(f"{expression!r} is no whole expression: a sign, number or bracket is missing") from None
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except (OverflowError, RecursionError):
        raise ValueError("the numbers become too large") from None


def format_number(number: Number) -> str:
    """Returns a number as text, without a trailing .0: 3 for 3.0."""
    if isinstance(number, float) and number.is_integer() and abs(number) < 1e15:
        return str(int(number))
    return str(number)


def _apply_function(name: str, function: Callable[..., Any], *numbers: Number) -> Any:
    try:
        return function(*numbers)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} cannot take {', '.join(map(format_number, numbers)) or 'nothing'}: {error}") from None


def _check_number(number: Any) -> Number:
    if isinstance(number, complex):
        raise ValueError("the root of a negative number is no real number")
    if isinstance(number, int) and number.bit_length() > MAX_INTEGER_BITS:
        raise OverflowError
    if isinstance(number, float) and not math.isfinite(number):
        raise OverflowError
    return number


def _power(base: Number, exponent: Number) -> Number | complex:
    is_whole = isinstance(base, int) and isinstance(exponent, int)
    if is_whole and abs(base) > 1 and int(base).bit_length() * exponent > 2 * MAX_INTEGER_BITS:
        raise OverflowError
    return base**exponent


def _round_number(number: Number, digits: int = 0) -> Number:
    """Like `round`, with a limit on the digits: Python's own takes time and memory for many."""
    if abs(digits) > MAX_ROUND_DIGITS:
        raise ValueError(f"at most {MAX_ROUND_DIGITS} digits")
    return round(number, digits)


def _divide(left: Number, right: Number) -> Number:
    """Returns the quotient, exact if both are integers and there is no remainder."""
    is_whole = isinstance(left, int) and isinstance(right, int) and right and left % right == 0
    return left // right if is_whole else left / right


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "sqrt": math.sqrt,
    "abs": abs,
    "round": _round_number,
    "floor": math.floor,
    "ceil": math.ceil,
    "min": lambda *numbers: min(numbers),
    "max": lambda *numbers: max(numbers),
    "log": math.log,
    "exp": math.exp,
    "sin": math.sin,
    "cos": math.cos,
    "tan": math.tan,
}
_ALLOWED = AllowedParts(
    ARITHMETIC | {ast.Div: _divide, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: _power},
    _check_number,
    {name: partial(_apply_function, name, function) for name, function in _FUNCTIONS.items()},
)
_KNOWN = (*_FUNCTIONS, *_CONSTANTS, "E")
