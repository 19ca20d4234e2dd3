"""Online preference optimisation (Guo et al., 2024; the loss of Rafailov et al., 2023): of siblings that started from
the same place, the one that earned more is preferred to the one that earned less.

Siblings are those of GRPO: whole lines, or answers of one seat to one observation. What a reward is worth in size does
not count, only which of two was better.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import permutations
from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from palestra.algorithms.text.base import sample_of, with_reference
from palestra.algorithms.text.groups import Group, SiblingAlgorithm
from palestra.learners.base import Learner
from palestra.losses.preferences import Kind, preference_loss
from palestra.types import Answer, Episode, Memory, Metrics, Sample

EQUAL = 1e-8  # values closer than this differ by rounding alone


class DPO(SiblingAlgorithm):
    """DPO and its kin, on pairs of siblings from the policy's own play.

    `pairs: best_worst` makes one pair of a group, `all` one of every two siblings whose values differ; by `margin` at
    least, in units of reward. Two siblings that said the same are no pair. With `at: root` a side is all that a seat
    said along its line. For `kind`, `beta`, `label_smoothing` and `reference_free` see `preference_loss`.
    """

    type: Literal["dpo"] = "dpo"
    k: int = Field(4, ge=2, le=4096)
    pairs: Literal["best_worst", "all"] = "best_worst"
    margin: float = Field(0.0, ge=0)
    kind: Kind = "sigmoid"
    beta: float = Field(0.1, gt=0)
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    reference_free: bool = False

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.label_smoothing and self.kind == "ipo":
            raise ValueError("label_smoothing is of kind: sigmoid and hinge, and ipo has none: leave it out")
        return self

    @property
    def reads_sampler(self) -> bool:
        return False

    @property
    def loss(self) -> Callable:
        return preference_loss

    @property
    def loss_options(self) -> dict[str, Any]:
        options = {"label_smoothing": self.label_smoothing, "reference_free": self.reference_free}
        return {"kind": self.kind, "beta": self.beta} | {name: value for name, value in options.items() if value}

    def samples(
        self, episodes: Sequence[Episode], policy: str, memory: Memory | None = None
    ) -> tuple[list[Sample], Metrics]:
        """The pairs that `policy` learns from, each a group of samples, chosen before rejected. Writes to each answer's
        node how many pairs it wins less how many it loses. The figures say how many groups and pairs there were, and
        which share of the groups had none to teach."""
        groups = self.groups_of(episodes, policy)
        samples: list[Sample] = []
        pairs = flat = 0
        for group in groups:
            sides = _sides(group)
            found = self._paired(group.values, sides)
            _annotate(group, found)
            for number, (better, worse) in enumerate(found, pairs):
                samples += _pair(sides[better], sides[worse], number, mean=self.kind == "ipo")
            pairs, flat = pairs + len(found), flat + (not found)
        share = flat / len(groups) if groups else 0.0
        return samples, {"groups": float(len(groups)), "pairs": float(pairs), "zero_variance": share}

    @property
    def refers(self) -> bool:
        return not self.reference_free

    async def refined(self, samples: list[Sample], learner: Learner, memory: Memory) -> tuple[list[Sample], Metrics]:
        return (await with_reference(samples, learner) if self.refers and samples else samples), {}

    def _paired(self, values: Sequence[float], sides: Sequence[Sequence[Answer]]) -> list[tuple[int, int]]:
        """Numbers of siblings, the better one first, whose values and words differ."""
        said = [[(answer.prompt_ids.tolist(), answer.token_ids.tolist()) for answer in side] for side in sides]
        gaps = {
            (better, worse): values[better] - values[worse]
            for better, worse in permutations(range(len(sides)), 2)
            if said[better] and said[worse] and said[better] != said[worse]
        }
        found = [pair for pair, gap in gaps.items() if gap > max(EQUAL, self.margin - EQUAL)]
        return found if self.pairs == "all" else sorted(found, key=lambda pair: -gaps[pair])[:1]


def _sides(group: Group) -> list[list[Answer]]:
    """Each sibling's answers that have tokens."""
    answers = [[node.answers[group.seat] for node in nodes] for nodes in group.nodes]
    return [[answer for answer in side if len(answer.token_ids)] for side in answers]


def _pair(chosen: Sequence[Answer], rejected: Sequence[Answer], number: int, *, mean: bool) -> list[Sample]:
    """The samples of a pair, which count as one however long they are; with `mean` each side's tokens by their mean."""
    lengths = [sum(len(answer.token_ids) for answer in side) for side in (chosen, rejected)]
    samples = []
    for side, sign, length in zip((chosen, rejected), (1.0, -1.0), lengths, strict=True):
        for answer in side:
            weights = np.full(len(answer.token_ids), sign / length if mean else sign, np.float32)
            samples.append(sample_of(answer, weights, weight=1 / sum(lengths), group=number))
    return samples


def _annotate(group: Group, pairs: Sequence[tuple[int, int]]) -> None:
    """Notes at each answer's node how many pairs its side wins less how many it loses."""
    for sibling, nodes in enumerate(group.nodes):
        wins = sum(better == sibling for better, _ in pairs) - sum(worse == sibling for _, worse in pairs)
        for node in nodes:
            node.advantages[group.seat] = float(wins)
