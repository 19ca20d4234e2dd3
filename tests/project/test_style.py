"""How dense the package's code is, and what its functions are called: counts that may fall, and do not rise.

Limits are what was counted last, rounded up. Those of model codebases are lower: 0.2 to 3.5 packed assignments and 0 to
2.7 nested comprehensions in 1,000 statements, 9 to 22 conditional expressions.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "palestra"
COMPREHENSIONS = (ast.ListComp, ast.DictComp, ast.SetComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

PACKED_PER_THOUSAND = 2.5
NESTED_PER_THOUSAND = 7.0
CONDITIONAL_PER_THOUSAND = 37.5
PARTICIPLES = 136
LONG_LINES_PERCENT = 12.0
MAX_PARAMETERS = 8
# Commands and envs have an option for each parameter; kernels take their arrays one by one.
MORE_PARAMETERS = 30

# Participles that no rule of spelling finds, and words that look like one and are none.
IRREGULAR = """
told said made taken shown kept found met held seen given gone drawn known left sent chosen built felt heard lost sold
grown done written spoken begun bought brought caught
""".split()  # noqa: SIM905
NOT_PARTICIPLES = """
len between shorten widen open listen token seven happen strengthen lengthen harden need feed seed embed speed exceed
proceed red bed screen even often when then golden
""".split()  # noqa: SIM905


@cache
def sources() -> dict[Path, str]:
    """Returns the text of the package's modules, without generated ones."""
    paths = [path for path in PACKAGE.rglob("*.py") if "_pb2" not in path.name]
    return {path: path.read_text(encoding="utf-8") for path in paths if PACKAGE / "data" not in path.parents}


@cache
def nodes() -> list[tuple[Path, ast.AST]]:
    return [(path, node) for path, text in sources().items() for node in ast.walk(ast.parse(text))]


def per_thousand_statements(count: int) -> float:
    return 1000 * count / sum(isinstance(node, ast.stmt) for _, node in nodes())


def functions() -> Iterator[tuple[Path, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for path, node in nodes():
        if isinstance(node, FUNCTIONS):
            yield path, node


def is_packed(node: ast.AST) -> bool:
    """True for `a, b = x, y`."""
    return isinstance(node, ast.Assign) and all(isinstance(side, ast.Tuple) for side in (node.targets[0], node.value))


def is_nested(node: ast.AST) -> bool:
    """True for a comprehension with two `for`, or with another inside."""
    if not isinstance(node, COMPREHENSIONS):
        return False
    return len(node.generators) > 1 or any(isinstance(n, COMPREHENSIONS) for n in ast.walk(node) if n is not node)


def is_participle(name: str) -> bool:
    """True for a function named by a participle alone, such as `_joined`, which does not say what is done with what."""
    word = name.strip("_")
    if "_" in word or word in NOT_PARTICIPLES:
        return False
    return word in IRREGULAR or re.search("(ed|en)$", word) is not None


def num_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    given = function.args
    names = [argument.arg for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def test_assignments_are_not_packed() -> None:
    assert per_thousand_statements(sum(is_packed(node) for _, node in nodes())) <= PACKED_PER_THOUSAND


def test_comprehensions_are_not_nested() -> None:
    assert per_thousand_statements(sum(is_nested(node) for _, node in nodes())) <= NESTED_PER_THOUSAND


def test_conditional_expressions_are_few() -> None:
    count = sum(isinstance(node, ast.IfExp) for _, node in nodes())
    assert per_thousand_statements(count) <= CONDITIONAL_PER_THOUSAND


def test_functions_are_named_by_more_than_a_participle() -> None:
    named = [f"{path.relative_to(PACKAGE)}:{node.lineno} {node.name}" for path, node in functions()]
    participles = [line for line in named if is_participle(line.split()[-1])]
    assert len(participles) <= PARTICIPLES, "\n".join(participles)


def test_functions_have_few_parameters() -> None:
    many = [
        f"{path.relative_to(PACKAGE)}:{node.lineno} {node.name} has {num_parameters(node)}"
        for path, node in functions()
        if num_parameters(node) > MAX_PARAMETERS
    ]
    assert len(many) <= MORE_PARAMETERS, "\n".join(many)


def test_lines_are_short() -> None:
    lines = [line for text in sources().values() for line in text.splitlines()]
    assert 100 * sum(len(line) > 100 for line in lines) / len(lines) <= LONG_LINES_PERCENT
