"""Data types of debates: topics, facts, points and parsed arguments."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Literal

Side = Literal["pro", "con"]
SIDES: tuple[Side, Side] = ("pro", "con")
STANCES: dict[Side, str] = {"pro": "yes", "con": "no"}
ArgumentPart = Literal["claim", "because", "against", "so"]
PART_KEYWORDS: dict[ArgumentPart, tuple[str, ...]] = {  # keywords that start a part
    "claim": ("claim", "i claim", "i argue", "we argue"),
    "because": ("because", "since", "reason", "reasons", "evidence", "given that"),
    "against": ("against", "rebuttal", "however", "in reply", "my opponent", "the other side", "they say", "you say"),
    "so": ("so", "therefore", "thus", "hence", "conclusion", "in conclusion", "in short"),
}
MIN_CONTENT_WORDS = 3  # minimum content words of a part, and beside each cited number; lower where facts are shorter

_WORD = re.compile(r"[^\W_]+(?:['’.,-][^\W_]+)*")
_FILLERS = (
    "a an and are as at be been but by can could do does for from had has have he her his if in into is it its may "
    "more most not of on or our she should than that their them there these this those to was were what when which "
    "while who will with would your"
)
_STOP = frozenset(
    chain((word for words in PART_KEYWORDS.values() for phrase in words for word in phrase.split()), _FILLERS.split())
)


def content_words(text: str) -> tuple[str, ...]:
    """Returns the content words of `text` in order: lower case, stemmed, without function words and part keywords."""
    return tuple(_stem(word) for word in _WORD.findall(text.lower()) if word not in _STOP)


def _stem(word: str) -> str:
    for ending in ("'s", "’s", "ing", "ed", "es", "s", "e"):
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            return word.removesuffix(ending)
    return word


@dataclass(frozen=True)
class Fact:
    """A piece of evidence for one side. In synthetic topics the text equals the id."""

    id: str
    text: str
    side: Side

    @cached_property
    def words(self) -> frozenset[str]:
        return frozenset(content_words(self.text))


@dataclass(frozen=True)
class Topic:
    """The motion, its evidence in display order, and the correct side (`truth`, None if there is none)."""

    text: str
    facts: tuple[Fact, ...]
    truth: Side | None = None

    def facts_of(self, side: Side) -> list[Fact]:
        """Returns the facts of one side, in display order."""
        return [fact for fact in self.facts if fact.side == side]

    @cached_property
    def by_id(self) -> dict[str, Fact]:
        """The facts by lower-case id."""
        return {fact.id.lower(): fact for fact in self.facts}

    @cached_property
    def id_pattern(self) -> re.Pattern[str]:
        """Pattern that matches anything shaped like a fact id, whether or not the fact exists."""
        letters = "".join(sorted({fact.id[0].lower() for fact in self.facts}))
        return re.compile(rf"\b[{letters}]\d{{1,4}}\b", re.IGNORECASE)

    @cached_property
    def min_words(self) -> int:
        """Minimum content words of a statement: 3, or the length of the shortest fact if that is less."""
        return min(MIN_CONTENT_WORDS, *(len(fact.words) for fact in self.facts))

    @cached_property
    def motion_words(self) -> frozenset[str]:
        return frozenset(content_words(self.text))


@dataclass(frozen=True)
class Point:
    """A point the opponent can rebut: a cited fact (`id`), or words of the speaker's own (`id` is "")."""

    id: str
    words: frozenset[str]


@dataclass(frozen=True)
class Argument:
    """One parsed answer.

    `supporting_ids`: ids of the side's own facts that it cites. `rebutted_ids`: ids of the other side's facts that it
    argues against. `false_ids`: ids cited as support that belong to the other side or to no fact. `stance`: the side
    its conclusion supports, None if it states none. `read_share`, in (0, 1]: share of the text that was read, below 1
    for an answer over the word limit.
    """

    side: Side
    text: str
    has_claim: bool
    has_reason: bool
    has_conclusion: bool
    stance: Side | None
    supporting_ids: tuple[str, ...]
    false_ids: tuple[str, ...]
    rebutted_ids: tuple[str, ...]
    points: tuple[Point, ...]
    rebuttal_words: tuple[frozenset[str], ...]  # content words of each `against` part
    words: tuple[str, ...]
    read_share: float

    @property
    def is_readable(self) -> bool:
        """True if the answer has a claim, a reason or a conclusion."""
        return self.has_claim or self.has_reason or self.has_conclusion

    def addresses(self, point: Point) -> bool:
        """True if the answer argues against `point`: by its id, or with enough of its words in one `against` part."""
        enough = min(MIN_CONTENT_WORDS, len(point.words))
        return point.id in self.rebutted_ids or any(
            len(point.words & reply) >= enough > 0 for reply in self.rebuttal_words
        )


def unanswered_points(points: Iterable[Point], answers: Sequence[Argument]) -> list[Point]:
    """Returns the points that no answer argues against."""
    return [point for point in points if not any(answer.addresses(point) for answer in answers)]
