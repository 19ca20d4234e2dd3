"""Off-policy actor-critic training shared by SAC, DDPG and TD3: replay buffer, action-value critics, target networks.

A policy's critics see the observation and action of its seat (`critic: own`) or everything (`critic: central`, as in
MADDPG, Lowe et al., 2017): the env's global state, or all observations together; the agent mask, the actions of all
seats that learn, and a one-hot seat. Each seat learns from its own rewards. Seats that do not learn are part of the
env: their next actions cannot be predicted, so critics do not see their actions.

With `critic: own` time is counted in a seat's own decisions. Central critics count every step of the env, also those in
which their seat does not act, as in turn-based games; its action is then the fixed idle code.

Shapes: `K` critics, `P` members of a stack, `M` transitions, `S` seats of a member, `R` = M*S rows, `N` seats, `A`
numbers of an encoded action, `J` of the encoded actions of all seats that learn, `O` outputs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from palestra.algorithms.vector.critics import CriticEnsemble, frozen_copy, frozen_parameters, polyak_update
from palestra.envs.vector.base import Arrays, MultiDiscrete, Space, VectorEnv
from palestra.learners.nets import AlgorithmConfig, NetLearner, NetLearnerSpec
from palestra.learners.policy_stack import NetPolicyConfig, PolicyStack, StackedAdam, strip_prefix
from palestra.losses.critics import critic_loss, td_target
from palestra.losses.policy import TensorMetrics
from palestra.nets.continuous_heads import ActionEncoder, idle_code
from palestra.nets.heads import MASKED_LOGIT, ActionHead
from palestra.nets.layers import Net, make_generators
from palestra.nets.replay import ReplayBuffer, TransitionBatch
from palestra.nets.seat_mapping import SeatMapping
from palestra.policies.nets import ActionSelector, NetVectorPolicy, sampling_selector, uniform_selector
from palestra.seeding import derive_seed
from palestra.types import Metrics, RolloutBatch


class OffPolicyConfig(AlgorithmConfig):
    """Base config of off-policy actor-critics: collect `rollout_length` steps, add them to the replay buffer, then take
    `gradient_steps` gradient steps."""

    rollout_length: int = Field(8, ge=1)
    """Rollout length: steps of every parallel game between updates."""
    gradient_steps: int = Field(8, ge=1)
    """Gradient steps per rollout."""
    batch_size: int = Field(256, ge=1)
    """Joint transitions per gradient step."""
    learning_starts: int = Field(1000, ge=1)
    """Joint transitions collected with random actions before training starts; at most `buffer_size`."""
    buffer_size: int = Field(100_000, ge=1)
    """Size of the replay buffer, in joint transitions."""
    gamma: float = Field(0.99, ge=0, le=1)
    """Discount per decision of a seat (per env step with `critic: central`)."""
    tau: float = Field(0.005, gt=0, le=1)
    """Polyak coefficient: how far the target networks move to the online networks per update."""
    critic: Literal["own", "central"] = "own"
    """Input of the critics: the seat's `own` observation and action, or `central`: the env's state (or all
    observations) and all learning seats' actions."""
    critic_lr: float | None = Field(None, gt=0, le=1_000_000)
    """Learning rate of the critics; null uses the policy's."""

    @model_validator(mode="after")
    def _learns(self) -> OffPolicyConfig:
        if self.learning_starts > self.buffer_size:
            raise ValueError(
                f"learning_starts is {self.learning_starts}, but only {self.buffer_size} moments are remembered "
                "(buffer_size), so learning would never begin: lower the one or raise the other"
            )
        return self


@dataclass
class PolicyOutput:
    """Output of a stack's policies: network outputs `outputs` [P, R, O], encoded actions `action_codes` [P, R, A], and
    log-probabilities if the algorithm needs them: [P, R] of the sampled actions, or [P, R, A] of every discrete action.
    All float32."""

    outputs: Tensor
    action_codes: Tensor
    logp: Tensor | None = None


@dataclass
class UpdateBatch:
    """Update batch of one stack: policy inputs `observations` [P, R, ...] and action masks, `critic_inputs`
    [P, R, ...], encoded actions `action_codes` [P, R, A], row weights for the critics (`critic_weights`) and for the
    policies (`policy_weights`) [P, R]. The policies' are 0 for rows in which the seat did not act; both sum to one for
    each seat."""

    observations: Tensor
    action_mask: Tensor | None
    critic_inputs: Tensor
    action_codes: Tensor
    critic_weights: Tensor
    policy_weights: Tensor


