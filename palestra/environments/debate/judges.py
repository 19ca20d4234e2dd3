"""Rule-based debate judge: scores each answer given the answers before it, and determines the winner.

A side's score is the sum of its answers' scores and lies in [0, 1], so each answer can be rewarded immediately. Each
answer has an equal share of the structure and rebuttal scores; the evidence score is shared by all of a side's answers,
since each fact counts once. Length earns nothing: text over the limit, repetition and false citations reduce the score.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, field
from itertools import chain
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from palestra.core.config import StrictModel
from palestra.environments.debate.arguments import SIDES, Argument, Point, Side, Topic, unanswered_points
from palestra.envs.support.answers import read_choice

DebateMode = Literal["competitive", "truth"]
Winner = Literal["pro", "con", "draw"]
NGRAM_WORDS = 3  # n-gram size of the repetition measure, in content words
DRAW_MARGIN = 0.02  # a smaller score difference is a draw: the rules are not that precise


class ScoreWeights(StrictModel):
    """Weights of the parts of a side's score. The first three are normalised to sum to 1."""

    structure: float = Field(1.0, ge=0)
    """Weight of claim, reason and conclusion being present, at least 0."""
    evidence: float = Field(2.0, ge=0)
    """Weight of the side's facts being cited, at least 0."""
    rebuttal: float = Field(1.0, ge=0)
    """Weight of answering the other side's points, at least 0."""
    repetition: float = Field(0.25, ge=0)
    """Score subtracted from a side that only repeats itself, at least 0; proportional to the repeated share."""

    @model_validator(mode="after")
    def _weighs_something(self) -> Self:
        if not self.structure + self.evidence + self.rebuttal:
            raise ValueError("weights: structure, evidence and rebuttal are all 0, so that no side could ever win")
        return self

    def weighted_terms(self, structure: float, evidence: float, rebuttal: float, repetition: float) -> dict[str, float]:
        """Returns the terms of a score in [0, 1] by part. Repetition subtracts at most what the others add."""
        total = self.structure + self.evidence + self.rebuttal
        earned = {
            "structure": self.structure * structure / total,
            "evidence": self.evidence * evidence / total,
            "rebuttal": self.rebuttal * rebuttal / total,
        }
        return earned | {"repetition": 0.0 - min(sum(earned.values()), self.repetition * repetition)}


@dataclass(frozen=True)
class ScoreParts:
    """Score of an answer, or of all answers of a side, by part; each in [0, 1].

    `honesty`: share of the named facts that exist, belong to the claimed side and, if rebutted, were cited by the
    opponent; it scales `evidence`. `worth`: the weighted total.
    """

    structure: float = 0.0
    evidence: float = 0.0
    rebuttal: float = 0.0
    repetition: float = 0.0
    honesty: float = 0.0
    worth: float = 0.0

    def to_info(self) -> dict[str, float]:
        """Returns the parts by name, rounded to 6 decimals, for a step's info."""
        return {name: round(value, 6) for name, value in asdict(self).items()}

    def __add__(self, other: ScoreParts) -> ScoreParts:
        return ScoreParts(*map(operator.add, astuple(self), astuple(other)))


@dataclass(frozen=True)
class Speech:
    """An answer given in `round`, and its contribution to its side's score."""

    round: int
    argument: Argument
    parts: ScoreParts

    @property
    def side(self) -> Side:
        return self.argument.side


@dataclass(frozen=True)
class DebateVerdict:
    """The winner, and each side's score in [0, 1]."""

    winner: Winner
    scores: dict[Side, float]

    @property
    def margin(self) -> float:
        """Pro's score minus con's, in [-1, 1]."""
        return self.scores["pro"] - self.scores["con"]

    def to_info(self) -> dict[str, Any]:
        """Returns winner, scores and margin for a step's info."""
        return {"winner": self.winner, "scores": dict(self.scores), "margin": self.margin}


