"""Math relay env: a story is read in parts, each by another seat, and a message is handed on from part to part.

No seat can answer alone, and none can copy: the first does not observe the question, the others do not observe the
numbers that the story begins with. Made for small instruct models: short parts in English, messages and answers of one
line, worked examples as earlier turns of the conversation (`shots`). Only right numbers are rewarded, never a form. For
comparison, a single seat may observe the whole story, and work it out in one answer or in one for each part.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, product
from typing import Any, ClassVar, Literal

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
RelayTeam = Literal["relay", "single", "single_turns"]
READERS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh")
SOLVER = "solver"
FIRST_ROLE = (
    "You read the first part of a story. Tell your colleague, who reads the rest, how many there are by then. "
    "Answer with the calculation and its result, for example 12 + 9 = 21."
)
MIDDLE_ROLE = (
    "Your colleague tells you how a story begins; you read the next part. Tell your colleague, who reads the rest, how "
    "many there are by then. Answer with the calculation and its result, for example 21 - 4 = 17."
)
LAST_ROLE = (
    "Your colleague tells you how a story begins; you read the rest. Answer its question with the calculation "
    "and its result, for example 21 - 4 = 17."
)
SOLVER_ROLE = (
    "You read a story and answer its question. Answer with the calculations and their results, for example "
    "12 + 9 = 21, 21 - 4 = 17."
)
TURNS_ROLE = (
    "You read a story and answer its question, one calculation after the other. Answer with the next calculation and "
    "its result, for example 21 - 4 = 17."
)
MAX_MESSAGE_CHARS = 80  # characters of a seat's reply that the next one observes
LARGEST_LIMIT = 10_000  # largest value of `limit`
MAX_TRIES = 100  # draws of a later number of a story, for one of the story's split
UNIT = {"+": 1, "-": -1}
HELD_OUT = 0.4  # share of calculations that are in stories of the splits dev and test only

# By topic: the first part with a number added or taken, a later part likewise, and the question.
STORIES: tuple[tuple[dict[str, str], dict[str, str], str], ...] = (
    (
        {"+": "{name} has {a} {things} and finds {b} more.", "-": "{name} has {a} {things} and loses {b} of them."},
        {"+": "Then {other} gives {name} {b} more.", "-": "Then {name} gives {b} to {other}."},
        "How many {things} does {name} have now?",
    ),
    (
        {"+": "{a} people are on a bus and {b} more get on.", "-": "{a} people are on a bus and {b} of them get off."},
        {"+": "At the next stop {b} more get on.", "-": "At the next stop {b} get off."},
        "How many people are on the bus now?",
    ),
    (
        {"+": "{a} {animals} are in a field and {b} more come.", "-": "{a} {animals} are in a field and {b} run away."},
        {"+": "Later {b} more come.", "-": "Later {b} run away."},
        "How many {animals} are in the field now?",
    ),
    (
        {"+": "{name} has {a} dollars and earns {b} more.", "-": "{name} has {a} dollars and spends {b}."},
        {"+": "Then {name} earns {b} more.", "-": "Then {name} spends {b}."},
        "How many dollars does {name} have now?",
    ),
)


@dataclass(frozen=True)
class RelayStory:
    """A story in `parts`, the last with the question. `calculations` has one for each part, with its result, such as
    "23 + 14 = 37"; `keys` are the same without, in the form that decides the split: the smaller number of a sum
    first."""

    parts: tuple[str, ...]
    calculations: tuple[str, ...]
    keys: tuple[str, ...]

    @property
    def text(self) -> str:
        return " ".join(self.parts)

    @property
    def split(self) -> Split | None:
        """The story's split. No calculation of a dev or test story is in one of base or train, in whichever part; a
        story with calculations of both kinds belongs to no split (None)."""
        held_out = {is_held_out(key) for key in self.keys}
        if len(held_out) > 1:
            return None
        splits: tuple[Split, Split] = ("base", "train")
        if held_out.pop():
            splits = ("dev", "test")
        return splits[hash_share(f"relay {', '.join(self.keys)}") < 0.5]


class MathRelay(Env):
    """Each seat observes the next of the story's `parts` and the message of the seat before, and sends one on; the last
    answers. The seats are `first`, `second`, and so on.

    `limit` is the largest number of a story, `signs` what its parts do: "+-" adds in the first and takes away in the
    second; each is as frequent. `shots` worked examples precede every question as turns of the conversation; they
    belong to the split `base`, in which no one is trained or evaluated. With team `single` the one seat `solver`
    observes the whole story and answers once; with `single_turns` it answers once for each part, and observes its
    earlier answers. Rewards: the team 1 for a right final answer, all others 1 for a message whose last number is
    right, as far as the next seat observes it (`reward: dense`). For ablations, `message: blank` replaces a message by
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
        parts: int = 2,
        limit: int = 30,
        signs: list[str] | None = None,
        shots: int = 3,
        split: Split = "train",
        reward: RewardMode = "dense",
        message: RelayedMessage = "sent",
    ) -> None:
        check_range("parts", parts, 2, len(READERS))
        check_range("limit", limit, 9, LARGEST_LIMIT)
        check_range("shots", shots, 0, MAX_SHOTS)
        self.turns: tuple[Seat, ...] = {
            "relay": READERS[:parts],
            "single": (SOLVER,),
            "single_turns": (SOLVER,) * parts,
        }[team]
        if team == "single" and message != "sent":
            raise ValueError(f"message: {message} replaces what is handed on, and team: single hands on nothing")
        self.seats = tuple(dict.fromkeys(self.turns))
        self.team = team
        self.limit = limit
        self.split = split
        self.reward = reward
        self.message = message
        self.signs = all_signs(parts) if signs is None else tuple(signs)
        if not self.signs:
            raise ValueError(f"signs: names none; give at least one of {', '.join(all_signs(parts))}")
        if unknown := [each for each in self.signs if each not in all_signs(parts)]:
            known = f"with + or - for each of {parts} parts and at most two more - than +"
            raise ValueError(f'signs: "{unknown[0]}" is none: write them as "{"+" * parts}", {known}')
        worked = [relay_story(seed, limit, "base", self.signs) for seed in range(shots)]
        self.examples = [self._worked_exchanges(turn, worked) for turn in range(len(self.turns))]
        self._turn = len(self.turns)

    def reset(self, seed: int) -> Step:
        self.story = relay_story(seed, self.limit, self.split, self.signs)
        self.foreign = relay_story(seed + 1, self.limit, self.split, self.signs)
        self.replies: tuple[str, ...] = ()
        self.grades: dict[Seat, AnswerGrade] = {}
        self._turn = 0
        return Step(self._observations(), info={"turn": 0, "success": False})

    def step(self, actions: dict[Seat, Any]) -> Step:
        seat = acting_seat(next(iter(self.turns[self._turn :]), None), actions)
        is_last = self._turn == len(self.turns) - 1
        reply = str(actions[seat])
        if not is_last:  # the part that the next seat observes, in one line
            reply = " ".join(reply.split())[:MAX_MESSAGE_CHARS]
        right = right_result(self._worked_reply(self._turn, self.story))
        grade = grade_directly(last_number(reply), right) or UNREADABLE
        self.replies = (*self.replies, reply)
        self.grades = self.grades | {seat: grade}
        self._turn += 1
        terms = {}
        if not is_last and self.reward == "dense":
            terms = {seat: {"message": float(grade.is_correct)}}
        success = is_last and grade.is_correct
        last_replies = dict(zip(self.turns, self.replies, strict=False))  # not all turns have been taken
        info = replies_info(last_replies, self.grades, success, right, is_last=is_last) | terms_info(terms)
        return Step(self._observations(), total_rewards(terms), float(success), info=info | {"turn": self._turn})

    def expert(self, seat: Seat, rng: random.Random) -> str:
        """Returns the calculation of the next part of the story and its right result; for `single` all of them."""
        return self._worked_reply(self._turn, self.story)

    def _observations(self) -> dict[Seat, Any]:
        turn = self._turn
        if turn == len(self.turns):
            return {}
        earlier = {
            "sent": self.replies,
            "blank": ("",) * turn,
            "foreign": self.foreign.calculations[:turn],
        }[self.message]
        seat = self.turns[turn]
        question = self._question(turn, self.story, earlier)
        return {seat: ask_with_examples(self._role(turn), self.examples[turn], question)}

    def _role(self, turn: int) -> str:
        if self.team == "relay":
            return [FIRST_ROLE, *[MIDDLE_ROLE] * (len(self.turns) - 2), LAST_ROLE][turn]
        return {"single": SOLVER_ROLE, "single_turns": TURNS_ROLE}[self.team]

    def _question(self, turn: int, story: RelayStory, earlier: Sequence[str]) -> str:
        """Returns what is asked in a turn, after the `earlier` replies."""
        is_relay = self.team == "relay"
        if is_relay and turn == 0:
            return story.parts[0]
        if is_relay:
            return f"Your colleague says: {earlier[-1]}\n{story.parts[turn]}"
        if turn == 0:
            return story.text
        return f"{story.text}\nSo far: {', '.join(earlier)}"

    def _worked_reply(self, turn: int, story: RelayStory) -> str:
        """Returns the right reply of a turn: the calculation of its part and the result; for `single`, all of them."""
        if self.team == "single":
            return ", ".join(story.calculations)
        return story.calculations[turn]

    def _worked_exchanges(self, turn: int, stories: Sequence[RelayStory]) -> list[tuple[str, str]]:
        """Returns what is asked in a turn after right messages, and the right reply, for each story."""
        asked = [self._question(turn, story, story.calculations[:turn]) for story in stories]
        return list(zip(asked, [self._worked_reply(turn, story) for story in stories], strict=True))


