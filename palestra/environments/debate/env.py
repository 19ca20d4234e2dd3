"""Debate env: pro and con argue a motion from given evidence, and a judge decides.

`mode: competitive` is zero-sum: one side wins. `mode: truth` is cooperative: both sides are paid if the judge finds the
correct side. The judge is a set of rules or a third seat, which any policy plays, one behind an endpoint among them.
With `commits_first` that seat answers from the evidence alone before the debate begins.
"""

from __future__ import annotations

import random
from collections.abc import Sequence, Set
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Literal

from palestra.core.types import Seat, Step
from palestra.environments.debate.argument_parser import parse_argument
from palestra.environments.debate.arguments import SIDES, STANCES, Argument, Fact, Point, Side, Topic, unanswered_points
from palestra.environments.debate.judges import (
    DebateMode,
    DebateVerdict,
    RuleJudge,
    ScoreWeights,
    Speech,
    Winner,
    read_verdict,
    total_score,
)
from palestra.environments.debate.prompts import (
    commit_observation,
    compact_observation,
    full_judge_observation,
    full_observation,
    role_prompts,
)
from palestra.environments.debate.topics import DEFAULT_FACTS, MAX_FACTS, draw_file_topic, draw_synthetic_topic
from palestra.envs.base import Env
from palestra.envs.reward_terms import EXACT_GRADE_KEY, FORM_TERM, VERDICT_TERM, Terms, terms_info, total_rewards
from palestra.envs.support.answers import mark_answer
from palestra.envs.support.options import Rendering, RewardMode, check_range
from palestra.envs.support.splits import Split

WIN_REWARD = 1.0  # competitive: gain of the winner and loss of the loser; truth: team reward
VERDICT_PAY: dict[Winner, float] = {"pro": WIN_REWARD, "con": -WIN_REWARD, "draw": 0.0}  # of pro; con's is the negative
# per seat, in mode truth: for correct citations, for the evidence shown
HONESTY_REWARD = 0.25
EVIDENCE_REWARD = 0.25
UNREADABLE_PENALTY = 0.1  # per seat, subtracted for an unreadable answer
OPPONENT_TERM = "opponent"  # the term of a reward that the other side's answer takes, in mode competitive

JudgeSource = Literal["rules", "seat"]
SEATS: dict[JudgeSource, tuple[Seat, ...]] = {"rules": SIDES, "seat": (*SIDES, "judge")}
OPPONENTS: dict[Side, Side] = {"pro": "con", "con": "pro"}


