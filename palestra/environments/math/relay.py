"""Math relay env: one seat observes the first part of a story, the other the second part and a message from the first.

Neither seat can answer alone, and neither can copy: the first does not observe the question, the second does not
observe the numbers that the story begins with. Made for small instruct models: short parts in English, messages and
answers of one line, worked examples as earlier turns of the conversation (`shots`). Only right numbers are rewarded,
never a form. For comparison, a single seat may observe the whole story.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from palestra.core.types import Seat, Step
from palestra.environments.math.grading import UNREADABLE, AnswerGrade, grade_directly
from palestra.environments.math.review import last_number, replies_info
from palestra.environments.math.word_templates import ANIMALS, NAMES, THINGS
from palestra.envs.base import Env
from palestra.envs.reward_terms import terms_info, total_rewards
from palestra.envs.support.few_shot import MAX_SHOTS, acting_seat, ask_with_examples
from palestra.envs.support.options import RewardMode, check_range
from palestra.envs.support.splits import MAX_DRAWS, Split, first_of_split, hash_share

RelayedMessage = Literal["sent", "blank", "foreign"]
Signs = Literal["++", "+-", "-+", "--"]  # what the two parts of a story do: add or take away
RelayTeam = Literal["relay", "single"]
FIRST = "first"
SECOND = "second"
SOLVER = "solver"
SEATS: dict[RelayTeam, tuple[Seat, ...]] = {"relay": (FIRST, SECOND), "single": (SOLVER,)}
ROLES: dict[Seat, str] = {
    FIRST: "You read the first part of a story. Tell your colleague, who reads the rest, how many there are by then. "
    "Answer with the calculation and its result, for example 12 + 9 = 21.",
    SECOND: "Your colleague tells you how a story begins; you read the rest. Answer its question with the calculation "
    "and its result, for example 21 - 4 = 17.",
    SOLVER: "You read a story and answer its question. Answer with the calculations and their results, for example "
    "12 + 9 = 21, 21 - 4 = 17.",
}
MAX_MESSAGE_CHARS = 80  # characters of the first seat's reply that the second observes
LARGEST_LIMIT = 10_000  # largest value of `limit`
HELD_OUT = 0.4  # share of calculations that are in stories of the splits dev and test only

# By topic: the first part with a number added or taken, the second part likewise, and the question.
STORIES: tuple[tuple[dict[str, str], dict[str, str], str], ...] = (
    (
        {"+": "{name} has {a} {things} and finds {b} more.", "-": "{name} has {a} {things} and loses {b} of them."},
        {"+": "Then {other} gives {name} {c} more.", "-": "Then {name} gives {c} to {other}."},
        "How many {things} does {name} have now?",
    ),
    (
        {"+": "{a} people are on a bus and {b} more get on.", "-": "{a} people are on a bus and {b} of them get off."},
        {"+": "At the next stop {c} more get on.", "-": "At the next stop {c} get off."},
        "How many people are on the bus now?",
    ),
    (
        {"+": "{a} {animals} are in a field and {b} more come.", "-": "{a} {animals} are in a field and {b} run away."},
        {"+": "Later {c} more come.", "-": "Later {c} run away."},
        "How many {animals} are in the field now?",
    ),
    (
        {"+": "{name} has {a} dollars and earns {b} more.", "-": "{name} has {a} dollars and spends {b}."},
        {"+": "Then {name} earns {c} more.", "-": "Then {name} spends {c}."},
        "How many dollars does {name} have now?",
    ),
)


@dataclass(frozen=True)
class RelayStory:
    """A story in two parts. `middle` and `end` are calculations with their results, such as "23 + 14 = 37";
    `calculations` are the same without, in the form that decides the split: the smaller number of a sum first."""

    opening: str
    rest: str
    middle: str
    end: str
    calculations: tuple[str, str]

    @property
    def split(self) -> Split | None:
        """The story's split. No calculation of a dev or test story is in one of base or train, be it in the first part
        or the second; a story with one calculation of each kind belongs to no split (None)."""
        held_out = {hash_share(f"relay {each}") < HELD_OUT for each in self.calculations}
        if len(held_out) > 1:
            return None
        splits: tuple[Split, Split] = ("dev", "test") if held_out.pop() else ("base", "train")
        return splits[hash_share("relay {}, {}".format(*self.calculations)) < 0.5]


class MathRelay(Env):
    """The seat `first` observes how a story begins and sends a message; `second` observes it and the rest, and answers.

    `limit` is the largest number of a story, `signs` what its parts do: "+-" adds in the first and takes away in the
    second; each is as frequent. `shots` worked examples precede every question as turns of the conversation; they
    belong to the split `base`, in which no one is trained or evaluated. With team `single` the one seat `solver`
    observes the whole story. Rewards: the team 1 for a right final answer, `first` 1 for a message whose last number is
    right, as far as `second` observes it (`reward: dense`). For ablations, `message: blank` replaces the message by
    nothing and `foreign` by the right one of another story; rewards are still for the message that was sent. Info:
    `success`, `turn`, by seat `answers` and `invalid` (no number in the reply); in the last step `answer` (the final
    one) and `gold`. Raises ValueError if an option is out of range.
    """

    name: ClassVar[str] = "math_relay"
    replaces_state = True

    def __init__(
        self,
        *,
        team: RelayTeam = "relay",
        limit: int = 30,
        signs: list[Signs] | None = None,
        shots: int = 3,
        split: Split = "train",
        reward: RewardMode = "dense",
        message: RelayedMessage = "sent",
    ) -> None:
        check_range("limit", limit, 9, LARGEST_LIMIT)
        check_range("shots", shots, 0, MAX_SHOTS)
        self.seats = SEATS[team]
        self.roles = {seat: ROLES[seat] for seat in SEATS[team]}
        self.limit = limit
        self.split = split
        self.reward = reward
        self.message = message
        self.signs = tuple(get_args(Signs) if signs is None else signs)
        if not self.signs:
            raise ValueError(f"signs: names none; give at least one of {', '.join(get_args(Signs))}")
        worked = [relay_story(seed, limit, "base", self.signs) for seed in range(shots)]
        self.examples = {seat: example_turns(seat, worked) for seat in self.seats}
        self._next: Seat | None = None

    def reset(self, seed: int) -> Step:
        self.story = relay_story(seed, self.limit, self.split, self.signs)
        self.foreign = relay_story(seed + 1, self.limit, self.split, self.signs).middle
        self.replies: dict[Seat, str] = {}
        self.grades: dict[Seat, AnswerGrade] = {}
        self._next = self.seats[0]
        return Step(self._observations(), info={"turn": 0, "success": False})

    def step(self, actions: dict[Seat, Any]) -> Step:
        seat = acting_seat(self._next, actions)
        reply = sent_message(str(actions[seat])) if seat == FIRST else str(actions[seat])
        self.replies = self.replies | {seat: reply}
        self.grades = self.grades | {seat: self._grade(seat, reply)}
        self._next = SECOND if seat == FIRST else None
        is_correct = self.grades[seat].is_correct
        terms = {seat: {"message": float(is_correct)}} if seat == FIRST and self.reward == "dense" else {}
        success = self._next is None and is_correct
        gold = None if self._next else right_result(self.story.end)
        info = replies_info(self.replies, self.grades, success, gold) | terms_info(terms)
        return Step(self._observations(), total_rewards(terms), float(success), info=info)

    def expert(self, seat: Seat, rng: random.Random) -> str:
        """Returns the calculation of the seat's part of the story and its right result."""
        return worked_reply(seat, self.story)

    def _grade(self, seat: Seat, reply: str) -> AnswerGrade:
        return grade_directly(last_number(reply), right_result(worked_reply(seat, self.story))) or UNREADABLE

    def _observations(self) -> dict[Seat, Any]:
        if self._next is None:
            return {}
        messages = {"sent": self.replies.get(FIRST, ""), "blank": "", "foreign": self.foreign}
        question = seat_question(self._next, self.story, messages[self.message])
        return {self._next: ask_with_examples(self.roles[self._next], self.examples[self._next], question)}


