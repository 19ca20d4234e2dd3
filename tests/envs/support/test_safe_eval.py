"""Only allowed expressions are evaluated, and every intermediate number is bounded."""

import ast
import operator
from typing import Any

import pytest

from palestra.envs.support.safe_eval import AllowedParts, NotAllowed, safe_eval


def below_100(number: Any) -> Any:
    if abs(number) >= 100:
        raise OverflowError
    return number


ALLOWED = AllowedParts(
    {ast.Add: operator.add, ast.Sub: operator.sub, ast.USub: operator.neg, ast.Lt: operator.lt},
    below_100,
    {"max": lambda *numbers: max(numbers)},
)


@pytest.mark.parametrize(
    ("source", "value"), [(" 1 + -2 ", -1), ("x - 1.5", 5.5), ("max(1, x, 3) + 1", 8), ("x < 3", False)]
)
def test_allowed_expressions_are_evaluated(source: str, value: float) -> None:
    assert safe_eval(source, ALLOWED, {"x": 7}) == value


@pytest.mark.parametrize(
    "source",
    [
        "1 * 2",
        "+1",
        "1 < 2 < 3",
        "y",
        "max",
        "min(1, 2)",
        "max(1, key=2)",
        "max(*x)",
        "max(**x)",
        "(max)(1).real",
        "x.real",
        "'a'",
        "True",
        "1j",
        "None",
        "(1, 2)",
        "[1]",
        "lambda: 1",
        "(y := 1)",
        "1 if x else 2",
        "x and 1",
        "f'{x}'",
        "max(1)(2)",
    ],
)
def test_everything_else_is_refused(source: str) -> None:
    with pytest.raises(NotAllowed, match="is not allowed in an expression"):
        safe_eval(source, ALLOWED, {"x": 7})


def test_intermediate_results_are_bounded() -> None:
    with pytest.raises(OverflowError):
        safe_eval("60 + 60 - 60", ALLOWED, {})
    with pytest.raises(OverflowError):
        safe_eval("100 - 60", ALLOWED, {})
