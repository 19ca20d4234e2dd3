"""Grades an answer: directly if it is plain, otherwise by `math-verify` in a separate process."""

from __future__ import annotations

import re
from dataclasses import dataclass

from palestra.environments.math import final_form, grader_client
from palestra.environments.math.answer_extraction import (
    MAX_ANSWER_CHARS,
    answers_equal_text,
    parse_number,
    parse_relation,
    strip_markup,
)
from palestra.environments.math.answer_kinds import kinds_equal
from palestra.environments.math.grader_client import GraderResult
from palestra.environments.math.plain_numbers import join_mixed_numbers, normalize_latex, numbers_equal

ASKS_ORDER = re.compile(
    r"\b(?:in|the) (?:\w+ )?order\b|\border (?:them|these|the|from)\b|\b(?:arrange|rank)\b|est to (?:the )?\w+est\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class AnswerGrade:
    """The grade of an answer: its score in [0, 1], whether it is readable, and whether grading completed.

    An answer whose grading ran out of time or crashed counts as wrong, and `is_graded` is False.
    """

    score: float
    is_readable: bool = True
    is_graded: bool = True

    @property
    def is_correct(self) -> bool:
        return self.score >= 1


CORRECT = AnswerGrade(1.0)
INCORRECT = AnswerGrade(0.0)
UNREADABLE = AnswerGrade(0.0, is_readable=False)


async def grade_answer(answer: str | None, gold: str, *, question: str = "", cpu_limit_s: float = 2.0) -> AnswerGrade:
    """Returns the grade of `answer`: 1 if it equals `gold` in a final form, found within `cpu_limit_s` of CPU time.

    If `gold` is a plain number, a right answer must be one too: nothing may be left to compute. For all others see
    `final_form`; `question` is the text from which no answer may be copied. A `gold` that is not readable matches only
    the same text. Raises ValueError if `math-verify` is needed and not installed.
    """
    grade = grade_directly(answer, gold, question=question)
    if grade is not None:
        return grade
    request = {
        "answer": _readable(answer or ""),
        "gold": _readable(gold),
        "asks_for_form": final_form.asks_for_form(question),
        "given": final_form.stated_expressions(question),
    }
    if not request["gold"]:
        return INCORRECT
    return grade_from_result(await grader_client.grade("math", request, cpu_limit_s))


def grade_directly(answer: str | None, gold: str, *, question: str = "") -> AnswerGrade | None:
    """Returns the grade if no symbolic mathematics is needed; None if `math-verify` has to decide."""
    if not answer or len(answer) > MAX_ANSWER_CHARS:
        return UNREADABLE
    if answers_equal_text(answer, gold):
        return CORRECT
    if wanted := parse_number(gold):
        number = parse_number(answer)
        if number is None:
            return UNREADABLE
        asks_percent = not question or bool(re.search(r"%|per\s?cent", question, re.IGNORECASE))
        is_equal = numbers_equal(number, wanted, asks_percent=asks_percent)
        return AnswerGrade(float(number.is_lowest_terms and is_equal))
    if (said_relation := parse_relation(answer)) and (wanted_relation := parse_relation(gold)):
        *said_order, number = said_relation
        *wanted_order, bound = wanted_relation
        is_equal = said_order == wanted_order and numbers_equal(number, bound)
        return AnswerGrade(float(number.is_lowest_terms and is_equal))
    in_order = bool(ASKS_ORDER.search(question))
    if (is_same := kinds_equal(strip_markup(answer), strip_markup(gold), in_order=in_order)) is not None:
        return AnswerGrade(float(is_same))
    tokens = final_form.tokenize_answer(strip_markup(answer))
    if not tokens or not _is_final(tokens, gold, question):
        return UNREADABLE
    return None


def _is_final(tokens: list[str], gold: str, question: str) -> bool:
    """True if an answer leaves nothing to compute that the right answer has computed."""
    wanted = final_form.tokenize_answer(strip_markup(gold)) or []
    allowed = final_form.operator_families(wanted)
    if "e^" in "".join(wanted):
        allowed |= {"exponential"}
    if not final_form.operator_families(tokens) <= allowed or final_form.is_calculation_of_matrices(tokens, wanted):
        return False
    if final_form.count_open_fractions("".join(tokens)) > final_form.count_open_fractions("".join(wanted)):
        return False
    if final_form.integers_under_roots("".join(tokens)) & final_form.integers_under_roots(
        question
    ) - final_form.integers_under_roots(gold):
        return False
    return not final_form.is_copied_from(tokens, question) or final_form.is_copied_from(tokens, gold)


def _readable(text: str) -> str:
    """Returns the text for math-verify, rebuilt from our own tokens; "" if it is not readable."""
    tokens = final_form.tokenize_answer(join_mixed_numbers(normalize_latex(strip_markup(text))))
    return final_form.join_tokens(tokens or [])


def grade_from_result(judgement: GraderResult) -> AnswerGrade:
    """Returns the grade from a grader process's result."""
    if judgement.outcome == "scored":
        return AnswerGrade(judgement.score)
    return AnswerGrade(0.0, is_readable=False, is_graded=judgement.outcome == "unreadable")
