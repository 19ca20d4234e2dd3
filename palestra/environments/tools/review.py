"""Tool review env: a caller makes a tool call for a question; a reviewer observes it and gives the final answer.

Made for small instruct models: short questions in English, one call (`<tool_call>{"name": ..., "arguments":
...}</tool_call>`) or one number a reply, worked examples as earlier turns of the conversation (`shots`), the same for
every policy. Only right numbers are rewarded, never the form of a call.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, ClassVar, Literal, NamedTuple

from palestra.core.chat import TOOL_CALL_PATTERN, ToolCall, parse_tool_call, render_tool_call
from palestra.core.types import Seat, Step
from palestra.environments.math.relay import LARGEST_LIMIT, relay_story, right_result
from palestra.environments.tools.builtin_tools import built_in_tools
from palestra.environments.tools.synthetic_world import PLACE_NAMES, place_names, places_in
from palestra.environments.tools.tasks import is_correct
from palestra.environments.tools.tool_state import Library, SearchHit, ToolState
from palestra.environments.tools.toolbox import Toolbox
from palestra.envs.base import Env
from palestra.envs.reward_terms import terms_info, total_rewards
from palestra.envs.support.few_shot import MAX_SHOTS, acting_seat, ask_with_examples
from palestra.envs.support.options import RewardMode, check_range
from palestra.envs.support.splits import MAX_DRAWS, Split, first_of_split, split_of_text

CallTeam = Literal["caller_reviewer", "single"]
QuestionKind = Literal["sum", "lookup"]
KINDS: tuple[QuestionKind, ...] = ("sum", "lookup")
CALLER = "caller"
REVIEWER = "reviewer"
AGENT = "agent"
SEATS: dict[CallTeam, tuple[Seat, ...]] = {"caller_reviewer": (CALLER, REVIEWER), "single": (AGENT,)}
SUM_EXAMPLE = render_tool_call("calculator", {"expression": "4812 + 377"})
SEARCH_EXAMPLE = render_tool_call("search", {"query": "Elmstead"})
TOOLS_TEXT = f"There are two tools: {SUM_EXAMPLE} works out sums, {SEARCH_EXAMPLE} finds places."
ANSWER_TEXT = "answer with the number alone if the result is right, else call a tool again."
ROLES: dict[Seat, str] = {
    CALLER: f"You call the tool that answers a question. {TOOLS_TEXT}",
    REVIEWER: f"You review a colleague's call of a tool: {ANSWER_TEXT} {TOOLS_TEXT}",
    AGENT: f"You answer a question with a tool: call it, then {ANSWER_TEXT} {TOOLS_TEXT}",
}
PLACE_QUESTIONS = {
    "people": "How many people live in {}?",
    "founded": "In which year was {} founded?",
    "bridges": "How many bridges are there in {}?",
}
PLACE_TEXTS = (
    "{name} was founded in {founded} and has {bridges} bridges. Today {people} people live there.",
    "Some {people} people live in {name}, a town of {bridges} bridges. It was founded in {founded}.",
    "With its {bridges} bridges, {name} is home to {people} people. The town was founded in {founded}.",
)
MAX_RESULT_CHARS = 400  # characters of a result, or a call, that a seat observes
NO_CALL = "Error: that is no call of a tool."


class Question(NamedTuple):
    """A question, its answer, which is a number, the library, a call that finds it, and a similar one that does not."""

    kind: QuestionKind
    text: str
    answer: str
    library: Library
    right_call: ToolCall
    wrong_call: ToolCall


@dataclass(frozen=True)
class MadeCall:
    """A call: the seat that made it, its text, and the result of the tool."""

    seat: Seat
    text: str
    result: str


class ToolReview(Env):
    """The caller calls a tool once; the reviewer observes the question, the call and its result, and answers.

    Questions are of `kinds`: "sum", a story with numbers up to `limit`, for the calculator; "lookup", a number in a
    document on a place, for the search. Instead of an answer the reviewer may make up to `max_calls` calls of its own,
    whose results it observes. With team `single` one seat `agent` does all of it. `shots` worked examples precede every
    question as turns of the conversation; they belong to the split `base`, in which no one is trained or evaluated. In
    two of every four examples the first call is wrong and is then corrected. Rewards: the team 1 for the right number,
    the caller 1 for a call that finds it (`reward: dense`). Info: `success`, `turn`, `kind`, `calls` (their number), by
    seat `invalid` (a reply that is not a call where it must be one, or no number where it must be); in the last step
    `gold`. Raises ValueError if an option is out of range.
    """

    name: ClassVar[str] = "tool_review"
    replaces_state = True

    def __init__(
        self,
        *,
        team: CallTeam = "caller_reviewer",
        kinds: list[QuestionKind] | None = None,
        limit: int = 999,
        max_calls: int = 1,
        shots: int = 4,
        split: Split = "train",
        reward: RewardMode = "dense",
    ) -> None:
        check_range("limit", limit, 9, LARGEST_LIMIT)
        check_range("max_calls", max_calls, 0, 8)
        check_range("shots", shots, 0, MAX_SHOTS)
        self.kinds = KINDS if kinds is None else tuple(kinds)
        if not self.kinds:
            raise ValueError(f"kinds: names none; give at least one of {', '.join(KINDS)}")
        self.seats = SEATS[team]
        self.roles = {seat: ROLES[seat] for seat in SEATS[team]}
        self.limit = limit
        self.calls_allowed = 1 + max_calls
        self.split = split
        self.reward = reward
        self.examples = {seat: worked_exchanges(seat, shots, self.kinds, limit) for seat in self.seats}
        self._next: Seat | None = None

    def reset(self, seed: int) -> Step:
        kind = random.Random(f"tool review {seed}").choice(self.kinds)
        self.question = draw_question(kind, seed, self.limit, self.split)
        self.calls: tuple[MadeCall, ...] = ()
        self.invalid: dict[Seat, bool] = {}
        self._replies = 0
        self._next = self.seats[0]
        return Step(self._observations(), info=self._info(success=False))

    def step(self, actions: dict[Seat, Any]) -> Step:
        seat = acting_seat(self._next, actions)
        reply = str(actions[seat])
        self._replies = self._replies + 1
        has_call = TOOL_CALL_PATTERN.search(reply) is not None
        if seat == CALLER or (has_call and len(self.calls) < self.calls_allowed):
            return self._call(seat, reply)
        success = not has_call and is_right(reply, self.question)
        self.invalid = self.invalid | {seat: has_call or not any(c.isdigit() for c in reply)}
        self._next = None
        return Step({}, {}, float(success), info=self._info(success))

    def expert(self, seat: Seat, rng: random.Random) -> str:
        """Returns the right call, or the answer if the last call found it."""
        is_answered = bool(self.calls) and finds_answer(self.calls[-1].result, self.question)
        if seat != CALLER and (is_answered or len(self.calls) >= self.calls_allowed):
            return self.question.answer
        return render(self.question.right_call)

    def _call(self, seat: Seat, reply: str) -> Step:
        """Runs the first call of a reply; the reviewer, or the lone agent, is next."""
        call = None
        text = reply
        if written := TOOL_CALL_PATTERN.search(reply):
            call = parse_tool_call(written[1])
            text = written[0]
        result = run_call(call, self.question.library) if call else NO_CALL
        self.calls = (*self.calls, MadeCall(seat, " ".join(text.split())[:MAX_RESULT_CHARS], result))
        self.invalid = self.invalid | {seat: call is None}
        self._next = self.seats[-1]
        terms = {}
        if seat == CALLER and self.reward == "dense":
            terms = {seat: {"call": float(finds_answer(result, self.question))}}
        return Step(self._observations(), total_rewards(terms), info=self._info(success=False) | terms_info(terms))

    def _info(self, success: bool) -> dict[str, Any]:
        info: dict[str, Any] = {"turn": self._replies, "success": success, "kind": self.question.kind}
        info |= {"calls": len(self.calls), "invalid": dict(self.invalid)}
        if self._next is None:
            info["gold"] = self.question.answer
        return info

    def _observations(self) -> dict[Seat, Any]:
        assert self._next is not None
        asked = seat_question(self._next, self.question, self.calls)
        return {self._next: ask_with_examples(self.roles[self._next], self.examples[self._next], asked)}


# ---- questions


def draw_question(kind: QuestionKind, seed: int, limit: int, split: Split) -> Question:
    """Returns the question of `split` for `seed`. Raises ValueError if there is none."""
    if kind == "sum":
        return _sum_question(seed, limit, split)
    return _lookup_question(seed, split)


def _sum_question(seed: int, limit: int, split: Split) -> Question:
    """Returns a story of three numbers; the wrong call has another second sign."""
    story = relay_story(seed, limit, split)
    first = story.calculations[0].partition(" = ")[0]
    _, sign, last = story.calculations[1].partition(" = ")[0].split()
    wrong = {"+": "-", "-": "+"}[sign]
    calls = (ToolCall("calculator", {"expression": f"{first} {each} {last}"}) for each in (sign, wrong))
    answer = right_result(story.calculations[-1])
    return Question("sum", story.text, answer, PlaceLibrary(seed), *calls)


def _lookup_question(seed: int, split: Split) -> Question:
    """Returns a question for a number of a place; the wrong call searches for another place."""
    rng = random.Random(f"tool review {seed}")
    names = place_names()
    drawn = (rng.choice(names) for _ in range(MAX_DRAWS))
    name = first_of_split(
        drawn, split, lambda name: split_of_text(f"tool review {name}"), f'no place of split "{split}"'
    )
    fact, text = rng.choice(list(PLACE_QUESTIONS.items()))
    answer = PlaceLibrary(seed).numbers(name)[fact]
    other = rng.choice([each for each in names if each != name])
    calls = (ToolCall("search", {"query": title.capitalize()}) for title in (name, other))
    return Question("lookup", text.format(name.capitalize()), answer, PlaceLibrary(seed), *calls)


class PlaceLibrary:
    """A library with a document for each of 2,304 places, whose numbers are drawn anew from `seed`."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def search(self, query: str, k: int) -> Sequence[SearchHit]:
        return [SearchHit(name.capitalize(), self._text(name)) for name in places_in(query)[:k]]

    def read(self, title: str) -> str | None:
        if title.lower() not in PLACE_NAMES:
            return None
        return self._text(title.lower())

    def numbers(self, name: str) -> dict[str, str]:
        """Returns the numbers in the document of a place."""
        rng = random.Random(f"{name} {self.seed}")
        people = rng.randint(1000, 99_999)
        founded = rng.randint(1001, 1899)
        bridges = rng.randint(2, 99)
        return {"people": f"{people:,}", "founded": str(founded), "bridges": str(bridges)}

    def _text(self, name: str) -> str:
        text = random.Random(f"{name} {self.seed} text").choice(PLACE_TEXTS)
        return text.format(name=name.capitalize(), **self.numbers(name))


