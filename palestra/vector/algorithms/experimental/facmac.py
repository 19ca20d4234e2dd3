"""FACMAC (Peng et al., 2021): a factored central critic, whose team value mixes a value of each seat's observation and
action, and policies that ascend it together. Policies, exploration and discrete actions are those of DDPG.

Rewards, time and seats that do not act or have terminated are handled as in QMIX: the team's reward is the mean reward
of the seats that learn, time is counted in env steps, and a seat that does not act adds a value of 0.

Shapes: as in `palestra.vector.algorithms.off_policy`; `G` numbers of the mixer's state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from palestra.core.losses import TensorMetrics
from palestra.core.seeding import derive_seed
from palestra.vector.algorithms.action_values import UpdateBatch
from palestra.vector.algorithms.critics import frozen_copy, frozen_parameters, polyak_update
from palestra.vector.algorithms.ddpg import DDPGLearner, DeterministicConfig
from palestra.vector.algorithms.off_policy import PolicyOutput
from palestra.vector.algorithms.team_mixing import check_mixer_sees_state, mix_values
from palestra.vector.learners.nets import NetLearner
from palestra.vector.learners.optimizers import StackedOptimizer
from palestra.vector.losses import q_loss, td_target
from palestra.vector.nets.mixers import QMIXMixer, SeatValues, VDNMixer
from palestra.vector.nets.on_device import constant
from palestra.vector.nets.replay import TransitionBatch


class FACMAC(DeterministicConfig):
    """FACMAC: a mixed critic of the team and deterministic policies that ascend it together."""

    type: Literal["facmac"] = "facmac"
    combines: ClassVar[Literal["nothing", "seats", "networks"]] = "seats"
    critic: Literal["own"] = "own"
    """Input of each seat's value: its own observation and action. The mixer adds the state."""
    mixer: Literal["qmix", "nonmonotonic", "vdn"] = "qmix"
    """`qmix` mixes the seats' values with nonnegative weights that a network generates from the env's global state
    (from all observations together if it has none); `nonmonotonic` is the same with weights of any sign, which suits
    policy gradients, since no action is chosen by a maximum; `vdn` adds the values."""
    mixer_units: int = Field(32, ge=1, le=65_536)
    """Units of the mixing network's hidden layer."""

    def learner_class(self) -> Callable[..., NetLearner]:
        return FACMACLearner