def all_signs(parts: int) -> tuple[str, ...]:
    """Returns what the parts of a story may do: "++", "+-", "-+" and "--" for two. Up to no part there are three more
    "-" than "+", since few such stories have positive results."""
    drawn = []
    for signs in product("+-", repeat=parts):
        balance = accumulate(UNIT[sign] for sign in signs)
        if min(balance) > -3:
            drawn.append("".join(signs))
    return tuple(drawn)


@lru_cache(maxsize=16_384)  # tree search resets the same seed many times
def relay_story(seed: int, limit: int, split: Split, signs: tuple[str, ...] = all_signs(2)) -> RelayStory:
    """Returns the story of `split` for `seed`, with a part for each sign: numbers from 2 to `limit`, all results
    positive.

    Its split depends on the calculations, not on topic, names and things. Raises ValueError if there are too few.
    """
    rng = random.Random(f"relay {seed}")
    drawn = (_draw_story(rng, limit, rng.choice(signs)) for _ in range(MAX_DRAWS))
    lacking = f'no story of split "{split}" in {MAX_DRAWS} draws with numbers up to {limit}: give a larger limit'
    return first_of_split(drawn, split, lambda story: story.split, lacking)


def _draw_story(rng: random.Random, limit: int, signs: str) -> RelayStory:
    opening, later, question = rng.choice(STORIES)
    numbers = _draw_numbers(rng, limit, signs)
    totals = running_totals(numbers, signs)
    name, other = rng.sample(NAMES, 2)
    words = {"name": name, "other": other, "things": rng.choice(THINGS), "animals": rng.choice(ANIMALS)}
    parts = []
    calculations = []
    clauses = [opening, *[later] * (len(signs) - 1)]
    for part, (sign, number) in enumerate(zip(signs, numbers[1:], strict=True)):
        parts.append(clauses[part][sign].format(**words, a=numbers[0], b=number))
        calculations.append(f"{totals[part]} {sign} {number} = {totals[part + 1]}")
    parts[-1] += f" {question.format(**words)}"
    return RelayStory(tuple(parts), tuple(calculations), _keys(numbers, signs))


