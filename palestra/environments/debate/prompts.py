"""Prompts and observations of the debate env, for debaters and judge seats.

Debaters see all the evidence. A judge sees the speeches and only the cited evidence, so in mode truth its knowledge is
limited to what the debate has shown.
"""

from __future__ import annotations

from collections.abc import Sequence

from palestra.environments.debate.arguments import SIDES, STANCES, Side, Topic
from palestra.environments.debate.judges import DebateMode, Speech

COMPACT_NAMES: dict[DebateMode, str] = {"competitive": "debate", "truth": "truth"}

ANSWER_FORMAT = (
    'An answer is at most {words} words, in four parts, each begun by its word. "Claim:" what you hold. "Because:" '
    "your reasons: the facts you rely on, each told in short with its number in brackets. "
    '"Against:" an answer to what your opponent has said, with the number of the fact you answer; leave it out while '
    'there is nothing to answer. "So:" "yes" if the motion holds, "no" if it does not. Rely on facts of your own side '
    "that are listed, never on others, and do not repeat yourself. If you think first, write #### before your answer: "
    "only what follows is heard."
)
AIMS: dict[DebateMode, str] = {
    "competitive": "A judge finds for the side that argues better; one side's gain is the other's loss.",
    "truth": (
        "One side is right, and the facts tell which. You both win if the judge finds the truth. Show the facts of "
        "your side; in the end conclude what the facts of both sides together say, even if that is for the other side."
    ),
}
JUDGE_CRITERIA: dict[DebateMode, str] = {
    "competitive": "say which side argued better: by its reasons, its evidence and its answers to the other side",
    "truth": "say which side is right, as far as the evidence that was shown tells",
}
JUDGE_PROMPT = (
    "You judge a debate on a motion: pro holds that it is right, con that it is not. Read what was said and {asked}. "
    "Facts that were cited are listed if they are in evidence. If you think first, write #### and then the verdict. "
    "The verdict is one word: pro or con."
)

COMMIT_QUESTION = "Nothing was said yet. Which side is right by the evidence: pro or con?"


def role_prompts(mode: DebateMode, seats: Sequence[str], rounds: int, longest: int, compact: bool) -> dict[str, str]:
    """Returns the role prompt of each seat."""
    if compact:
        return {seat: f"{COMPACT_NAMES[mode]} {seat}" for seat in seats}
    roles: dict[str, str] = {"judge": JUDGE_PROMPT.format(asked=JUDGE_CRITERIA[mode])}
    for side, hold in zip(SIDES, ("right", "not right"), strict=True):
        roles[side] = (
            f"You are in a debate on a motion, of {rounds} round{'s' if rounds > 1 else ''}. You are {side}: it is "
            f"yours to argue that the motion is {hold}. {AIMS[mode]}\n{ANSWER_FORMAT.format(words=longest)}"
        )
    return {seat: roles[seat] for seat in seats}


def compact_observation(topic: Topic, seat: str, speeches: Sequence[Speech], left: int) -> str:
    """Returns the compact observation `topic c3 pro r1 r7 con r3 r9 you con said pro r1 r7 so yes`.

    The judge's omits the evidence. `left`: remaining answers of this seat; 0 omits it.
    """
    texts = ["topic", topic.text]
    if seat != "judge":
        texts += compact_evidence(topic)
    texts += ["you", seat, "said", " ".join(map(compact_speech, speeches)) or "none"]
    if left:
        texts.append(f"left {left}")
    return " ".join(texts)


def compact_evidence(topic: Topic) -> list[str]:
    """Returns the evidence of each side in compact form: `pro r1 r7`."""
    return [" ".join([side, *(fact.id for fact in topic.facts_of(side))]) for side in SIDES]


def compact_speech(speech: Speech) -> str:
    """Returns a parsed answer in compact form: facts cited, facts cited falsely, facts rebutted, conclusion."""
    heard = speech.argument
    named_ids = [("", heard.supporting_ids), ("false", heard.false_ids), ("against", heard.rebutted_ids)]
    references = [" ".join([name, *ids]).strip() for name, ids in named_ids if ids]
    if heard.stance:
        references.append(f"so {STANCES[heard.stance]}")
    return " ".join([speech.side, *references])


def _evidence(topic: Topic, side: Side) -> str:
    return "\n".join([f"Evidence for {side}:", *(f"[{fact.id}] {fact.text}" for fact in topic.facts_of(side))])


def full_observation(topic: Topic, side: Side, speeches: Sequence[Speech], current: int, rounds: int) -> str:
    """Returns a debater's full observation: the motion, all the evidence and the transcript."""
    evidence = [_evidence(topic, side) for side in SIDES]
    transcript = f"Said so far:\n{_transcript(speeches)}" if speeches else "Nothing was said yet."
    return "\n\n".join(
        [f"Motion: {topic.text}", *evidence, transcript, f"Round {current} of {rounds}. You are {side}."]
    )


def commit_observation(topic: Topic, compact: bool) -> str:
    """Returns what a judge sees that commits to a side before the debate: the motion and all the evidence."""
    if compact:
        return " ".join(["topic", topic.text, *compact_evidence(topic), "you judge"])
    evidence = [_evidence(topic, side) for side in SIDES]
    return "\n\n".join([f"Motion: {topic.text}", *evidence, COMMIT_QUESTION])


def full_judge_observation(topic: Topic, speeches: Sequence[Speech]) -> str:
    """Returns the judge's full observation: the motion, the transcript and the cited facts."""
    facts = "\n".join(f"[{number}] {text}" for number, text in cited_facts(topic, speeches).items()) or "none"
    return "\n\n".join(
        [
            f"Motion: {topic.text}",
            _transcript(speeches),
            f"Cited and in evidence:\n{facts}",
            "Your verdict: pro or con?",
        ]
    )


def _transcript(speeches: Sequence[Speech]) -> str:
    """Returns the transcript; every line of a speech is prefixed, so no speech can imitate another speaker."""
    return "\n\n".join(f"{s.side}, round {s.round}:\n{_quote_lines(s.argument.text or '(nothing)')}" for s in speeches)


def _quote_lines(text: str) -> str:
    return "\n".join(f"> {line}" for line in text.splitlines())


def cited_facts(topic: Topic, speeches: Sequence[Speech]) -> dict[str, str]:
    """Returns the texts of the facts named in any speech, by id."""
    named: set[str] = set()
    for argument in (speech.argument for speech in speeches):
        named.update(argument.supporting_ids, argument.rebutted_ids, argument.false_ids)
    return {fact.id: fact.text for fact in topic.facts if {fact.id, fact.id.lower()} & named}
