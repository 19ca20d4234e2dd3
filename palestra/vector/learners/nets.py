"""Base class of learners of small networks (in stacks, see policy_stack.py); their state is saved as arrays.

Shapes: `P` members of a stack, `T` steps, `B` games, `S` seats of a member, `N` seats, `G` numbers of the global
features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from palestra.core.config import StrictModel
from palestra.core.files import read_arrays, write_arrays
from palestra.core.losses import TensorMetrics
from palestra.core.types import Metrics, RolloutBatch
from palestra.envs.vector_base import Arrays, Space, VectorEnv
from palestra.parallel.process_group import SINGLE_PROCESS, ProcessGroup
from palestra.vector.learners.optimizers import StackedOptimizer
from palestra.vector.learners.policy_stack import (
    MAX_NORMALISED_INPUT,
    NetPolicyConfig,
    PolicyStack,
    policy_writers,
    strip_prefix,
)
from palestra.vector.nets.heads import ActionHead, make_head
from palestra.vector.nets.images import ImageLayout
from palestra.vector.nets.layers import Net, make_generators
from palestra.vector.nets.normalise import RunningNorm
from palestra.vector.nets.on_device import CPU, RolloutTensors, numbers_of
from palestra.vector.nets.seat_mapping import SeatMapping, group_into_stacks
from palestra.vector.policies.base import VectorPolicy
from palestra.vector.policies.nets import NetVectorPolicy, greedy_selector
from palestra.vector.rollouts.rollout import TimeLimit

WEIGHT_KEY = "weight"  # key in a line of metrics: the weight of its minibatch


class AlgorithmConfig(StrictModel, ABC):
    """Base of the configs of algorithms that train networks on rollouts of `rollout_length` steps
    of every game. A config selects a user's own subclass with `type: "module:Class"`."""

    rollout_length: int = Field(16, ge=1)
    """Rollout length: steps of every parallel game between updates."""
    time_limit: TimeLimit = "cuts"
    """Treatment of games that are truncated by a time limit. `cuts`: returns bootstrap from the value of the last
    observation. `ends`: the game counts as terminated and its last value is 0, as in EPyMARL and JaxMARL."""

    @abstractmethod
    def learner_class(self) -> Callable[..., NetLearner]:
        """Returns the learner class of this config."""

    @property
    def combines(self) -> Literal["nothing", "seats", "networks"]:
        """What of a team is trained together: the values or actions of its `seats`, or its `networks` one after
        another, each by what the earlier ones have become. `nothing`: each seat has its own reward."""
        return "nothing"

    def build_learner(
        self,
        env: VectorEnv,
        seats: Mapping[str, list[int]],
        policies: Mapping[str, NetPolicyConfig],
        seeds: Mapping[str, int],
        process_group: ProcessGroup = SINGLE_PROCESS,
        device: torch.device = CPU,
    ) -> Any:
        """Creates the learner on `device`. `seats` are the seat numbers of each policy, `policies`
        their settings, `seeds` their seeds. Raises ValueError if they do not fit the env."""
        return self.learner_class()(self, NetLearnerSpec(env, dict(seats), policies, seeds, process_group, device))


class NetLearnerSpec(NamedTuple):
    """Specification of the policies in training: env, seat numbers, settings, seeds, the processes
    that train them, and the device of networks and their training."""

    env: VectorEnv
    seats: dict[str, list[int]]
    policies: Mapping[str, NetPolicyConfig]
    seeds: Mapping[str, int]
    process_group: ProcessGroup
    device: torch.device = CPU

    @property
    def learning_seats(self) -> list[int]:
        """The seat numbers of all policies."""
        return list(chain.from_iterable(self.seats.values()))

    @property
    def action_spaces(self) -> list[Space]:
        """The action spaces of the seats that learn; other seats may have actions of other kinds."""
        return [self.env.action_spaces[seat] for seat in self.learning_seats]


