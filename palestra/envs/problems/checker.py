"""Runs a data set's assertions, in a sandbox where no program is that could tamper with them.

The function under test is a stand-in that knows what the program returned for which arguments, found out in another
sandbox (`harness`). A call that it has no answer to yet is asked for: the file "asked" has a line for each. The result
of assertion 3 is the file "3": "ok", "error" with the exception, or "waiting" for what was asked.
"""

from __future__ import annotations

import ast
import builtins
import json
import os
import random
import sys
from collections.abc import Callable
from typing import Any

from palestra.envs.problems.harness import encoded, leave, named

Known = dict[str, tuple[bool, str]]  # calls, and for each whether it returned, with the value as JSON or the exception


class ProgramError(Exception):
    """Raised by a call at which the program failed in a way that Python has no exception for."""


class Pending:
    """Stands for a value that is not known yet: what would be worked out from it raises."""

    def _unknown(self, *_: object) -> Any:
        raise TypeError("this value is not known yet")

    __bool__ = __eq__ = __ne__ = __hash__ = __str__ = __repr__ = __format__ = _unknown


class Opaque:
    """Stands for an object that is no plain value, such as a `re.Match`: it is true or false, and nothing else."""

    def __init__(self, truth: bool) -> None:
        self.truth = truth is True

    def __bool__(self) -> bool:
        return self.truth


class Tests:
    """Assertions in turn, and the calls that they make."""

    def __init__(self, preamble: str, entry: str, known: Known) -> None:
        self.preamble, self.entry, self.known = preamble, entry, known
        self.asked: dict[str, None] = {}
        self.waiting = False

    def run(self, test: str) -> tuple[str, str]:
        """The status of one test, and its exception where it failed."""
        self.waiting = False
        random.seed(0)  # a test must make the same calls every time it is run
        names: dict[str, object] = {"__name__": "tests"}
        try:
            exec(compile(self.preamble, "given.py", "exec"), names)
            names |= {self.entry: self._call, "_waiting": lambda: self.waiting}
            exec(compile(_patient(test), "test.py", "exec"), names)
        except BaseException as error:  # whatever a test raises is its result
            return ("waiting", "") if self.waiting else ("error", named(error))
        return ("waiting" if self.waiting else "ok"), ""

    def _call(self, *args: object, **kwargs: object) -> object:
        call = repr((_plain(args), _plain(kwargs)))
        if call not in self.known:
            self.asked[call], self.waiting = None, True
            return Pending()
        returned, text = self.known[call]
        if not returned:
            raise _failure(text)
        return _decoded(text)


def _failure(text: str) -> Exception:
    """The exception that the program raised, where it is one of Python's own, as a test may expect it."""
    name, _, message = text.partition(": ")
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, ArithmeticError | LookupError | TypeError | ValueError):
        return kind(message)
    return ProgramError(text)


class _Patience(ast.NodeTransformer):
    """Lets a test go on after an assertion that failed for want of a value, so that it makes its other calls too."""

    def visit_Assert(self, node: ast.Assert) -> ast.Try:
        (around,) = ast.parse("try: pass\nexcept Exception:\n    if not _waiting(): raise").body
        assert isinstance(around, ast.Try)
        around.body = [node]
        return around


def _patient(test: str) -> Any:
    return ast.fix_missing_locations(_Patience().visit(ast.parse(test)))


def _plain(value: object) -> Any:
    """A copy that holds values of Python's own types alone, so that its `repr` can be evaluated."""
    return _decoded(encoded(value))


def _decoded(text: str) -> Any:
    """The value that `encoded` wrote, or that a program pretends it did."""
    return _built(json.loads(text))


def _built(tree: Any) -> Any:
    return BUILD[tree[0]](*tree[1:]) if isinstance(tree, list) else tree


BUILD: dict[str, Callable[..., Any]] = {
    "list": lambda *items: [_built(item) for item in items],
    "tuple": lambda *items: tuple(_built(item) for item in items),
    "set": lambda *items: {_built(item) for item in items},
    "dict": lambda *pairs: {_built(key): _built(item) for key, item in pairs},
    "bytes": bytes.fromhex,
    "complex": complex,
    "object": Opaque,
}


def main() -> None:
    preamble, entry, tests, known = eval(sys.stdin.read())
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    checks = Tests(preamble, entry, known)
    for number, test in enumerate(tests):
        leave(str(number), *checks.run(test))
    leave("asked", "ok", "\n".join(checks.asked))
