"""A debate judged by rules: what an answer is worth given what was said before it, and who has won.

A side's score is the sum of what its answers are worth, between 0 and 1, so an answer's worth can be paid when it is
given. Each answer has an equal share of structure and rebuttal; evidence is shared by all of a side's answers, since
each fact counts once. Nothing is earned by length: what is too long, unread, repeated or made up takes away.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from palestra.config import Strict
from palestra.envs.text.arguments import SIDES, Argument, Point, Side, Topic

Mode = Literal["competitive", "truth"]
Winner = Literal["pro", "con", "draw"]
GRAM = 3  # content words in a row that make a repetition
CLOSE = 0.02  # scores nearer to each other than this are a draw: the rules are not as fine as that


class Weights(Strict):
    """What the parts of a side's score count for. The first three are taken as shares of their sum; `repetition` is
    what a side loses that says everything again."""

    structure: float = Field(1.0, ge=0)
    evidence: float = Field(2.0, ge=0)
    rebuttal: float = Field(1.0, ge=0)
    repetition: float = Field(0.25, ge=0)

    @model_validator(mode="after")
    def _weighs_something(self) -> Self:
        if not self.structure + self.evidence + self.rebuttal:
            raise ValueError("weights: structure, evidence and rebuttal are all 0, so that no side could ever win")
        return self

    def worth(self, structure: float, evidence: float, rebuttal: float, repetition: float) -> float:
        whole = self.structure + self.evidence + self.rebuttal
        earned = self.structure * structure + self.evidence * evidence + self.rebuttal * rebuttal
        return max(0.0, earned / whole - self.repetition * repetition)


@dataclass(frozen=True)
class Parts:
    """What an answer, or a side's whole case, is worth, and why; each in [0, 1].

    `honesty` is the share of the facts named that exist, stand on the right side and were said where they are said to
    have been; it scales the evidence. `worth` is the weighted whole.
    """

    structure: float = 0.0
    evidence: float = 0.0
    rebuttal: float = 0.0
    repetition: float = 0.0
    honesty: float = 0.0
    worth: float = 0.0

    def shown(self) -> dict[str, float]:
        return {name: round(value, 6) for name, value in asdict(self).items()}

    def __add__(self, other: Parts) -> Parts:
        ours, theirs = asdict(self), asdict(other)
        return Parts(**{name: ours[name] + theirs[name] for name in ours})


@dataclass(frozen=True)
class Speech:
    """An answer that was given in `round`, and what it adds to its side's score."""

    round: int
    argument: Argument
    parts: Parts

    @property
    def side(self) -> Side:
        return self.argument.side


@dataclass(frozen=True)
class Verdict:
    """Who won, and the scores in [0, 1] it rests on."""

    winner: Winner
    scores: dict[Side, float]

    @property
    def margin(self) -> float:
        """Pro's score less con's, in [-1, 1]."""
        return self.scores["pro"] - self.scores["con"]

    def info(self) -> dict[str, Any]:
        return {"winner": self.winner, "scores": dict(self.scores), "margin": self.margin}