class OffPolicyLearner(NetLearner):
    """Base learner of off-policy actor-critics; a subclass defines the policies' actions, target values and losses.
    `num_critics` critics evaluate each policy; policies and target networks are updated every `policy_delay`-th step.
    Raises ValueError for envs and policies that these algorithms do not support (see `check_supported`)."""

    num_critics = 2
    policy_delay = 1

    def __init__(self, config: OffPolicyConfig, spec: NetLearnerSpec) -> None:
        check_supported(config, spec.env, spec.policies, self.value_per_action(spec.env.action_spaces[0]))
        self.config = config
        super().__init__(spec)
        self.action_encoder = ActionEncoder(
            {seat: stack.head for stack in self.stacks for seat in stack.seat_mapping.all_seats}
        )
        self.critics = [self._critic(stack) for stack in self.stacks]
        self.replay = ReplayBuffer(
            config.buffer_size,
            gamma=config.gamma,
            seats=sorted(self.action_encoder.heads),
            count_env_steps=config.critic == "central",
        )
        self.steps = 0
        self.build_extras()

    # ---- defined by an algorithm

    def build_extras(self) -> None:
        """Builds further parts of the learner."""

    @abstractmethod
    def make_head(self, space: Space) -> ActionHead:
        """Returns the policies' distribution over actions."""

    def value_per_action(self, space: Space) -> bool:
        """True if critics output a value for each action, see `CriticEnsemble`."""
        return False

    @abstractmethod
    def policy_output(
        self, i: int, observations: Tensor, action_mask: Tensor | None, generator: torch.Generator
    ) -> PolicyOutput:
        """Returns the actions of stack i's policies, differentiable with respect to their networks."""

    @abstractmethod
    def target_actions(
        self, i: int, observations: Tensor, action_mask: Tensor | None, generator: torch.Generator
    ) -> PolicyOutput:
        """Returns the next actions that targets assume."""

    @abstractmethod
    def target_value(self, i: int, q: Tensor, answer: PolicyOutput) -> Tensor:
        """Returns the target value [P, R] of a state from the critics' values `q` [K, P, R, O] of the policy's output
        there."""

    @abstractmethod
    def loss(self, i: int, q: Tensor, answer: PolicyOutput, batch: UpdateBatch) -> tuple[Tensor, TensorMetrics]:
        """Returns the policies' losses [P] and metrics [P]."""

    def after_policy_step(self, i: int, answer: PolicyOutput, batch: UpdateBatch, progress: float) -> TensorMetrics:
        """Updates anything else after a policy step; returns metrics."""
        return {}

    # ---- construction

    def build_stack(self, seat_mapping: SeatMapping) -> PolicyStack:
        made = super().build_stack(seat_mapping)
        made.head = self.make_head(seat_mapping.action_space)
        return made

    def _critic(self, stack: PolicyStack) -> CriticEnsemble:
        seat_mapping, branches = stack.seat_mapping, self.value_per_action(stack.seat_mapping.action_space)
        width = len(self.action_encoder.columns[seat_mapping.all_seats[0]])
        observation = seat_mapping.input_shape
        if self.config.critic == "central":
            whole = self.global_size
            observation = (whole + 2 * len(self.env.seats) + self.action_encoder.size,)
        observation = observation if branches else (observation[0] + width,)
        seeds = [
            derive_seed(self.seeds[name], "critic", k) for k in range(self.num_critics) for name in seat_mapping.names
        ]
        net = Net(observation, width if branches else 1, stack.config, make_generators(seeds))
        config = stack.config.model_copy(update={"lr": self.config.critic_lr or stack.config.lr})
        return CriticEnsemble(
            net,
            frozen_copy(net),
            StackedAdam(net, seat_mapping.names * self.num_critics, config, self.gradient_sync),
            self.num_critics,
            branches,
        )

    # ---- play

    @property
    def is_warm(self) -> bool:
        """True if the replay buffer holds at least `learning_starts` transitions."""
        return len(self.replay) >= self.config.learning_starts

    def rollout_policies(self, progress: float) -> list[NetVectorPolicy]:
        return [
            stack.build_policy(self.exploration(stack, progress) if self.is_warm else uniform_selector(stack.head))
            for stack in self.stacks
        ]

    @property
    def uses_global_features(self) -> bool:
        return self.config.critic == "central"

    def exploration(self, stack: PolicyStack, progress: float) -> ActionSelector:
        """Returns the action function of a stack's policies in training."""
        return sampling_selector(stack.head)

    # ---- learning

    def update(self, batch: RolloutBatch, progress: float) -> dict[str, Metrics]:
        """Adds the batch to the replay buffer, then takes `gradient_steps` gradient steps once it holds
        `learning_starts` transitions; returns metrics by policy."""
        self.replay.add(batch)
        self.update_norms(batch)
        lines: list[list[TensorMetrics]] = [[] for _ in self.stacks]
        if self.is_warm:
            rng = np.random.default_rng(derive_seed(self.seeds[self.names[0]], "moments", self.steps))
            generator = torch.Generator().manual_seed(int(rng.integers(2**62)))
            for _ in range(self.config.gradient_steps):
                transitions = self.replay.sample(self.config.batch_size, rng)
                for own, line in zip(lines, self.train_step(transitions, generator, progress), strict=True):
                    own.append(line)
        means = [mean_metrics(own) for own in lines]
        return {
            name: {key: float(value[p]) for key, value in line.items()}
            for stack, line in zip(self.stacks, means, strict=True)
            for p, name in enumerate(stack.seat_mapping.names)
        }

    def train_step(
        self, transitions: TransitionBatch, generator: torch.Generator, progress: float
    ) -> list[TensorMetrics]:
        """Takes one gradient step of all critics, and every `policy_delay`-th time of the policies; returns metrics by
        stack."""
        targets = self.targets(transitions, generator)
        joint = self.action_encoder.encode(transitions.actions, transitions.agent_mask)
        batches = [self._update_batch(stack, transitions, joint) for stack in self.stacks]
        lines = [self._train_critics(*judged, progress) for judged in zip(self.critics, batches, targets, strict=True)]
        self.steps += 1
        if self.steps % self.policy_delay == 0:
            for i, batch in enumerate(batches):
                lines[i] |= self._train_policies(i, batch, generator, progress)
            for net, target in self.polyak_pairs():
                polyak_update(net, target, self.config.tau)
        return lines

    @torch.no_grad()
    def targets(self, transitions: TransitionBatch, generator: torch.Generator) -> list[Tensor]:
        """Returns the critics' targets [P, R] for each stack."""
        answers = [self._next(i, transitions, generator) for i in range(len(self.stacks))]
        joint = torch.zeros(len(transitions.rewards), self.action_encoder.size)
        for stack, answer in zip(self.stacks, answers, strict=True):
            self.action_encoder.write(joint, stack.seat_mapping, answer.action_codes)
        targets = []
        for i, (stack, critic, answer) in enumerate(zip(self.stacks, self.critics, answers, strict=True)):
            seen = self._critic_inputs(
                stack, transitions.next_obs, transitions.next_state, transitions.next_agent_mask, joint
            )
            value = self.target_value(i, critic.q_values(critic.target, seen, answer.action_codes), answer)
            targets.append(td_target(stack.rows(transitions.rewards, 1), stack.rows(transitions.discounts, 1), value))
        return targets

    def _next(self, i: int, transitions: TransitionBatch, generator: torch.Generator) -> PolicyOutput:
        """Returns the next actions of stack i's policies; the idle code, with probability 1, where a seat does not
        act."""
        stack = self.stacks[i]
        answer = self.target_actions(
            i,
            stack.observations(transitions.next_obs, 1),
            optional_rows(stack, transitions.next_action_mask),
            generator,
        )
        if self.config.critic == "own":  # the next step is the seat's own next decision
            return answer
        agent_mask, nothing = stack.rows(transitions.next_agent_mask, 1)[..., None], idle_code(stack.head)
        answer.action_codes = torch.where(agent_mask, answer.action_codes, nothing)
        if answer.logp is not None:
            certain = (1 - nothing) * MASKED_LOGIT if answer.logp.dim() > 2 else torch.zeros(1)
            logp = answer.logp if answer.logp.dim() > 2 else answer.logp[..., None]
            answer.logp = torch.where(agent_mask, logp, certain).view_as(answer.logp)
        return answer

    def _update_batch(self, stack: PolicyStack, transitions: TransitionBatch, joint: Tensor) -> UpdateBatch:
        weight = stack.seat_mapping.select_seats(transitions.weight, 1)  # [P, M, S]
        return UpdateBatch(
            observations=stack.observations(transitions.obs, 1),
            action_mask=optional_rows(stack, transitions.action_mask),
            critic_inputs=self._critic_inputs(stack, transitions.obs, transitions.state, transitions.agent_mask, joint),
            action_codes=self.action_encoder.own_actions(joint, stack.seat_mapping),
            critic_weights=normalise_weights(weight),
            policy_weights=normalise_weights(weight * stack.seat_mapping.select_seats(transitions.agent_mask, 1)),
        )

    def _train_critics(
        self, critic: CriticEnsemble, batch: UpdateBatch, target: Tensor, progress: float
    ) -> TensorMetrics:
        q = critic.taken_q_values(batch.critic_inputs, batch.action_codes)
        loss = critic_loss(q, target, batch.critic_weights)
        critic.optimizer.step(loss.sum(), progress)
        seats = batch.critic_weights.sum(1).clamp(min=1e-8)
        return {"critic_loss": loss.detach(), "q": (batch.critic_weights * q[0].detach()).sum(1) / seats}

    def _train_policies(self, i: int, batch: UpdateBatch, generator: torch.Generator, progress: float) -> TensorMetrics:
        stack, critic = self.stacks[i], self.critics[i]
        answer = self.policy_output(i, batch.observations, batch.action_mask, generator)
        with frozen_parameters(critic.net):
            q = critic.q_values(critic.net, batch.critic_inputs, answer.action_codes)
        loss, metrics = self.loss(i, q, answer, batch)
        norms = stack.optimizer.step(loss.sum(), progress)
        stack.version += 1
        metrics = {"policy_loss": loss.detach(), "grad_norm": norms} | metrics
        return metrics | self.after_policy_step(i, answer, batch, progress)

    def _critic_inputs(
        self, stack: PolicyStack, obs: Tensor, state: Tensor | None, agent_mask: Tensor, joint: Tensor
    ) -> Tensor:
        """Returns the critics' inputs besides the seat's own action [P, R, ...]."""
        if self.config.critic == "own":
            return stack.observations(obs, 1)
        seat_mapping, N = stack.seat_mapping, len(self.env.seats)
        whole = torch.cat([self.global_features(obs, state, 1), agent_mask.float()], -1)[None, :, None]
        others = self.action_encoder.other_actions(joint, seat_mapping)
        ids = torch.eye(N)[torch.tensor(seat_mapping.seats)][:, None]  # [P, 1, S, N]
        shape = others.shape[:3]
        seen = torch.cat([whole.expand(*shape, -1), ids.expand(*shape, N), others], -1)
        return seen.flatten(1, 2)

    # ---- state

    def polyak_pairs(self) -> list[tuple[Net, Net]]:
        """Returns pairs of online and target networks."""
        return [(critic.net, critic.target) for critic in self.critics]

    def modules(self) -> dict[str, nn.Module]:
        nets = {f"critic.{i}": critic.net for i, critic in enumerate(self.critics)}
        return super().modules() | nets | {f"target.{i}": critic.target for i, critic in enumerate(self.critics)}

    def optimizers(self) -> dict[str, StackedAdam]:
        return super().optimizers() | {f"critic_adam.{i}": critic.optimizer for i, critic in enumerate(self.critics)}

    def state_arrays(self) -> Arrays:
        replay = {f"replay/{name}": array for name, array in self.replay.arrays().items()}
        return super().state_arrays() | replay | {"steps": np.array([self.steps])}

    def load_arrays(self, arrays: Mapping[str, np.ndarray]) -> None:
        super().load_arrays(arrays)
        self.replay.load(strip_prefix(arrays, "replay"))
        self.steps = int(arrays["steps"][0])


