"""Grades an answer: directly if it is plain, otherwise by `math-verify` in a separate process."""

from __future__ import annotations

from dataclasses import dataclass

from palestra.envs.problems import final_form, workers
from palestra.envs.problems.answers import LONGEST, cleaned, number, relation, same_relation, same_text
from palestra.envs.problems.plain_numbers import same
from palestra.envs.problems.workers import Judgement


@dataclass(frozen=True)
class Verdict:
    """The grade of an answer: its score in [0, 1], whether it is readable, and whether grading completed.

    An answer whose grading ran out of time or crashed counts as wrong, and `judged` is False.
    """

    score: float
    readable: bool = True
    judged: bool = True

    @property
    def right(self) -> bool:
        return self.score >= 1


RIGHT, WRONG, EMPTY = Verdict(1.0), Verdict(0.0), Verdict(0.0, readable=False)


async def judge(answer: str | None, gold: str, *, question: str = "", seconds: float = 2.0) -> Verdict:
    """Returns the grade of `answer`: 1 if it equals `gold` in a final form, found within `seconds` of CPU time.

    If `gold` is a plain number, a right answer must be one too: nothing may be left to compute. For all others see
    `final_form`; `question` is the text from which no answer may be copied. A `gold` that is not readable matches only
    the same text. Raises ValueError if `math-verify` is needed and not installed.
    """
    verdict = at_once(answer, gold, question=question)
    if verdict is None:
        request = {"answer": _readable(answer or ""), "gold": _readable(gold)}
        verdict = verdict_of(await workers.MATH.ask(request, seconds)) if request["gold"] else WRONG
    return verdict


def at_once(answer: str | None, gold: str, *, question: str = "") -> Verdict | None:
    """Returns the grade if no symbolic mathematics is needed; None if `math-verify` has to decide."""
    if not answer or len(answer) >= LONGEST:
        return EMPTY
    if same_text(answer, gold):
        return RIGHT
    if wanted := number(gold):
        said = number(answer)
        if said is None:
            return EMPTY
        return RIGHT if said.lowest and same(said, wanted) else WRONG
    if (said_relation := relation(answer)) and (wanted_relation := relation(gold)):
        is_lowest = said_relation[2].lowest
        return RIGHT if is_lowest and same_relation(said_relation, wanted_relation) else WRONG
    tokens = final_form.read(cleaned(answer))
    return None if tokens and _is_final(tokens, gold, question) else EMPTY


def _is_final(tokens: list[str], gold: str, question: str) -> bool:
    """True if an answer leaves nothing to compute that the right answer has computed."""
    wanted = final_form.read(cleaned(gold)) or []
    if not final_form.operators(tokens) <= final_form.operators(wanted):
        return False
    if final_form.roots("".join(tokens)) & final_form.roots(question) - final_form.roots(gold):
        return False
    return not final_form.copies(tokens, question) or final_form.copies(tokens, gold)


def _readable(text: str) -> str:
    """Returns the text for math-verify, rebuilt from our own tokens; "" if it is not readable."""
    return final_form.rewritten(final_form.read(cleaned(text)) or [])


def verdict_of(judgement: Judgement) -> Verdict:
    """Returns the grade from a grader process's result."""
    if judgement.ended == "scored":
        return Verdict(judgement.score)
    return Verdict(0.0, readable=False, judged=judgement.ended == "unreadable")