class Debate(Env):
    """Pro and con speak `rounds` times each, in turns or simultaneously; then the judge decides.

    Info of every step: `round` and `invalid` (by seat), after speeches also the rule judge's score `parts` (by side).
    Info of the last step also: `success`, `winner` ("pro", "con" or "draw"), `scores`, `margin`, `rules_winner` (winner
    by the rule judge), `case` (total score parts by side) and, in mode truth, `truth`. Success means in mode truth that
    the judge found the correct side; in mode competitive it is by side: the other did not win and all answers of
    the side were readable. There `exact_grade` is, by side, what the verdict of the rules would have paid. With
    `commits_first` (mode truth, a judge at a seat) the judge names a side before the debate, and its verdict counts
    only for that side: else it is a draw.

    Raises ValueError if an option is out of range, or two options contradict each other.
    """

    name: ClassVar[str] = "debate"
    replaces_state = True

    def __init__(  # noqa: PLR0913 - a parameter for each option
        self,
        *,
        mode: DebateMode = "competitive",
        source: Literal["topics", "drills"] = "topics",
        topics: Path | None = None,
        split: Split | Literal["all"] = "train",
        rounds: int = 2,
        order: Literal["turns", "simultaneous"] = "turns",
        judge: JudgeSource = "rules",
        commits_first: bool = False,
        weights: ScoreWeights | None = None,
        facts: int = DEFAULT_FACTS,
        max_words: int = 200,
        reward: RewardMode = "dense",
        rendering: Rendering = "full",
    ) -> None:
        check_range("rounds", rounds, 1, 100)
        check_range("facts", facts, 1 if mode == "competitive" else 2, MAX_FACTS)
        check_range("max_words", max_words, 10, 10_000)
        if source == "drills" and topics:
            raise ValueError("topics names a file, but source: drills makes its own topics: drop one of the two")
        if source == "topics" and facts != DEFAULT_FACTS:
            raise ValueError("facts is for drills, and topics have their own: set source: drills, or leave it out")
        if source == "topics" and rendering == "compact":
            raise ValueError(
                "rendering: compact shows facts as single tokens, which only drills have: set source: drills"
            )
        if commits_first and judge != "seat":
            raise ValueError("commits_first: the judge by rules has nothing to commit to: set judge: seat")
        if commits_first and mode != "truth":
            raise ValueError("commits_first: in mode: competitive no side is right beforehand: set mode: truth")
        self.mode = mode
        self.source = source
        self.topics = topics
        self.split = split
        self.facts = facts
        self.rounds = rounds
        self.order = order
        self.judge = judge
        self.commits_first = commits_first
        self.words = max_words
        self.weights = weights or ScoreWeights()
        self.reward = reward
        self.rendering = rendering
        self.is_paid_at_end = mode == "competitive" and judge != "rules"
        self.seats = SEATS[judge]
        self.roles = role_prompts(mode, self.seats, rounds, max_words, rendering == "compact")
        self._over = True

    # ---- env interface

    def instance_of(self, seed: int) -> int | tuple[str, ...]:
        """Returns a file's topic and its facts, which seeds order differently; of a drill, its seed."""
        if self.source == "drills":
            return seed
        topic = self._topic(seed)
        return (topic.text, *sorted(fact.text for fact in topic.facts))

    def reset(self, seed: int) -> Step:
        self.topic = self._topic(seed)
        self.rule_judge = RuleJudge(self.topic, self.rounds, self.mode, self.weights)
        self.speeches: tuple[Speech, ...] = ()
        self.committed: str | None = None  # the judge's own answer
        self._over = False
        self._sound = dict.fromkeys(SIDES, True)
        return self._first_step({})

    def _first_step(self, invalid: dict[Seat, bool]) -> Step:
        """Returns a step before anything is said."""
        info: dict[str, Any] = {"round": 1}
        if invalid:
            info["invalid"] = invalid
        return Step(self._observations(), legal_actions=self._legal_actions(), info=info)

    def step(self, actions: dict[Seat, Any]) -> Step:
        acting = self._acting()
        if self._over or actions.keys() != set(acting):
            why = f"give them for {' and '.join(acting)}, who speak next"
            if self._over:
                why = "the debate is over, call reset(seed)"
            raise ValueError(f"the actions are for {sorted(actions)}: {why}")
        if self._commits_next():
            self.committed = read_verdict(actions["judge"]) or ""
            return self._first_step({"judge": not self.committed})
        if acting == ("judge",):
            return self._end_by_judge(actions["judge"])
        current = self._round()
        heard = tuple(s.argument for s in self.speeches)
        for side in SIDES:
            if side in actions:
                argument = parse_argument(actions[side], self.topic, side, self.words)
                self.speeches += (Speech(current, argument, self.rule_judge.score_argument(argument, heard)),)
        new = self.speeches[len(heard) :]
        for speech in new:
            self._sound[speech.side] &= speech.argument.is_readable
        return self._step_after(new, current)

    def expert(self, seat: Seat, rng: random.Random) -> str:
        """Returns a good answer for `seat`: its own facts, a rebuttal, and a conclusion for its side (mode truth: for
        the correct side). For the judge: in mode truth the correct side, else the rule judge's winner (pro on a draw).
        """
        truth = self.topic.truth if self.mode == "truth" else None
        if seat == "judge":
            winner = truth or self._by_rules().winner
            return self._verdict_text("con" if winner == "con" else "pro")
        heard = [s.argument for s in self.speeches]
        side = SIDES[SIDES.index(seat)]
        return write_argument(self.topic, side, heard, self.rounds, self.words, truth or side)

    # ---- turn order and observations

    def _topic(self, seed: int) -> Topic:
        if self.source == "drills":
            return draw_synthetic_topic(seed, self.split, self.mode, self.facts)
        return draw_file_topic(self.topics, seed, self.split, self.mode)

    def _commits_next(self) -> bool:
        return self.commits_first and self.committed is None

    def _acting(self) -> tuple[Seat, ...]:
        if self._commits_next():
            return ("judge",)
        if len(self.speeches) == 2 * self.rounds:
            return self.seats[len(SIDES) :]  # the judge, if a seat judges
        if self.order == "simultaneous":
            return SIDES
        return (SIDES[len(self.speeches) % 2],)

    def _round(self) -> int:
        return min(len(self.speeches) // 2 + 1, self.rounds)

    def _observations(self) -> dict[Seat, Any]:
        return {seat: self._observation(seat) for seat in self._acting()}

    def _observation(self, seat: Seat) -> str:
        current = self._round()
        if self._commits_next():
            return commit_observation(self.topic, self.rendering == "compact")
        if self.rendering == "compact":
            left = self.rounds - current + 1 if self.rounds > 1 and seat != "judge" else 0
            return compact_observation(self.topic, seat, self.speeches, left)
        if seat == "judge":
            return full_judge_observation(self.topic, self.speeches)
        return full_observation(self.topic, SIDES[SIDES.index(seat)], self.speeches, current, self.rounds)

    def _legal_actions(self) -> dict[Seat, list[Any]] | None:
        if self._acting() != ("judge",):
            return None
        return {"judge": [self._verdict_text(side) for side in SIDES]}

    def _verdict_text(self, side: Side) -> str:
        return mark_answer(side, is_compact=self.rendering == "compact")

    # ---- rewards

    def _step_after(self, new: tuple[Speech, ...], current: int) -> Step:
        terms = self._dense_terms(new)
        info: dict[str, Any] = {
            "round": current,
            "invalid": {s.side: not s.argument.is_readable for s in new},
            "parts": {s.side: s.parts.to_info() for s in new},
        }
        if not self._acting():
            return self._end(self._by_rules(), terms, info)
        info |= terms_info(terms)
        return Step(self._observations(), total_rewards(terms), legal_actions=self._legal_actions(), info=info)

    def _dense_terms(self, new: tuple[Speech, ...]) -> dict[Seat, Terms]:
        """Returns the terms of the dense rewards of the new speeches; none with `reward: outcome`."""
        terms: dict[Seat, Terms] = {side: {} for side in SIDES}
        if self.reward == "outcome":
            return terms
        for speech in new:
            speech_terms = self._speech_terms(speech)
            terms[speech.side] = {**terms[speech.side], **speech_terms}
            if self.mode == "competitive" and speech_terms:
                other = OPPONENTS[speech.side]
                terms[other] = {**terms[other], OPPONENT_TERM: 0.0 - sum(speech_terms.values())}
        return terms

    def _speech_terms(self, speech: Speech) -> dict[str, float]:
        """Returns the terms of the dense reward of one speech.

        Mode competitive: its contribution to the score under the rule judge, by parts; none under other judges (their
        verdict is paid at the end). Mode truth: weighted honesty and evidence. Unreadable answers, except in a
        competition under the rule judge: a penalty.
        """
        scores = speech.parts
        if self.mode == "competitive" and self.judge == "rules":
            return self.weights.weighted_terms(scores.structure, scores.evidence, scores.rebuttal, scores.repetition)
        if not speech.argument.is_readable:
            return {FORM_TERM: -UNREADABLE_PENALTY / self.rounds}
        if self.mode == "competitive":
            return {}
        return {"honesty": HONESTY_REWARD * scores.honesty, "evidence": EVIDENCE_REWARD * scores.evidence}

    def _end_by_judge(self, answer: Any) -> Step:
        """Ends the episode with the judge seat's verdict; an unreadable verdict is a draw."""
        verdict = read_verdict(answer)
        winner = verdict
        if self.commits_first and verdict != self.committed:
            winner = None
        scores: dict[Side, float] = dict.fromkeys(SIDES, 0.5)
        if winner:
            scores = {side: float(side == winner) for side in SIDES}
        terms: dict[Seat, Terms] = {}
        if verdict is None and self.reward == "dense":
            terms["judge"] = {FORM_TERM: -UNREADABLE_PENALTY}
        elif winner and self.mode == "competitive":
            terms["judge"] = {"correct": WIN_REWARD * (self._by_rules().winner in (winner, "draw"))}
        info = {"round": self.rounds, "invalid": {"judge": verdict is None}}
        if self.commits_first:
            info["committed"] = self.committed
        return self._end(DebateVerdict(winner or "draw", scores), terms, info)

    def _by_rules(self) -> DebateVerdict:
        return self.rule_judge.verdict(self.speeches)

    def _end(self, verdict: DebateVerdict, terms: dict[Seat, Terms], info: dict[str, Any]) -> Step:
        """Returns the last step: its rewards are `terms`, and what the verdict pays."""
        self._over = True
        rules = self._by_rules()
        verdict_info = verdict.to_info() | {
            "rules_winner": rules.winner,
            "case": {s: total_score(self.speeches, s).to_info() for s in SIDES},
        }
        if self.mode == "truth":
            is_right = verdict.winner == self.topic.truth
            info = info | verdict_info | {"truth": self.topic.truth, "success": is_right} | terms_info(terms)
            return Step({}, total_rewards(terms), WIN_REWARD * is_right, info=info)
        if self.reward == "outcome" or self.judge != "rules":  # else the scores were paid step by step
            paid = VERDICT_PAY[verdict.winner]
            exact = VERDICT_PAY[rules.winner]
            for side, sign in zip(SIDES, (1, -1), strict=True):
                terms[side] = {**terms.get(side, {}), VERDICT_TERM: sign * paid}
            info = info | {EXACT_GRADE_KEY: {"pro": exact, "con": 0.0 - exact}}
        success = {side: self._sound[side] and verdict.winner != OPPONENTS[side] for side in SIDES}
        info = info | verdict_info | {"success": success} | terms_info(terms)
        return Step({}, total_rewards(terms), info=info)


# ---- scripted debater


def write_argument(
    topic: Topic, side: Side, history: Sequence[Argument], rounds: int, max_words: int, truth: Side
) -> str:
    """Returns an answer of `side` that concludes for `truth`: `claim r1 because r7 against r3 so yes`, or in prose.

    The side's facts are split over its rounds; the last ones are dropped if the answer exceeds `max_words` words.
    """
    ours = [a for a in history if a.side == side]
    reply = _find_unanswered_point(ours, [a for a in history if a.side != side])
    facts = _turn(topic.facts_of(side), len(ours), rounds)
    shown = set(chain.from_iterable(a.supporting_ids for a in ours))
    wordless = all(fact.text == fact.id for fact in topic.facts)
    while True:
        if wordless:
            text = _as_ids(facts, reply, side, truth)
        else:
            text = _in_prose(topic, facts, shown, reply, side, truth)
        if len(text.split()) <= max_words or len(facts) <= 1:
            return text
        facts = facts[:-1]


def _turn(facts: Sequence[Fact], turn: int, rounds: int) -> list[Fact]:
    """Returns the facts of one turn: new ones, or up to two repeated ones if there are more turns than facts."""
    fresh = list(facts[turn * len(facts) // rounds : (turn + 1) * len(facts) // rounds])
    start = turn % len(facts)
    return fresh or [*facts[start:], *facts[:start]][:2]


def _find_unanswered_point(ours: Sequence[Argument], others: Sequence[Argument]) -> Point | None:
    """Returns the first unanswered point of the other side, facts before other points; None without one."""
    points = list(chain.from_iterable(a.points for a in others))
    still = unanswered_points(points, ours)
    facts = [point for point in still if point.id]
    return next(iter([*facts, *still]), None)


def _as_ids(facts: Sequence[Fact], reply: Point | None, side: Side, truth: Side) -> str:
    claim, *reasons = [fact.id for fact in facts]
    if not reasons:
        reasons = [claim]
        claim = STANCES[side]
    against = f" against {reply.id}" if reply and reply.id else ""
    return f"claim {claim} because {' '.join(reasons)}{against} so {STANCES[truth]}"


def _in_prose(
    topic: Topic, facts: Sequence[Fact], shown: Set[str], reply: Point | None, side: Side, truth: Side
) -> str:
    claim, *reasons = [_quote_fact(fact, fact.id in shown) for fact in facts]
    if not reasons:
        reasons = [claim]
        claim = f"{STANCES[side].capitalize()}."
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