@cache
def _toolbox() -> Toolbox:
    tools = built_in_tools(("calculator", "search"), 1, False, 10.0, False)
    return Toolbox(tools, max_result_chars=MAX_RESULT_CHARS)


def run_call(call: ToolCall, library: Library) -> str:
    """Returns the tool's result on one line."""
    result = _toolbox().call_now(call, ToolState(library))
    return " ".join(result.text.split())


def make_call(seat: Seat, call: ToolCall, library: Library) -> MadeCall:
    """Returns a seat's call with the tool's result."""
    return MadeCall(seat, render(call), run_call(call, library))


def finds_answer(result: str, question: Question) -> bool:
    """True if a result has the answer: if it equals the result of the right call."""
    return result == run_call(question.right_call, question.library)


def is_right(reply: str, question: Question) -> bool:
    """True if a reply states the answer and no other number; a calculation may precede it ("4812 + 377 = 5189")."""
    return is_correct(reply.rpartition("=")[2], question.answer)


# ---- prompts


def render(call: ToolCall) -> str:
    """Returns a call as the model writes it."""
    return render_tool_call(call.name, call.arguments)


def seat_question(seat: Seat, question: Question, calls: Sequence[MadeCall]) -> str:
    """Returns the text that a seat is asked: the question, then the calls that were made and their results."""
    lines = [question.text]
    for call in calls:
        who = "You" if call.seat == seat else "Your colleague"
        lines += [f"{who} called: {call.text}", f"Result: {call.result}"]
    return "\n".join(lines)