def _draw_numbers(rng: random.Random, limit: int, signs: str) -> list[int]:
    """Returns the first number of a story and that of each part; all totals are positive.

    A number after the third is drawn until its calculation is held out as the first is, or is not, as far as there is
    such a number: else few long stories would belong to a split.
    """
    numbers: list[int] = []
    totals = [0]
    while min(totals) < 1:
        numbers = [rng.randint(2, limit) for _ in range(3)]
        for part in range(2, len(signs)):
            for _ in range(MAX_TRIES):
                drawn = [*numbers, rng.randint(2, limit)]
                first, *_, last = _keys(drawn, signs[: part + 1])
                if is_held_out(first) == is_held_out(last):
                    break
            numbers = drawn
        totals = running_totals(numbers, signs)
    return numbers


def running_totals(numbers: Sequence[int], signs: str) -> list[int]:
    """Returns the first number, and the total after each further one is added or taken away."""
    signed = [UNIT[sign] * number for sign, number in zip(signs, numbers[1:], strict=True)]
    return list(accumulate(signed, initial=numbers[0]))


def _keys(numbers: Sequence[int], signs: str) -> tuple[str, ...]:
    """Returns the calculations as texts, the smaller number of a sum first."""
    calculations = zip(running_totals(numbers, signs), signs, numbers[1:], strict=False)  # the last total has no sign
    keys = []
    for a, sign, b in calculations:
        pair = [a, b]
        if sign == "+":
            pair.sort()
        keys.append(f" {sign} ".join(map(str, pair)))
    return tuple(keys)


def is_held_out(key: str) -> bool:
    """True if a calculation is in stories of the splits dev and test only."""
    return hash_share(f"relay {key}") < HELD_OUT


def right_result(calculation: str) -> str:
    """Returns the result of a calculation such as "23 + 14 = 37"."""
    return calculation.rpartition("= ")[2]
