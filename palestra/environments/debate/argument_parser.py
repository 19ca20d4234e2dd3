"""Parser for debate answers: claim, cited facts, rebuttals and conclusion of one answer.

An answer is prose in four parts, each introduced by a keyword: `claim` (the thesis), `because` (the reasons), `against`
(a reply to the opponent), `so` (the conclusion). A few synonyms are accepted. A keyword starts a part at the start of a
clause, or anywhere in an answer without punctuation, so `claim r1 because r7 against r3 so yes` follows the same rules.

A citation is a fact's number with a statement about the fact, or a quotation of most of it. A bare number does not
count as a citation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from palestra.core.mappings import key_by_value
from palestra.environments.debate.arguments import (
    MIN_CONTENT_WORDS,
    PART_KEYWORDS,
    SIDES,
    STANCES,
    Argument,
    ArgumentPart,
    Fact,
    Point,
    Side,
    Topic,
    content_words,
)

MIN_QUOTED_SHARE = 0.6  # minimum share of a fact's words in a quotation without the fact's number

_PART = key_by_value(PART_KEYWORDS)
_BEGIN = re.compile(rf"\b(?:{'|'.join(sorted(_PART, key=len, reverse=True))})\b", re.IGNORECASE)
_PUNCTUATION = re.compile(r"[.,;:!?\n]")
_STANCE = re.compile(r"\W*(?:the answer is\W+)?(yes|no)\b", re.IGNORECASE)


@dataclass(frozen=True)
class _Segment:
    """One part of an answer: its content words, the facts it cites, and numbers in it that match no fact."""

    part: ArgumentPart
    text: str
    words: tuple[str, ...]
    cited: tuple[Fact, ...]
    quoted: tuple[Fact, ...]
    unknown: tuple[str, ...]


def parse_argument(answer: object, topic: Topic, side: Side, max_words: int) -> Argument:
    """Returns the parsed argument. Only the first `max_words` words are read, after the last `####` if there is one."""
    text, heard = _truncate(str(answer).rpartition("####")[2].strip(), max_words)
    segments = [_segment(part, body, topic) for part, body in _parts(text)]
    support, false, rebuts = _citations(segments, side)
    claim, reason, conclusion = _structure(segments, topic, side)
    return Argument(
        side=side,
        text=text,
        has_claim=claim,
        has_reason=reason,
        has_conclusion=conclusion,
        stance=_stance(segments),
        supporting_ids=support,
        false_ids=false,
        rebutted_ids=rebuts,
        points=tuple(chain.from_iterable(_points(s, topic) for s in segments if s.part != "against")),
        rebuttal_words=tuple(frozenset(s.words) for s in segments if s.part == "against"),
        words=content_words(text),
        read_share=heard,
    )


def _truncate(text: str, longest: int) -> tuple[str, float]:
    """Returns the first `longest` words of the text, and their share of its characters."""
    short = text[: longest * 12]  # bounds the cost of a text with extremely long words
    ends = [match.end() for match in re.finditer(r"\S+", short)]
    cut = short[: ends[longest - 1]] if len(ends) > longest else short.rstrip()
    return cut, len(cut) / len(text) if text else 1.0


def _parts(text: str) -> Iterator[tuple[ArgumentPart, str]]:
    """Yields the parts of an answer in order; text before the first keyword is a claim."""
    bare = not _PUNCTUATION.search(text)
    part: ArgumentPart = "claim"
    start = 0
    for match in _BEGIN.finditer(text):
        word = match[0].lower()
        if bare or _opens(text, match) or (word == "because" and part != "against"):
            yield part, text[start : match.start()]
            part = _PART[word]
            start = match.end()
    yield part, text[start:]


def _opens(text: str, match: re.Match[str]) -> bool:
    """True where a clause begins: after punctuation (list and emphasis marks are skipped), or before a colon."""
    before = text[: match.start()].rstrip(" \t*_#>\"'([-•")
    return not before or before[-1] in ".,;:!?\n" or text[match.end() : match.end() + 3].lstrip("* ").startswith(":")


def _segment(part: ArgumentPart, text: str, topic: Topic) -> _Segment:
    words = content_words(text)
    named = list(dict.fromkeys(number.lower() for number in topic.id_pattern.findall(text)))
    word_set = frozenset(words)
    explained = len(words) >= topic.min_words * len(named)
    cited = [topic.by_id[number] for number in named if number in topic.by_id]
    return _Segment(
        part=part,
        text=text,
        words=words,
        cited=tuple(fact for fact in cited if explained and fact.words & word_set),
        quoted=tuple(fact for fact in topic.facts if fact not in cited and _quotes(word_set, fact)),
        unknown=tuple(number for number in named if number not in topic.by_id),
    )


def _quotes(words: frozenset[str], fact: Fact) -> bool:
    return len(fact.words) >= MIN_CONTENT_WORDS and len(fact.words & words) >= MIN_QUOTED_SHARE * len(fact.words)


def _citations(segments: Sequence[_Segment], side: Side) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Returns the fact ids cited as support, cited falsely, and argued against, each id once."""
    support: dict[str, None] = {}
    false: dict[str, None] = {}
    rebuts: dict[str, None] = {}
    for segment in segments:
        against = segment.part == "against"
        others = rebuts if against else false  # for all that is not the side's own
        others.update(dict.fromkeys(segment.unknown))
        others.update(dict.fromkeys(fact.id for fact in segment.cited if fact.side != side))
        support.update(dict.fromkeys(fact.id for fact in segment.cited if fact.side == side))
        for fact in segment.quoted:  # quoting the other side's fact is not claiming it as support
            if fact.side == side:
                support[fact.id] = None
            elif against:
                rebuts[fact.id] = None
    return tuple(support), tuple(false), tuple(rebuts)


