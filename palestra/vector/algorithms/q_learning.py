"""Q-learning shared by DQN and QMIX: Q-networks with target networks, epsilon-greedy exploration, and a replay buffer
of transitions (of sequences for recurrent networks).

Shapes: `P` members of a stack, `T` steps (1 for single transitions), `M` transitions or sequences, `N` seats, `S` seats
of a member, `R` = M*S rows, `A` actions, `O` outputs, `F` truncated games.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from palestra.core.losses import TensorMetrics
from palestra.core.types import Metrics, RolloutBatch
from palestra.envs.vector_base import Discrete, Space
from palestra.vector.algorithms.critics import PolyakPairs, frozen_copy, polyak_update
from palestra.vector.algorithms.minibatches import minibatch_seed
from palestra.vector.algorithms.presets import algorithm_name
from palestra.vector.learners.nets import AlgorithmConfig, NetLearner, NetLearnerSpec
from palestra.vector.learners.policy_stack import PolicyStack, policy_writers
from palestra.vector.losses import best_action, dueling_values, gather_values, next_value, sequence_priority
from palestra.vector.nets.heads import MASKED_LOGIT, ActionHead
from palestra.vector.nets.layers import Net, make_generators, states_at
from palestra.vector.nets.on_device import RolloutTensors, uniform
from palestra.vector.nets.replay import ReplayBuffer, TransitionBatch
from palestra.vector.nets.sequence_replay import SequenceBatch, SequenceReplay
from palestra.vector.policies.nets import ActionSelector, NetVectorPolicy


class EpsilonGreedyConfig(AlgorithmConfig):
    """Base config of algorithms that explore epsilon-greedily."""

    epsilon: float = Field(1.0, ge=0, le=1)
    """Share of random actions at the start of the run."""
    epsilon_end: float = Field(0.05, ge=0, le=1)
    """Share of random actions after the decay."""
    epsilon_share: float = Field(0.5, gt=0, le=1)
    """Share of the run over which epsilon decays, linearly."""

    def epsilon_at(self, progress: float) -> float:
        """Returns the share of random actions at `progress` in [0, 1]."""
        return self.epsilon + (self.epsilon_end - self.epsilon) * min(1.0, progress / self.epsilon_share)


class DeepQConfig(AlgorithmConfig):
    """Base config of Q-networks with target networks: `gradient_steps` gradient steps follow each rollout."""

    rollout_length: int = Field(8, ge=1)
    """Rollout length: steps of every parallel game between updates; also the sequence length of recurrent policies."""
    gradient_steps: int = Field(8, ge=1)
    """Gradient steps per rollout."""
    batch_size: int = Field(256, ge=1)
    """Joint transitions per gradient step."""
    gamma: float = Field(0.99, ge=0, le=1)
    """Discount per decision of a seat (per env step for QMIX)."""
    n_step: int = Field(1, ge=1)
    """Decisions of n-step returns: rewards are summed over them before bootstrapping."""
    double: bool = True
    """Double Q-learning: the online network selects the next action, the target network evaluates it."""
    duelling: bool = False
    """Compute action values as a state value plus advantages (Wang et al., 2016)."""
    tau: float = Field(0.005, gt=0, le=1)
    """Polyak coefficient: how far the target networks move to the online networks per target
    update. `tau: 1` with `target_interval: 200` copies them every 200 steps."""
    target_interval: int = Field(1, ge=1)
    """Gradient steps between target updates."""


class QLearningConfig(DeepQConfig, EpsilonGreedyConfig):
    """Base config of Q-learning: collect `rollout_length` steps, add them to the replay buffer, then take
    `gradient_steps` gradient steps.

    Recurrent policies train on sequences of `rollout_length` steps, `batch_size` / `rollout_length` of them per
    gradient step.
    """

    learning_starts: int = Field(1000, ge=0)
    """Joint steps collected with random actions before training starts."""
    buffer_size: int = Field(100_000, ge=1)
    """Size of the replay buffer, in joint transitions."""
    priority_exponent: float = Field(0.0, ge=0)
    """Exponent of TD errors in prioritised replay (Schaul et al., 2016); 0 samples uniformly."""
    priority_beta: float = Field(0.4, ge=0, le=1)
    """Initial exponent of the importance weights that correct prioritised sampling; it rises to 1 over the run."""
    burn_in: int = Field(0, ge=0)
    """First steps of a sequence that only update the recurrent state and are not trained on, unless
    the game began within the sequence. Less than `rollout_length`."""

    @model_validator(mode="after")
    def _learns(self) -> Self:
        if self.burn_in >= self.rollout_length:
            raise ValueError(
                f"burn_in is {self.burn_in}, but sequences have {self.rollout_length} steps (rollout_length), so "
                "no step would be left to train on: lower the one or raise the other"
            )
        return self


class ValueHead(ActionHead):
    """ActionHead whose outputs are action values; it selects the best action."""

    width = 0

    def __init__(self, space: Discrete, duelling: bool) -> None:
        self.num_actions = space.n
        self.duelling = duelling
        self.outputs = space.n + duelling

    def values(self, out: Tensor) -> Tensor:
        """Returns action values: outputs [..., O] -> [..., A]."""
        return dueling_values(out) if self.duelling else out

    def mode(self, out: Tensor, action_mask: Tensor | None) -> Tensor:
        return best_action(self.values(out), action_mask)

    def sample(self, out: Tensor, action_mask: Tensor | None, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return self.mode(out, action_mask), out.new_zeros(out.shape[:-1])

    def evaluate_actions(self, out: Tensor, action: Tensor, action_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        logp = torch.where(action == self.mode(out, action_mask), 0.0, MASKED_LOGIT)
        return logp, torch.zeros_like(logp)

    def epsilon_greedy(self, epsilon: float) -> ActionSelector:
        """Returns a function that acts uniformly with probability `epsilon`, else best."""

        def choose(out: Tensor, action_mask: Tensor | None, generator: torch.Generator) -> tuple[Tensor, None]:
            action = self.mode(out, action_mask)
            dice = uniform(action.shape, generator, out.device)
            lots = uniform((*action.shape, self.num_actions), generator, out.device)
            return torch.where(dice < epsilon, best_action(lots, action_mask), action), None

        return choose


class ValueLearner(NetLearner):
    """Base learner of policies that act epsilon-greedily by their action values. Raises ValueError for envs without
    discrete actions."""

    duelling = False  # whether action values are a state value plus advantages

    def __init__(self, config: EpsilonGreedyConfig, spec: NetLearnerSpec) -> None:
        check_action_spaces(config, spec)
        self.config = config
        super().__init__(spec)
        self.heads = [stack.head for stack in self.stacks if isinstance(stack.head, ValueHead)]
        self.seats = list(chain.from_iterable(stack.seat_mapping.all_seats for stack in self.stacks))

    def build_head(self, space: Space) -> ActionHead:
        assert isinstance(space, Discrete)
        return ValueHead(space, self.duelling)

    def rollout_policies(self, progress: float) -> list[NetVectorPolicy]:
        epsilon = self.epsilon_at(progress)
        return [
            stack.build_policy(head.epsilon_greedy(epsilon))
            for stack, head in zip(self.stacks, self.heads, strict=True)
        ]

    def epsilon_at(self, progress: float) -> float:
        """Returns the share of random actions in training."""
        return self.config.epsilon_at(progress)


class QLearner(ValueLearner):
    """Base learner of Q-learning; a subclass defines the loss. With `counts_env_steps` time is counted in env steps,
    not in each seat's own decisions."""

    config: QLearningConfig
    counts_env_steps = False
    saved_counts = {"steps": "steps", "seen": "env_steps_seen"}

    def __init__(self, config: QLearningConfig, spec: NetLearnerSpec) -> None:
        self.duelling = config.duelling
        super().__init__(config, spec)
        self.target_nets = [frozen_copy(stack.net) for stack in self.stacks]
        self.register("target", self.target_nets)
        nets = [stack.net for stack in self.stacks]
        self.polyak_pairs: PolyakPairs = list(zip(nets, self.target_nets, strict=True))
        self.steps = 0
        self.env_steps_seen = 0
        self.replay = self.build_replay()
        self.saved_parts["replay"] = self.replay

    def build_replay(self) -> ReplayBuffer | SequenceReplay:
        """Builds the replay buffer."""
        config = self.config
        credit: dict[str, Any] = {
            "n_step": config.n_step,
            "gamma": config.gamma,
            "priority": config.priority_exponent,
            "count_env_steps": self.counts_env_steps,
            "team": self.seats if self.counts_env_steps else (),
        }
        remembered = [stack.seat_mapping.label for stack in self.stacks if stack.net.recurrent_units]
        if not remembered:
            return ReplayBuffer(config.buffer_size, seats=self.seats, **credit)
        capacity = max(1, config.buffer_size // config.rollout_length)
        return SequenceReplay(capacity, burn_in=config.burn_in, recurrent_players=remembered, **credit)

    def epsilon_at(self, progress: float) -> float:
        return super().epsilon_at(progress) if self.is_warm else 1.0

    # ---- learning

    @property
    def is_warm(self) -> bool:
        return self.env_steps_seen >= self.config.learning_starts

    def remember(self, batch: RolloutBatch) -> None:
        """Adds a rollout to the replay buffer and the running norms."""
        self.replay.add(self.replay_rows(batch))
        self.env_steps_seen += batch.terminated.size
        if self.has_norms:
            self.update_norms(RolloutTensors.of(batch, self.device))

    def replay_rows(self, batch: RolloutBatch) -> RolloutBatch:
        """Returns the rollout as the replay buffer stores it."""
        return batch

    def update(self, batch: RolloutBatch, progress: float) -> dict[str, Metrics]:
        """Stores the rollout and, once training has started, takes `gradient_steps` steps."""
        self.remember(batch)
        lines: list[list[TensorMetrics]] = [[] for _ in self.stacks]
        if self._ready():
            seed = minibatch_seed(self.seeds[self.names[0]], self.process_group, "moments", self.steps)
            rng = np.random.default_rng(seed)
            for _ in range(self.config.gradient_steps):
                for own, line in zip(lines, self._step(rng, progress), strict=True):
                    own.append(line)
        return self.policy_metrics(lines)

    def _ready(self) -> bool:
        return self.process_group.all_ranks(self.is_warm and self.replay.ring.can_sample)

    def _step(self, rng: np.random.Generator, progress: float) -> list[TensorMetrics]:
        """Takes one gradient step; returns metrics by stack."""
        config = self.config
        count = config.batch_size
        if isinstance(self.replay, SequenceReplay):
            count = max(1, count // config.rollout_length)
        drawn = self.replay.sample(count, rng, self.priority_beta_at(progress)).to(self.device)
        if isinstance(drawn, SequenceBatch):
            lines, error, known = self.train_step(drawn, progress)
            priority = sequence_priority(error, known)
        else:
            lines, error, _ = self.train_step(as_sequences(drawn), progress)
            priority = error[0]
        self.replay.update_priorities(drawn.index, priority)
        self.steps += 1
        for stack in self.stacks:
            stack.version += 1
        if self.steps % config.target_interval == 0:
            polyak_update(self.polyak_pairs, config.tau)
        return lines

    def priority_beta_at(self, progress: float) -> float:
        """Returns the exponent of the importance weights of prioritised replay."""
        return self.config.priority_beta + (1 - self.config.priority_beta) * progress

    @abstractmethod
    def train_step(
        self, drawn: TransitionBatch | SequenceBatch, progress: float
    ) -> tuple[list[TensorMetrics], Tensor, Tensor]:
        """Trains the policies on a replay batch; returns metrics by stack, mean absolute TD errors
        [T, M], and a mask of the known ones [T, M]."""

    def online_and_target_values(self, i: int, drawn: TransitionBatch | SequenceBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the online values of stack i for all actions [P, T, R, A] and for those taken,
        and the target values of the following decisions, both [P, T, R]."""
        stack = self.stacks[i]
        q, target_q, chooser_q = self.action_values(i, drawn)
        following = next_value(target_q, chooser_q, stack.optional_rows(drawn.next_action_mask))
        return q, gather_values(q, stack.action_rows(drawn.actions)), following

    def action_values(self, i: int, drawn: TransitionBatch | SequenceBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Returns values of all actions by stack i, [P, T, R, A] each: the online network's, and for the following
        decisions those of the target network and of the network that chooses the action, both without gradients."""
        stack = self.stacks[i]
        head = self.heads[i]
        target = self.target_nets[i]
        if isinstance(drawn, SequenceBatch):
            q, chooser_q = unroll_values(stack, head, stack.net, drawn)
            with torch.no_grad():
                target_q = unroll_values(stack, head, target, drawn)[1]
            if not self.config.double:
                chooser_q = target_q
        else:
            q = head.values(stack.net.unroll(stack.observations(drawn.obs))[0])
            with torch.no_grad():
                after = stack.observations(drawn.next_obs)
                target_q = head.values(target.unroll(after)[0])
                chooser_q = target_q
                if self.config.double:
                    chooser_q = head.values(stack.net.unroll(after)[0])
        return q, target_q, chooser_q

    # ---- state

    def member_writers(self) -> dict[str, Callable[[Path], None]]:
        """Returns writers of the policies as plain Q-networks, so that loading them needs no duelling head."""
        stacks = zip(self.stacks, self.heads, strict=True)
        return policy_writers(replace(stack, net=without_duelling(stack, head)) for stack, head in stacks)


def check_action_spaces(config: AlgorithmConfig, spec: NetLearnerSpec) -> None:
    """Raises ValueError if a seat that learns has no discrete actions."""
    for seat in spec.learning_seats:
        space = spec.env.action_spaces[seat]
        if not isinstance(space, Discrete):
            raise ValueError(
                f"{algorithm_name(config)} compares the values of single actions, but seat "
                f'"{spec.env.seats[seat]}" of env "{spec.env.label}" takes {space}: use ppo or a2c, or for continuous '
                "actions sac, ddpg or td3 (a policy may have an algorithm of its own: policies.NAME.algorithm)"
            )


def as_sequences(transitions: TransitionBatch) -> TransitionBatch:
    """Returns transitions as sequences of one step: every array [M, ...] -> [1, M, ...], except `index`."""
    return transitions.map(lambda x: x[None])


def unroll_values(stack: PolicyStack, head: ValueHead, net: Net, drawn: SequenceBatch) -> tuple[Tensor, Tensor]:
    """Returns values of every step, and those of each seat's own next decision without gradients, both [P, T, R, A]."""
    P = len(stack.seat_mapping.names)
    S = len(stack.seat_mapping.seats[0])
    is_first = drawn.is_first.repeat_interleave(S, 1)
    memory = drawn.recurrent_states.get(stack.seat_mapping.label)
    out, memories = net.unroll(stack.observations(drawn.obs), memory, is_first.expand(P, *is_first.shape))
    q = head.values(out)
    with torch.no_grad():
        times, stretches = drawn.truncations
        ends = torch.zeros_like(q[:, :-1])
        if len(times):
            before = states_at(memories, S, times, stretches)
            last, _ = net.unroll(stack.observations(drawn.final_obs, 1)[:, None], before)
            ends.unflatten(2, (-1, S))[:, times, stretches] = head.values(last[:, 0]).unflatten(1, (-1, S))
        step_index = stack.rows(drawn.step_index)[..., None].expand(*q[:, :-1].shape)
        following = torch.cat([q, ends], 1).gather(1, step_index)
    return q[:, :-1], following


def without_duelling(stack: PolicyStack, head: ValueHead) -> Net:
    """Returns networks of plain action values: the last layer absorbs duelling, which is linear."""
    if not head.duelling:
        return stack.net
    return with_last_layer(stack, head.num_actions, dueling_values)


@torch.no_grad()
def with_last_layer(stack: PolicyStack, outputs: int, convert: Callable[[Tensor], Tensor]) -> Net:
    """Returns copies of a stack's networks with `outputs` outputs: `convert` maps the weights and
    biases of the last layer, whose last dimension is the layer's outputs."""
    net = Net(
        stack.seat_mapping.input_shape,
        outputs,
        stack.config,
        make_generators([0] * len(stack.seat_mapping.names)),
        layout=stack.seat_mapping.layout,
    ).to(stack.net.head.weight.device)
    weights = stack.net.state_dict()
    for name in ("head.weight", "head.bias"):
        weights[name] = convert(weights[name])
    net.load_state_dict(weights)
    return net
