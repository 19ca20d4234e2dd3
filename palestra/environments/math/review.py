"""Math review env: a reasoner answers a problem, then a checker reviews the answer; the checker's answer is the team's.

Made for small instruct models: short questions in English, answers of one line such as `57 + 38 = 95`, and worked
examples as earlier turns of the conversation (`shots`), the same for every policy. Only a right answer is rewarded,
never its form: whatever an answer looks like, its last number counts.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from palestra.core.types import Seat, Step
from palestra.environments.math.answer_extraction import MAX_ANSWER_CHARS, final_answer
from palestra.environments.math.grading import UNREADABLE, AnswerGrade, grade_directly
from palestra.environments.math.problem import Problem
from palestra.environments.math.problem_source import ProblemSource
from palestra.envs.base import Env
from palestra.envs.reward_terms import terms_info, total_rewards
from palestra.envs.support.few_shot import MAX_SHOTS, acting_seat, ask_with_examples
from palestra.envs.support.options import RewardMode, check_range
from palestra.envs.support.splits import Split

ReviewTeam = Literal["reasoner_checker", "single"]
ReviewKind = Literal["sum", "arithmetic", "word"]
SEATS: dict[ReviewTeam, tuple[Seat, ...]] = {"reasoner_checker": ("reasoner", "checker"), "single": ("reasoner",)}
FORM = "Answer with the calculation and its result, for example 12 + 9 = 21."
ROLES = {
    "reasoner": f"You solve math problems. {FORM}",
    "checker": f"You check a colleague's answer to a math problem, which may be wrong. {FORM}",
}
MAX_QUOTE_CHARS = 200  # characters of the reasoner's reply that the checker observes

# A hyphen between digits is no sign: "12-5" ends in 5.
_NUMBER = re.compile(r"(?:(?<!\d)[-\u2212])?(?:\d{1,3}(?:,\d{3})+|\d{1,40})(?:\.\d{1,40})?(?:\s?/\s?\d{1,40})?")
_OPERATOR = re.compile(r"\s*(//|[-+*/])\s*")


class MathReview(Env):
    """A reasoner answers a generated problem; a checker observes problem and answer, and gives the final answer.

    With team `single` the reasoner's answer is final. `shots` worked examples precede every question as turns of the
    conversation; they belong to the split `base`, in which no one is trained or evaluated. The checker's alternate
    between right and wrong proposals. Rewards: the team 1 for a right final answer, the reasoner 1 for a right answer
    of its own (`reward: dense`). Info: `success`, `turn`, by seat `answers` and `invalid` (no number in the reply);
    in the last step `answer` (the final one) and `gold`. Raises ValueError if an option is out of range.
    """

    name: ClassVar[str] = "math_review"
    replaces_state = True

    def __init__(
        self,
        *,
        team: ReviewTeam = "reasoner_checker",
        kinds: list[ReviewKind] | None = None,
        difficulty: int | list[int] = 1,
        shots: int = 3,
        split: Split = "train",
        reward: RewardMode = "dense",
    ) -> None:
        check_range("shots", shots, 0, MAX_SHOTS)
        self.seats = SEATS[team]
        self.roles = {seat: ROLES[seat] for seat in SEATS[team]}
        self.reward = reward
        kinds = ["sum"] if kinds is None else kinds
        self.source = ProblemSource(kinds, difficulty, split)
        examples = ProblemSource(kinds, difficulty, "base")
        worked = [examples.problem(seed) for seed in range(shots)]
        self.examples = {seat: worked_exchanges(seat, worked) for seat in self.seats}
        self._next: Seat | None = None

    def reset(self, seed: int) -> Step:
        self.problem = self.source.problem(seed)
        self.replies: dict[Seat, str] = {}
        self.grades: dict[Seat, AnswerGrade] = {}
        self._next = self.seats[0]
        return Step(self._observations(), info={"turn": 0, "success": False})

    def step(self, actions: dict[Seat, Any]) -> Step:
        seat = acting_seat(self._next, actions)
        reply = str(actions[seat])
        self.replies = self.replies | {seat: reply}
        self.grades = self.grades | {seat: grade_directly(last_number(reply), self.problem.answer) or UNREADABLE}
        left = self.seats[len(self.replies) :]
        self._next = next(iter(left), None)
        is_correct = self.grades[seat].is_correct
        terms = {}
        if seat == "reasoner" and self.reward == "dense":
            terms = {seat: {"correct": float(is_correct)}}
        success = not left and is_correct
        info = replies_info(self.replies, self.grades, success, self.problem.answer, is_last=not left)
        info |= terms_info(terms)
        return Step(self._observations(), total_rewards(terms), float(success), info=info)

    def expert(self, seat: Seat, rng: random.Random) -> str:
        """Returns the calculation and its right result."""
        return worked_answer(self.problem, self.problem.answer)

    def _observations(self) -> dict[Seat, Any]:
        if self._next is None:
            return {}
        question = seat_question(self._next, self.problem, self.replies.get("reasoner", ""))
        return {self._next: ask_with_examples(self.roles[self._next], self.examples[self._next], question)}


def replies_info(
    replies: Mapping[Seat, str], grades: Mapping[Seat, AnswerGrade], success: bool, gold: str, *, is_last: bool
) -> dict[str, Any]:
    """Returns the info of a step; of the last one also the final answer, and the right one, `gold`."""
    answers = {seat: last_number(reply) for seat, reply in replies.items()}
    info: dict[str, Any] = {"turn": len(replies), "success": success, "answers": answers}
    info["invalid"] = {seat: not grade.is_readable for seat, grade in grades.items()}
    if is_last:
        info |= {"answer": list(answers.values())[-1], "gold": gold}
    return info


def last_number(reply: str) -> str | None:
    r"""Returns the answer in a reply: the last number, after #### or in \boxed{} if it has one; None without any."""
    marked = final_answer(reply)
    numbers = _NUMBER.findall(marked or reply[-MAX_ANSWER_CHARS:])
    return next(reversed(numbers), None)


def seat_question(seat: Seat, problem: Problem, proposal: str) -> str:
    """Returns the text that a seat is asked: the problem, for the checker with the reasoner's reply `proposal`."""
    if seat == "reasoner":
        return problem.question
    return f"{problem.question}\nYour colleague says: {' '.join(proposal.split())[:MAX_QUOTE_CHARS]}"


def worked_answer(problem: Problem, result: str) -> str:
    """Returns a calculation and its result: "57 + 38 = 95"; the result alone if there is no short calculation."""
    calculation = problem.solution_program
    if "\n" in calculation or "print" in calculation:
        return result
    return f"{_OPERATOR.sub(lambda found: f' {found[1][0]} ', calculation)} = {result}"


def worked_exchanges(seat: Seat, problems: list[Problem]) -> list[tuple[str, str]]:
    """Returns what a seat is asked and right answers; every second proposal to a checker is wrong."""
    exchanges = []
    for number, problem in enumerate(problems):
        proposal = right = worked_answer(problem, problem.answer)
        if number % 2:
            proposal = worked_answer(problem, wrong_result(problem, number))
        exchanges.append((seat_question(seat, problem, proposal), right))
    return exchanges


def wrong_result(problem: Problem, seed: int) -> str:
    """Returns a result that is near the right one and wrong; the right one's negative if that is not an integer."""
    right = problem.answer
    off = random.Random(seed).choice((-10, -2, -1, 1, 2, 10))
    if right.removeprefix("-").isdecimal():
        return str(int(right) + off)
    return f"-{right}".removeprefix("--")
