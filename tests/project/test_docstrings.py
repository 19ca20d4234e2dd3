"""Docstrings name exceptions that exist."""

import ast
import builtins
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "palestra"
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
RAISES = re.compile(r"\b[Rr]aises ([A-Z]\w+)|, (?:or )?([A-Z][a-z]+\w*) (?:if|where|for|unless)\b")


def exceptions_named(nodes: list[ast.AST]) -> Iterator[str]:
    """Yields the names of the exceptions that the docstrings of a module say are raised."""
    for node in nodes:
        if isinstance(node, DOCUMENTED):
            for sentence in re.split(r"\.\s", ast.get_docstring(node) or ""):
                if re.search(r"\b[Rr]aises [A-Z]", sentence):
                    yield from (first or more for first, more in RAISES.findall(sentence))


def test_exceptions_in_docstrings_exist() -> None:
    files = {path: list(ast.walk(ast.parse(path.read_text("utf-8")))) for path in PACKAGE.rglob("*.py")}
    known = {node.name for nodes in files.values() for node in nodes if isinstance(node, ast.ClassDef)}
    known |= {*dir(builtins)}
    wrong = [
        f"{path.relative_to(PACKAGE)}: {name}"
        for path, nodes in files.items()
        for name in exceptions_named(nodes)
        if name not in known and name not in used_names(nodes)
    ]
    assert wrong == []


def used_names(nodes: list[ast.AST]) -> set[str]:
    """Returns the names and attributes that the code of a module uses."""
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    return names | {node.attr for node in nodes if isinstance(node, ast.Attribute)}
