"""Compares what a program printed or returned with the expected result.

A program under test writes its own result, so reading it takes time and memory proportional to its length, whatever it
contains: values arrive as JSON (`harness.encode_value`) and are compared as JSON trees. Sets and dicts are compared
sorted; a hash table of integers that a program chose could take hours to build.
"""

from __future__ import annotations

import ast
import json
import math
import re
import warnings
from typing import Any

from palestra.environments.code.harness import encode_value

NO_VALUE = object()
BLANKS = " \t\r\f\v"
ZERO_TOLERANCE = 1e-9  # absolute difference, where 0.0 is expected
MAX_EXACT_FLOAT = 2**53  # above it, not every integer has an exact float
SEQUENCES = ("list", "tuple")
_FRACTION = re.compile(r"[+-]?(\d+\.\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)


def parse_literal(text: str) -> Any:
    """Returns the value of a Python literal; `NO_VALUE`, which equals no value, if `text` is none."""
    try:
        with warnings.catch_warnings(action="ignore"):  # e.g. SyntaxWarning for invalid escapes
            value = ast.literal_eval(text)
            encode_value(value)  # refuses `...`, and integers of more digits than Python writes
            return value
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return NO_VALUE


# ---- printed text


def outputs_equal(expected: str, actual: str) -> bool:
    """True if two outputs are equal apart from blanks at line ends, empty lines at the end, and the seventh digit of
    numbers that are expected with a decimal point.
    """
    wanted = _lines(expected)
    got = _lines(actual)
    return wanted == got or (len(wanted) == len(got) and all(map(_same_line, wanted, got)))


def _lines(text: str) -> list[str]:
    return [line.rstrip(BLANKS) for line in text.rstrip(f"{BLANKS}\n").split("\n")]


def _same_line(wanted: str, got: str) -> bool:
    if wanted == got:
        return True
    # words, and the blanks between them
    wanted_words = re.split(r"(\s+)", wanted)
    got_words = re.split(r"(\s+)", got)
    return len(wanted_words) == len(got_words) and all(map(words_equal, wanted_words, got_words))


def words_equal(wanted: str, got: str) -> bool:
    """True for equal words, and for numbers equal up to the seventh digit if the expected one has a decimal point."""
    if wanted == got:
        return True
    return bool(_FRACTION.fullmatch(wanted) and _NUMBER.fullmatch(got)) and _close(float(wanted), float(got))


# ---- values


def parse_encoding(text: str) -> Any:
    """Returns the tree of JSON `text`; `NO_VALUE` if it is not JSON or nested too deep."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return NO_VALUE


def matches_literal(expected: str, tree: Any, *, exact: bool) -> bool:
    """True if `tree` encodes the value of the Python literal `expected`.

    Floats may differ in the seventh digit; unless `exact`, a tuple may be a list.
    """
    wanted = parse_literal(expected)
    if wanted is NO_VALUE or tree is NO_VALUE:
        return False
    try:
        return _same(json.loads(encode_value(wanted)), tree, exact)
    except (RecursionError, OverflowError, TypeError, ValueError):  # nested too deep, an integer too large for a float,
        return False  # or no encoding


def encodings_equal(wanted: Any, got: Any) -> bool:
    """True if two trees encode the same value; tuples and lists are not distinguished."""
    return _same(wanted, got, exact=False)


def _same(wanted: Any, got: Any, exact: bool) -> bool:
    if isinstance(wanted, list) and isinstance(got, list):
        kind, *parts = got or [""]
        return _same_parts(wanted[0], wanted[1:], kind, parts, exact)
    if isinstance(wanted, float) and type(got) in (int, float):
        return _close(wanted, float(got))
    return bool(wanted == got)


def _same_parts(kind: str, wanted: list[Any], other: Any, got: list[Any], exact: bool) -> bool:
    if len(wanted) != len(got) or not (kind == other or (not exact and kind in SEQUENCES and other in SEQUENCES)):
        return False
    if kind == "set":
        return sorted(map(canonical_text, wanted)) == sorted(map(canonical_text, got))
    if kind == "dict":
        return all(
            one == two and _same(value, actual, exact)
            for (one, value), (two, actual) in zip(_sort_by_key(wanted), _sort_by_key(got), strict=True)
        )
    return all(_same(one, two, exact) for one, two in zip(wanted, got, strict=True))


def _sort_by_key(pairs: list[Any]) -> list[tuple[str, Any]]:
    return sorted(((canonical_text(key), value) for key, value in pairs), key=lambda pair: pair[0])


def canonical_text(tree: Any) -> str:
    """Returns a text that is equal for encodings of values that are equal in Python: 1, 1.0 and True, or a set in any
    order.

    Above 2^53, floats and integers are distinguished.
    """
    if isinstance(tree, list):
        items = list(map(canonical_text, tree[1:]))
        if tree[:1] == ["set"]:
            items.sort()
        return f"[{','.join([json.dumps(tree[:1]), *items])}]"
    if isinstance(tree, bool) or (isinstance(tree, float) and tree.is_integer() and abs(tree) < MAX_EXACT_FLOAT):
        return str(int(tree))
    return json.dumps(tree)


def to_python_text(tree: Any) -> str:
    """Returns an encoded value in Python notation; "no plain value" if it is not an encoding."""
    try:
        return _write_literal(tree)
    except (KeyError, TypeError, ValueError, RecursionError):
        return "no plain value"


def _write_literal(tree: Any) -> str:
    if not isinstance(tree, list):
        return repr(tree)
    kind, *items = tree or [""]
    if kind == "dict":
        return f"{{{', '.join(f'{_write_literal(key)}: {_write_literal(value)}' for key, value in items)}}}"
    if kind == "bytes":
        return repr(bytes.fromhex(*items))
    if kind == "complex":
        return repr(complex(*items))
    inner = ", ".join(map(_write_literal, items))
    if kind == "tuple" and len(items) == 1:
        return f"({inner},)"
    if kind == "set" and not items:
        return "set()"
    return {"list": f"[{inner}]", "tuple": f"({inner})", "set": f"{{{inner}}}"}[kind]


def _close(wanted: float, got: float) -> bool:
    """True if two numbers agree in six digits; 0 is no rounded form of a small number that is expected."""
    return math.isclose(wanted, got, rel_tol=1e-6, abs_tol=0.0 if wanted else ZERO_TOLERANCE)