class FACMACLearner(DDPGLearner):
    """Learner of FACMAC. Raises ValueError for a mixer other than `vdn` on pixels without a global state."""

    config: FACMAC
    team_metrics = ("critic_loss", "q", "policy_loss")

    def build_extras(self) -> None:
        super().build_extras()
        config = self.config
        seats = sum(len(stack.seat_mapping.all_seats) for stack in self.stacks)
        check_mixer_sees_state(config.mixer, self.env)
        seed = derive_seed(self.seeds[self.names[0]], "mixer")
        self.mixer: nn.Module = VDNMixer()
        self.mixer_adam: StackedOptimizer | None = None
        if config.mixer != "vdn":
            self.mixer = QMIXMixer(seats, self.global_size, config.mixer_units, seed, monotonic=config.mixer == "qmix")
            self.mixer.to(self.device)
            settings = self.policies[self.names[0]].with_lr(config.critic_lr)
            self.mixer_adam = StackedOptimizer(self.mixer, ["+".join(self.names)], settings, self.process_group)
            self.extra_optimizers["mixer_adam"] = self.mixer_adam
        self.target_mixer = frozen_copy(self.mixer)
        self.extra_modules |= {"mixer": self.mixer, "target_mixer": self.target_mixer}
        self.polyak_pairs.append((self.mixer, self.target_mixer))

    def replay_options(self) -> dict[str, Any]:
        options = super().replay_options()
        return options | {"count_env_steps": True, "team": options["seats"]}

    @property
    def uses_global_features(self) -> bool:
        return self.config.mixer != "vdn"

    # ---- learning

    def train_step(
        self, transitions: TransitionBatch, generator: torch.Generator, progress: float
    ) -> list[TensorMetrics]:
        """Takes one gradient step of the mixed critic and one of all policies; returns metrics by stack."""
        target = self.team_target(transitions, generator)
        joint = self.action_encoder.encode(transitions.actions, transitions.agent_mask)
        batches = [self.update_batch(stack, transitions, joint) for stack in self.stacks]
        lines = self._train_mixed_critic(transitions, batches, target, progress)
        for line, own in zip(lines, self._train_team(transitions, batches, generator, progress), strict=True):
            line |= own
        self.steps += 1
        polyak_update(self.polyak_pairs, self.config.tau)
        return lines

    @torch.no_grad()
    def team_target(self, transitions: TransitionBatch, generator: torch.Generator) -> Tensor:
        """Returns the critic's targets [M]: the team's reward plus the discounted value, by the
        target networks, of the target policies' next actions (eq. 5)."""
        values = []
        for i, (stack, critic) in enumerate(zip(self.stacks, self.critics, strict=True)):
            observations = stack.observations(transitions.next_obs, 1)
            mask = stack.optional_rows(transitions.next_action_mask, 1)
            codes = self.target_actions(i, observations, mask, generator).action_codes
            values.append(critic.taken_q_values(observations, codes, critic.target)[0])
        state = self._mixer_state(transitions.next_obs, transitions.next_state)
        after = self._team_value(self.target_mixer, values, transitions.next_agent_mask, state)
        seats = sorted(self.action_encoder.heads)  # all have the same discount and weight
        rewards = transitions.rewards[:, constant(tuple(seats), self.device)].mean(-1)
        return td_target(rewards, transitions.discounts[:, seats[0]], after)

    def _train_mixed_critic(
        self, transitions: TransitionBatch, batches: list[UpdateBatch], target: Tensor, progress: float
    ) -> list[TensorMetrics]:
        """Takes a gradient step of the seats' values and the mixer; returns metrics by stack."""
        values = [
            critic.taken_q_values(batch.critic_inputs, batch.action_codes)[0]
            for critic, batch in zip(self.critics, batches, strict=True)
        ]
        leaves = [value.detach().requires_grad_() for value in values]  # for gradients of the mixer's inputs
        state = self._mixer_state(transitions.obs, transitions.state)
        total = self._team_value(self.mixer, leaves, transitions.agent_mask, state)
        weight = self._row_weights(transitions)
        loss, _ = q_loss(total, target, weight)
        slopes = torch.autograd.grad(loss, leaves, retain_graph=True)
        if self.mixer_adam:
            self.mixer_adam.step(loss, progress)
        for critic, value, slope in zip(self.critics, values, slopes, strict=True):
            critic.optimizer.step((value * slope).sum(), progress)  # the chain rule, stack by stack
        mean = (weight * total.detach()).sum() / weight.sum().clamp(min=1e-8)
        members = [len(stack.seat_mapping.names) for stack in self.stacks]
        return [{"critic_loss": loss.detach().expand(P), "q": mean.expand(P)} for P in members]

    def _train_team(
        self, transitions: TransitionBatch, batches: list[UpdateBatch], generator: torch.Generator, progress: float
    ) -> list[TensorMetrics]:
        """Takes a gradient step of all policies; returns metrics by stack."""
        answers = [
            self.policy_output(i, batch.observations, batch.action_mask, generator) for i, batch in enumerate(batches)
        ]
        objective, slopes = self.policy_gradient(transitions, batches, answers)
        lines: list[TensorMetrics] = []
        for stack, batch, answer, slope in zip(self.stacks, batches, answers, slopes, strict=True):
            size = (batch.policy_weights[..., None] * answer.outputs.square()).sum(1).mean(-1)
            loss = self.config.action_l2_coef * size.sum() - (answer.action_codes * slope).sum()
            norms = stack.optimizer.step(loss, progress)
            stack.version += 1
            policy_loss = -objective.expand(len(norms)) + self.config.action_l2_coef * size.detach()
            lines.append({"policy_loss": policy_loss, "grad_norm": norms, "outputs": size.detach()})
        return lines

    def policy_gradient(
        self, transitions: TransitionBatch, batches: list[UpdateBatch], answers: list[PolicyOutput]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Returns the mean team value of the current policies' actions at all seats (eq. 7), a
        scalar, and its gradients with respect to each stack's encoded actions [P, R, A]."""
        leaves = [answer.action_codes.detach().requires_grad_() for answer in answers]
        values = []
        for critic, batch, leaf in zip(self.critics, batches, leaves, strict=True):
            with frozen_parameters(critic.net):
                values.append(critic.taken_q_values(batch.critic_inputs, leaf)[0])
        state = self._mixer_state(transitions.obs, transitions.state)
        total = self._team_value(self.mixer, values, transitions.agent_mask, state)
        objective = (self._row_weights(transitions) * total).sum()
        return objective.detach(), torch.autograd.grad(objective, leaves)

    def _row_weights(self, transitions: TransitionBatch) -> Tensor:
        """Returns the weights [M] of the transitions in means over those that are known."""
        weight = transitions.weight[:, min(self.action_encoder.heads)]
        return weight / (weight > 0).sum().clamp(min=1)

    def _team_value(self, mixer: nn.Module, values: list[Tensor], agent_mask: Tensor, state: Tensor) -> Tensor:
        """Returns the team's value [M] from the stacks' values [P, R]."""
        inputs = [SeatValues(value[:, None]) for value in values]
        return mix_values(mixer, self.stacks, inputs, agent_mask[None], state[None])[0]

    def _mixer_state(self, obs: Tensor, state: Tensor | None) -> Tensor:
        """Returns the mixer's state [M, G]; of width 0 for `vdn`, which ignores it."""
        if not self.uses_global_features:
            return obs.new_zeros(len(obs), 0)
        return self.global_features(obs, state, 1)
