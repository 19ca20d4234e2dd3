"""Metrics of evaluations that play each instance several times: pass@k and majority vote.

An instance has n samples, of which c succeeded. The samples of an instance are neighbours in the list of episodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from math import comb
from typing import Any

import numpy as np

from palestra.core.types import Episode
from palestra.text.rollouts.metrics import number_instances, reporting_envs

SampleValues = dict[str, float]

ANSWER_KEY = "answer"  # key in the info of an episode's last step: the team's final answer; None if it gave none


def pass_at_k(n: int, c: int, k: int) -> float:
    """Returns the unbiased estimate of the probability that one of `k` samples succeeds, from `c` successes of `n`: 1 -
    C(n - c, k) / C(n, k) (Chen et al., 2021, eq. 1). Raises ValueError unless 1 <= k <= n and 0 <= c <= n."""
    if not (1 <= k <= n and 0 <= c <= n):
        raise ValueError(f"pass@{k} of {c} successes in {n} samples: k must be from 1 to {n}, successes at most {n}")
    return 1.0 - comb(n - c, k) / comb(n, k)


def majority_success(episodes: Sequence[Episode]) -> float:
    """Returns the success of the most frequent final answer (self-consistency, Wang et al., 2023), or the mean over the
    answers that are equally frequent; 0 if no sample has an answer.

    Answers are compared as text. The success of an answer is the mean success of the samples that gave it.
    """
    votes: dict[str, list[float]] = {}  # the successes of the samples that gave each answer
    for leaf in chain.from_iterable(episode.leaves() for episode in episodes if episode.error is None):
        if leaf.info.get(ANSWER_KEY) is not None:
            votes.setdefault(str(leaf.info[ANSWER_KEY]).strip(), []).append(leaf.success or 0.0)
    most = max(map(len, votes.values()), default=0)
    shares = [np.mean(successes) for successes in votes.values() if len(successes) == most]
    return float(np.mean(shares)) if shares else 0.0


def _reports_answers(episodes: Sequence[Episode]) -> bool:
    """True if the env reports a final answer, which may be None, in any episode."""
    leaves = chain.from_iterable(map(Episode.leaves, episodes))
    return any(ANSWER_KEY in leaf.info for leaf in leaves)


def sample_metrics(episodes: Sequence[Episode], samples: int) -> dict[str, Any]:
    """Returns `episodes` (the number of instances), `samples` (the number per instance), and `pass_at_k`, a dict by k
    for k = 1, 2, 4, ... and `samples`; if the env reports final answers (`ANSWER_KEY`), also `maj_at_k` of all samples.

    Values are means over different instances; those with `_ci95` are half the width of their 95 % confidence intervals
    (normal approximation over instances). An episode that failed or got no reward does not count as a sample; an
    instance with fewer samples than k is left out. The result is empty for one sample per instance, and has only the
    two numbers if the env reports no success of all seats. A sample of partial success counts if that is at least a
    half.
    """
    if samples < 2:
        return {}
    found: dict[str, Any] = {"episodes": float(len(episodes) // samples), "samples": float(samples)}
    if not reporting_envs(episodes):
        return found
    groups: dict[int, list[Episode]] = {}
    for number, episode in zip(number_instances(episodes), episodes, strict=True):
        group = groups.setdefault(number, [])
        if episode.error is None and episode.leaves():
            group.append(episode)
    successes = [[(e.success or 0.0) >= 0.5 for e in group] for group in groups.values()]
    passed = {}
    for k in sorted({2**i for i in range(samples.bit_length())} | {samples}):
        passed[str(k)] = [pass_at_k(len(own), sum(own), k) for own in successes if len(own) >= k]
    voted = [majority_success(group) for group in groups.values() if group] if _reports_answers(episodes) else []
    found |= _means("pass_at_k", passed)
    return found | (_means("maj_at_k", {str(samples): voted}) if voted else {})


def _means(name: str, values: dict[str, list[float]]) -> dict[str, SampleValues]:
    known = {k: own for k, own in values.items() if own}
    return {
        name: {k: float(np.mean(own)) for k, own in known.items()},
        f"{name}_ci95": {
            k: 1.96 * float(np.std(own, ddof=1)) / len(own) ** 0.5 for k, own in known.items() if len(own) > 1
        },
    }


def sample_rows(metrics: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns titles and texts of `sample_metrics`, for tables: "pass@4" and "61.3% ± 4.2%"."""
    rows = []
    for name, title in (("pass_at_k", "pass"), ("maj_at_k", "maj")):
        for k, value in metrics.get(name, {}).items():
            half = metrics.get(f"{name}_ci95", {}).get(k)
            rows.append((f"{title}@{k}", f"{value:.1%}" + ("" if half is None else f" ± {half:.1%}")))
    return rows