@dataclass(frozen=True)
class Rules:
    """The judge by rules, for one topic and a number of rounds.

    In a competition a side's evidence is measured by what it could have shown. In search of the truth both are measured
    by the side that has more, so that more facts weigh more, and a side that concludes for the other has conceded.
    """

    topic: Topic
    rounds: int
    mode: Mode = "competitive"
    weights: Weights = field(default_factory=Weights)

    def judge(self, argument: Argument, heard: Sequence[Argument]) -> Parts:
        """What an answer adds to its side's score; `heard` is what its side had heard when it spoke, its own earlier
        answers included. An answer that cannot be read adds nothing."""
        if not argument.readable:
            return Parts()
        own = [a for a in heard if a.side == argument.side]
        made = [point for a in heard if a.side != argument.side for point in a.points]
        share, honesty = argument.heard / self.rounds, honest(argument, made)
        structure = share * (argument.claim + argument.reason + argument.conclusion) / 3
        evidence = argument.heard * honesty * self._fresh(argument, own)
        answered = share * rebuttal(argument, own, made)
        repeated = repetition(argument.words, [a.words for a in own]) / self.rounds
        worth = self.weights.worth(structure, evidence, answered, repeated)
        return Parts(structure, evidence, answered, repeated, honesty / self.rounds, worth)

    def _fresh(self, argument: Argument, own: Sequence[Argument]) -> float:
        """The share of the evidence to be shown that this answer is the first to show."""
        shown = set(chain.from_iterable(a.support for a in own))
        sizes = {side: len(self.topic.of(side)) for side in SIDES}
        whole = max(sizes.values()) if self.mode == "truth" else sizes[argument.side]
        return len(set(argument.support) - shown) / whole

    def verdict(self, speeches: Sequence[Speech]) -> Verdict:
        totals = {side: total(speeches, side).worth for side in SIDES}
        return Verdict(self._conceded(speeches) or leader(totals), totals)

    def _conceded(self, speeches: Sequence[Speech]) -> Side | None:
        """The side to which the other gives way by its last conclusion, unless both do."""
        if self.mode == "competitive":
            return None
        last = {s.side: s.argument.stance for s in speeches if s.argument.stance}
        won = [stance for side, stance in last.items() if stance != side]
        return won[0] if len(won) == 1 else None


def total(speeches: Sequence[Speech], side: Side) -> Parts:
    """A side's whole case so far."""
    return sum((s.parts for s in speeches if s.side == side), Parts())


def leader(scores: dict[Side, float]) -> Winner:
    margin = scores["pro"] - scores["con"]
    if abs(margin) < CLOSE:
        return "draw"
    return "pro" if margin > 0 else "con"


def read_verdict(answer: object) -> Side | None:
    """The side that a judge's answer names after its last `####`, or in all of it; None unless it names just one."""
    said = set(re.findall(r"\b(pro|con)\b", str(answer).rpartition("####")[2].lower()))
    return next((side for side in SIDES if said == {side}), None)


def honest(argument: Argument, made: Sequence[Point]) -> float:
    """The share of the facts that an answer names which are what it takes them for; 0 where it names none."""
    real = len(argument.support) + sum(number in _ids(made) for number in argument.rebuts)
    named = len(argument.support) + len(argument.rebuts) + len(argument.false)
    return real / named if named else 0.0


def rebuttal(argument: Argument, own: Sequence[Argument], made: Sequence[Point]) -> float:
    """How well an answer meets what the other side has said, in [0, 1].

    1 where it answers at least one point that was not answered yet, less for arguing against facts that the other side
    never cited. Where there is nothing left to answer, 1 for leaving it at that, and 0 for an opponent made up.
    """
    invented = sum(number not in _ids(made) for number in argument.rebuts)
    still_open = [point for point in made if not any(a.answers(point) for a in own)]
    if not still_open:
        return float(not invented and (bool(made) or not argument.replies))
    answered = len({point for point in still_open if argument.answers(point)})
    return answered / (answered + invented) if answered else 0.0


def _ids(points: Sequence[Point]) -> set[str]:
    return {point.id for point in points}


def repetition(words: Sequence[str], earlier: Sequence[Sequence[str]]) -> float:
    """The share of an answer's runs of three words that its side had said before, in this answer or an earlier one."""
    seen = set(chain.from_iterable(map(_grams, earlier)))
    again, grams = 0, _grams(words)
    for gram in grams:
        again += gram in seen
        seen.add(gram)
    return again / len(grams) if grams else 0.0


def _grams(words: Sequence[str]) -> list[tuple[str, ...]]:
    if len(words) <= GRAM:
        return [tuple(words)] if words else []
    return [tuple(words[i : i + GRAM]) for i in range(len(words) - GRAM + 1)]
