"""Kahneman-Tversky optimisation (Ethayarajh et al., 2024): each answer is desirable or not, and needs no counterpart.

Answers are siblings of the policy's own episodes, or recorded ones. The loss saturates: it moves most those answers
whose implicit reward is near the reference point z_0, the divergence of the policy from its reference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle, groupby
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from palestra.core.losses import LossFunction
from palestra.core.types import AlgorithmState, Answer, Episode, Metrics, Sample, Seat, num_sampled
from palestra.text.algorithms.base import add_reference_logprobs, build_sample
from palestra.text.algorithms.dpo import MIN_VALUE_GAP, answered_sides
from palestra.text.algorithms.groups import GroupAlgorithm, Penalty, SiblingGroup
from palestra.text.learners.base import Learner
from palestra.text.losses import kto_loss

LONE_THRESHOLD = 0.5  # for an answer without siblings: half the reward of a recorded success


class KTO(GroupAlgorithm):
    """KTO on siblings or recorded answers. With `branch_at: root` a side is every answer of a seat along its
    trajectory, whose value is its return. With `branch_at: turn` a side is an answer, whose value is the return from it
    on if its trajectory was played to the end. For the loss see `kto_loss`."""

    type: Literal["kto"] = "kto"
    needs_old_logprobs: ClassVar[bool] = False
    needs_reference: ClassVar[bool] = True
    group_size: int = Field(4, ge=1, le=4096)
    """Siblings per group (group size)."""
    threshold: float | None = None
    """Value above which an answer is desirable and below which it is undesirable; one that is equal is left out. Null:
    the mean of its siblings' values, and 0.5 for an answer without siblings, half the reward of a success. An answer
    whose siblings were all lost is left out."""
    beta: float = Field(0.1, gt=0)
    """Strength of the pull to the reference policy; larger values keep the policy closer to it."""
    desirable_weight: float = Field(1.0, ge=0)
    """Weight of desirable answers."""
    undesirable_weight: float = Field(1.0, ge=0)
    """Weight of undesirable answers. With many more answers of one kind, choose weights so that weight times number is
    about equal for both."""

    @property
    def loss(self) -> LossFunction:
        return kto_loss

    @property
    def loss_options(self) -> dict[str, Any]:
        return {"beta": self.beta}

    def build_samples(
        self, episodes: Sequence[Episode], policy: str, state: AlgorithmState | None = None
    ) -> tuple[list[Sample], Metrics]:
        """Returns the sides that `policy` trains on, as groups of samples, and metrics; writes 1 or -1 to the nodes of
        desirable and undesirable answers, 0 to others.

        `groups` is a count, `desirable` and `undesirable` are the numbers of sides.
        """
        groups = self.policy_groups(episodes, policy)
        samples: list[Sample] = []
        counts = {1: 0, 0: 0, -1: 0}
        for group in groups:
            signs = self._signs(group.values) if len(group.values) > 1 or not group.lost else [0]
            for nodes, side, sign in zip(group.nodes, answered_sides(group), signs, strict=True):
                for node in nodes:
                    node.advantages[group.seat] = float(sign)
                weight = self.desirable_weight if sign > 0 else self.undesirable_weight
                if side and sign and weight:
                    samples += _side_samples(side, sign * weight, counts[1] + counts[-1])
                    counts[sign] += 1
        metrics = {"desirable": float(counts[1]), "undesirable": float(counts[-1])}
        return samples, {"groups": float(len(groups))} | metrics

    def groups(self, episode: Episode, penalties: Sequence[Penalty] | None = None) -> Iterator[SiblingGroup]:
        """Yields the groups of an episode; none if it failed.

        With `branch_at: turn`, the values of siblings that were all played to the end are their returns from this turn
        on. A sibling that play did not continue from has only its step's rewards, so these are then compared.
        """
        groups = super().groups(episode, penalties)
        if self.branch_at == "root":
            yield from groups
            return
        returns = {seat: self._returns_to_go(episode, seat) for seat in episode.seats}
        ended = {node.id for node in episode.nodes if node.done} | {node.parent for node in episode.nodes}
        for group in groups:
            numbers = [node.id for (node,) in group.nodes]
            all_ended = ended.issuperset(numbers)
            yield replace(group, values=[returns[group.seat][i] for i in numbers]) if all_ended else group

    def _returns_to_go(self, episode: Episode, seat: Seat) -> dict[int, float]:
        """Returns, by number of the node, the seat's return from that node on: its reward there plus the mean return of
        the children that play continued from or ended with."""
        returns: dict[int, float] = {}
        later: dict[int | None, list[float]] = {}
        for node in reversed(episode.valid_nodes):  # children come after their parents
            value = self.reward(node, seat) + (float(np.mean(later[node.id])) if node.id in later else 0.0)
            returns[node.id] = value
            if node.chosen:
                later.setdefault(node.parent, []).append(value)
        return returns

    def _signs(self, values: Sequence[float]) -> list[int]:
        """Returns 1 for desirable, -1 for undesirable answers, and 0 for those between."""
        threshold = self.threshold
        if threshold is None:
            threshold = float(np.mean(values)) if len(values) > 1 else LONE_THRESHOLD
        gaps = np.asarray(values) - threshold
        return np.where(np.abs(gaps) > MIN_VALUE_GAP, np.sign(gaps), 0).astype(int).tolist()

    async def finalize_samples(
        self, samples: list[Sample], learner: Learner, state: AlgorithmState
    ) -> tuple[list[Sample], Metrics]:
        """Returns the samples with reference log-probabilities to which the reference point is added, and the metric
        `reference_point`, z_0 in nats."""
        if not samples:
            return samples, {}
        point = await _reference_point(samples, learner)
        referenced = await add_reference_logprobs(samples, learner)
        return _shift_references(referenced, point), {"reference_point": point}


def _side_samples(side: Sequence[Answer], weight: float, number: int) -> list[Sample]:
    """Returns the samples of a side. Its tokens' weights sum to one, however long it is."""
    length = sum(map(num_sampled, side))
    return [
        build_sample(answer, np.full(len(answer.token_ids), weight, np.float32), weight=1 / length, group=number)
        for answer in side
    ]


