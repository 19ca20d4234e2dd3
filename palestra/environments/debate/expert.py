"""Scripted debater: each round it states some of its facts and rebuts the other side."""

from __future__ import annotations

from collections.abc import Sequence, Set

from palestra.environments.debate.arguments import STANCES, Argument, Fact, Point, Side, Topic


def write_argument(
    topic: Topic, side: Side, history: Sequence[Argument], rounds: int, max_words: int, truth: Side
) -> str:
    """Returns an answer of `side` that concludes for `truth`: `claim r1 because r7 against r3 so yes`, or in prose.

    The side's facts are split over its rounds; the last ones are dropped if the answer exceeds `max_words` words.
    """
    own = [a for a in history if a.side == side]
    reply = _unanswered(own, [a for a in history if a.side != side])
    facts = _turn(topic.facts_of(side), len(own), rounds)
    shown = {number for a in own for number in a.supporting_ids}
    wordless = all(fact.text == fact.id for fact in topic.facts)
    while True:
        text = _drilled(facts, reply, side, truth) if wordless else _in_prose(topic, facts, shown, reply, side, truth)
        if len(text.split()) <= max_words or len(facts) <= 1:
            return text
        facts = facts[:-1]


def _turn(facts: Sequence[Fact], turn: int, rounds: int) -> list[Fact]:
    """Returns the facts of one turn: new ones, or up to two repeated ones if there are more turns than facts."""
    fresh = list(facts[turn * len(facts) // rounds : (turn + 1) * len(facts) // rounds])
    start = turn % len(facts)
    return fresh or [*facts[start:], *facts[:start]][:2]


def _unanswered(own: Sequence[Argument], others: Sequence[Argument]) -> Point | None:
    """Returns the first unanswered point of the other side, facts before other points; None without one."""
    points = [point for a in others for point in a.points]
    still = [point for point in points if not any(a.addresses(point) for a in own)]
    facts = [point for point in still if point.id]
    return next(iter([*facts, *still]), None)


def _drilled(facts: Sequence[Fact], reply: Point | None, side: Side, truth: Side) -> str:
    claim, *reasons = [fact.id for fact in facts] if len(facts) > 1 else [STANCES[side], facts[0].id]
    against = f" against {reply.id}" if reply and reply.id else ""
    return f"claim {claim} because {' '.join(reasons)}{against} so {STANCES[truth]}"


def _in_prose(
    topic: Topic, facts: Sequence[Fact], shown: Set[str], reply: Point | None, side: Side, truth: Side
) -> str:
    sentences = [_quote_fact(fact, fact.id in shown) for fact in facts]
    claim, *reasons = sentences if len(sentences) > 1 else [f"{STANCES[side].capitalize()}.", *sentences]
    against = [f"Against: {_reply(topic, reply)}"] if reply else []
    return "\n".join([f"Claim: {claim}", f"Because: {' '.join(reasons)}", *against, f"So: {STANCES[truth]}."])


def _quote_fact(fact: Fact, again: bool) -> str:
    """Returns the fact's text, or its content words if it was cited before, which avoids the repetition penalty."""
    if again:
        return f"[{fact.id}] still stands, with its {' '.join(sorted(fact.words))}."
    return f"{fact.text.rstrip('.')} [{fact.id}]."


def _reply(topic: Topic, point: Point) -> str:
    if fact := topic.by_id.get(point.id.lower()):
        return f"{fact.text.rstrip('.')} [{fact.id}], but this is outweighed."
    if point.id:
        return f"There is no fact [{point.id}] in evidence."
    return f"What was said of {' '.join(sorted(point.words))} is outweighed."
