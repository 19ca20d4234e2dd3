"""Describe-and-guess env: a describer observes a word and describes it; a guesser names the word among several.

Made for small instruct models: replies of one line, worked examples as earlier turns of the conversation (`shots`), the
same for every policy. Neither seat can do without the other: a description that names the word is withheld, and the
guesser observes nothing of the word but the description.
"""

from __future__ import annotations

import json
import random
import re
import unicodedata
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from palestra.core.mappings import key_by_value
from palestra.core.types import Seat, Step
from palestra.envs.base import Env
from palestra.envs.support.few_shot import acting_seat, ask_with_examples
from palestra.envs.support.options import check_range
from palestra.envs.support.splits import MAX_DRAWS, Split, first_of_split, split_of_text

DESCRIBER = "describer"
GUESSER = "guesser"
ROLES: dict[Seat, str] = {
    DESCRIBER: "You describe a thing to a colleague, who must name it. Answer in a few words, without its name.",
    GUESSER: "Your colleague describes a thing. Answer with its name, one word of the list.",
}
NOUNS_FILE = Path(__file__).parent / "data" / "nouns.json"  # nouns by kind of thing
DESCRIPTIONS = {  # of worked examples: all of the split "base"
    "giraffe": "a tall animal with a very long neck",
    "kettle": "you boil water in it for tea",
    "strawberry": "a small red fruit with seeds on its skin",
    "hammer": "a tool to drive nails into wood",
    "penguin": "a black and white bird that swims and cannot fly",
    "submarine": "a ship that travels under water",
    "violin": "an instrument with strings, played with a bow",
    "lightning": "a flash in the sky during a storm",
}
MAX_DESCRIPTION_CHARS = 120  # characters of the describer's reply that the guesser observes
MIN_INNER_CHARS = 5  # a shorter name may be part of another word by chance ("ant" in "elephant")
MIN_STEM_CHARS = 3  # a word that begins with the name without its last letter (3 letters at least) names the thing
WITHHELD = "(nothing)"


class Instance(NamedTuple):
    """The thing to be named, and the things that the guesser may name, in the order that it observes."""

    thing: str
    choices: tuple[str, ...]


class DescribeGuess(Env):
    """The describer observes a thing; the guesser observes the description and `choices` things, and names one.

    Things are 376 common nouns, each in one split only. `shots` worked examples precede every question as turns of the
    conversation; their things belong to the split `base`, in which no one is trained or evaluated. A description with
    the thing's name in it, or another form of it, is withheld. The reward is the team's: 1 for the right thing. Info:
    `success`, `turn`, `withheld`, by seat `invalid` (a name in the description, or none of the list in the answer); in
    the last step `gold`. Raises ValueError if an option is out of range.
    """

    name: ClassVar[str] = "describe_guess"
    seats = (DESCRIBER, GUESSER)
    replaces_state = True

    def __init__(self, *, choices: int = 8, shots: int = 3, split: Split = "train") -> None:
        check_range("choices", choices, 2, 32)
        check_range("shots", shots, 0, len(DESCRIPTIONS))
        self.choices = choices
        self.split = split
        self.roles = dict(ROLES)
        worked = [list_choices(thing, choices, random.Random(thing)) for thing in [*DESCRIPTIONS][:shots]]
        self.examples = {seat: [worked_exchange(seat, instance) for instance in worked] for seat in self.seats}
        self._next: Seat | None = None

    def instance_of(self, seed: int) -> str:
        return draw_instance(seed, self.choices, self.split).thing

    def reset(self, seed: int) -> Step:
        self.instance = draw_instance(seed, self.choices, self.split)
        self.description = ""
        self.invalid = dict[Seat, bool]()
        self._next = DESCRIBER
        return Step(self._observations(), info=self._info(success=False))

    def step(self, actions: dict[Seat, Any]) -> Step:
        seat = acting_seat(self._next, actions)
        reply = str(actions[seat])
        if seat == DESCRIBER:
            is_withheld = names_thing(reply, self.instance.thing)
            self.description = " ".join(reply.split())[:MAX_DESCRIPTION_CHARS]
            if is_withheld:
                self.description = WITHHELD
            self.invalid = {seat: is_withheld}
            self._next = GUESSER
            return Step(self._observations(), info=self._info(success=False))
        guess = named_choice(reply, self.instance.choices)
        self.invalid = self.invalid | {seat: guess is None}
        self._next = None
        success = guess == self.instance.thing
        return Step({}, {}, float(success), info=self._info(success))

    def expert(self, seat: Seat, rng: random.Random) -> str:
        """Returns the thing's kind ("a kind of bird"), which does not always tell it from the others, or its name."""
        return worked_reply(seat, self.instance.thing)

    def _info(self, success: bool) -> dict[str, Any]:
        info: dict[str, Any] = {"turn": len(self.invalid), "success": success}
        info |= {"withheld": self.description == WITHHELD, "invalid": dict(self.invalid)}
        if self._next is None:
            info["gold"] = self.instance.thing
        return info

    def _observations(self) -> dict[Seat, Any]:
        assert self._next is not None
        asked = seat_question(self._next, self.instance, self.description)
        return {self._next: ask_with_examples(self.roles[self._next], self.examples[self._next], asked)}