class SavedPart(Protocol):
    """A part of a learner, such as a replay buffer, that is saved with it."""

    def arrays(self) -> Arrays:
        """Returns its state."""

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Restores what `arrays` returned."""


class NetLearner(ABC):
    """Policies of one env in training by one algorithm. `names` are the policies that learn."""

    saved_counts: ClassVar[Mapping[str, str]] = {}  # attributes that count something, by their name in the saved state

    def __init__(self, spec: NetLearnerSpec) -> None:
        self.env, seats, self.policies, self.seeds, self.process_group, self.device = spec
        self.names = list(seats)
        self.extra_modules: dict[str, nn.Module] = {}  # of a subclass, by name
        self.extra_optimizers: dict[str, StackedOptimizer] = {}
        self.saved_parts: dict[str, SavedPart] = {}
        if not self.trains_teams and any(policy.communication_rounds for policy in self.policies.values()):
            raise ValueError(
                "communication_rounds: seats that communicate must be trained together, as only ppo, a2c and trpo do: "
                "use one of these, or leave communication_rounds out"
            )
        if not self.trains_transformers and any(p.attention_type != "softmax" for p in self.policies.values()):
            raise ValueError(
                "attention_type applies only to the transformer of algorithm mat: use type: mat, or leave "
                "attention_type out"
            )
        self.stacks = [self.build_stack(seat_mapping) for seat_mapping in self.seat_mappings(seats)]
        self.global_norm: RunningNorm | None = None
        if self.uses_global_features and any(policy.normalize_observations for policy in self.policies.values()):
            self.global_norm = RunningNorm(1, self.global_size, clip=MAX_NORMALISED_INPUT).to(self.device)

    def seat_mappings(self, seats: dict[str, list[int]]) -> list[SeatMapping]:
        """Returns the seat mapping of each stack: the policies of a stack are trained in one pass."""
        return group_into_stacks(self.env, seats, dict(self.policies))

    def build_stack(self, seat_mapping: SeatMapping) -> PolicyStack:
        """Builds networks, optimizer and norm of policies of one shape."""
        config = self.policies[seat_mapping.names[0]]
        head = self.build_head(seat_mapping.action_space).to(self.device)
        seeds = [self.seeds[name] for name in seat_mapping.names]
        net = self.build_net(seat_mapping, head, config, seeds).to(self.device)
        optimizer = StackedOptimizer(net, seat_mapping.names, config, self.process_group)
        if config.normalize_observations and isinstance(seat_mapping.layout, ImageLayout):
            raise ValueError(
                f"normalize_observations: {', '.join(seat_mapping.names)} sees an image beside other numbers, and "
                "pixels must not be scaled one by one: leave it out, and let the env scale the other numbers"
            )
        norm = None
        if config.normalize_observations and len(seat_mapping.observation_shape) == 1:
            norm = RunningNorm(len(seat_mapping.names), seat_mapping.input_shape[0], clip=MAX_NORMALISED_INPUT)
            norm.to(self.device)
        return PolicyStack(seat_mapping, config, head, net, optimizer, norm)

    def build_head(self, space: Space) -> ActionHead:
        """Returns what turns the outputs of policies into actions of a space."""
        return make_head(space)

    def build_net(
        self, seat_mapping: SeatMapping, head: ActionHead, config: NetPolicyConfig, seeds: Sequence[int]
    ) -> Net:
        """Builds the networks of policies of one shape."""
        return Net(
            seat_mapping.input_shape,
            head.outputs,
            config,
            make_generators(seeds),
            self.output_gain,
            self.has_value_output,
            len(seat_mapping.seats[0]),
            seat_mapping.layout,
        )

    trains_teams = False  # whether all seats of a team are in one minibatch
    trains_transformers = False  # whether policies are transformers of teams
    output_gain = 0.01  # initialisation gain of the last layer
    has_value_output = False  # whether the policy networks also predict values

    # ---- observations

    @property
    def uses_global_features(self) -> bool:
        """True if a part of training (a central critic or a mixer) uses the observations of all seats."""
        return False

    @property
    def global_size(self) -> int:
        """Number of values that `global_features` returns."""
        return self.env.state_size or sum(int(np.prod(shape)) for shape in self.env.observation_shapes)

    def global_features(self, obs: np.ndarray | Tensor, state: np.ndarray | Tensor | None, lead: int) -> Tensor:
        """Returns the global features [..., G] float32, from observations [..., N, *padded] with `lead` dimensions
        before the seats: the env's state, or all observations concatenated if the env has none."""
        if state is None:
            flat = torch.as_tensor(obs).flatten(lead + 1)
            sizes = [int(np.prod(shape)) for shape in self.env.observation_shapes]
            padded = any(size < flat.shape[-1] for size in sizes)
            observations = [flat[..., seat, :size] for seat, size in enumerate(sizes)] if padded else []
            found = (torch.cat(observations, -1) if padded else flat.flatten(lead)).float()
        else:
            found = torch.as_tensor(state).float()
        return found if self.global_norm is None else self.global_norm.normalise(found[None])[0]

    @property
    def has_norms(self) -> bool:
        """True if there are running norms of observations."""
        return self.global_norm is not None or any(stack.norm for stack in self.stacks)

    def update_norms(self, batch: RolloutTensors) -> None:
        """Updates the running norms of observations."""
        for stack in self.stacks:
            if stack.norm:
                rows = stack.seat_mapping.network_inputs(batch.obs, 2)[:, :-1].flatten(1, 3)
                stack.norm.update(
                    rows, stack.rows(batch.agent_mask[:-1]).flatten(1).float(), self.process_group.all_reduce
                )
        if self.global_norm:
            # update the norm with unnormalised features
            world = self.global_norm
            self.global_norm = None
            rows = self.global_features(batch.obs, batch.state, 2)[:-1].flatten(0, 1)[None]
            world.update(rows, rows.new_ones(rows.shape[:2]), self.process_group.all_reduce)
            self.global_norm = world

    def policy_metrics(self, lines: Sequence[Sequence[TensorMetrics]]) -> dict[str, Metrics]:
        """Returns the means of metrics [P] over the `lines` of each stack, by policy."""
        metrics: dict[str, Metrics] = {}
        for stack, own in zip(self.stacks, lines, strict=True):
            metrics |= metrics_by_policy(stack.seat_mapping.names, own)
        return metrics

    @abstractmethod
    def update(self, batch: RolloutBatch, progress: float) -> dict[str, Metrics]:
        """Trains on a rollout; returns metrics by policy. `progress` in [0, 1] is the finished share of the run."""

    def check_finite(self) -> None:
        """Raises FloatingPointError if a gradient was not finite since the last call. On a GPU,
        `update` does not wait for the norms that show it."""
        for optimizer in self.optimizers().values():
            optimizer.check_finite()

    def rollout_policies(self, progress: float) -> Sequence[VectorPolicy]:
        """Returns the policies as they play in training, with exploration."""
        return [stack.build_policy(stack.head.sample) for stack in self.stacks]

    def sampling_policies(self) -> Sequence[VectorPolicy]:
        """Returns the policies without exploration, sampling their actions."""
        return self.rollout_policies(1.0)

    def greedy_policies(self) -> list[NetVectorPolicy]:
        """Returns the policies with greedy actions."""
        return [stack.build_policy(greedy_selector(stack.head)) for stack in self.stacks]

    def acting_tensors(self) -> list[Tensor]:
        """Returns the tensors that players use to act (weights and norms) of every stack, in order."""
        kept = [stack.net for stack in self.stacks] + [stack.norm for stack in self.stacks if stack.norm]
        return list(chain.from_iterable(module.state_dict().values() for module in kept))

    def modules(self) -> dict[str, nn.Module]:
        """Returns all modules with weights, by name."""
        norms: dict[str, nn.Module] = {f"norm.{i}": s.norm for i, s in enumerate(self.stacks) if s.norm}
        nets: dict[str, nn.Module] = {f"net.{i}": stack.net for i, stack in enumerate(self.stacks)}
        return nets | norms | ({"world": self.global_norm} if self.global_norm else {}) | self.extra_modules

    def optimizers(self) -> dict[str, StackedOptimizer]:
        """Returns all optimizers, by name."""
        return {f"adam.{i}": stack.optimizer for i, stack in enumerate(self.stacks)} | self.extra_optimizers

    def register(self, name: str, modules: Sequence[nn.Module], optimizers: Sequence[StackedOptimizer] = ()) -> None:
        """Adds modules and optimizers to the training state, as `name`.0, `name`.1, ... and `name`_adam.0, ..."""
        self.extra_modules |= {f"{name}.{i}": module for i, module in enumerate(modules)}
        self.extra_optimizers |= {f"{name}_adam.{i}": optimizer for i, optimizer in enumerate(optimizers)}

    def member_writers(self) -> dict[str, Callable[[Path], None]]:
        """Returns functions that write what is needed to play each policy alone to a folder."""
        return policy_writers(self.stacks)

    def write_state(self, folder: Path) -> None:
        """Writes the full training state to `folder`; `read_state` restores it."""
        write_arrays(folder / "learner.safetensors", self.state_arrays())

    def read_state(self, folder: Path) -> None:
        """Restores what `write_state` wrote; training resumes exactly there."""
        self.load_arrays(read_arrays(folder / "learner.safetensors"))

    def state_arrays(self) -> Arrays:
        """Returns the full training state; `load_arrays` restores it."""
        found = self.network_arrays()
        found |= {key: np.array([getattr(self, name)]) for key, name in self.saved_counts.items()}
        for name, part in self.saved_parts.items():
            found |= {f"{name}/{key}": value for key, value in part.arrays().items()}
        return found

    def network_arrays(self) -> Arrays:
        """Returns the state of networks and optimizers alone; `load_networks` restores it."""
        found: Arrays = {"versions": np.array([stack.version for stack in self.stacks])}
        for name, module in self.modules().items():
            found |= {f"{name}/{key}": value.cpu().numpy() for key, value in module.state_dict().items()}
        for name, optimizer in self.optimizers().items():
            found |= {f"{name}/{key}": value for key, value in optimizer.rule.arrays().items()}
        return found

    def start_from(self, folder: Path) -> None:
        """Loads the weights and statistics of a learner whose state `write_state` wrote to
        `folder`. Raises FileNotFoundError or RuntimeError if its networks are others."""
        self._load_modules(read_arrays(folder / "learner.safetensors"))

    def _load_modules(self, arrays: Mapping[str, np.ndarray]) -> None:
        for name, module in self.modules().items():
            module.load_state_dict({k: torch.from_numpy(np.array(v)) for k, v in strip_prefix(arrays, name).items()})

    def load_arrays(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Restores the training state that `state_arrays` returned."""
        self.load_networks(arrays)
        for key, name in self.saved_counts.items():
            setattr(self, name, int(arrays[key][0]))
        for name, part in self.saved_parts.items():
            part.load(strip_prefix(arrays, name))

    def load_networks(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Restores the state that `network_arrays` returned."""
        for stack, version in zip(self.stacks, arrays["versions"], strict=True):
            stack.version = int(version)
        self._load_modules(arrays)
        for name, optimizer in self.optimizers().items():
            optimizer.rule.load(strip_prefix(arrays, name))


def mean_metrics(lines: Sequence[Mapping[str, Any]]) -> Metrics:
    """Returns the mean of each metric over `lines`: numbers, or tensors of one number on any device. A line may have a
    weight, the number of actions of its minibatch; a gradient's norm has none, since each step counts the same."""
    lines = numbers_of(lines)
    weights = [float(line.get(WEIGHT_KEY, 1.0)) for line in lines]
    is_weighted = len(set(weights)) > 1
    means = {}
    for key in lines[0] if lines else ():
        values = [float(line[key]) for line in lines]
        if is_weighted and key != "grad_norm":
            means[key] = sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)
        else:
            means[key] = sum(values) / len(values)
    means.pop(WEIGHT_KEY, None)
    return means


def metrics_by_policy(names: Sequence[str], lines: Sequence[TensorMetrics]) -> dict[str, Metrics]:
    """Returns the means of metrics [P] over `lines`, by the name of the policy."""
    found = {}
    for p, name in enumerate(names):
        found[name] = mean_metrics([{key: value[p] for key, value in line.items()} for line in lines])
    return found
