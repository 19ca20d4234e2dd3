"""How dense the package's code is, and what its functions are called: counts that may fall, and do not rise.

Limits are what was counted last, rounded up. Those of model codebases are lower: 0.2 to 3.5 packed assignments and 0 to
2.7 nested comprehensions in 1,000 statements, 9 to 22 conditional expressions.
"""

import ast
import re
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "palestra"
COMPREHENSIONS = (ast.ListComp, ast.DictComp, ast.SetComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

PACKED_PER_THOUSAND = 2.0
NESTED_PER_THOUSAND = 2.0
CONDITIONAL_PER_THOUSAND = 20.9
PARTICIPLES = 23
LONG_LINES_PERCENT = 10.9

# Participles that no rule of spelling finds, and words that look like one and are none.
IRREGULAR = """
told said made taken shown kept found met held seen given gone drawn known left sent chosen built felt heard lost sold
grown done written spoken begun bought brought caught
""".split()  # noqa: SIM905
NOT_PARTICIPLES = """
len between shorten widen open listen token seven happen strengthen lengthen harden need feed seed embed speed exceed
proceed red bed screen even often when then golden children
""".split()  # noqa: SIM905


def sources() -> dict[Path, str]:
    """Returns the text of the package's modules, without generated ones."""
    paths = [path for path in PACKAGE.rglob("*.py") if "_pb2" not in path.name]
    return {path: path.read_text(encoding="utf-8") for path in paths if PACKAGE / "data" not in path.parents}


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


def test_counts_do_not_rise() -> None:
    statements = packed = nested = conditional = 0
    participles: list[str] = []
    for path, text in sources().items():
        for node in ast.walk(ast.parse(text)):
            statements += isinstance(node, ast.stmt)
            packed += is_packed(node)
            nested += is_nested(node)
            conditional += isinstance(node, ast.IfExp)
            if isinstance(node, FUNCTIONS):
                place = f"{path.relative_to(PACKAGE)}:{node.lineno} {node.name}"
                participles += [place] * is_participle(node.name)
    assert 1000 * packed / statements <= PACKED_PER_THOUSAND
    assert 1000 * nested / statements <= NESTED_PER_THOUSAND
    assert 1000 * conditional / statements <= CONDITIONAL_PER_THOUSAND
    assert len(participles) <= PARTICIPLES, "\n".join(participles)


def test_lines_are_short() -> None:
    lines = [line for text in sources().values() for line in text.splitlines()]
    assert 100 * sum(len(line) > 100 for line in lines) / len(lines) <= LONG_LINES_PERCENT
