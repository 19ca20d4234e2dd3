"""Two policies compared by a language model: a judge reads what both did on the same instances, in both orders.

A judge prefers what it reads first (or second) more often than chance. A win therefore counts only if the judge prefers
the same side in both orders; otherwise the pair is a tie (Zheng et al., 2023, sec. 3.4, arXiv:2306.05685).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Unpack

from palestra.evaluation.evaluate import EvalOptions, open_eval
from palestra.evaluation.target import EvalResult, OnProgress
from palestra.evaluation.text import TextEvalSetup
from palestra.policies.base import Policy, Query
from palestra.rollouts.metrics import chosen_nodes
from palestra.seeding import derive_seed
from palestra.types import Episode

Verdict = Literal["A", "B", "tie"]
JUDGE_ROLE = (
    "You compare how two assistants did the same task. Judge by how well the task is done; neither the order of the "
    "two nor their length counts. Explain briefly, then end with a line that has one word only: A, B or tie."
)
_LAST_WORD = re.compile(r"\W*(A|B|tie)\W*", re.IGNORECASE)


class JudgedResult(NamedTuple):
    """Outcome of a comparison over pairs of episodes. `wins`, `losses` and `ties` of the first side sum to the number
    of pairs; a tie is `disagreed` if the two orders disagree, `unreadable` if one of the replies names no verdict."""

    results: tuple[EvalResult, EvalResult]
    wins: int
    losses: int
    ties: int
    disagreed: int
    unreadable: int

    @property
    def win_rate(self) -> float:
        """Share of pairs won, with a half for a tie."""
        return (self.wins + self.ties / 2) / (self.wins + self.losses + self.ties)

    def metrics(self) -> dict[str, float]:
        """Returns the counts, and `win_rate`."""
        return {name: getattr(self, name) for name in self._fields[1:]} | {"win_rate": self.win_rate}


def compare_judged(
    what: str,
    env: Mapping[str, Any],
    seats: Mapping[str, str],
    against: str,
    judge: str,
    *,
    episodes: int,
    seed: int = 0,
    on_progress: OnProgress = lambda played, of: None,
    **options: Unpack[EvalOptions],
) -> JudgedResult:
    """Plays the same instances with the policies of `seats` and with policy `against` at all seats, and returns what
    policy `judge` makes of each pair. For names and the other arguments see `evaluate`.

    Raises ValueError for an unknown name, a vectorised env, and if every pair has a failed episode.
    """
    with open_eval(what, env, seats, episodes, options) as setup:
        if not isinstance(setup, TextEvalSetup):
            raise ValueError(f"--judge reads what language agents say, and {what} is a vectorised game")
        return asyncio.run(_compare(setup, against, judge, episodes, seed, on_progress))


async def _compare(
    setup: TextEvalSetup, against: str, judge: str, episodes: int, seed: int, on_progress: OnProgress
) -> JudgedResult:
    sides = (setup.policy_names, dict.fromkeys(setup.policy_names, against))
    ours, theirs = await setup.play_assignments(sides, episodes, seed, on_progress)
    both = zip(ours.episodes, theirs.episodes, strict=True)
    pairs = [(one, other) for one, other in both if one.error is None and other.error is None]
    if not pairs:
        raise ValueError(f"no instance was played to its end by both sides: of {episodes} one side failed in each")
    policy = setup.load_policy(judge)
    asked = (judge_pair(policy, *pair, derive_seed(seed, "judge", i)) for i, pair in enumerate(pairs))
    verdicts = await asyncio.gather(*asked)
    outcomes = [outcome(*verdict) for verdict in verdicts]
    unreadable = sum(None in verdict for verdict in verdicts)
    disagreed = sum(
        None not in v and v != ("tie", "tie") and o == "tie" for v, o in zip(verdicts, outcomes, strict=True)
    )
    counts = (outcomes.count("A"), outcomes.count("B"), outcomes.count("tie"))
    return JudgedResult((ours, theirs), *counts, disagreed, unreadable)


async def judge_pair(judge: Policy, ours: Episode, theirs: Episode, seed: int) -> tuple[Verdict | None, Verdict | None]:
    """Returns the judge's verdict with our episode as A, and with it as B; None where its reply names none."""
    orders = ((ours, theirs), (theirs, ours))
    queries = [Query(JUDGE_ROLE, question(*order), seed=derive_seed(seed, i)) for i, order in enumerate(orders)]
    first, second = await asyncio.gather(*map(judge.act, queries))
    return read_verdict(first[0].text), read_verdict(second[0].text)


def question(a: Episode, b: Episode) -> str:
    """Returns what the judge reads of two episodes: their observations and answers, without policies and rewards."""
    return f"Assistant A:\n\n{_record(a)}\n\nAssistant B:\n\n{_record(b)}\n\nWhich did better: A, B or tie?"


def _record(episode: Episode) -> str:
    lines: list[str] = []
    for node in chosen_nodes(episode):
        for seat, answer in node.answers.items():
            lines += [f"[{seat} observes] {node.observations[seat]}", f"[{seat} answers] {answer.text}"]
    return "\n".join(lines)


def read_verdict(reply: str) -> Verdict | None:
    """Returns the word in the last line of a judge's reply; None if it is none of A, B and tie."""
    lines = reply.strip().splitlines()
    found = _LAST_WORD.fullmatch(lines[-1]) if lines else None
    verdicts: Sequence[Verdict] = ("A", "B", "tie")
    return next((v for v in verdicts if found and found[1].lower() == v.lower()), None)


def outcome(as_a: Verdict | None, as_b: Verdict | None) -> Verdict:
    """Returns "A" if the episode that was A in the first order and B in the second is preferred in both, "B" if the
    other is, else a tie."""
    if (as_a, as_b) == ("A", "B"):
        return "A"
    return "B" if (as_a, as_b) == ("B", "A") else "tie"
