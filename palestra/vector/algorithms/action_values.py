"""Training by action values shared by SAC, DDPG, TD3 and IQL: replay buffer, action-value critics, target networks.

A policy's critics see the observation and action of its seat (`critic: own`) or everything (`critic: central`, as in
MADDPG, Lowe et al., 2017): the env's global state, or all observations together; the agent mask, the actions of all
seats that learn, and a one-hot seat. Each seat learns from its own rewards. Seats that do not learn are part of the
env: their next actions cannot be predicted, so critics do not see their actions.

With `critic: own` time is counted in a seat's own decisions. Central critics count every step of the env, also those in
which their seat does not act, as in turn-based games; its action is then the fixed idle code.

Shapes: `K` critics, `P` members of a stack, `M` transitions, `S` seats of a member, `R` = M*S rows, `N` seats, `A`
numbers of an encoded action, `J` numbers of the encoded actions of all seats that learn.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from palestra.core.losses import TensorMetrics
from palestra.core.seeding import derive_seed
from palestra.core.types import Metrics, RolloutBatch
from palestra.envs.vector_base import MultiDiscrete, Space
from palestra.vector.algorithms.critics import CriticEnsemble, PolyakPairs, frozen_copy
from palestra.vector.algorithms.minibatches import minibatch_seed
from palestra.vector.algorithms.presets import algorithm_name
from palestra.vector.learners.nets import AlgorithmConfig, NetLearner, NetLearnerSpec
from palestra.vector.learners.optimizers import StackedOptimizer
from palestra.vector.learners.policy_stack import PolicyStack
from palestra.vector.losses import critic_loss
from palestra.vector.nets.continuous_heads import ActionEncoder
from palestra.vector.nets.heads import ActionHead
from palestra.vector.nets.layers import Net, make_generators
from palestra.vector.nets.replay import ReplayBuffer, TransitionBatch


class ActionValueConfig(AlgorithmConfig):
    """Base config of algorithms with action-value critics: `gradient_steps` gradient steps follow each rollout."""

    rollout_length: int = Field(8, ge=1)
    gradient_steps: int = Field(8, ge=1)
    """Gradient steps per rollout."""
    batch_size: int = Field(256, ge=1)
    """Joint transitions per gradient step."""
    gamma: float = Field(0.99, ge=0, le=1)
    """Discount per decision of a seat (per env step with `critic: central`)."""
    tau: float = Field(0.005, gt=0, le=1)
    """Polyak coefficient: how far the target networks move to the online networks per update."""
    critic: Literal["own", "central"] = "own"
    """Input of the critics: the seat's `own` observation and action, or `central`: the env's state
    (or all observations) and all learning seats' actions."""
    critic_lr: float | None = Field(None, gt=0, le=1_000_000)
    """Learning rate of the critics; null uses the policy's."""


@dataclass
class UpdateBatch:
    """Update batch of one stack: policy inputs `observations` [P, R, ...] and action masks,
    `critic_inputs` [P, R, ...], encoded actions `action_codes` [P, R, A], row weights for the
    critics (`critic_weights`) and for the policies (`policy_weights`) [P, R]. The policies' are 0
    for rows in which the seat did not act; both sum to one for each seat."""

    observations: Tensor
    action_mask: Tensor | None
    critic_inputs: Tensor
    action_codes: Tensor
    critic_weights: Tensor
    policy_weights: Tensor


