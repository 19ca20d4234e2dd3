"""Assertions as tests: `assert f(1, 2) == 3` says what is given and what is expected."""

from __future__ import annotations

import ast
import builtins
from collections import Counter
from collections.abc import Set

from palestra.envs.problems.trials import Case, Kind


class Inseparable(ValueError):
    """Assertions that need more of a program than what its function returns."""


def cases_of(asserts: str, entry: str, *, alias: str | None = None, given: str = "") -> tuple[Kind, tuple[Case, ...]]:
    """The tests that a run of assertions makes: calls with the values they should have, where all say just that of
    `entry`; else assertions, which run apart from the program. One that does not mention the function tests nothing
    and is left out. `alias` is another name of the function, `given` code that runs before.

    Raises Inseparable where they or `given` use a name that only the program can define.
    """
    names = {entry, alias}
    check_names(f"{given}\n{asserts}", names)
    nodes = [node for node in ast.parse(asserts).body if isinstance(node, ast.Assert) and names & _used(node)]
    calls = [_call(node.test, names) for node in nodes]
    if all(calls):
        return "function", tuple(call for call in calls if call)
    before = f"{alias} = {entry}\n" if alias else ""
    return "assertion", tuple(Case(before + ast.unparse(node)) for node in nodes)


def check_names(source: str, known: Set[str | None]) -> None:
    """Raises Inseparable where code uses a name that is not its own, nor Python's, nor in `known`."""
    tree = ast.parse(source)
    defined = _defined(tree) | known
    unknown = {str(name) for name in _used(tree) - defined if not hasattr(builtins, str(name))}
    if unknown and "*" not in defined:  # `from math import *` defines what cannot be told here
        raise Inseparable(f"its tests use {', '.join(sorted(unknown))}, which only the program defines")


def _used(tree: ast.AST) -> set[str | None]:
    names = (node for node in ast.walk(tree) if isinstance(node, ast.Name))
    return {node.id for node in names if isinstance(node.ctx, ast.Load)}


def _defined(tree: ast.AST) -> set[str | None]:
    """The names that code gives a meaning to, anywhere in it."""
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


def _call(test: ast.expr, names: Set[str | None]) -> Case | None:
    """What `f(arguments) == value` gives and expects, where both are plain values; None for anything else."""
    if not isinstance(test, ast.Compare) or len(test.ops) != 1 or not isinstance(test.ops[0], ast.Eq):
        return None
    call = test.left
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in names) or call.keywords:
        return None
    try:
        arguments, value = [ast.literal_eval(node) for node in call.args], ast.literal_eval(test.comparators[0])
    except (ValueError, TypeError):
        return None
    return Case(repr(tuple(arguments)), repr(value))


def entry_of(asserts: str, code: str) -> str:
    """The function that the assertions are about: the one they call most that `code` defines, one that goes by the
    name of a function of Python's (MBPP has a `sum`) only where there is no other.

    Raises ValueError where they call none of its.
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
