"""Compares two policies by a language model: a judge reads the episodes of both on the same instances, in both orders.

A judge prefers what it reads first (or second) more often than chance. A win therefore counts only if the judge prefers
the same side in both orders; otherwise the pair is a tie (Zheng et al., 2023, sec. 3.4, arXiv:2306.05685). If the judge
fails on a pair, for example because it is too long, the pair counts as unreadable, and the others are still judged.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, NamedTuple, Unpack

from palestra.core.failures import RunFailed, describe_error
from palestra.core.seeding import derive_seed
from palestra.core.types import Answer, Episode
from palestra.engine.sampling.token_sampling import SamplingConfig
from palestra.evaluation.evaluate import EvalOptions, open_eval
from palestra.evaluation.target import EvalResult, OnProgress
from palestra.evaluation.text import TextEvalSetup
from palestra.text.policies.base import Policy, Query
from palestra.text.policies.endpoint import EndpointPolicy
from palestra.text.policies.lm import LanguagePolicy
from palestra.text.rollouts.metrics import chosen_nodes

Verdict = Literal["A", "B", "tie"]
JUDGE_ROLE = (
    "You compare how two assistants did the same task. Judge by how well the task is done; neither the order of the "
    "two nor their length counts. Explain briefly, then end with a line that has one word only: A, B or tie."
)
JUDGE_TOKENS = 256  # token limit of a judge's reply; the policy's own limit is for another task
MAX_QUOTE_CHARS = 80  # characters of a reply in an error message
_LAST_WORD = re.compile(r"\W*(A|B|tie)\W*", re.IGNORECASE)


@dataclass(frozen=True)
class Judge:
    """The policy that judges, by name, and the tokens of its replies (see `as_judge`)."""

    policy: str
    max_tokens: int | None = None


class Judgement(NamedTuple):
    """A judge's reply about a pair in one order, and its verdict (None: the reply names none). If the judge failed,
    `error` is its message."""

    verdict: Verdict | None
    reply: str = ""
    is_cut: bool = False  # the reply ran into its token limit
    error: str = ""


class JudgedResult(NamedTuple):
    """Outcome of a comparison over pairs of episodes. `wins`, `losses` and `ties` of the first side sum to the number
    of pairs. Of the ties, `disagreed` counts those where the two orders disagree, `unreadable` those without a verdict
    in one of the orders, and `failed` the unreadable ones where the judge failed; `error` is its first error
    message."""

    results: tuple[EvalResult, EvalResult]
    wins: int
    losses: int
    ties: int
    disagreed: int
    unreadable: int
    failed: int
    error: str = ""

    @property
    def win_rate(self) -> float:
        """Share of pairs won, with a half for a tie."""
        return (self.wins + self.ties / 2) / (self.wins + self.losses + self.ties)

    def metrics(self) -> dict[str, float]:
        """Returns the counts, and `win_rate`."""
        counts = ("wins", "losses", "ties", "disagreed", "unreadable", "failed")
        return {name: getattr(self, name) for name in counts} | {"win_rate": self.win_rate}


def compare_judged(
    what: str,
    env: Mapping[str, Any],
    seats: Mapping[str, str],
    against: str,
    judge: Judge,
    *,
    episodes: int,
    seed: int = 0,
    on_progress: OnProgress = lambda played, of: None,
    **options: Unpack[EvalOptions],
) -> JudgedResult:
    """Plays the same instances with the policies of `seats` and with policy `against` at all seats. Returns the judge's
    preference for each pair. For names and the other arguments see `evaluate`.

    Raises ValueError for an unknown name, a vectorised env, and if every pair has a failed episode; RunFailed if no
    pair has two readable replies.
    """
    with open_eval(what, env, seats, episodes, options) as setup:
        if not isinstance(setup, TextEvalSetup):
            raise ValueError(f"--judge compares the answers of language agents, and {what} is a vectorised game")
        policy = as_judge(setup.load_policy(judge.policy), judge.max_tokens)
        return asyncio.run(_compare(setup, against, policy, episodes, seed, on_progress))


def as_judge(policy: Policy, max_tokens: int | None = None) -> Policy:
    """Returns `policy` as a judge. A language model answers greedily, in at most `max_tokens` tokens (None: 256), with
    the judge's role instead of its own system prompt; an endpoint keeps its settings, except for `max_tokens`."""
    if isinstance(policy, LanguagePolicy):
        sampling = SamplingConfig(max_tokens=max_tokens or JUDGE_TOKENS, temperature=0)
        return LanguagePolicy(policy.name, policy.sampler, policy.encoder, sampling, policy.adapter)
    if isinstance(policy, EndpointPolicy) and max_tokens:
        return EndpointPolicy(policy.name, policy.config.model_copy(update={"max_tokens": max_tokens}))
    return policy


