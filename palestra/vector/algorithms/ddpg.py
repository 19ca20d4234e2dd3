"""Deep deterministic policy gradients (Lillicrap et al., 2016) and TD3 (Fujimoto et al., 2018);
with a central critic MADDPG (Lowe et al., 2017) and MATD3. Discrete actions are sampled with
straight-through Gumbel-softmax gradients (Jang et al., 2017), as in Lowe et al."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from palestra.core.losses import TensorMetrics
from palestra.envs.vector_base import Continuous, Space
from palestra.vector.algorithms.action_values import UpdateBatch
from palestra.vector.algorithms.critics import frozen_copy
from palestra.vector.algorithms.off_policy import OffPolicyConfig, OffPolicyLearner, PolicyOutput
from palestra.vector.learners.nets import NetLearner
from palestra.vector.learners.policy_stack import PolicyStack
from palestra.vector.losses import actor_loss
from palestra.vector.nets.continuous_heads import TanhHead, gumbel_softmax
from palestra.vector.nets.exploration_noise import CorrelatedNoise
from palestra.vector.nets.heads import ActionHead, CategoricalHead
from palestra.vector.nets.layers import Net
from palestra.vector.nets.on_device import normal_like
from palestra.vector.policies.nets import ActionSelector, noisy_selector


class DeterministicConfig(OffPolicyConfig, ABC):
    """Base config of DDPG and TD3. Continuous actions explore with Gaussian noise; discrete actions are sampled."""

    exploration_noise: float = Field(0.5, ge=0)
    """Standard deviation of the exploration noise, in half-widths of the action bounds."""
    exploration_noise_end: float | None = Field(0.1, ge=0)
    """Exploration noise after the decay; null keeps `exploration_noise`."""
    exploration_noise_share: float = Field(1.0, gt=0, le=1)
    """Share of the run over which the noise decays, linearly."""
    gumbel_temperature: float = Field(1.0, gt=0)
    """Softmax temperature of the Gumbel-softmax gradient, for discrete actions."""
    action_l2_coef: float = Field(1e-2, ge=0)
    """Weight of the mean square of the policy's outputs in its loss, which keeps them from saturation. The code of Lowe
    et al. uses 1e-3, with which discrete policies more often converge too early."""

    def noise_at(self, progress: float) -> float:
        """Returns the standard deviation of the exploration noise at `progress` in [0, 1]."""
        if self.exploration_noise_end is None:
            return self.exploration_noise
        decayed = min(1.0, progress / self.exploration_noise_share)
        return self.exploration_noise + (self.exploration_noise_end - self.exploration_noise) * decayed


class DDPG(DeterministicConfig):
    """DDPG: one critic per policy."""

    type: Literal["ddpg"] = "ddpg"

    def learner_class(self) -> Callable[..., NetLearner]:
        return DDPGLearner


class TD3(DeterministicConfig):
    """TD3: twin critics with the smaller value as target, delayed policy updates and target policy smoothing."""

    type: Literal["td3"] = "td3"
    gradient_steps: int = Field(64, ge=1)
    """Gradient steps per rollout: twice those of SAC, since target networks move at every second one."""
    target_noise: float = Field(0.2, ge=0)
    """Standard deviation of the noise on target actions, in half-widths; discrete actions get none,
    since they are sampled."""
    target_noise_clip: float = Field(0.5, ge=0)
    """Bound of that noise, in half-widths."""
    policy_delay: int = Field(2, ge=1)
    """Critic steps per step of the policies and target networks."""

    def learner_class(self) -> Callable[..., NetLearner]:
        return TD3Learner


class DDPGLearner(OffPolicyLearner):
    """Learner of DDPG."""

    config: DeterministicConfig
    num_critics = 1

    def build_extras(self) -> None:
        nets = [stack.net for stack in self.stacks]
        self.copies = [frozen_copy(net) for net in nets]
        self.register("copy", self.copies)
        self.polyak_pairs += zip(nets, self.copies, strict=True)

    def build_head(self, space: Space) -> ActionHead:
        return TanhHead(space) if isinstance(space, Continuous) else super().build_head(space)

    def exploration(self, stack: PolicyStack, noise: CorrelatedNoise, progress: float) -> ActionSelector:
        if isinstance(stack.seat_mapping.action_space, Continuous):
            head = TanhHead(stack.seat_mapping.action_space, self.config.noise_at(progress)).to(self.device)
            return noisy_selector(head, noise)
        return stack.head.sample

    def policy_output(
        self,
        i: int,
        observations: Tensor,
        action_mask: Tensor | None,
        generator: torch.Generator,
        net: Net | None = None,
    ) -> PolicyOutput:
        """Returns the actions of stack i's policies, or of the networks `net` of the same policies."""
        out = (net or self.stacks[i].net)(observations)
        head = self.stacks[i].head
        if isinstance(head, TanhHead):
            return PolicyOutput(out, torch.tanh(out))
        assert isinstance(head, CategoricalHead)
        logits = head.logits(out, action_mask)
        return PolicyOutput(out, gumbel_softmax(logits, generator, temperature=self.config.gumbel_temperature))

    def target_actions(
        self, i: int, observations: Tensor, action_mask: Tensor | None, generator: torch.Generator
    ) -> PolicyOutput:
        return self.policy_output(i, observations, action_mask, generator, self.copies[i])

    def target_value(self, i: int, q: Tensor, answer: PolicyOutput) -> Tensor:
        return q.amin(0)[..., 0]

    def loss(self, i: int, q: Tensor, answer: PolicyOutput, batch: UpdateBatch) -> tuple[Tensor, TensorMetrics]:
        """Returns the deterministic policy gradient loss, by the first critic alone as in Fujimoto et al."""
        size = (batch.policy_weights[..., None] * answer.outputs.square()).sum(1).mean(-1)
        loss = actor_loss(q[0][..., 0], batch.policy_weights) + self.config.action_l2_coef * size
        return loss, {"outputs": size.detach()}


class TD3Learner(DDPGLearner):
    """Learner of TD3."""

    config: TD3
    num_critics = 2

    def build_extras(self) -> None:
        super().build_extras()
        self.policy_delay = self.config.policy_delay

    def target_actions(
        self, i: int, observations: Tensor, action_mask: Tensor | None, generator: torch.Generator
    ) -> PolicyOutput:
        """Returns the actions of the target policies with clipped noise, which smooths sharp peaks of the critics."""
        answer = super().target_actions(i, observations, action_mask, generator)
        clip = self.config.target_noise_clip
        if isinstance(self.stacks[i].head, TanhHead):
            noise = self.config.target_noise * normal_like(answer.action_codes, generator)
            answer.action_codes = (answer.action_codes + noise.clamp(-clip, clip)).clamp(-1, 1)
        return answer
