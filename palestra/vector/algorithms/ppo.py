"""Proximal policy optimisation (Schulman et al., 2017): independent PPO, or MAPPO with a central critic; and advantage
actor-critic (Mnih et al., 2016), synchronous, which with V-trace and asynchronous actors is IMPALA."""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from palestra.core.losses import LossInputs, TensorMetrics, clipped_policy_loss, policy_gradient_loss
from palestra.vector.algorithms.actor_critic import ActorCriticConfig
from palestra.vector.algorithms.minibatches import PolicyRows
from palestra.vector.losses import CategoricalInputs, clipped_categorical_loss
from palestra.vector.nets.heads import ActionHead, CategoricalHead


class PPO(ActorCriticConfig):
    """PPO: several passes over each rollout with a clipped surrogate. The defaults are ten passes in small minibatches
    and normalised returns: with four passes in large minibatches and raw returns, LunarLander was not learned, and play
    in CartPole was unsteady (docs/results-defaults.md)."""

    type: Literal["ppo"] = "ppo"
    epochs: int = Field(10, ge=1)
    minibatches: int = Field(16, ge=1)
    """Gradient steps per pass. With 16 games and the default rollout length, each is on 128 game steps."""
    entropy_coef: float = Field(0.01, ge=0)
    clip: float = Field(0.2, gt=0)
    """Clipping distance of the probability ratio from 1."""
    value_norm: bool | Literal["popart"] = True

    def loss(self, rows: LossInputs) -> tuple[Tensor, TensorMetrics]:
        return clipped_policy_loss(rows, clip=self.clip)

    def policy_loss(
        self, head: ActionHead, out: Tensor, rows: PolicyRows, weight: Tensor, bonus: float
    ) -> tuple[Tensor, list[dict[str, Any]]]:
        own_loss = type(self).loss is not PPO.loss  # the compiled loss is PPO's, not a subclass's
        compiled = isinstance(head, CategoricalHead) and out.device.type == "cpu" and out.dtype == torch.float32
        if own_loss or not compiled:
            return super().policy_loss(head, out, rows, weight, bonus)
        tensors = (out, rows.actions, rows.action_mask, rows.logp, rows.advantage, weight)
        inputs: list[Any] = [None if x is None else x.flatten(1, 2) for x in tensors]
        return clipped_categorical_loss(CategoricalInputs(*inputs), clip=self.clip, entropy=bonus)


class A2C(ActorCriticConfig):
    """A2C: one gradient step on each short rollout."""

    type: Literal["a2c"] = "a2c"
    rollout_length: int = Field(16, ge=1)
    entropy_coef: float = Field(0.01, ge=0)

    def loss(self, rows: LossInputs) -> tuple[Tensor, TensorMetrics]:
        return policy_gradient_loss(rows)