async def _compare(
    setup: TextEvalSetup, against: str, judge: Policy, episodes: int, seed: int, on_progress: OnProgress
) -> JudgedResult:
    sides = (setup.policy_names, dict.fromkeys(setup.policy_names, against))
    ours, theirs = await setup.play_assignments(sides, episodes, seed, on_progress)
    both = zip(ours.episodes, theirs.episodes, strict=True)
    pairs = [(one, other) for one, other in both if one.error is None and other.error is None]
    if not pairs:
        raise ValueError(f"in each of the {episodes} instances the episode of at least one side failed")
    asked = (judge_pair(judge, *pair, derive_seed(seed, "judge", i)) for i, pair in enumerate(pairs))
    return summarise((ours, theirs), await asyncio.gather(*asked), judge.name)


def summarise(
    results: tuple[EvalResult, EvalResult], judged: Sequence[tuple[Judgement, Judgement]], judge: str
) -> JudgedResult:
    """Returns the outcome of the judgements of all pairs, each in both orders. Raises RunFailed if no pair has two
    readable replies, since the win rate would then mean nothing."""
    verdicts = [(first.verdict, second.verdict) for first, second in judged]
    unreadable = sum(None in verdict for verdict in verdicts)
    if unreadable == len(verdicts):
        raise RunFailed(_why_unreadable(judged, judge))
    outcomes = [outcome(*verdict) for verdict in verdicts]
    disagreed = sum(
        None not in v and v != ("tie", "tie") and o == "tie" for v, o in zip(verdicts, outcomes, strict=True)
    )
    counts = (outcomes.count("A"), outcomes.count("B"), outcomes.count("tie"))
    errors = [first.error or second.error for first, second in judged if first.error or second.error]
    return JudgedResult(results, *counts, disagreed, unreadable, len(errors), next(iter(errors), ""))


def _why_unreadable(judged: Sequence[tuple[Judgement, Judgement]], judge: str) -> str:
    """Returns the error message of a comparison without a readable pair."""
    lost = [each for each in chain.from_iterable(judged) if each.verdict is None]
    failed = [each for each in lost if each.error]
    wrong = [each for each in lost if not each.error]
    causes = []
    if failed:
        causes.append(f"failed replies: {len(failed)}, the first with {failed[0].error}")
    if wrong:
        quote = repr(wrong[0].reply[-MAX_QUOTE_CHARS:])
        causes.append(f"replies without a verdict: {len(wrong)}, the first ends {quote}")
        if wrong[0].is_cut:
            causes[-1] += ", cut at its token limit (--judge-tokens)"
    return (
        f"judge {judge} gave no verdict in both orders for any of {len(judged)} pairs; {'; '.join(causes)}. A reply "
        "must end with a line that says A, B or tie: use another judge"
    )


async def judge_pair(judge: Policy, ours: Episode, theirs: Episode, seed: int) -> tuple[Judgement, Judgement]:
    """Returns two judgements: with our episode as A, and with our episode as B."""
    orders = ((ours, theirs), (theirs, ours))
    queries = [Query(JUDGE_ROLE, question(*order), seed=derive_seed(seed, i)) for i, order in enumerate(orders)]
    first, second = await asyncio.gather(*map(judge.act, queries), return_exceptions=True)
    return _judgement(first), _judgement(second)


def _judgement(outcome: list[Answer] | BaseException) -> Judgement:
    """Returns the judgement from a judge's answers, or from the exception that the judge raised."""
    if isinstance(outcome, Exception):
        return Judgement(None, error=describe_error(outcome).message)
    if isinstance(outcome, BaseException):
        raise outcome
    answer = outcome[0]
    is_cut = answer.stop_reason == "length"
    verdict = None if is_cut else read_verdict(answer.text)  # "A" may be the beginning of "A is worse"
    return Judgement(verdict, answer.text, is_cut)


def question(a: Episode, b: Episode) -> str:
    """Returns the judge's prompt for two episodes: their observations and answers, without policies and rewards."""
    return f"Assistant A:\n\n{_record(a)}\n\nAssistant B:\n\n{_record(b)}\n\nWhich did better: A, B or tie?"


def _record(episode: Episode) -> str:
    lines: list[str] = []
    for node in chosen_nodes(episode):
        for seat, answer in node.answers.items():
            lines += [f"[{seat} observes] {node.observations[seat]}", f"[{seat} answers] {answer.text}"]
    return "\n".join(lines)


def read_verdict(reply: str) -> Verdict | None:
    """Returns the verdict in the last line of a judge's reply; None if the line is not A, B or tie."""
    lines = reply.strip().splitlines() or [""]
    match = _LAST_WORD.fullmatch(lines[-1])
    verdicts: Sequence[Verdict] = ("A", "B", "tie")
    return next((v for v in verdicts if match and match[1].lower() == v.lower()), None)


def outcome(as_a: Verdict | None, as_b: Verdict | None) -> Verdict:
    """Returns "A" if both orders prefer the first order's A, "B" if both prefer its B, else "tie"."""
    if (as_a, as_b) == ("A", "B"):
        return "A"
    if (as_a, as_b) == ("B", "A"):
        return "B"
    return "tie"
