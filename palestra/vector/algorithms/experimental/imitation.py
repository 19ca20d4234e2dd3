"""Learning from demonstrations: behaviour cloning, and generative adversarial imitation learning (GAIL, Ho & Ermon,
2016).

Demonstrations are recorded episodes of players of any kind (see `palestra.vector.rollouts.episodes`). A policy imitates
the actions at its own seats. Rewards of the env are not used.

Shapes: `P` members of a stack, `T` steps, `B` parallel games, `S` seats of a member, `C` = B*S columns, `N` seats, `A`
actions, `L` steps of a sequence, `M` transitions or sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from palestra.core.losses import LossInputs, TensorMetrics, clipped_policy_loss, cross_entropy_loss
from palestra.core.seeding import derive_seed
from palestra.core.types import Metrics, RolloutBatch
from palestra.vector.algorithms.actor_critic import ActorCriticConfig, ActorCriticLearner
from palestra.vector.algorithms.minibatches import minibatch_seed, normalise_weights
from palestra.vector.learners.nets import (
    WEIGHT_KEY,
    AlgorithmConfig,
    NetLearner,
    NetLearnerSpec,
    mean_metrics,
    metrics_by_policy,
)
from palestra.vector.learners.optimizers import StackedOptimizer
from palestra.vector.learners.policy_stack import PolicyStack
from palestra.vector.losses import ImitationReward, discriminator_loss, gradient_penalty, imitation_reward
from palestra.vector.nets.heads import encode_actions, encoding_size
from palestra.vector.nets.layers import Net, make_generators
from palestra.vector.nets.normalise import normalise
from palestra.vector.nets.on_device import RolloutTensors, uniform
from palestra.vector.rollouts.episodes import EpisodeFiles, read_vector_episodes


class DemoBatch:
    """Demonstrations at the seats of a stack, each array [P, T, C, ...]. `sample` samples transitions for each member,
    or with `memory` sequences that start at the first step of a game."""

    def __init__(self, stack: PolicyStack, batch: RolloutTensors, memory: bool) -> None:
        self.stack = stack
        self.observations = stack.seat_mapping.network_inputs(batch.obs[:-1], 2).flatten(2, 3)
        self.actions = stack.actions(batch)
        self.agent_mask = stack.rows(batch.agent_mask[:-1])
        self.action_mask = stack.action_masks(batch)
        self.is_first = stack.seat_mapping.repeat_games(batch.is_first[:-1])
        begin = self.is_first if memory else self.agent_mask
        self.starts = [own.flatten().nonzero()[:, 0] for own in begin]  # t * C + c, where sequences may start

    @property
    def policies_without_actions(self) -> list[str]:
        """The policies without any action in the demonstrations."""
        masks = zip(self.stack.seat_mapping.names, self.agent_mask, strict=True)
        return [name for name, agent_mask in masks if not agent_mask.any()]

    def sample(self, count: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Samples `count` sequences of `length` steps: returns their indices t * C + c (int64) and
        a mask of the actions to imitate, [P, L, M] each."""
        _, T, C = self.agent_mask.shape
        device = self.agent_mask.device
        places = [torch.randint(len(own), (count,), generator=generator).to(device) for own in self.starts]
        first = torch.stack([own[place] for own, place in zip(self.starts, places, strict=True)])
        at = first[:, None] + C * torch.arange(length, device=device)[:, None]
        inside = at < T * C
        at = at.clamp(max=T * C - 1)
        return at, inside & self.gather(self.agent_mask, at)

    @staticmethod
    def gather(x: Tensor, at: Tensor) -> Tensor:
        """Gathers indices from an array: [P, T, C, ...] -> [P, L, M, ...]."""
        return x.flatten(1, 2)[torch.arange(len(x), device=x.device)[:, None, None], at]

    def network_inputs(self, at: Tensor) -> Tensor:
        """Returns the network inputs at the indices [P, L, M], normalised if the stack does so."""
        return normalise(self.stack.norm, self.gather(self.observations, at))

    def encoded_transitions(self, at: Tensor) -> Tensor:
        """Returns observations and encoded actions at indices [P, 1, M], concatenated: [P, M, D] float32."""
        code = encode_actions(self.stack.seat_mapping.action_space, self.gather(self.actions, at))
        return torch.cat([self.network_inputs(at).flatten(3).float(), code], -1)[:, 0]


def load_demonstrations(paths: Sequence[str], learner: NetLearner, *, memory: bool) -> list[DemoBatch]:
    """Returns the demonstrations of each stack. Raises ValueError if a policy has no action in
    them, or if a recurrent policy has no first step of a game."""
    batch = RolloutTensors.of(read_vector_episodes(paths, learner.env), learner.device)
    where = ", ".join(paths)
    found = [DemoBatch(stack, batch, memory and stack.config.is_recurrent) for stack in learner.stacks]
    for demos in found:
        if demos.policies_without_actions:
            raise ValueError(
                f"in {where} no step has an action of policy {demos.policies_without_actions[0]}: record more steps"
            )
        if not all(map(len, demos.starts)):
            raise ValueError(
                f"in {where} no game begins, and recurrent policies learn from the start of games: record more steps"
            )
    return found


