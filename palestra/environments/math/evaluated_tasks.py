"""Scorers for the reasoning-gym tasks whose own scorers pass the answer to Python's `eval` or SymPy's `parse_expr`.

Here an answer is parsed by a whitelist grammar (`answer_syntax`) and never evaluated. Scores equal those of
reasoning-gym 0.1.25, except where it rewards answers that are no solution: `countdown` and `puzzle24` compare exactly
here, `puzzle24` requires the numbers of the puzzle (reasoning-gym accepts any four), and formulas may hold no
`Integral` nor any other name outside `answer_syntax.FUNCTIONS`. A formula that does not parse scores 0.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from palestra.environments.math.answer_syntax import (
    Formula,
    evaluate_exact,
    formula_integers,
    parse_formula,
    parse_value,
)
from palestra.environments.math.grading import INCORRECT, UNREADABLE, AnswerGrade

ReasoningEntry = Mapping[str, Any]

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
    return AnswerGrade(1.0) if answer in solutions else _as_list(answer, _rows, solutions, 0.5)


def score_countdown(answer: str, entry: ReasoningEntry) -> AnswerGrade:
    """Scores countdown: 1 for a formula of exactly the given numbers that equals the target; 0.05 for any other
    formula.
    """
    return _compare_formula(answer, entry["metadata"]["numbers"], entry["metadata"]["target"], 0.05)


def score_puzzle24(answer: str, entry: ReasoningEntry) -> AnswerGrade:
    """Scores puzzle24: 1 for a formula of exactly the four given numbers that equals 24; 0.01 for any other formula."""
    return _compare_formula(answer, entry["metadata"]["numbers"], 24, 0.01)


def _compare_formula(answer: str, numbers: list[int], target: int, worth: float) -> AnswerGrade:
    """Returns 1 for a formula of exactly these numbers that equals `target`, `worth` for any other formula."""
    formula = parse_formula(answer)
    value = formula and evaluate_exact(formula)
    if not formula or value is None:
        return UNREADABLE
    is_right = value == target and Counter(formula_integers(formula)) == Counter(numbers)
    return AnswerGrade(1.0 if is_right else worth)


DIRECT_SCORERS: dict[str, Callable[[str, ReasoningEntry], AnswerGrade]] = {
    "string_insertion": score_string_insertion,
    "spiral_matrix": score_spiral_matrix,
    "binary_matrix": score_binary_matrix,
    "n_queens": score_n_queens,
    "countdown": score_countdown,
    "puzzle24": score_puzzle24,
}
SYMBOLIC_TASKS = ("polynomial_multiplication", "simple_integration", "intermediate_integration")


def symbolic_request(task: str, answer: str, entry: ReasoningEntry) -> dict[str, Any] | None:
    """Returns the request for the grader process to score a formula with SymPy; None if `answer` is not a formula.

    Raises ValueError if reasoning-gym's own formula does not parse.
    """
    formula = parse_formula(answer)
    if formula is None:
        return None
    if task == "polynomial_multiplication":
        return {"formula": formula, "wanted": _own(entry["answer"])}
    wanted = _own(entry["metadata"]["integrand"])
    return {"formula": formula, "wanted": wanted, "variable": entry["metadata"]["variable"]}


def has_solution(task: str, entry: ReasoningEntry) -> bool:
    """Returns whether a task has a solution: not for integrals that reasoning-gym itself leaves as `Integral(...)`, for
    which a copy of the question would be a correct answer.
    """
    return task not in SYMBOLIC_TASKS or parse_formula(entry["answer"]) is not None


def refusal_reason(task: str, dataset: type) -> str | None:
    """Returns why `task` is refused: its scorer evaluates text and has not been reviewed. None if it is allowed."""
    if task in DIRECT_SCORERS or task in SYMBOLIC_TASKS or task in REVIEWED_TASKS:
        return None
    calls = sorted(_evaluating_calls(dataset))
    if not calls:
        return None
    return (
        f"reasoning: the scorer of {task} passes text to {', '.join(calls)}, which could run a model's answer as code: "
        "leave the task out, or install reasoning-gym 0.1.25, whose scorers have been reviewed"
    )


def _as_list(answer: str, text: Callable[[Any], str], wanted: set[str], worth: float) -> AnswerGrade:
    value = parse_value(answer)
    try:
        return AnswerGrade(worth) if value is not None and text(value) in wanted else INCORRECT
    except TypeError:  # a list of other types
        return INCORRECT


def _rows(value: Any) -> str:
    return "\n".join(" ".join(map(str, row)) for row in value)


def _own(text: str) -> Formula:
    """Parses a formula that reasoning-gym wrote."""
    formula = parse_formula(text)
    if formula is None:
        raise ValueError(f"reasoning-gym's own formula {text!r} cannot be read; install reasoning-gym 0.1.25")
    return formula


def _evaluating_calls(kind: type) -> set[str]:
    """Returns the names of calls that evaluate text in the reasoning-gym modules that define `kind`."""
    modules = {base.__module__ for base in kind.__mro__ if base.__module__.startswith("reasoning_gym")}
    trees = (ast.parse(inspect.getsource(sys.modules[name])) for name in modules)
    return {name for tree in trees for node in ast.walk(tree) if (name := _called_function(node)) in EVALUATING_CALLS}


def _called_function(node: ast.AST) -> str:
    """Returns the name of the function that a node calls ("parse_expr" for `sympy.parse_expr(text)`), else ""."""
    if not isinstance(node, ast.Call):
        return ""
    if isinstance(node.func, ast.Attribute):
        return node.func.attr if node.func.attr != "compile" else ""  # `re.compile` evaluates nothing
    return node.func.id if isinstance(node.func, ast.Name) else ""