def relay_story(seed: int, limit: int, split: Split, signs: Sequence[Signs] = get_args(Signs)) -> RelayStory:
    """Returns the story of `split` for `seed`: numbers from 2 to `limit`, all results positive.

    Its split depends on the two calculations, not on topic, names and things. Raises ValueError if there are too few.
    """
    rng = random.Random(f"relay {seed}")
    drawn = (_draw_story(rng, limit, rng.choice(signs)) for _ in range(MAX_DRAWS))
    lacking = f'no story of split "{split}" in {MAX_DRAWS} draws with numbers up to {limit}: give a larger limit'
    return first_of_split(drawn, split, lambda story: story.split, lacking)


def _draw_story(rng: random.Random, limit: int, signs: Signs) -> RelayStory:
    opening, rest, question = rng.choice(STORIES)
    sign, then = signs
    middle = end = 0
    while middle < 1 or end < 1:
        a, b, c = (rng.randint(2, limit) for _ in range(3))
        middle = a + b if sign == "+" else a - b
        end = middle + c if then == "+" else middle - c
    name, other = rng.sample(NAMES, 2)
    words = {"name": name, "other": other, "things": rng.choice(THINGS), "animals": rng.choice(ANIMALS)}
    first, second = (text.format(**words, a=a, b=b, c=c) for text in (opening[sign], f"{rest[then]} {question}"))
    keys = _calculation_key(a, sign, b), _calculation_key(middle, then, c)
    return RelayStory(first, second, f"{a} {sign} {b} = {middle}", f"{middle} {then} {c} = {end}", keys)


def _calculation_key(a: int, sign: str, b: int) -> str:
    """Returns a calculation as text, the smaller number of a sum first."""
    return f"{min(a, b)} + {max(a, b)}" if sign == "+" else f"{a} - {b}"


def seat_question(seat: Seat, story: RelayStory, message: str) -> str:
    """Returns the text that a seat is asked: its part of the story, for `second` after the message."""
    if seat == FIRST:
        return story.opening
    if seat == SOLVER:
        return f"{story.opening} {story.rest}"
    return f"Your colleague says: {sent_message(message)}\n{story.rest}"


def sent_message(reply: str) -> str:
    """Returns the part of the first seat's reply that the second observes, in one line."""
    return " ".join(reply.split())[:MAX_MESSAGE_CHARS]


def worked_reply(seat: Seat, story: RelayStory) -> str:
    """Returns the right reply of a seat: its calculation and the result; for the single seat, both."""
    return {FIRST: story.middle, SECOND: story.end, SOLVER: f"{story.middle}, {story.end}"}[seat]


def right_result(calculation: str) -> str:
    """Returns the result of a calculation such as "23 + 14 = 37"."""
    return calculation.rpartition("= ")[2]


def example_turns(seat: Seat, stories: list[RelayStory]) -> list[dict[str, str]]:
    """Returns stories with right messages and answers as turns of a conversation."""
    turns = []
    for story in stories:
        turns.append({"role": "user", "content": seat_question(seat, story, story.middle)})
        turns.append({"role": "assistant", "content": worked_reply(seat, story)})
    return turns
