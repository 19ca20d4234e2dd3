"""Advantage actor-critic (Mnih et al., 2016), synchronous; with V-trace and asynchronous actors it is IMPALA."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor

from palestra.core.losses import LossInputs, TensorMetrics, policy_gradient_loss
from palestra.vector.algorithms.actor_critic import ActorCriticConfig


class A2C(ActorCriticConfig):
    """A2C: one gradient step on each short rollout."""

    type: Literal["a2c"] = "a2c"
    """Selects A2C."""
    rollout_length: int = Field(16, ge=1)
    """Rollout length: steps of every parallel game per batch."""
    entropy_coef: float = Field(0.01, ge=0)
    """Coefficient of the entropy bonus."""

    def loss(self, rows: LossInputs) -> tuple[Tensor, TensorMetrics]:
        return policy_gradient_loss(rows)
