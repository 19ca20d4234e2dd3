"""Weights of the named terms of rewards (envs/reward_terms.py), which may fade during training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import chain

from pydantic import Field

from palestra.core.config import StrictModel
from palestra.core.types import Episode, Step
from palestra.envs.reward_terms import REWARD_TERMS_KEY, TEAM_TERMS_KEY


class FadingWeight(StrictModel):
    """A weight that moves linearly from `start` to `end` over the first `steps` training steps, and stays there."""

    start: float = Field(1.0, allow_inf_nan=False)
    """Weight in the first training step."""
    end: float = Field(0.0, allow_inf_nan=False)
    """Weight after `steps` training steps, and from then on."""
    steps: int = Field(ge=1)
    """Training steps over which the weight moves from `start` to `end`."""

    def at(self, step: int) -> float:
        """Returns the weight in a training step, counted from 0."""
        return self.start + (self.end - self.start) * min(1.0, step / self.steps)


RewardWeights = Mapping[str, float | FadingWeight]


def weights_at(weights: RewardWeights, step: int) -> dict[str, float]:
    """Returns the weight of each term in a training step, counted from 0."""
    return {name: each.at(step) if isinstance(each, FadingWeight) else each for name, each in weights.items()}


def reweigh(step: Step, weights: Mapping[str, float]) -> Step:
    """Returns an env's step with each named term of a seat's reward, or of the team's, times its weight; terms without
    a weight, and rewards without terms, do not change."""
    terms = step.info.get(REWARD_TERMS_KEY, {})
    team = step.info.get(TEAM_TERMS_KEY, {})
    if not weights or not (terms or team):
        return step
    weighted_team = {name: weights.get(name, 1.0) * value for name, value in team.items()}
    weighted = {seat: {name: weights.get(name, 1.0) * x for name, x in own.items()} for seat, own in terms.items()}
    change = {seat: sum(weighted[seat].values()) - sum(own.values()) for seat, own in terms.items()}
    rewards = {seat: step.rewards.get(seat, 0.0) + change.get(seat, 0.0) for seat in {**step.rewards, **change}}
    info = step.info | {REWARD_TERMS_KEY: weighted} | ({TEAM_TERMS_KEY: weighted_team} if team else {})
    team_reward = step.team_reward + sum(weighted_team.values()) - sum(team.values())
    return replace(step, rewards=rewards, team_reward=team_reward, info=info)


def seen_terms(episodes: Iterable[Episode]) -> set[str]:
    """Returns the names of all terms in the rewards of episodes."""
    names: set[str] = set()
    for node in chain.from_iterable(episode.valid_nodes for episode in episodes):
        names.update(node.info.get(TEAM_TERMS_KEY, {}), *node.info.get(REWARD_TERMS_KEY, {}).values())
    return names