def check_supported(
    config: OffPolicyConfig, env: VectorEnv, policies: Mapping[str, NetPolicyConfig], value_per_action: bool
) -> None:
    """Raises ValueError for recurrent policies, multi-discrete actions, and critics that would need pixels beside
    actions."""
    kind = getattr(config, "type", "this algorithm")
    for name, policy in policies.items():
        if policy.gru_units:
            raise ValueError(
                f"policy {name} has memory, but {kind} learns from single moments, before which nothing is "
                "remembered: set gru_units: 0, or train it with ppo or a2c"
            )
    if isinstance(env.action_spaces[0], MultiDiscrete):
        raise ValueError(f'env "{env.name}" takes several choices at once, which {kind} cannot learn: use ppo or a2c')
    pixels = any(len(shape) > 1 for shape in env.observation_shapes)
    if pixels and not (value_per_action if config.critic == "own" else env.state_size):
        raise ValueError(f'critics of {kind} cannot see the pixels of env "{env.name}" beside actions: use ppo or a2c')


def normalise_weights(weight: Tensor) -> Tensor:
    """Returns weights [P, M, S] divided by their sum per seat, as rows [P, R]; zeros where it is zero."""
    return (weight / weight.sum(1, keepdim=True).clamp(min=1e-8)).flatten(1, 2)


def optional_rows(stack: PolicyStack, x: Tensor | None) -> Tensor | None:
    """Reorders an array by stack: [M, N, ...] -> [P, R, ...]; None stays None."""
    return None if x is None else stack.rows(x, 1)


def mean_metrics(lines: Sequence[TensorMetrics]) -> TensorMetrics:
    """Returns the mean of each metric over the dicts that contain it."""
    found: dict[str, list[Tensor]] = {}
    for line in lines:
        for key, value in line.items():
            found.setdefault(key, []).append(value)
    return {key: torch.stack(values).mean(0) for key, values in found.items()}
