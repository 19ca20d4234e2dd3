"""Soft actor-critic for continuous (Haarnoja et al., 2018) and discrete actions (Christodoulou,
2019); with a central critic it is MASAC."""

from __future__ import annotations

import math
from abc import ABC
from collections.abc import Callable
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from palestra.core.losses import TensorMetrics
from palestra.envs.vector_base import Continuous, Discrete, Space
from palestra.vector.algorithms.action_values import UpdateBatch
from palestra.vector.algorithms.off_policy import OffPolicyConfig, OffPolicyLearner, PolicyOutput
from palestra.vector.learners.nets import AlgorithmConfig, NetLearner
from palestra.vector.learners.optimizers import StackedOptimizer
from palestra.vector.losses import actor_loss, expected_soft_value, soft_value, temperature_loss
from palestra.vector.nets.continuous_heads import SquashedHead, one_hot
from palestra.vector.nets.heads import ActionHead, CategoricalHead


class SoftConfig(AlgorithmConfig, ABC):
    """Base config of SAC and of offline algorithms based on it."""

    alpha: float = Field(0.2, gt=0)
    """Entropy temperature: the reward of one nat of entropy; the initial one with `learn_alpha`."""
    learn_alpha: bool = True
    """Adjust the temperature so that the policy keeps its target entropy."""
    target_entropy: float | None = None
    """Target entropy. Continuous actions: nats per dimension, in half-widths of the bounds (uniform has 0.69); null is
    -1 (Haarnoja et al., 2018b). Discrete actions: share of the maximum, 0 to 1; null is 0.5, since Christodoulou's 0.98
    keeps play nearly uniform, which also hinders the other seats."""


class SAC(OffPolicyConfig, SoftConfig):
    """SAC: an off-policy actor-critic that maximises reward plus policy entropy."""

    type: Literal["sac"] = "sac"

    def learner_class(self) -> Callable[..., NetLearner]:
        return SACLearner


# target entropy if `target_entropy` is null
DEFAULT_ENTROPY_SHARE = 0.5
DEFAULT_ENTROPY_PER_DIM = -1.0


class Temperature(nn.Module):
    """Log entropy temperature of each of P members [P, 1] float32."""

    def __init__(self, members: int, start: float) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.full((members, 1), math.log(start)))

    def forward(self) -> Tensor:
        """Returns the temperatures [P, 1], without gradients."""
        return self.log.detach().exp()


class SACLearner(OffPolicyLearner):
    """Learner of SAC. Raises ValueError if `target_entropy` is outside 0 to 1 with discrete actions."""

    config: SoftConfig  # type: ignore[assignment]  # with the fields of an OffPolicyConfig, or of offline learning

    def build_extras(self) -> None:
        wanted = self.config.target_entropy
        if wanted is not None and any(critic.value_per_action for critic in self.critics) and not 0 <= wanted <= 1:
            raise ValueError(
                f'target_entropy is {wanted}, but actions of env "{self.env.name}" are discrete, and for these it is a '
                "share of the maximum entropy: give a number from 0 to 1"
            )
        self.alphas = [
            Temperature(len(stack.seat_mapping.names), self.config.alpha).to(self.device) for stack in self.stacks
        ]
        self.alpha_adams = [
            StackedOptimizer(alpha, stack.seat_mapping.names, stack.config, self.process_group)
            for alpha, stack in zip(self.alphas, self.stacks, strict=True)
        ]
        self.register("alpha", self.alphas, self.alpha_adams)

    def build_head(self, space: Space) -> ActionHead:
        return SquashedHead(space) if isinstance(space, Continuous) else super().build_head(space)

    def value_per_action(self, space: Space) -> bool:
        return isinstance(space, Discrete)

    def policy_output(
        self, i: int, observations: Tensor, action_mask: Tensor | None, generator: torch.Generator
    ) -> PolicyOutput:
        out = self.stacks[i].net(observations)
        head = self.stacks[i].head
        if isinstance(head, SquashedHead):
            return PolicyOutput(out, *head.sample_units(out, generator))
        assert isinstance(head, CategoricalHead)
        drawn, _ = head.sample(out.detach(), action_mask, generator)
        return PolicyOutput(out, one_hot(drawn, head.outputs), head.logits(out, action_mask))

    def target_value(self, i: int, q: Tensor, answer: PolicyOutput) -> Tensor:
        assert answer.logp is not None
        least = q.amin(0)
        alpha = self.alphas[i]()
        if self.critics[i].value_per_action:
            return expected_soft_value(least, answer.logp, alpha)
        return soft_value(least[..., 0], answer.logp, alpha)

    def loss(self, i: int, q: Tensor, answer: PolicyOutput, batch: UpdateBatch) -> tuple[Tensor, TensorMetrics]:
        return actor_loss(self.target_value(i, q, answer), batch.policy_weights), {}

    def after_policy_step(self, i: int, answer: PolicyOutput, batch: UpdateBatch, progress: float) -> TensorMetrics:
        """Updates the temperature; returns metrics."""
        entropy = self._entropy(i, answer)
        share = batch.policy_weights
        alpha = self.alphas[i]
        if self.config.learn_alpha:
            loss = temperature_loss(alpha.log, entropy, self._target_entropy(i, batch), share)
            self.alpha_adams[i].step(loss.sum(), progress)
        mean = (share * entropy).sum(1) / share.sum(1).clamp(min=1e-8)
        return {"entropy": mean, "alpha": alpha()[:, 0]}

    def _entropy(self, i: int, answer: PolicyOutput) -> Tensor:
        """Returns the policy's entropy in nats [P, R]; for continuous actions a one-sample estimate."""
        assert answer.logp is not None
        logp = answer.logp.detach()
        return -(logp.exp() * logp).sum(-1) if self.critics[i].value_per_action else -logp

    def _target_entropy(self, i: int, batch: UpdateBatch) -> Tensor:
        """Returns the target entropy [P, R] in nats."""
        head = self.stacks[i].head
        set_to = self.config.target_entropy
        if isinstance(head, SquashedHead):
            each = DEFAULT_ENTROPY_PER_DIM if set_to is None else set_to
            return torch.full_like(batch.policy_weights, each * head.width)
        share = DEFAULT_ENTROPY_SHARE if set_to is None else set_to
        choices = torch.full_like(batch.policy_weights, float(head.outputs))
        if batch.action_mask is not None:
            choices = batch.action_mask.sum(-1).clamp(min=1)
        return share * torch.log(choices)