class ActionValueLearner(NetLearner):
    """Base learner with action-value critics; a subclass defines the replay buffer and a gradient
    step. `num_critics` critics evaluate each policy. Raises ValueError for envs and policies that
    these algorithms do not support (see `check_supported`)."""

    num_critics = 2
    saved_counts = {"steps": "steps"}
    team_metrics: tuple[str, ...] = ()  # metrics of a step that are means over joint steps, not over decisions

    def __init__(self, config: ActionValueConfig, spec: NetLearnerSpec) -> None:
        check_supported(config, spec, self.value_per_action)
        self.config = config
        super().__init__(spec)
        heads: dict[int, ActionHead] = {}
        for stack in self.stacks:
            heads |= dict.fromkeys(stack.seat_mapping.all_seats, stack.head)
        self.action_encoder = ActionEncoder(heads)
        self.critics = [self._critic(stack) for stack in self.stacks]
        self.register("critic", [one.net for one in self.critics], [one.optimizer for one in self.critics])
        self.register("target", [one.target for one in self.critics])
        self.polyak_pairs: PolyakPairs = [(one.net, one.target) for one in self.critics]
        self.replay = self.build_replay()
        self.saved_parts["replay"] = self.replay
        self.steps = 0
        self.build_extras()

    # ---- defined by an algorithm

    @abstractmethod
    def build_replay(self) -> ReplayBuffer:
        """Builds the replay buffer."""

    def replay_options(self) -> dict[str, Any]:
        """Returns the options of the replay buffer."""
        seats = sorted(self.action_encoder.heads)
        return {"gamma": self.config.gamma, "seats": seats, "count_env_steps": self.config.critic == "central"}

    def build_extras(self) -> None:
        """Builds further parts of the learner."""

    def value_per_action(self, space: Space) -> bool:
        """True if critics output a value for each action, see `CriticEnsemble`."""
        return False

    @property
    def is_warm(self) -> bool:
        return True

    @abstractmethod
    def remember(self, batch: RolloutBatch) -> None:
        """Adds a rollout to the replay buffer and the running norms."""

    @abstractmethod
    def train_step(
        self, transitions: TransitionBatch, generator: torch.Generator, progress: float
    ) -> list[TensorMetrics]:
        """Takes one gradient step; returns metrics by stack."""

    # ---- construction

    def critic_input_shape(self, stack: PolicyStack) -> tuple[int, ...]:
        """Returns the shape of the critics' inputs besides the seat's own action."""
        if self.config.critic == "own":
            return stack.seat_mapping.input_shape
        return (self.global_size + 2 * len(self.env.seats) + self.action_encoder.size,)

    def _critic(self, stack: PolicyStack) -> CriticEnsemble:
        seat_mapping = stack.seat_mapping
        branches = self.value_per_action(stack.seat_mapping.action_space)
        width = len(self.action_encoder.columns[seat_mapping.all_seats[0]])
        observation = self.critic_input_shape(stack)
        outputs = width
        if not branches:  # the action is an input
            observation = (observation[0] + width,)
            outputs = 1
        members = product(range(self.num_critics), seat_mapping.names)
        seeds = [derive_seed(self.seeds[name], "critic", k) for k, name in members]
        layout = seat_mapping.layout if branches and self.config.critic == "own" else None
        net = Net(observation, outputs, stack.config, make_generators(seeds), layout=layout).to(self.device)
        config = stack.config.with_lr(self.config.critic_lr)
        return CriticEnsemble(
            net,
            frozen_copy(net),
            StackedOptimizer(net, seat_mapping.names * self.num_critics, config, self.process_group),
            self.num_critics,
            branches,
        )

    @property
    def uses_global_features(self) -> bool:
        return self.config.critic == "central"

    # ---- learning

    def update(self, batch: RolloutBatch, progress: float) -> dict[str, Metrics]:
        """Stores the rollout and, once training has started, takes `gradient_steps` steps."""
        self.remember(batch)
        lines: list[list[tuple[TensorMetrics, TensorMetrics]]] = [[] for _ in self.stacks]
        if self.process_group.all_ranks(self.is_warm and self.replay.ring.can_sample):
            seed = minibatch_seed(self.seeds[self.names[0]], self.process_group, "moments", self.steps)
            rng = np.random.default_rng(seed)
            generator = torch.Generator().manual_seed(int(rng.integers(2**62)))
            for _ in range(self.config.gradient_steps):
                transitions = self.replay.sample(self.config.batch_size, rng).to(self.device)
                known = transitions.weight > 0
                acts = transitions.agent_mask * known
                stepped = self.train_step(transitions, generator, progress)
                for own, stack, line in zip(lines, self.stacks, stepped, strict=True):
                    count = stack.rows(acts, 1).sum(1)
                    weights = dict.fromkeys(line, count)
                    weights |= dict.fromkeys(self.team_metrics, known.any(1).sum().expand_as(count))
                    weights |= {"grad_norm": torch.ones_like(count)}
                    own.append((line, weights))
        return self.policy_metrics([[mean_tensors(own)] for own in lines])

    def update_batch(self, stack: PolicyStack, transitions: TransitionBatch, joint: Tensor) -> UpdateBatch:
        """Returns the update batch of a stack; `joint` [M, J] are the encoded actions."""
        weight = stack.seat_mapping.select_seats(transitions.weight, 1)  # [P, M, S]
        return UpdateBatch(
            observations=stack.observations(transitions.obs, 1),
            action_mask=stack.optional_rows(transitions.action_mask, 1),
            critic_inputs=self.critic_inputs(stack, transitions.obs, transitions.state, transitions.agent_mask, joint),
            action_codes=self.action_encoder.own_actions(joint, stack.seat_mapping),
            critic_weights=normalise_weights(weight),
            policy_weights=normalise_weights(weight * stack.seat_mapping.select_seats(transitions.agent_mask, 1)),
        )

    def train_critics(
        self,
        critic: CriticEnsemble,
        batch: UpdateBatch,
        target: Tensor,
        progress: float,
        penalty: Callable[[Tensor], Tensor] | None = None,
    ) -> TensorMetrics:
        """Takes a gradient step of a stack's critics towards targets [P, R], plus a `penalty` [P]
        of the values [K, P, R] of the actions in the batch; returns metrics."""
        q = critic.taken_q_values(batch.critic_inputs, batch.action_codes)
        loss = total = critic_loss(q, target, batch.critic_weights)
        if penalty is not None:
            total = loss + penalty(q)
        critic.optimizer.step(total.sum(), progress)
        seats = batch.critic_weights.sum(1).clamp(min=1e-8)
        return {"critic_loss": loss.detach(), "q": (batch.critic_weights * q[0].detach()).sum(1) / seats}

    def critic_inputs(
        self, stack: PolicyStack, obs: Tensor, state: Tensor | None, agent_mask: Tensor, joint: Tensor
    ) -> Tensor:
        """Returns the critics' inputs besides the seat's own action [P, R, ...]."""
        if self.config.critic == "own":
            return stack.observations(obs, 1)
        seat_mapping = stack.seat_mapping
        N = len(self.env.seats)
        whole = torch.cat([self.global_features(obs, state, 1), agent_mask.float()], -1)[None, :, None]
        others = self.action_encoder.other_actions(joint, seat_mapping)
        ids = seat_mapping.one_hot_seats(self.device)[:, None]  # [P, 1, S, N]
        shape = others.shape[:3]
        seen = torch.cat([whole.expand(*shape, -1), ids.expand(*shape, N), others], -1)
        return seen.flatten(1, 2)