@dataclass(frozen=True)
class RuleJudge:
    """Rule-based judge for one topic and a number of rounds.

    In mode competitive a side's evidence is a share of its own facts. In mode truth both sides' evidence is a share of
    the larger fact count, so more facts score more, and a side that concludes for the other has conceded.
    """

    topic: Topic
    rounds: int
    mode: DebateMode = "competitive"
    weights: ScoreWeights = field(default_factory=ScoreWeights)

    def score_argument(self, argument: Argument, history: Sequence[Argument]) -> ScoreParts:
        """Returns an answer's contribution to its side's score; 0 in all parts for an unreadable answer.

        `history`: all answers visible to the side when it spoke, its own included.
        """
        if not argument.is_readable:
            return ScoreParts()
        ours = [a for a in history if a.side == argument.side]
        opponent_points = list(chain.from_iterable(a.points for a in history if a.side != argument.side))
        share = argument.read_share / self.rounds
        honesty = honesty_score(argument, opponent_points)
        structure = share * (argument.has_claim + argument.has_reason + argument.has_conclusion) / 3
        evidence = argument.read_share * honesty * self._fresh(argument, ours)
        answered = share * rebuttal_score(argument, ours, opponent_points)
        repeated = repetition_rate(argument.words, [a.words for a in ours]) / self.rounds
        worth = sum(self.weights.weighted_terms(structure, evidence, answered, repeated).values())
        return ScoreParts(structure, evidence, answered, repeated, honesty / self.rounds, worth)

    def _fresh(self, argument: Argument, ours: Sequence[Argument]) -> float:
        """Returns the share of the evidence that this answer is the first to cite."""
        shown = set(chain.from_iterable(a.supporting_ids for a in ours))
        sizes = {side: len(self.topic.facts_of(side)) for side in SIDES}
        num_facts = sizes[argument.side]
        if self.mode == "truth":
            num_facts = max(sizes.values())
        return len(set(argument.supporting_ids) - shown) / num_facts

    def verdict(self, speeches: Sequence[Speech]) -> DebateVerdict:
        """Returns the winner by concession or by score, and the total scores."""
        totals = {side: total_score(speeches, side).worth for side in SIDES}
        return DebateVerdict(self._winner_by_concession(speeches) or winner_by_score(totals), totals)

    def _winner_by_concession(self, speeches: Sequence[Speech]) -> Side | None:
        """Returns the side that the other conceded to in its last conclusion; None in competitions or if both did."""
        if self.mode == "competitive":
            return None
        last = {s.side: s.argument.stance for s in speeches if s.argument.stance}
        won = [stance for side, stance in last.items() if stance != side]
        if len(won) != 1:
            return None
        return won[0]


def total_score(speeches: Sequence[Speech], side: Side) -> ScoreParts:
    """Returns the summed score parts of one side."""
    return sum((s.parts for s in speeches if s.side == side), ScoreParts())


def winner_by_score(scores: dict[Side, float]) -> Winner:
    """Returns the side with the higher score, "draw" if the difference is below `DRAW_MARGIN`."""
    margin = scores["pro"] - scores["con"]
    if abs(margin) < DRAW_MARGIN:
        return "draw"
    return "pro" if margin > 0 else "con"


def read_verdict(answer: object) -> Side | None:
    """Returns the side named after the last `####`, or in the whole answer without one; None unless exactly one is."""
    choice = read_choice(answer, SIDES)
    return next((side for side in SIDES if side == choice), None)


def honesty_score(argument: Argument, opponent_points: Sequence[Point]) -> float:
    """Returns the share of the named facts that are used correctly; 0 if the answer names none.

    `opponent_points`: the points that the other side has made.
    """
    real = len(argument.supporting_ids) + sum(number in _ids(opponent_points) for number in argument.rebutted_ids)
    named = len(argument.supporting_ids) + len(argument.rebutted_ids) + len(argument.false_ids)
    return real / max(named, 1)


def rebuttal_score(argument: Argument, ours: Sequence[Argument], opponent_points: Sequence[Point]) -> float:
    """Returns the rebuttal score of an answer, in [0, 1].

    1 if it answers at least one point not answered before, less if it also argues against facts that the other side
    never cited. If no point is open: 0 if it argues against facts never cited, or rebuts before the other side has made
    any point; else 1.
    """
    invented = sum(number not in _ids(opponent_points) for number in argument.rebutted_ids)
    still_open = unanswered_points(opponent_points, ours)
    if not still_open:
        return float(not invented and (bool(opponent_points) or not argument.rebuttal_words))
    answered = len({point for point in still_open if argument.addresses(point)})
    return answered / max(answered + invented, 1)


def _ids(points: Sequence[Point]) -> set[str]:
    return {point.id for point in points}


def repetition_rate(words: Sequence[str], earlier: Sequence[Sequence[str]]) -> float:
    """Returns the share of an answer's word trigrams that its side used before, in this answer or an earlier one."""
    seen = set(chain.from_iterable(map(_grams, earlier)))
    again = 0
    grams = _grams(words)
    for gram in grams:
        again += gram in seen
        seen.add(gram)
    return again / max(len(grams), 1)


def _grams(words: Sequence[str]) -> list[tuple[str, ...]]:
    if len(words) <= NGRAM_WORDS:
        return [tuple(words)] if words else []
    return [tuple(words[i : i + NGRAM_WORDS]) for i in range(len(words) - NGRAM_WORDS + 1)]
