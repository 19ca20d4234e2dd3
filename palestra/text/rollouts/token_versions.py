"""The versions of the weights that sampled each token, and how old they are in training."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from palestra.core.types import Answer, Episode, Metrics
from palestra.text.rollouts.metrics import answers_of


def answer_versions(answer: Answer) -> np.ndarray:
    """Returns the version of the policy that sampled each token of an answer [T] int32; -1 if its name has none."""
    if len(answer.versions):
        return answer.versions
    _, _, version = answer.policy.partition("@")
    return np.full(len(answer.token_ids), int(version) if version.isdecimal() else -1, np.int32)


def token_staleness_metrics(episodes: Sequence[Episode], policy: str, step_versions: Sequence[int]) -> Metrics:
    """Returns how many training steps the weights that sampled each token of `policy` are behind the newest ones (mean
    and maximum over tokens), and the share of answers with tokens of more than one version.

    `step_versions` are the policy's versions after consecutive training steps, the newest last. Answers of failed
    episodes do not count.
    """
    answers = [
        answer for answer in answers_of([e for e in episodes if e.error is None], policy) if len(answer.token_ids)
    ]
    versions = [answer_versions(answer) for answer in answers]
    behind = len(step_versions) - np.searchsorted(step_versions, np.concatenate([*versions, []]), side="right")
    mixed = [len(np.unique(own)) > 1 for own in versions]
    return {
        "token_staleness": float(behind.mean()) if len(behind) else 0.0,
        "token_staleness_max": float(behind.max(initial=0)),
        "mixed_version_fraction": float(np.mean(mixed)) if mixed else 0.0,
    }
