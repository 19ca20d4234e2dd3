"""Algorithms as a user writes them: one of their own, and a credit rule of their own."""

import numpy as np
from pydantic import Field

from palestra.core.losses import importance_sampling_loss
from palestra.text.algorithms.base import TextAlgorithm, build_sample
from palestra.text.algorithms.grpo import GRPO
from palestra.text.rollouts.metrics import member_name


class Reinforce(TextAlgorithm):
    """REINFORCE (Williams, 1992) with the constant `baseline`."""

    type: str = "helpers.toy_algorithms:Reinforce"
    baseline: float = Field(0.5, ge=0)

    @property
    def loss(self):
        return importance_sampling_loss

    def build_samples(self, episodes, policy, memory=None):
        found = []
        for episode in (episode for episode in episodes if episode.error is None):
            worth = sum(node.team_reward for node in episode.nodes) - self.baseline
            for node in episode.nodes:
                for seat, answer in node.answers.items():
                    if member_name(answer.policy) == policy:
                        node.advantages[seat] = worth
                        found.append(build_sample(answer, np.full(len(answer.token_ids), worth, np.float32)))
        return found, {"worth": float(np.mean([sample.advantages[0] for sample in found]))}


def renamed_loss(tokens):
    """A loss with a metric that the run logs itself."""
    loss, metrics = importance_sampling_loss(tokens)
    return loss, metrics | {"return": loss.detach()}


def detached_loss(tokens):
    """A loss that nothing learns from."""
    loss, metrics = importance_sampling_loss(tokens)
    return loss.detach(), metrics


class Renamed(Reinforce):
    """With the loss `renamed_loss`."""

    type: str = "helpers.toy_algorithms:Renamed"

    @property
    def loss(self):
        return renamed_loss


class Detached(Reinforce):
    """With the loss `detached_loss`."""

    type: str = "helpers.toy_algorithms:Detached"

    @property
    def loss(self):
        return detached_loss


class Median(GRPO):
    """GRPO with a credit rule of one's own."""

    type: str = "helpers.toy_algorithms:Median"

    def advantages(self, values, group):
        return (np.array(values) - np.median(values)).tolist()


class Stranger:
    """Not an algorithm."""
