"""Prompts and observations of the math env: full ones for language models, compact ones for tiny models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from palestra.core.types import Seat
from palestra.environments.math.grading import AnswerGrade
from palestra.environments.math.problem import Problem

MAX_QUOTE_CHARS = 2000  # maximum characters of a quoted reply
MAX_COMPACT_QUOTE_CHARS = 24  # maximum characters of an answer in the compact rendering

ANSWER_FORMAT = "End with #### and the final answer alone, for example #### 42, or put it in \\boxed{}."
EXACT_NUMBER_FORMAT = "A number is an integer or a fraction in lowest terms, such as 7/2."
NUMBER_FORMAT = "Work the answer out: a number is an integer, a decimal or a fraction in lowest terms, such as 7/2."


@dataclass(frozen=True)
class Reply:
    """A seat's reply in one turn, the answer extracted from it, and the grader's verdict.

    For the tool seat, `text` is the program and `error` a one-line description of its failure.
    """

    text: str
    answer: str | None
    verdict: AnswerGrade
    error: str | None = None


MathTurn = Mapping[Seat, Reply]


def role_prompts(seats: Sequence[Seat], turns: int, seconds: float, exact: str, compact: bool) -> dict[Seat, str]:
    """Returns the system message of each seat; `exact` is a sentence about the form of answers, or ""."""
    if compact:
        return {seat: f"math {seat}" for seat in seats}
    numbers = f" {exact}" if exact else ""
    if len(seats) == 1:
        again = f" You are asked up to {turns} times, until your answer stays the same." if turns > 1 else ""
        return {
            "reasoner": f"You solve a mathematics problem.{again}\n"
            f"Think it through step by step. {ANSWER_FORMAT}{numbers}"
        }
    together = (
        "You and a partner solve the same mathematics problem at the same time. After each turn both of you see what "
        f"both answered. It is over when your two answers agree, after {turns} turns at the latest; the reasoner's "
        "last answer is the team's."
    )
    reasoner = f"You are the reasoner; your partner writes programs. Think step by step. {ANSWER_FORMAT}"
    tool = (
        "You are the tool user; your partner reasons. Write one Python program that prints the answer on its last "
        f"line, in a ```python block. It runs alone, without network, for at most {seconds:g} seconds."
    )
    return {"reasoner": f"{together}\n{reasoner}{numbers}", "tool": f"{together}\n{tool}{numbers}"}


def format_observation(problem: Problem, seat: Seat, turns: Sequence[MathTurn], max_turns: int, compact: bool) -> str:
    """Returns the observation of a seat: the problem and the replies so far."""
    if compact:
        return " ".join([problem.short_question, *(_compact(turn, seat) for turn in turns)])
    parts = [f"Problem: {problem.question}"]
    parts += [f"Turn {number}\n{_full(turn, seat)}" for number, turn in enumerate(turns, start=1)]
    if max_turns > 1:
        parts.append(
            f"This is turn {len(turns) + 1} of {max_turns}.{' Check, and correct what is wrong.' if turns else ''}"
        )
    return "\n\n".join(parts)


def _compact(turn: MathTurn, seat: Seat) -> str:
    """Returns one turn in compact form, the seat's own answer last: "tool 26 you 24"."""
    ordered = sorted(turn, key=lambda who: who == seat)
    return " ".join(f"{'you' if who == seat else who} {_brief(turn[who])}" for who in ordered)


def _brief(reply: Reply) -> str:
    if reply.error:
        return "error"
    return " ".join(reply.answer.split())[:MAX_COMPACT_QUOTE_CHARS] if reply.answer else "none"


def _full(turn: MathTurn, seat: Seat) -> str:
    return "\n".join(_quoted(who, reply, who == seat) for who, reply in turn.items())


def _quoted(who: Seat, reply: Reply, own: bool) -> str:
    if who == "tool":
        came = f"It failed: {reply.error}" if reply.error else f"It printed: {reply.answer or 'no answer'}"
        whose = "Your" if own else "The tool user's"
        return f"{whose} program:\n```python\n{reply.text[-MAX_QUOTE_CHARS:]}\n```\n{came}"
    answer = reply.answer or "none was found: end with #### and the answer"
    return f"{'You' if own else 'The reasoner'} said:\n{reply.text[-MAX_QUOTE_CHARS:]}\nAnswer: {answer}"
