"""Assertions as tests: `assert f(1, 2) == 3` says what is given and what is expected."""

from __future__ import annotations

import ast
import builtins
from collections import Counter

from palestra.envs.problems.programs import Case
from palestra.envs.problems.trials import Kind


def cases_of(asserts: str, entry: str, *, alias: str | None = None) -> tuple[Kind, tuple[Case, ...]]:
    """The tests that a run of assertions makes: calls with the values they should have, where all say just that of
    `entry`; else assertions, which run beside the program and so tell it what is expected. `alias` is another name of
    the function."""
    nodes = [node for node in ast.parse(asserts).body if isinstance(node, ast.Assert)]
    calls = [_call(node.test, {entry, alias}) for node in nodes]
    if all(calls):
        return "function", tuple(call for call in calls if call)
    before = f"{alias} = {entry}\n" if alias else ""
    return "assertion", tuple(Case(before + ast.unparse(node)) for node in nodes)


def _call(test: ast.expr, names: set[str | None]) -> Case | None:
    """What `f(arguments) == value` gives and expects, where both are plain values; None for anything else."""
    if not isinstance(test, ast.Compare) or len(test.ops) != 1 or not isinstance(test.ops[0], ast.Eq | ast.Is):
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
    """The function that the assertions are about: the one they call most that `code` defines.

    Raises ValueError where they call none of its.
    """
    defined = {node.name for node in ast.walk(ast.parse(code)) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    called = Counter(
        node.func.id
        for node in ast.walk(ast.parse(asserts))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    )
    found = [name for name, _ in called.most_common() if name in defined and not hasattr(builtins, name)]
    if not found:
        raise ValueError(f"the tests call nothing that the code defines ({', '.join(sorted(defined))})")
    return found[0]
