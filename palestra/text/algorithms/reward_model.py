"""Training of a reward model on pairs of siblings: a scalar head on an adapter (Bradley & Terry, 1952; Ouyang et al.,
2022, eq. 1). Training raises the reward of the answer with the higher value above the other's.

The reward of an answer is the head's value of the state after its last token. Pairs are those of DPO: recorded ones
(`data:`), or siblings that the policy plays itself. This training does not improve the policy's answers;
text/rollouts/learned_reward.py uses the rewards to train a policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from palestra.core.losses import LossFunction
from palestra.core.types import AlgorithmState, Answer, Episode, Metrics, Sample
from palestra.text.algorithms.dpo import PairAlgorithm, answered_sides
from palestra.text.losses import bradley_terry_loss


class RewardModel(PairAlgorithm):
    """A reward model from pairs of siblings. With `branch_at: root` a side is scored by its last answer."""

    type: Literal["reward_model"] = "reward_model"
    needs_old_logprobs: ClassVar[bool] = False
    needs_critic: ClassVar[bool] = True
    center_coef: float = Field(0.0, ge=0)
    """Coefficient of the squared sum of a pair's rewards, which keeps rewards around 0 (Eisenstein et al., 2023)."""

    @property
    def loss(self) -> LossFunction:
        return bradley_terry_loss

    @property
    def loss_options(self) -> dict[str, Any]:
        return {"center_coef": self.center_coef} if self.center_coef else {}

    def build_samples(
        self, episodes: Sequence[Episode], policy: str, state: AlgorithmState | None = None
    ) -> tuple[list[Sample], Metrics]:
        """Returns a group of two samples for each pair, the chosen side first, and the metrics of `find_pairs`. On
        pairs not trained on before, as in the first epoch, the loss's `accuracy` is a held-out accuracy."""
        samples: list[Sample] = []
        groups, pairs, metrics = self.find_pairs(episodes, policy)
        for number, (group, better, worse) in enumerate(pairs):
            sides = answered_sides(groups[group])
            for side, sign in ((sides[better], 1.0), (sides[worse], -1.0)):
                samples.append(scoring_sample(side[-1], sign, group=number))
        return samples, metrics


def scoring_sample(answer: Answer, advantage: float = 0.0, *, group: int = -1) -> Sample:
    """Returns a sample with a single value, that of the state after the answer's last token. Its prompt is the answer's
    prompt and tokens; the one token after that (here the last one again) does not affect the value."""
    prompt = np.concatenate([answer.prompt_ids, answer.token_ids])
    weights = np.array([advantage], np.float32)
    return Sample(prompt, answer.token_ids[-1:], np.zeros(1, np.float32), weights, weight=0.5, group=group)
