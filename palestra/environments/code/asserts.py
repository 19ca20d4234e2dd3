"""Parses assertions as tests: `assert f(1, 2) == 3` gives an input and an expected value."""

from __future__ import annotations

import ast
import builtins
from collections import Counter
from collections.abc import Set

from palestra.environments.code.test_runner import ProgramKind, ProgramTest


class InseparableTestsError(ValueError):
    """Raised for assertions that need more of a program than the return values of its function."""


def parse_asserts(
    asserts: str, entry: str, *, alias: str | None = None, given: str = ""
) -> tuple[ProgramKind, tuple[ProgramTest, ...]]:
    """Returns the tests in a sequence of assertions.

    If all compare a call of `entry` with a value, these are input-value pairs; otherwise the assertions themselves,
    which run apart from the program. An assertion that does not mention the function tests nothing and is left out.
    `alias` is another name of the function, `given` is code that runs before. Raises InseparableTestsError if the
    assertions or `given` use a name that only the program can define.
    """
    names = {entry, alias}
    check_names(f"{given}\n{asserts}", names)
    nodes = [node for node in ast.parse(asserts).body if isinstance(node, ast.Assert) and names & _used(node)]
    calls = [_call(node.test, names) for node in nodes]
    if all(calls):
        return "function", tuple(call for call in calls if call)
    before = f"{alias} = {entry}\n" if alias else ""
    return "assertion", tuple(ProgramTest(before + ast.unparse(node)) for node in nodes)


def check_names(source: str, known: Set[str | None]) -> None:
    """Raises InseparableTestsError if code uses a name that it does not define, is not a Python builtin and is not in
    `known`."""
    tree = ast.parse(source)
    defined = _defined_names(tree) | known
    unknown = {str(name) for name in _used(tree) - defined if not hasattr(builtins, str(name))}
    if unknown and "*" not in defined:  # `from math import *` defines unknown names
        raise InseparableTestsError(f"its tests use {', '.join(sorted(unknown))}, which only the program defines")


def _used(tree: ast.AST) -> set[str | None]:
    names = (node for node in ast.walk(tree) if isinstance(node, ast.Name))
    return {node.id for node in names if isinstance(node.ctx, ast.Load)}


def _defined_names(tree: ast.AST) -> set[str | None]:
    """Returns the names that code binds, anywhere in it."""
    found: set[str | None] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.alias):
            found.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Name):
            found |= set() if isinstance(node.ctx, ast.Load) else {node.id}
        else:  # functions, classes, caught exceptions
            found.add(getattr(node, "name", None))
    return found


def _call(test: ast.expr, names: Set[str | None]) -> ProgramTest | None:
    """Returns input and value of `f(arguments) == value` if both are literals; None for anything else."""
    if not isinstance(test, ast.Compare) or len(test.ops) != 1 or not isinstance(test.ops[0], ast.Eq):
        return None
    call = test.left
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in names) or call.keywords:
        return None
    try:
        arguments, value = [ast.literal_eval(node) for node in call.args], ast.literal_eval(test.comparators[0])
    except (ValueError, TypeError):
        return None
    return ProgramTest(repr(tuple(arguments)), repr(value))


def find_entry_point(asserts: str, code: str) -> str:
    """Returns the function that the assertions test: the one they call most often among those that `code` defines.

    A function with the name of a Python builtin (MBPP has a `sum`) is chosen only if there is no other. Raises
    ValueError if they call none.
    """
    defined = {node.name for node in ast.walk(ast.parse(code)) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    called = Counter(
        node.func.id
        for node in ast.walk(ast.parse(asserts))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    )
    found = [name for name, _ in called.most_common() if name in defined]
    if not found:
        raise ValueError(f"the tests call nothing that the code defines ({', '.join(sorted(defined))})")
    return min(found, key=lambda name: hasattr(builtins, name))