def check_supported(config: ActionValueConfig, spec: NetLearnerSpec, value_per_action: Callable[[Space], bool]) -> None:
    """Raises ValueError for recurrent policies, multi-discrete actions, and critics that would need pixels beside
    actions. `value_per_action` tells whether critics have an output for each action of a space."""
    kind = algorithm_name(config)
    env = spec.env
    for name, policy in spec.policies.items():
        if policy.is_recurrent:
            raise ValueError(
                f"policy {name} is recurrent, but {kind} learns from single transitions, without the recurrent state "
                "before them: leave gru_units (or a network with a state) out, or train it with ppo or a2c"
            )
    if any(isinstance(space, MultiDiscrete) for space in spec.action_spaces):
        raise ValueError(f'env "{env.name}" takes several choices at once, which {kind} cannot learn: use ppo or a2c')
    if config.critic == "own":
        beside_actions = [seat for seat in spec.learning_seats if not value_per_action(env.action_spaces[seat])]
    else:
        beside_actions = [] if env.state_size else list(range(len(env.seats)))
    if any(env.sees_image(seat) for seat in beside_actions):
        raise ValueError(f'critics of {kind} cannot see the pixels of env "{env.name}" beside actions: use ppo or a2c')


def normalise_weights(weight: Tensor) -> Tensor:
    """Returns weights [P, M, S] divided by their sum per seat, as rows [P, R]; zeros where it is zero."""
    return (weight / weight.sum(1, keepdim=True).clamp(min=1e-8)).flatten(1, 2)


def mean_tensors(lines: Sequence[tuple[TensorMetrics, TensorMetrics]]) -> TensorMetrics:
    """Returns the mean of each metric [P] over the dicts that contain it, by the weights beside it."""
    found: dict[str, list[Tensor]] = {}
    weights: dict[str, list[Tensor]] = {}
    for line, line_weights in lines:
        for key, value in line.items():
            found.setdefault(key, []).append(value)
            weights.setdefault(key, []).append(line_weights[key])
    shares = {key: torch.stack(own) / torch.stack(own).sum(0).clamp(min=1) for key, own in weights.items()}
    return {key: (torch.stack(values) * shares[key]).sum(0) for key, values in found.items()}
