"""Runs a data set's assertions in a sandbox of their own, so that the program under test cannot tamper with them.

The function under test is replaced by a lookup of results that the program returned in another sandbox (`harness`). A
call without a known result is requested: the file "asked" has one line for each. The result of assertion 3 is the file
"3": "ok", "error" with the exception, or "waiting" if it needs a requested result.
"""

from __future__ import annotations

import ast
import builtins
import json
import math
import os
import random
import sys
from collections.abc import Callable
from typing import Any

from palestra.environments.code.harness import encode_value, error_text, write_result

KnownCalls = dict[str, tuple[bool, str]]  # by call: (returned, value as JSON) or (raised, exception)


class ProgramError(Exception):
    """Raised by a call in which the program failed with an exception that is not one of Python's common ones."""


class PendingValue:
    """Placeholder for a result that is not known yet: any computation with it raises TypeError."""

    def _unknown(self, *_: object) -> Any:
        raise TypeError("this value is not known yet")

    __bool__ = __eq__ = __ne__ = __hash__ = __str__ = __repr__ = __format__ = _unknown


class OpaqueValue:
    """Stands for an object that is not a plain value, such as a `re.Match`; only its truth value is kept."""

    def __init__(self, truth: bool) -> None:
        self.truth = truth is True

    def __bool__(self) -> bool:
        return self.truth


class AssertionRunner:
    """Runs assertions one after the other and collects the calls that they make."""

    def __init__(self, preamble: str, entry: str, known: KnownCalls) -> None:
        self.preamble = preamble
        self.entry = entry
        self.known_calls = known
        self.requested_calls: dict[str, None] = {}
        self.is_waiting = False

    def run(self, test: str) -> tuple[str, str]:
        """Returns the status of one test ("ok", "error" or "waiting"), and the exception if it failed."""
        self.is_waiting = False
        random.seed(0)  # a test must make the same calls in every run
        names: dict[str, object] = {"__name__": "tests"}
        try:
            exec(compile(self.preamble, "given.py", "exec"), names)
            names |= {self.entry: self._call, "_waiting": lambda: self.is_waiting, "_check_not_nan": _check_not_nan}
            exec(compile(ast.fix_missing_locations(_Rewriter().visit(ast.parse(test))), "test.py", "exec"), names)
        except BaseException as error:  # any exception of a test is its result
            return ("waiting", "") if self.is_waiting else ("error", error_text(error))
        return ("waiting" if self.is_waiting else "ok"), ""

    def _call(self, *args: object, **kwargs: object) -> object:
        call = repr((_plain(args), _plain(kwargs)))
        if call not in self.known_calls:
            self.requested_calls[call], self.is_waiting = None, True
            return PendingValue()
        returned, text = self.known_calls[call]
        if not returned:
            raise _failure(text)
        return _decode_value(text)


def _failure(text: str) -> Exception:
    """Returns the exception that the program raised: of Python's own type if common, since a test may expect it."""
    name, _, message = text.partition(": ")
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, ArithmeticError | LookupError | TypeError | ValueError):
        return kind(message)
    return ProgramError(text)


class _Rewriter(ast.NodeTransformer):
    """Lets a test continue after an assertion that failed on a pending value, so that it makes its other calls too;
    and lets it fail where it orders NaN, since `not abs(x - y) > eps` holds for NaN."""

    def visit_Assert(self, node: ast.Assert) -> ast.Try:
        (around,) = ast.parse("try: pass\nexcept Exception:\n    if not _waiting(): raise").body
        assert isinstance(around, ast.Try)
        around.body = [self.generic_visit(node)]  # type: ignore[list-item]
        return around

    def visit_Compare(self, node: ast.Compare) -> ast.Compare:
        self.generic_visit(node)
        if any(isinstance(sign, ast.Lt | ast.LtE | ast.Gt | ast.GtE) for sign in node.ops):
            node.left = _checked_operand(node.left)
            node.comparators = list(map(_checked_operand, node.comparators))
        return node


def _checked_operand(operand: ast.expr) -> ast.expr:
    return ast.Call(ast.Name("_check_not_nan", ast.Load()), [operand], [])


def _check_not_nan(value: Any) -> Any:
    """Returns the value. Raises AssertionError if it is NaN or a sequence that holds NaN."""
    if isinstance(value, list | tuple):
        for item in value:
            _check_not_nan(item)
    elif isinstance(value, float) and math.isnan(value):
        raise AssertionError("NaN is neither less nor greater than a number")
    return value


def _plain(value: object) -> Any:
    """Returns a copy that holds only Python's own types, so that its `repr` can be evaluated."""
    return _decode_value(encode_value(value))


def _decode_value(text: str) -> Any:
    """Returns the value that `encode_value` wrote. The text may come from the program itself and is not trusted."""
    return _build_value(json.loads(text))


def _build_value(tree: Any) -> Any:
    if not isinstance(tree, list):
        return tree
    return DECODERS[tree[0]](*tree[1:])


DECODERS: dict[str, Callable[..., Any]] = {
    "list": lambda *items: [_build_value(item) for item in items],
    "tuple": lambda *items: tuple(_build_value(item) for item in items),
    "set": lambda *items: {_build_value(item) for item in items},
    "dict": lambda *pairs: {_build_value(key): _build_value(item) for key, item in pairs},
    "bytes": bytes.fromhex,
    "complex": complex,
    "object": OpaqueValue,
}


def main() -> None:
    """Reads the preamble, entry point, tests and known calls from stdin, and writes one result file for each test."""
    preamble, entry, tests, known = eval(sys.stdin.read())
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    checks = AssertionRunner(preamble, entry, known)
    for number, test in enumerate(tests):
        write_result(str(number), *checks.run(test))
    write_result("asked", "ok", "\n".join(checks.requested_calls))
