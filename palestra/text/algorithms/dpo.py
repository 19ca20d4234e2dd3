"""Online preference optimisation (Guo et al., 2024; loss of Rafailov et al., 2023, by default): of two siblings with
the same prompt, the one with the higher reward is preferred.

Siblings are those of GRPO: whole trajectories, or answers of one seat to one observation. The size of a reward
difference has no effect, only its sign.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from palestra.core.losses import LossFunction
from palestra.core.types import AlgorithmState, Answer, Episode, Metrics, Sample, num_sampled
from palestra.text.algorithms.base import add_reference_logprobs, build_sample
from palestra.text.algorithms.groups import GroupAlgorithm, SiblingGroup
from palestra.text.learners.base import Learner
from palestra.text.losses import MEAN_KINDS, REFERENCE_FREE_KINDS, PreferenceKind, preference_loss

MIN_VALUE_GAP = 1e-8  # smaller differences between values are rounding errors


class PairAlgorithm(GroupAlgorithm):
    """Base config of algorithms that learn from pairs of siblings. Two siblings with the same text form no pair."""

    group_size: int = Field(4, ge=2, le=4096)
    """Siblings per group (group size)."""
    pairs: Literal["best_worst", "all"] = "best_worst"
    """`best_worst` makes one pair per group; `all` pairs every two siblings whose values differ."""
    min_margin: float = Field(0.0, ge=0)
    """Minimum difference of two siblings' values, in units of reward, to form a pair."""

    def find_pairs(
        self, episodes: Sequence[Episode], policy: str
    ) -> tuple[list[SiblingGroup], list[tuple[int, int, int]], Metrics]:
        """Returns the groups of `policy`, its pairs as (number of the group, better sibling, worse sibling), and
        metrics. Writes to each answer's node the number of pairs it wins minus the number it loses.

        `groups` and `pairs` are counts; `zero_std_fraction` is the share of groups without a pair.
        """
        groups = self.policy_groups(episodes, policy)
        pairs: list[tuple[int, int, int]] = []
        flat = 0
        for number, group in enumerate(groups):
            index_pairs = self._preference_pairs(group.values, answered_sides(group))
            _annotate(group, index_pairs)
            pairs += [(number, better, worse) for better, worse in index_pairs]
            flat += not index_pairs
        share = flat / len(groups) if groups else 0.0
        return groups, pairs, {"groups": float(len(groups)), "pairs": float(len(pairs)), "zero_std_fraction": share}

    def _preference_pairs(self, values: Sequence[float], sides: Sequence[Sequence[Answer]]) -> list[tuple[int, int]]:
        """Returns index pairs (better, worse) of siblings whose values and texts differ."""
        tokens = [list(map(_token_ids, side)) for side in sides]
        gaps = {
            (better, worse): values[better] - values[worse]
            for better, worse in permutations(range(len(sides)), 2)
            if tokens[better] and tokens[worse] and tokens[better] != tokens[worse]
        }
        preferred = [pair for pair, gap in gaps.items() if gap > max(MIN_VALUE_GAP, self.min_margin - MIN_VALUE_GAP)]
        return preferred if self.pairs == "all" else sorted(preferred, key=lambda pair: -gaps[pair])[:1]