# ---- behaviour cloning


class BC(AlgorithmConfig):
    """Behaviour cloning: imitates recorded actions. Play in the env only measures the policy."""

    type: Literal["bc"] = "bc"
    demonstrations: EpisodeFiles
    """Path of a file of episodes (.parquet) that `palestra collect` wrote, or a list of them."""
    rollout_length: int = Field(16, ge=1)
    """Env steps between updates, of every parallel game; they measure the policy and are not trained on."""
    gradient_steps: int = Field(8, ge=1)
    """Gradient steps per rollout."""
    batch_size: int = Field(256, ge=1)
    """Actions per gradient step."""
    sequence_length: int = Field(64, ge=1)
    """Sequence length of recurrent policies; sequences start at the first step of a game."""
    entropy_coef: float = Field(0.0, ge=0)
    """Coefficient of the entropy bonus."""

    def learner_class(self) -> Callable[..., NetLearner]:
        return BCLearner

    @model_validator(mode="after")
    def _learns_no_values(self) -> Self:
        if self.time_limit == "ends":
            raise ValueError("time_limit: ends is about the values of states, and bc learns none: leave it out")
        return self


class BCLearner(NetLearner):
    """Learner of behaviour cloning. Raises ValueError if the demonstrations do not fit the env or its policies."""

    def __init__(self, config: BC, spec: NetLearnerSpec) -> None:
        super().__init__(spec)
        self.config = config
        self.demos = load_demonstrations(config.demonstrations, self, memory=True)
        for demos in self.demos:
            if norm := demos.stack.norm:
                norm.update(
                    demos.observations.flatten(1, 2), demos.agent_mask.flatten(1).float(), self.process_group.all_reduce
                )

    def update(self, batch: RolloutBatch, progress: float) -> dict[str, Metrics]:
        """Takes `gradient_steps` gradient steps on the demonstrations; ignores the batch. Returns metrics by policy."""
        lines: dict[str, list[TensorMetrics]] = {name: [] for name in self.names}
        for demos in self.demos:
            names = demos.stack.seat_mapping.names
            seed = minibatch_seed(self.seeds[names[0]], self.process_group, "bc", demos.stack.version)
            generator = torch.Generator().manual_seed(seed)
            for _ in range(self.config.gradient_steps):
                for name, line in zip(names, self._learn(demos, generator, progress), strict=True):
                    lines[name].append(line)
        return {name: mean_metrics(own) for name, own in lines.items()}

    def _learn(self, demos: DemoBatch, generator: torch.Generator, progress: float) -> list[TensorMetrics]:
        """Takes one gradient step; returns metrics of each member."""
        stack = demos.stack
        length = self.config.sequence_length if stack.config.is_recurrent else 1
        at, transitions = demos.sample(max(1, self.config.batch_size // length), length, generator)
        out, _ = stack.net.unroll(demos.network_inputs(at), None, demos.gather(demos.is_first, at))
        action_mask = demos.action_mask
        if action_mask is not None:
            action_mask = demos.gather(action_mask, at)
        logp, entropy = stack.head.evaluate_actions(out, demos.gather(demos.actions, at), action_mask)
        share = normalise_weights(transitions.float())
        total = out.new_zeros(())
        lines = []
        counts = transitions.sum((1, 2))
        for own, spread, weight in zip(logp.flatten(1), entropy.flatten(1), share.flatten(1), strict=True):
            loss, metrics = cross_entropy_loss(LossInputs(own, spread, own, None, torch.ones_like(own), weight))
            uncertainty = (weight * spread).sum()
            total = total + loss - self.config.entropy_coef * uncertainty
            lines.append(metrics | {"entropy": uncertainty.detach()})
        norms = stack.optimizer.step(total, progress)
        stack.version += 1
        return [
            line | {"grad_norm": norm, WEIGHT_KEY: count}
            for line, norm, count in zip(lines, norms, counts, strict=True)
        ]


# ---- generative adversarial imitation


class GAIL(ActorCriticConfig):
    """GAIL: PPO (see there) on the rewards of a discriminator that separates the policy's
    transitions from those in recorded episodes."""

    type: Literal["gail"] = "gail"
    demonstrations: EpisodeFiles
    """Path of a file of episodes (.parquet) that `palestra collect` wrote, or a list of them."""
    reward: ImitationReward = "positive"
    """Reward of a transition: `positive` is -log(1 - D), which favours long games; `logit` may be negative."""
    discriminator_steps: int = Field(16, ge=1)
    """Gradient steps of the discriminator per rollout."""
    discriminator_batch_size: int = Field(256, ge=1)
    """Transitions of either kind per discriminator step."""
    gradient_penalty: float = Field(1.0, ge=0)
    """Coefficient of the gradient penalty, the squared distance of the discriminator's gradient norm from 1."""
    discriminator_lr: float | None = Field(None, gt=0, le=1_000_000)
    """Learning rate of the discriminator; null uses the policy's."""
    epochs: int = Field(4, ge=1)
    minibatches: int = Field(4, ge=1)
    clip: float = Field(0.2, gt=0)
    """Clipping distance of the probability ratio from 1."""

    def loss(self, rows: LossInputs) -> tuple[Tensor, TensorMetrics]:
        return clipped_policy_loss(rows, clip=self.clip)

    def learner_class(self) -> Callable[..., NetLearner]:
        return GAILLearner


@dataclass
class Discriminator:
    """Discriminators of a stack: transitions [P, R, D] -> logits [P, R] of being the expert's."""

    net: Net
    optimizer: StackedOptimizer

    def __call__(self, transitions: Tensor) -> Tensor:
        return self.net(transitions)[..., 0]


class GAILLearner(ActorCriticLearner):
    """Learner of GAIL. Raises ValueError for pixel observations, and if the demonstrations do not
    fit the env or its policies."""

    def __init__(self, config: GAIL, spec: NetLearnerSpec) -> None:
        if any(map(spec.env.sees_image, spec.learning_seats)):
            raise ValueError(f'gail cannot see the pixels of env "{spec.env.name}" beside actions: use bc')
        super().__init__(config, spec)
        self.imitation = config
        self.demos = load_demonstrations(config.demonstrations, self, memory=False)
        self.discriminators = [self._discriminator(stack) for stack in self.stacks]
        self.register(
            "discriminator", [one.net for one in self.discriminators], [one.optimizer for one in self.discriminators]
        )

    def _discriminator(self, stack: PolicyStack) -> Discriminator:
        seat_mapping = stack.seat_mapping
        config = stack.config.without_memory().with_lr(self.imitation.discriminator_lr)
        config = config.model_copy(update={"communication_rounds": 0})
        seeds = [derive_seed(self.seeds[name], "discriminator") for name in seat_mapping.names]
        inputs = int(np.prod(seat_mapping.input_shape)) + encoding_size(seat_mapping.action_space)
        net = Net((inputs,), 1, config, make_generators(seeds)).to(self.device)
        return Discriminator(net, StackedOptimizer(net, seat_mapping.names, config, self.process_group))

    def update(self, batch: RolloutBatch, progress: float) -> dict[str, Metrics]:
        """Trains the discriminators, and the policies on their rewards in place of the env's."""
        rollout = RolloutTensors.of(batch, self.device)
        rewards = torch.zeros_like(rollout.rewards)
        lines: dict[str, Metrics] = {name: {} for name in self.names}
        for demos, discriminator in zip(self.demos, self.discriminators, strict=True):
            seat_mapping = demos.stack.seat_mapping
            played = DemoBatch(demos.stack, rollout, memory=False)
            idle = self.process_group.all_reduce(torch.tensor([float(len(played.policies_without_actions))]))
            if not idle.item():  # all policies acted, in all processes: a rollout may be too short for that
                lines |= self._train_discriminators(discriminator, demos, played, progress)
            earned = seat_mapping.by_seat(self._discriminator_rewards(discriminator, played))
            rewards[..., seat_mapping.seat_index(self.device)] = earned
        learned = self.train(replace(rollout, rewards=rewards), progress)
        return {name: lines[name] | line for name, line in learned.items()}

    def _train_discriminators(
        self, discriminator: Discriminator, expert: DemoBatch, policy: DemoBatch, progress: float
    ) -> dict[str, Metrics]:
        """Trains the discriminators of a stack; returns metrics by policy."""
        config = self.imitation
        names = expert.stack.seat_mapping.names
        seed = minibatch_seed(self.seeds[names[0]], self.process_group, "gail", expert.stack.version)
        generator = torch.Generator().manual_seed(seed)
        lines: list[TensorMetrics] = []
        for _ in range(config.discriminator_steps):
            theirs, ours = (
                side.encoded_transitions(side.sample(config.discriminator_batch_size, 1, generator)[0])
                for side in (expert, policy)
            )
            loss, metrics = discriminator_loss(discriminator(theirs), discriminator(ours))
            if config.gradient_penalty:
                mix = uniform((*theirs.shape[:2], 1), generator, self.device)
                loss = loss + config.gradient_penalty * gradient_penalty(discriminator, theirs, ours, mix)
            discriminator.optimizer.step(loss.sum(), progress)
            lines.append(metrics)
        return metrics_by_policy(names, lines)

    @torch.no_grad()
    def _discriminator_rewards(self, discriminator: Discriminator, played: DemoBatch) -> Tensor:
        """Returns the discriminator's reward of every transition [P, T, C]; 0 where a seat did not act."""
        P, T, C = played.agent_mask.shape
        logit = discriminator(
            played.encoded_transitions(torch.arange(T * C, device=self.device).expand(P, 1, -1))
        ).view(P, T, C)
        return imitation_reward(logit, self.imitation.reward) * played.agent_mask
