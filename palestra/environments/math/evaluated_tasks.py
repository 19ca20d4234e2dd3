"""Scorers for the reasoning-gym tasks whose own scorers pass the answer to Python's `eval`.

Here a list is read as a literal, and a formula of integers computed exactly by `safe_eval`. Scores equal those of
reasoning-gym 0.1.25, except where it rewards answers that are no solution: `countdown` and `puzzle24` compare exactly
here, and `puzzle24` requires the numbers of the puzzle (reasoning-gym accepts any four). A formula with anything but
integers, brackets and + - * / ** scores 0.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from fractions import Fraction
from typing import Any

from palestra.environments.math.grading import INCORRECT, UNREADABLE, AnswerGrade
from palestra.envs.support.safe_eval import ARITHMETIC, AllowedParts, safe_eval

ReasoningEntry = Mapping[str, Any]

FORMULA = re.compile(r"[-+*/()0-9 \t\r\n]{1,1000}")
MAX_EXPONENT = 64  # of powers in a formula
MAX_BITS = 4096  # of intermediate results

EVALUATING_CALLS = {"eval", "exec", "compile", "parse_expr", "sympify", "lambdify", "__import__"}
# Tasks whose modules make such a call, but not with the answer (reviewed in reasoning-gym 0.1.25).
REVIEWED_TASKS = {
    "basic_arithmetic": "evaluates the sums that it makes",
    "bitwise_arithmetic": "evaluates the problem, not the answer",
    "codeio": "runs the programs of its own data set",
    "number_sorting": "evaluates its own solution; the answer is read as JSON",
    "propositional_logic": "its parse_expr is its own parser of formulas, which evaluates nothing",
}


def score_string_insertion(answer: str, entry: ReasoningEntry) -> AnswerGrade:
    """Scores string_insertion: a list of the right characters scores 0.1."""
    return _as_list(answer, lambda value: "".join(value), {entry["answer"]}, 0.1)


def score_spiral_matrix(answer: str, entry: ReasoningEntry) -> AnswerGrade:
    """Scores spiral_matrix: a list of the right numbers scores 0.1."""
    wanted = entry["answer"].strip()
    if answer.strip() == wanted:
        return AnswerGrade(1.0)
    return _as_list(answer.strip(), lambda value: " ".join(map(str, value)), {wanted}, 0.1)


def score_binary_matrix(answer: str, entry: ReasoningEntry) -> AnswerGrade:
    """Scores binary_matrix: a list of the right rows scores 0.1."""
    return _as_list(answer, _rows, {entry["answer"]}, 0.1)


def score_n_queens(answer: str, entry: ReasoningEntry) -> AnswerGrade:
    """Scores n_queens: any of its solutions scores 1; a list of the rows of one, 0.5."""
    solutions = set(entry["metadata"]["valid_answers"])
    if answer in solutions:
        return AnswerGrade(1.0)
    return _as_list(answer, _rows, solutions, 0.5)


def score_countdown(answer: str, entry: ReasoningEntry) -> AnswerGrade:
    """Scores countdown: 1 for a formula of exactly the numbers with the target's value; 0.05 for others."""
    return _compare_formula(answer, entry["metadata"]["numbers"], entry["metadata"]["target"], 0.05)


def score_puzzle24(answer: str, entry: ReasoningEntry) -> AnswerGrade:
    """Scores puzzle24: 1 for a formula of exactly the four numbers that equals 24; 0.01 for others."""
    return _compare_formula(answer, entry["metadata"]["numbers"], 24, 0.01)


def _compare_formula(answer: str, numbers: list[int], target: int, worth: float) -> AnswerGrade:
    """Returns 1 for a formula of exactly these numbers that equals `target`, `worth` for any other formula."""
    if not FORMULA.fullmatch(answer):
        return UNREADABLE
    try:
        value = safe_eval(" ".join(answer.split()), _EXACT, {})
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return UNREADABLE
    if value == target and Counter(map(int, re.findall("[0-9]+", answer))) == Counter(numbers):
        return AnswerGrade(1.0)
    return AnswerGrade(worth)


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or abs(exponent) > MAX_EXPONENT:
        raise ValueError(f"a power that is no integer up to {MAX_EXPONENT}")
    return base ** int(exponent)


def _check_size(number: int | Fraction) -> Fraction:
    value = Fraction(number)
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise ValueError("too large")
    return value


_EXACT = AllowedParts(ARITHMETIC | {ast.Pow: _power}, _check_size)
DIRECT_SCORERS: dict[str, Callable[[str, ReasoningEntry], AnswerGrade]] = {
    "string_insertion": score_string_insertion,
    "spiral_matrix": score_spiral_matrix,
    "binary_matrix": score_binary_matrix,
    "n_queens": score_n_queens,
    "countdown": score_countdown,
    "puzzle24": score_puzzle24,
}


def refusal_reason(task: str, dataset: type) -> str | None:
    """Returns why `task` is refused: its scorer evaluates text. None if it is allowed."""
    if task in DIRECT_SCORERS or task in REVIEWED_TASKS:
        return None
    calls = sorted(_evaluating_calls(dataset))
    if not calls:
        return None
    return (
        f"reasoning: the scorer of {task} passes text to {', '.join(calls)}, which could run a model's answer as code: "
        "leave the task out (scorers were reviewed in reasoning-gym 0.1.25)"
    )


def _as_list(answer: str, text: Callable[[Any], str], wanted: set[str], worth: float) -> AnswerGrade:
    with suppress(SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        value = ast.literal_eval(answer.strip())
        if isinstance(value, list | tuple) and text(value) in wanted:
            return AnswerGrade(worth)
    return INCORRECT


def _rows(value: Any) -> str:
    return "\n".join(" ".join(map(str, row)) for row in value)


def _evaluating_calls(kind: type) -> set[str]:
    """Returns the names of calls that evaluate text in the reasoning-gym modules that define `kind`."""
    modules = {base.__module__ for base in kind.__mro__ if base.__module__.startswith("reasoning_gym")}
    trees = (ast.parse(inspect.getsource(sys.modules[name])) for name in modules)
    return {name for tree in trees for node in ast.walk(tree) if (name := _called_function(node)) in EVALUATING_CALLS}


def _called_function(node: ast.AST) -> str:
    """Returns the name of the function that a node calls ("parse_expr" for `sympy.parse_expr(text)`), else ""."""
    if not isinstance(node, ast.Call):
        return ""
    if isinstance(node.func, ast.Attribute) and node.func.attr != "compile":  # re.compile is safe
        return node.func.attr
    if isinstance(node.func, ast.Name):
        return node.func.id
    return ""
