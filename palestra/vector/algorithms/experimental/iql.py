"""Implicit Q-learning (Kostrikov et al., 2022): offline learning that never evaluates an action outside the data. State
values are an upper expectile of the values of the actions played; action values bootstrap from the state values; the
policy imitates the data, each action weighted by its advantage.

Each policy learns independently: the other seats are part of the env. With `critic: central` action values also depend
on the actions of the other seats that learn; state values do not.

Shapes: `P` members of a stack, `R` rows (a seat of a transition each), `M` transitions, `N` seats.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from palestra.core.losses import TensorMetrics
from palestra.core.seeding import derive_seed
from palestra.envs.vector_base import Discrete, Space
from palestra.vector.algorithms.action_values import ActionValueConfig, ActionValueLearner, UpdateBatch
from palestra.vector.algorithms.critics import polyak_update
from palestra.vector.algorithms.experimental.offline import OfflineConfig, OfflineLearner
from palestra.vector.learners.nets import NetLearner
from palestra.vector.learners.optimizers import StackedOptimizer
from palestra.vector.learners.policy_stack import PolicyStack
from palestra.vector.losses import advantage_weighted_loss, expectile_loss, td_target
from palestra.vector.nets.layers import Net, make_generators
from palestra.vector.nets.replay import TransitionBatch


class IQL(OfflineConfig, ActionValueConfig):
    """IQL: offline actor-critic on recorded episodes, for discrete and continuous actions."""

    type: Literal["iql"] = "iql"
    expectile: float = Field(0.7, gt=0, lt=1)
    """Expectile of the action values that defines a state's value: 0.5 gives the value of the
    policy that played, larger expectiles approach the value of the best action in the data."""
    beta: float = Field(3.0, ge=0)
    """Inverse temperature: an action's weight in imitation is exp(beta * advantage); 0 is behaviour
    cloning. Scale it with the size of rewards."""
    max_weight: float = Field(100.0, gt=0)
    """Upper bound of that weight."""

    def learner_class(self) -> Callable[..., NetLearner]:
        return IQLLearner


class IQLLearner(OfflineLearner, ActionValueLearner):
    """Learner of IQL. Raises ValueError for data, envs and policies that it does not support."""

    config: IQL

    def value_per_action(self, space: Space) -> bool:
        return isinstance(space, Discrete)

    def build_extras(self) -> None:
        self.value_nets: list[Net] = []
        self.value_adams: list[StackedOptimizer] = []
        for stack in self.stacks:
            names = stack.seat_mapping.names
            generators = make_generators([derive_seed(self.seeds[name], "value") for name in names])
            net = Net(self.critic_input_shape(stack), 1, stack.config, generators).to(self.device)
            config = stack.config.with_lr(self.config.critic_lr)
            self.value_nets.append(net)
            self.value_adams.append(StackedOptimizer(net, names, config, self.process_group))
        self.register("value", self.value_nets, self.value_adams)

    def train_step(
        self, transitions: TransitionBatch, generator: torch.Generator, progress: float
    ) -> list[TensorMetrics]:
        """Takes one step of the state values, policies and action values, in this order."""
        joint = self.action_encoder.encode(transitions.actions, transitions.agent_mask)
        lines = []
        for i, (stack, critic) in enumerate(zip(self.stacks, self.critics, strict=True)):
            batch = self.update_batch(stack, transitions, joint)
            with torch.no_grad():
                q = critic.taken_q_values(batch.critic_inputs, batch.action_codes, critic.target).amin(0)
            line = self._train_values(i, transitions, q, batch, progress)
            with torch.no_grad():
                advantage = q - self.state_values(i, transitions)
                following = self.state_values(i, transitions, after=True)
            line |= self._train_policies(stack, transitions, advantage, batch, progress)
            target = td_target(stack.rows(transitions.rewards, 1), stack.rows(transitions.discounts, 1), following)
            lines.append(line | self.train_critics(critic, batch, target, progress))
        self.steps += 1
        polyak_update(self.polyak_pairs, self.config.tau)
        return lines

    def state_values(self, i: int, transitions: TransitionBatch, *, after: bool = False) -> Tensor:
        """Returns the values [P, R] of the states in which actions were taken, or of those that followed."""
        t = transitions
        seen = (t.obs, t.state, t.agent_mask)
        if after:
            seen = (t.next_obs, t.next_state, t.next_agent_mask)
        nothing = t.rewards.new_zeros(len(t.rewards), self.action_encoder.size)  # a state's value depends on no action
        return self.value_nets[i](self.critic_inputs(self.stacks[i], *seen, nothing))[..., 0]

    def _train_values(
        self, i: int, transitions: TransitionBatch, q: Tensor, batch: UpdateBatch, progress: float
    ) -> TensorMetrics:
        """Takes a step of the state values towards the expectile of action values `q` [P, R]; returns metrics."""
        value = self.state_values(i, transitions)
        loss = expectile_loss(value, q, batch.critic_weights, self.config.expectile)
        self.value_adams[i].step(loss.sum(), progress)
        seats = batch.critic_weights.sum(1).clamp(min=1e-8)
        return {"value_loss": loss.detach(), "value": (batch.critic_weights * value.detach()).sum(1) / seats}

    def _train_policies(
        self, stack: PolicyStack, transitions: TransitionBatch, advantage: Tensor, batch: UpdateBatch, progress: float
    ) -> TensorMetrics:
        """Takes a step of advantage-weighted imitation; returns metrics."""
        actions = stack.action_rows(transitions.actions, 1)
        share = batch.policy_weights
        out = stack.net(batch.observations)
        action_mask = stack.optional_rows(transitions.action_mask, 1)
        logp, entropy = stack.head.evaluate_actions(out, actions, action_mask)
        config = self.config
        loss = advantage_weighted_loss(logp, advantage, share, beta=config.beta, max_weight=config.max_weight)
        norms = stack.optimizer.step(loss.sum(), progress)
        stack.version += 1
        seats = share.sum(1).clamp(min=1e-8)
        means = {"entropy": entropy.detach(), "advantage": advantage}
        metrics = {name: (share * of).sum(1) / seats for name, of in means.items()}
        return {"policy_loss": loss.detach(), "grad_norm": norms} | metrics