def _structure(segments: Sequence[_Segment], topic: Topic, side: Side) -> tuple[bool, bool, bool]:
    """Returns whether there are a claim on the subject, a reason that adds to it, and a later conclusion for `side`."""
    telling = [len(s.words) >= topic.min_words and _on_subject(s, topic, side) for s in segments]
    claims = [s for s, tells in zip(segments, telling, strict=True) if s.part == "claim" and (tells or _takes(s, side))]
    known = topic.motion_words.union(STANCES.values(), *(s.words for s in claims))
    reasons = [
        i for i, s in enumerate(segments) if s.part == "because" and telling[i] and not known.issuperset(s.words)
    ]
    after = segments[min(reasons, default=len(segments)) :]
    return bool(claims), bool(reasons), any(s.part == "so" and _concludes(s, topic, side) for s in after)


def _on_subject(segment: _Segment, topic: Topic, side: Side) -> bool:
    """True if the segment shares a word with the motion or with the evidence of `side`."""
    words = topic.motion_words.union(*(fact.words for fact in topic.facts_of(side)))
    return not words.isdisjoint(segment.words) or any(fact.side == side for fact in (*segment.cited, *segment.quoted))


def _takes(segment: _Segment, side: Side) -> bool:
    stance = _STANCE.match(segment.text)
    return stance is not None and stance[1].lower() == STANCES[side]


def _concludes(segment: _Segment, topic: Topic, side: Side) -> bool:
    return _takes(segment, side) or (not _STANCE.match(segment.text) and _on_subject(segment, topic, side))


def _stance(segments: Sequence[_Segment]) -> Side | None:
    """Returns the side supported by the last conclusion that states yes or no, None without one."""
    stances = [match[1].lower() for s in segments if s.part == "so" and (match := _STANCE.match(s.text))]
    return next((side for side in SIDES if stances and stances[-1] == STANCES[side]), None)


def _points(segment: _Segment, topic: Topic) -> Iterator[Point]:
    """Yields the cited facts and unknown ids as points; without either, the words if they are on the subject."""
    facts = (*segment.cited, *segment.quoted)
    for fact in facts:
        yield Point(fact.id, fact.words)
    for number in segment.unknown:
        yield Point(number, frozenset((number,)))
    words = frozenset(segment.words)
    if not (facts or segment.unknown) and len(words) >= MIN_CONTENT_WORDS and words & topic.motion_words:
        yield Point("", words)