def _shift_references(samples: Sequence[Sample], point: float) -> list[Sample]:
    """Returns the samples with the reference point added to the reference log-probability of each side, spread over its
    tokens: log-ratios are then relative to it."""
    lengths: dict[int, int] = {}
    for sample in samples:
        lengths[sample.group] = lengths.get(sample.group, 0) + len(sample.token_ids)
    shifted = []
    for sample in samples:
        assert sample.reference_logprobs is not None
        logprobs = sample.reference_logprobs + np.float32(point / lengths[sample.group])
        shifted.append(replace(sample, reference_logprobs=logprobs))
    return shifted


async def _reference_point(samples: Sequence[Sample], learner: Learner) -> float:
    """Returns z_0, at least 0: the mean log-ratio to the reference of answers to other prompts (Ethayarajh et al.,
    2024, sec. 4.1). 0 if all samples have one prompt. It has no gradient."""
    mismatched = _mismatched_samples(samples)
    if learner.is_at_reference or not mismatched:
        return 0.0
    now = await learner.logprobs(mismatched)
    reference = await learner.logprobs(mismatched, reference=True)
    ratios = [float((logp - ref_logp).sum()) for logp, ref_logp in zip(now, reference, strict=True)]
    return max(float(np.mean(ratios)), 0.0)


def _mismatched_samples(samples: Sequence[Sample]) -> list[Sample]:
    """Returns the first prompt of each side with the first answer of a side of the next distinct prompt; none if there
    is only one prompt. The next side itself is mostly a sibling with the same prompt, so its answer would not do."""
    by_prompt: dict[tuple[int, ...], list[Sample]] = {}
    for first in (next(side) for _, side in groupby(samples, lambda sample: sample.group)):
        by_prompt.setdefault(tuple(first.prompt_ids.tolist()), []).append(first)
    sides = list(by_prompt.values())
    if len(sides) < 2:
        return []
    pairs: list[tuple[Sample, Sample]] = []
    for firsts, others in zip(sides, [*sides[1:], *sides[:1]], strict=True):
        pairs += zip(firsts, cycle(others), strict=False)
    return [
        # a new sample, since the recorded experts (`routed_experts`) are those of the prompt's own answer
        Sample(
            one.prompt_ids,
            other.token_ids,
            other.logprobs,
            other.advantages,
            one.temperature,
            sampling_mask=other.sampling_mask and other.sampling_mask.forced_only(),
        )
        for one, other in pairs
    ]
