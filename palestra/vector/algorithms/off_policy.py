"""Off-policy actor-critics: policies that ascend action-value critics, shared by SAC, DDPG and TD3.

Shapes: `K` critics, `P` members of a stack, `M` transitions, `S` seats of a member, `R` = M*S rows, `A` numbers of an
encoded action, `O` outputs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from palestra.core.losses import TensorMetrics
from palestra.core.types import RolloutBatch
from palestra.vector.algorithms.action_values import ActionValueConfig, ActionValueLearner, UpdateBatch
from palestra.vector.algorithms.critics import frozen_parameters, polyak_update
from palestra.vector.learners.nets import NetLearnerSpec
from palestra.vector.learners.policy_stack import PolicyStack
from palestra.vector.losses import td_target
from palestra.vector.nets.continuous_heads import BoundedHead, idle_code
from palestra.vector.nets.exploration_noise import CorrelatedNoise
from palestra.vector.nets.heads import MASKED_LOGIT
from palestra.vector.nets.on_device import RolloutTensors
from palestra.vector.nets.replay import ReplayBuffer, TransitionBatch
from palestra.vector.policies.nets import ActionSelector, NetVectorPolicy, noisy_selector, uniform_selector

# transitions, and share of the run, of random play before training
MOST_RANDOM = 10_000
RANDOM_SHARE = 0.1


class OffPolicyConfig(ActionValueConfig):
    """Base config of off-policy actor-critics: collect `rollout_length` steps, add them to the
    replay buffer, then take `gradient_steps` gradient steps."""

    gradient_steps: int = Field(32, ge=1)
    learning_starts: int | None = Field(None, ge=1)
    """Joint transitions collected with random actions before training starts (by every process, if there are several);
    at most `buffer_size`. Null: 10,000, or a tenth of the run if that is less."""
    buffer_size: int = Field(100_000, ge=1)
    """Size of the replay buffer, in joint transitions."""
    noise_correlation: float = Field(0.9, ge=0, lt=1)
    """Correlation of the noise of successive decisions in continuous actions, also of the random
    actions before training starts. Noise that keeps its sign for some steps moves a sluggish
    system; independent noise (0) averages out."""

    @model_validator(mode="after")
    def _learns(self) -> Self:
        if self.learning_starts is not None and self.learning_starts > self.buffer_size:
            raise ValueError(
                f"learning_starts is {self.learning_starts}, but the replay buffer holds only {self.buffer_size} "
                "transitions (buffer_size), so training would never start: lower the one or raise the other"
            )
        return self

    def is_warm(self, transitions: int, progress: float) -> bool:
        """Returns whether training starts with so many transitions, at `progress` in [0, 1]."""
        if self.learning_starts is not None:
            return transitions >= self.learning_starts
        return transitions >= min(MOST_RANDOM, self.buffer_size) or progress >= RANDOM_SHARE


@dataclass
class PolicyOutput:
    """Output of a stack's policies: network outputs `outputs` [P, R, O], encoded actions
    `action_codes` [P, R, A], and log-probabilities if the algorithm needs them: [P, R] of the
    sampled actions, or [P, R, A] of every discrete action. All float32."""

    outputs: Tensor
    action_codes: Tensor
    logp: Tensor | None = None


class OffPolicyLearner(ActionValueLearner):
    """Base learner of off-policy actor-critics; a subclass defines the policies' actions, target
    values and losses. Policies and target networks are updated every `policy_delay`-th step."""

    config: OffPolicyConfig
    policy_delay = 1

    def __init__(self, config: OffPolicyConfig, spec: NetLearnerSpec) -> None:
        self.progress = 0.0
        super().__init__(config, spec)
        self.noises = [CorrelatedNoise(self.noise_correlation) for _ in self.stacks]
        self.saved_parts |= {f"noise.{i}": noise for i, noise in enumerate(self.noises)}

    # ---- defined by an algorithm

    @abstractmethod
    def policy_output(
        self, i: int, observations: Tensor, action_mask: Tensor | None, generator: torch.Generator
    ) -> PolicyOutput:
        """Returns the actions of stack i's policies, differentiable with respect to their networks."""

    def target_actions(
        self, i: int, observations: Tensor, action_mask: Tensor | None, generator: torch.Generator
    ) -> PolicyOutput:
        """Returns the actions in the next states that the critics' targets assume: here those of the policies."""
        return self.policy_output(i, observations, action_mask, generator)

    @abstractmethod
    def target_value(self, i: int, q: Tensor, answer: PolicyOutput) -> Tensor:
        """Returns a state's value [P, R] from the critics' `q` [K, P, R, O] of the output there."""

    @abstractmethod
    def loss(self, i: int, q: Tensor, answer: PolicyOutput, batch: UpdateBatch) -> tuple[Tensor, TensorMetrics]:
        """Returns the policies' losses [P] and metrics [P]."""

    def penalty(
        self, i: int, batch: UpdateBatch, transitions: TransitionBatch, generator: torch.Generator
    ) -> Callable[[Tensor], Tensor] | None:
        """Returns a further loss [P] of the critics of stack i, a function of the values [K, P, R]
        of the actions in the batch; None here."""
        return None

    @property
    def noise_correlation(self) -> float:
        """Correlation of the noise of successive decisions in play."""
        return self.config.noise_correlation

    def after_policy_step(self, i: int, answer: PolicyOutput, batch: UpdateBatch, progress: float) -> TensorMetrics:
        """Updates anything else after a policy step; returns metrics."""
        return {}

    # ---- construction

    def build_replay(self) -> ReplayBuffer:
        return ReplayBuffer(self.config.buffer_size, **self.replay_options())

    # ---- play

    @property
    def is_warm(self) -> bool:
        return self.config.is_warm(len(self.replay), self.progress)

    def rollout_policies(self, progress: float) -> list[NetVectorPolicy]:
        self.progress = progress
        players = []
        for stack, noise in zip(self.stacks, self.noises, strict=True):
            selector = uniform_selector(stack.head, noise)
            if self.is_warm:
                selector = self.exploration(stack, noise, progress)
            players.append(stack.build_policy(selector))
        return players

    def sampling_policies(self) -> list[NetVectorPolicy]:
        independent = CorrelatedNoise(0.0)
        return [stack.build_policy(self.exploration(stack, independent, 1.0)) for stack in self.stacks]

    def exploration(self, stack: PolicyStack, noise: CorrelatedNoise, progress: float) -> ActionSelector:
        """Returns the action function of a stack's policies in training, with `noise` for continuous actions."""
        head = stack.head
        if isinstance(head, BoundedHead):
            return noisy_selector(head, noise)
        return head.sample

    # ---- learning

    def remember(self, batch: RolloutBatch) -> None:
        self.replay.add(batch)
        if self.has_norms:
            self.update_norms(RolloutTensors.of(batch, self.device))

    def train_step(
        self, transitions: TransitionBatch, generator: torch.Generator, progress: float
    ) -> list[TensorMetrics]:
        """Takes one step of all critics, and every `policy_delay`-th time of the policies."""
        targets = self.targets(transitions, generator)
        joint = self.action_encoder.encode(transitions.actions, transitions.agent_mask)
        batches = [self.update_batch(stack, transitions, joint) for stack in self.stacks]
        lines = [
            self.train_critics(
                critic, batches[i], target, progress, self.penalty(i, batches[i], transitions, generator)
            )
            for i, (critic, target) in enumerate(zip(self.critics, targets, strict=True))
        ]
        self.steps += 1
        if self.steps % self.policy_delay == 0:
            for i, batch in enumerate(batches):
                lines[i] |= self._train_policies(i, batch, generator, progress)
            polyak_update(self.polyak_pairs, self.config.tau)
        return lines

    @torch.no_grad()
    def targets(self, transitions: TransitionBatch, generator: torch.Generator) -> list[Tensor]:
        """Returns the critics' targets [P, R] for each stack."""
        answers = [self._next(i, transitions, generator) for i in range(len(self.stacks))]
        joint = transitions.rewards.new_zeros(len(transitions.rewards), self.action_encoder.size)
        for stack, answer in zip(self.stacks, answers, strict=True):
            self.action_encoder.write(joint, stack.seat_mapping, answer.action_codes)
        targets = []
        for i, (stack, critic, answer) in enumerate(zip(self.stacks, self.critics, answers, strict=True)):
            seen = self.critic_inputs(
                stack, transitions.next_obs, transitions.next_state, transitions.next_agent_mask, joint
            )
            value = self.target_value(i, critic.q_values(critic.target, seen, answer.action_codes), answer)
            targets.append(td_target(stack.rows(transitions.rewards, 1), stack.rows(transitions.discounts, 1), value))
        return targets

    def _next(self, i: int, transitions: TransitionBatch, generator: torch.Generator) -> PolicyOutput:
        """Returns stack i's next actions; the idle code, for certain, where a seat does not act."""
        stack = self.stacks[i]
        observations = stack.observations(transitions.next_obs, 1)
        action_mask = stack.optional_rows(transitions.next_action_mask, 1)
        answer = self.target_actions(i, observations, action_mask, generator)
        if self.config.critic == "own":  # the next step is the seat's own next decision
            return answer
        agent_mask = stack.rows(transitions.next_agent_mask, 1)[..., None]
        nothing = idle_code(stack.head, self.device)
        answer.action_codes = torch.where(agent_mask, answer.action_codes, nothing)
        if answer.logp is not None:
            if answer.logp.dim() > 2:
                answer.logp = torch.where(agent_mask, answer.logp, (1 - nothing) * MASKED_LOGIT)
            else:
                answer.logp = torch.where(agent_mask[..., 0], answer.logp, 0.0)
        return answer

    def _train_policies(self, i: int, batch: UpdateBatch, generator: torch.Generator, progress: float) -> TensorMetrics:
        stack = self.stacks[i]
        critic = self.critics[i]
        answer = self.policy_output(i, batch.observations, batch.action_mask, generator)
        with frozen_parameters(critic.net):
            q = critic.q_values(critic.net, batch.critic_inputs, answer.action_codes)
        loss, metrics = self.loss(i, q, answer, batch)
        norms = stack.optimizer.step(loss.sum(), progress)
        stack.version += 1
        metrics = {"policy_loss": loss.detach(), "grad_norm": norms} | metrics
        return metrics | self.after_policy_step(i, answer, batch, progress)
