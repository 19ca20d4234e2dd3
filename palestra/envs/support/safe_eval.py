"""The one evaluator of expressions in text from outside: an allow-list of operators and functions, bounded results.

Python's own `eval` is never used for it: an expression can read any attribute, and `9**9**9` takes all memory.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


class NotAllowed(ValueError):
    """Raised for an expression with a part that is not allowed: its syntax `node`."""

    def __init__(self, node: ast.AST) -> None:
        super().__init__(f"{type(node).__name__} is not allowed in an expression")
        self.node = node


ARITHMETIC: dict[type[ast.AST], Callable[..., Any]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


@dataclass(frozen=True)
class AllowedParts:
    """Operators (by syntax class) and functions (by name) that an expression of integers and floats may use.

    `bound` returns every number that occurs, or raises if it is too large. An operator or function whose result may
    take long to compute must check its arguments itself.
    """

    operators: Mapping[type[ast.AST], Callable[..., Any]]
    bound: Callable[[Any], Any]
    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)


def safe_eval(source: str, allowed: AllowedParts, names: Mapping[str, float]) -> Any:
    """Returns the value of a Python expression of numbers, `names`, and what is `allowed`.

    Raises SyntaxError as Python does, NotAllowed for any other part, and what operators, functions and `bound` raise.
    """
    return _value(ast.parse(source.strip(), mode="eval").body, allowed, names)


def _value(node: ast.AST, allowed: AllowedParts, names: Mapping[str, float]) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return allowed.bound(node.value)
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    function, arguments = _call(node, allowed)
    return allowed.bound(function(*[_value(argument, allowed, names) for argument in arguments]))


def _call(node: ast.AST, allowed: AllowedParts) -> tuple[Callable[..., Any], list[ast.expr]]:
    """Returns the function of an operator or a call, and its arguments. Raises NotAllowed for any other node."""
    if isinstance(node, ast.UnaryOp) and type(node.op) in allowed.operators:
        return allowed.operators[type(node.op)], [node.operand]
    if isinstance(node, ast.BinOp) and type(node.op) in allowed.operators:
        return allowed.operators[type(node.op)], [node.left, node.right]
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in allowed.operators:
        return allowed.operators[type(node.ops[0])], [node.left, *node.comparators]
    if isinstance(node, ast.Call) and not node.keywords and _name(node.func) in allowed.functions:
        return allowed.functions[_name(node.func)], node.args
    raise NotAllowed(node)


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else ""