@lru_cache(maxsize=64)  # an env is made for each episode
def worked_exchanges(seat: Seat, shots: int, kinds: tuple[QuestionKind, ...], limit: int) -> Sequence[tuple[str, str]]:
    """Returns what a seat is asked and right replies, for `shots` questions, the kinds one after the other."""
    exchanges: list[tuple[str, str]] = []
    for number in range(shots):
        question = draw_question(kinds[number % len(kinds)], number, limit, "base")
        exchanges += worked_replies(seat, question, is_wrong=number // len(kinds) % 2 == 1)
    return exchanges


def worked_replies(seat: Seat, question: Question, *, is_wrong: bool) -> list[tuple[str, str]]:
    """Returns what a seat is asked and the right replies; with `is_wrong`, after a wrong first call."""
    right = render(question.right_call)
    if seat == CALLER:
        return [(question.text, right)]
    caller = {REVIEWER: CALLER}.get(seat, seat)
    calls = []
    replies = []
    if is_wrong:
        calls.append(make_call(caller, question.wrong_call, question.library))
        caller = seat
    if seat == AGENT or is_wrong:
        replies.append((seat_question(seat, question, calls), right))
    calls.append(make_call(caller, question.right_call, question.library))
    return [*replies, (seat_question(seat, question, calls), question.answer)]
