"""Proximal policy optimisation (Schulman et al., 2017): independent PPO, or MAPPO with a central critic."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor

from palestra.algorithms.vector.actor_critic import ActorCriticConfig
from palestra.losses.policy import LossInputs, TensorMetrics, clipped_policy_loss


class PPO(ActorCriticConfig):
    """PPO: several passes over each rollout with a clipped surrogate."""

    type: Literal["ppo"] = "ppo"
    """Selects PPO."""
    epochs: int = Field(4, ge=1)
    """Passes over each rollout."""
    minibatches: int = Field(4, ge=1)
    """Gradient steps per pass."""
    entropy_coef: float = Field(0.01, ge=0)
    """Coefficient of the entropy bonus."""
    clip: float = Field(0.2, gt=0)
    """Clipping distance of the probability ratio from 1."""

    def loss(self, rows: LossInputs) -> tuple[Tensor, TensorMetrics]:
        return clipped_policy_loss(rows, clip=self.clip)