def draw_instance(seed: int, choices: int, split: Split) -> Instance:
    """Returns the instance of `split` for `seed`."""
    rng = random.Random(f"describe {seed}")
    things = list(kinds_of_nouns())
    drawn = (rng.choice(things) for _ in range(MAX_DRAWS))
    thing = first_of_split(
        drawn, split, lambda thing: split_of_text(f"describe {thing}"), f'no thing of split "{split}"'
    )
    return list_choices(thing, choices, rng)


def list_choices(thing: str, choices: int, rng: random.Random) -> Instance:
    """Returns the instance of `thing` with `choices` things in all; the others may be of any split."""
    others = rng.sample([each for each in kinds_of_nouns() if each != thing], choices - 1)
    return Instance(thing, tuple(rng.sample([thing, *others], choices)))


@cache
def kinds_of_nouns() -> dict[str, str]:
    """Returns the kind of thing that each noun names."""
    by_kind = json.loads(NOUNS_FILE.read_text(encoding="utf-8"))
    return key_by_value(by_kind)


def names_thing(description: str, thing: str) -> bool:
    """True if a description has a thing's name in it: as the beginning of a word, the name's last letter left out
    ("horses", "horseback"), inside a word if it has `MIN_INNER_CHARS` letters or more ("thehorse"), or in pieces, also
    of a letter each ("hor-se", "h o r s e"). Accents are ignored."""
    plain = unicodedata.normalize("NFKD", description.lower())
    words = re.findall(r"[a-z]+", "".join(c for c in plain if not unicodedata.combining(c)))
    stem = thing[: max(MIN_STEM_CHARS, len(thing) - 1)]
    if any(word.startswith(stem) or (len(thing) >= MIN_INNER_CHARS and thing in word) for word in words):
        return True
    joined = {"".join(words[at:end]) for at in range(len(words)) for end in range(at + 2, at + len(thing) + 1)}
    return not joined.isdisjoint((thing, f"{thing}s"))


def named_choice(reply: str, choices: Sequence[str]) -> str | None:
    """Returns the one thing of `choices` that a reply names; None if it names none or several."""
    named = set(re.findall(r"[a-z]+", reply.lower())) & set(choices)
    if len(named) != 1:
        return None
    return named.pop()


def seat_question(seat: Seat, instance: Instance, description: str) -> str:
    """Returns the text that a seat is asked: the thing, or its description and the list."""
    if seat == DESCRIBER:
        return f"The thing: {instance.thing}"
    return f"Your colleague says: {description}\nThe list: {', '.join(instance.choices)}"


def worked_reply(seat: Seat, thing: str) -> str:
    """Returns a good reply of a seat: a description, if there is no worked one the thing's kind; or the name."""
    if seat == GUESSER:
        return thing
    return DESCRIPTIONS.get(thing, f"a kind of {kinds_of_nouns()[thing]}")


def worked_exchange(seat: Seat, instance: Instance) -> tuple[str, str]:
    """Returns what a seat is asked after a right description, and its right reply."""
    asked = seat_question(seat, instance, worked_reply(DESCRIBER, instance.thing))
    return asked, worked_reply(seat, instance.thing)
