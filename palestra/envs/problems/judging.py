"""Whether an answer is right: at once where it is plain, else by `math-verify` in a process of its own."""

from __future__ import annotations

from dataclasses import dataclass

from palestra.envs.problems import workers
from palestra.envs.problems.answers import LONGEST, cleaned, holds_operation, number, relation, same
from palestra.envs.problems.verify_worker import SCORED, UNREADABLE


@dataclass(frozen=True)
class Verdict:
    """What a judge says of an answer: its score in [0, 1], whether it could be read, and whether it was judged at all.

    An answer whose judgement ran out of time or broke down counts as wrong, and `judged` is False.
    """

    score: float
    readable: bool = True
    judged: bool = True

    @property
    def right(self) -> bool:
        return self.score >= 1


RIGHT, WRONG, EMPTY = Verdict(1.0), Verdict(0.0), Verdict(0.0, readable=False)


async def judge(answer: str | None, gold: str, *, written_out: bool = False, seconds: float = 2.0) -> Verdict:
    """Whether `answer` says the same as `gold`, within so many `seconds` of a processor's time.

    With `written_out` the answer to "12 / 4" has to be worked out: 12/4 is wrong, and a text with an operation in it
    is no answer. Raises ValueError where `math-verify` is needed and missing.
    """
    verdict = at_once(answer, gold, written_out=written_out)
    if verdict is None:
        verdict = verdict_of(await workers.MATH.ask({"answer": answer, "gold": gold}, seconds))
    return verdict


def at_once(answer: str | None, gold: str, *, written_out: bool = False) -> Verdict | None:
    """The verdict where it takes no mathematics; None where `math-verify` has to be asked."""
    if not answer or len(answer) >= LONGEST:
        return EMPTY
    said, wanted = number(answer), number(gold)
    if "".join(cleaned(answer).split()) == "".join(cleaned(gold).split()):
        return RIGHT
    if said and wanted:
        return RIGHT if same(said, wanted) and (said.lowest or not written_out) else WRONG
    if wanted and not any(sign.isdigit() for sign in answer):
        return EMPTY  # "seven", "none", "x": no number is written without a digit
    if written_out and holds_operation(answer):
        return EMPTY
    return _related(answer, gold)


def _related(answer: str, gold: str) -> Verdict | None:
    said, wanted = relation(answer), relation(gold)
    if not said or not wanted:
        return None
    return RIGHT if said[:2] == wanted[:2] and same(said[2], wanted[2]) else WRONG


def verdict_of(code: int) -> Verdict:
    """What a judging process's code says."""
    if code >= SCORED:
        return Verdict((code - SCORED) / 100)
    return Verdict(0.0, readable=False, judged=code == UNREADABLE)