class DPO(PairAlgorithm):
    """DPO and its variants on pairs of siblings from the policy's own episodes.

    With `branch_at: root` a side is every answer of a seat along its trajectory. For the loss see `preference_loss`.
    """

    type: Literal["dpo"] = "dpo"
    loss_type: PreferenceKind = "sigmoid"
    """Loss: `sigmoid` (DPO), `hinge` (SLiC) or `ipo`; without a reference `simpo` or `orpo`."""
    beta: float | None = Field(None, gt=0)
    """Strength of the pull to the reference policy; larger values keep the policy closer to it. With `simpo` the scale
    of rewards, with `orpo` the weight of the odds ratio. Null: 2.0 with `simpo`, else 0.1."""
    target_margin: float = Field(1.0, ge=0)
    """With `loss_type: simpo`, the target difference of the chosen and the rejected side's rewards (gamma)."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Assumed probability that a preference is wrong (conservative DPO), below 0.5; not available with `ipo` and
    `orpo`."""
    reference_free: bool = False
    """Train without a reference policy, as if it gave both sides the same probability."""
    margin: Literal["seat", "joint"] = "seat"
    """Margin of a pair: of the `seat`'s own answer, or of the `joint` answer of all seats that act in the step, with
    the other seats' log-probabilities as they were sampled (MADPO of CoMLRL). `joint` needs `branch_at: turn`,
    `reference_free: true` and `loss_type: sigmoid` or `hinge`."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.label_smoothing and self.loss_type in ("ipo", "orpo"):
            raise ValueError(
                f"label_smoothing applies to loss_type: sigmoid, hinge and simpo, not to {self.loss_type}: leave it out"
            )
        if "target_margin" in self.model_fields_set and self.loss_type != "simpo" and self.target_margin != 1.0:
            raise ValueError(f"target_margin applies only to loss_type: simpo, not to {self.loss_type}: leave it out")
        return self

    @model_validator(mode="after")
    def _check_margin(self) -> Self:
        if self.margin == "joint" and (
            self.branch_at == "root" or not self.reference_free or self.loss_type not in ("sigmoid", "hinge")
        ):
            raise ValueError(
                "margin: joint compares the joint answers of one step, without a reference and without means over "
                "tokens: set branch_at: turn, reference_free: true and loss_type: sigmoid or hinge"
            )
        return self

    @property
    def needs_old_logprobs(self) -> bool:
        return self.margin == "joint"

    @property
    def loss(self) -> LossFunction:
        return preference_loss

    @property
    def loss_options(self) -> dict[str, Any]:
        alone = self.reference_free and self.margin == "seat"  # a joint margin has the others' part as its reference
        options: dict[str, Any] = {"label_smoothing": self.label_smoothing, "reference_free": alone}
        options |= {"target_margin": self.target_margin if self.loss_type == "simpo" else 0.0}
        beta = self.beta or (2.0 if self.loss_type == "simpo" else 0.1)
        return {"kind": self.loss_type, "beta": beta} | {name: value for name, value in options.items() if value}

    def build_samples(
        self, episodes: Sequence[Episode], policy: str, state: AlgorithmState | None = None
    ) -> tuple[list[Sample], Metrics]:
        """Returns the pairs that `policy` trains on, as groups of samples with the chosen side first, and the metrics
        of `find_pairs`."""
        groups, pairs, metrics = self.find_pairs(episodes, policy)
        samples: list[Sample] = []
        for number, (group, better, worse) in enumerate(pairs):
            sides = answered_sides(groups[group])
            pair = _pair(sides[better], sides[worse], number, mean=self.loss_type in MEAN_KINDS)
            if self.margin == "joint":
                pair = _with_offset(pair, _partners_margin(groups[group], better, worse))
            samples += pair
        return samples, metrics

    @property
    def needs_reference(self) -> bool:
        return not (self.reference_free or self.loss_type in REFERENCE_FREE_KINDS)

    async def finalize_samples(
        self, samples: list[Sample], learner: Learner, state: AlgorithmState
    ) -> tuple[list[Sample], Metrics]:
        return (await add_reference_logprobs(samples, learner) if self.needs_reference and samples else samples), {}


def _token_ids(answer: Answer) -> tuple[list[int], list[int]]:
    return answer.prompt_ids.tolist(), answer.token_ids.tolist()


def answered_sides(group: SiblingGroup) -> list[list[Answer]]:
    """Returns each sibling's answers that have tokens."""
    sides = []
    for nodes in group.nodes:
        answers = [node.answers[group.seat] for node in nodes]
        sides.append([answer for answer in answers if len(answer.token_ids)])
    return sides


def _pair(chosen: Sequence[Answer], rejected: Sequence[Answer], number: int, *, mean: bool) -> list[Sample]:
    """Returns the samples of a pair. A pair's weights sum to one, however long its sides are; with `mean` each side's
    advantages are divided by its length."""
    lengths = [sum(map(num_sampled, side)) for side in (chosen, rejected)]
    samples = []
    for side, sign, length in zip((chosen, rejected), (1.0, -1.0), lengths, strict=True):
        for answer in side:
            weights = np.full(len(answer.token_ids), sign / length if mean else sign, np.float32)
            samples.append(build_sample(answer, weights, weight=1 / sum(lengths), group=number))
    return samples


def _partners_margin(group: SiblingGroup, better: int, worse: int) -> float:
    """Returns the log-probability of the other seats' answers in the better joint answer minus that in the worse."""

    def logp(sibling: int) -> float:
        (node,) = group.nodes[sibling]
        return float(sum(answer.logprobs.sum() for seat, answer in node.answers.items() if seat != group.seat))

    return logp(better) - logp(worse)


def _with_offset(pair: Sequence[Sample], offset: float) -> list[Sample]:
    """Returns a pair of single answers whose margin has `offset` added. Reference log-probabilities carry it, since the
    loss subtracts them: they sum to `-offset` on the chosen side and are 0 on the rejected side."""
    chosen, rejected = pair
    share = np.full(len(chosen.token_ids), -offset / len(chosen.token_ids), np.float32)
    return [
        replace(chosen, reference_logprobs=share),
        replace(rejected, reference_logprobs=np.zeros(len(rejected.token_ids), np.float32)),
    ]


def _annotate(group: SiblingGroup, pairs: Sequence[tuple[int, int]]) -> None:
    """Writes to each answer's node the number of pairs its side wins minus the number it loses."""
    for sibling, nodes in enumerate(group.nodes):
        wins = sum(better == sibling for better, _ in pairs) - sum(worse == sibling for _, worse in pairs)
        for node in nodes:
            node.advantages[group.seat] = float(wins)
