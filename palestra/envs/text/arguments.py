"""What a debate is about and what was understood of an answer: topics, facts, points, arguments."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Literal

Side = Literal["pro", "con"]
SIDES: tuple[Side, Side] = ("pro", "con")
STANCES: dict[Side, str] = {"pro": "yes", "con": "no"}
Part = Literal["claim", "because", "against", "so"]
WORDS: dict[Part, tuple[str, ...]] = {  # by which a part may begin
    "claim": ("claim", "i claim", "i argue", "we argue"),
    "because": ("because", "since", "reason", "reasons", "evidence", "given that"),
    "against": ("against", "rebuttal", "however", "in reply", "my opponent", "the other side", "they say", "you say"),
    "so": ("so", "therefore", "thus", "hence", "conclusion", "in conclusion", "in short"),
}
EXPLAINED = 3  # words that each cited number needs beside it, and each part at least; fewer where facts are shorter

_WORD = re.compile(r"[^\W_]+(?:['’.,-][^\W_]+)*")
_FILLERS = (
    "a an and are as at be been but by can could do does for from had has have he her his if in into is it its may "
    "more most not of on or our she should than that their them there these this those to was were what when which "
    "while who will with would your"
)
_STOP = frozenset(
    chain(
        (word for words in WORDS.values() for phrase in words for word in phrase.split()),
        _FILLERS.split(),
    )
)


def content_words(text: str) -> tuple[str, ...]:
    """The words of `text` that say something, in order: lower case, endings cut off; the words that begin parts do not
    count."""
    return tuple(_stem(word) for word in _WORD.findall(text.lower()) if word not in _STOP)


def _stem(word: str) -> str:
    for ending in ("'s", "’s", "ing", "ed", "es", "s", "e"):
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            return word.removesuffix(ending)
    return word


@dataclass(frozen=True)
class Fact:
    """A piece of evidence. In drills the text is the number itself."""

    id: str
    text: str
    side: Side

    @cached_property
    def words(self) -> frozenset[str]:
        return frozenset(content_words(self.text))


@dataclass(frozen=True)
class Topic:
    """What is debated, the evidence in the order in which it is shown, and the side that is right, where one is."""

    text: str
    facts: tuple[Fact, ...]
    truth: Side | None = None

    def of(self, side: Side) -> list[Fact]:
        return [fact for fact in self.facts if fact.side == side]

    @cached_property
    def by_id(self) -> dict[str, Fact]:
        return {fact.id.lower(): fact for fact in self.facts}

    @cached_property
    def numbers(self) -> re.Pattern[str]:
        """Finds what looks like a fact's number, whether or not there is such a fact."""
        letters = "".join(sorted({fact.id[0].lower() for fact in self.facts}))
        return re.compile(rf"\b[{letters}]\d{{1,4}}\b", re.IGNORECASE)

    @cached_property
    def enough(self) -> int:
        """How many words say something here: 3, or 1 where facts are single words."""
        return min(EXPLAINED, *(len(fact.words) for fact in self.facts))

    @cached_property
    def subject(self) -> frozenset[str]:
        return frozenset(content_words(self.text))


@dataclass(frozen=True)
class Point:
    """Something a side said for itself, which the other may answer: a fact it cited, or words of its own."""

    id: str
    words: frozenset[str]


@dataclass(frozen=True)
class Argument:
    """One answer, read.

    `support` are facts of the own side that it cites, `rebuts` facts of the other side that it argues against, `false`
    numbers that it cites as support though they are the other side's or nobody's. `stance` is the side its conclusion
    is for, None where it does not say. `heard` in (0, 1] is less than 1 for an answer longer than allowed, whose end is
    not read.
    """

    side: Side
    text: str
    claim: bool
    reason: bool
    conclusion: bool
    stance: Side | None
    support: tuple[str, ...]
    false: tuple[str, ...]
    rebuts: tuple[str, ...]
    points: tuple[Point, ...]
    replies: tuple[frozenset[str], ...]  # the words of each part that argues against the other side
    words: tuple[str, ...]
    heard: float

    @property
    def readable(self) -> bool:
        return self.claim or self.reason or self.conclusion

    def answers(self, point: Point) -> bool:
        enough = min(EXPLAINED, len(point.words))
        return point.id in self.rebuts or any(len(point.words & reply) >= enough > 0 for reply in self.replies)
