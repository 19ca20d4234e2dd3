"""Base of the learners of small networks: stacked policies, an optimizer with per-member clipping, and state as arrays.

Shapes: `P` members of a stack, `T` steps, `B` games, `S` seats of a member, `N` seats, `G` numbers of the global
features.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from palestra.config import Strict
from palestra.envs.vector.base import Arrays, VectorEnv
from palestra.files import read_arrays, write_arrays
from palestra.nets.heads import CategoricalHead, GaussianHead, Head, MultiCategoricalHead, head_for
from palestra.nets.layers import Net, NetConfig, generators, member_of, put_member
from palestra.nets.normalise import RunningNorm, Sum
from palestra.nets.seating import Seating, seat_stacks
from palestra.nets.squashed import SquashedHead, TanhHead
from palestra.policies.frozen import NetMember
from palestra.policies.nets import Choose, NetPlayer, greedy, sampling
from palestra.policies.vector import Player
from palestra.types import Batch, Metrics

CLIP = 10.0  # maximum of normalised inputs in deviations from the mean; first observations can be extreme


class NetPolicyConfig(NetConfig):
    """A small network in training."""

    type: Literal["net"] = "net"
    """Kind of policy: a small network in training."""
    lr: float = Field(3e-4, gt=0, le=1_000_000)
    """Adam's learning rate, above 0."""
    schedule: Literal["constant", "linear"] = "constant"
    """"constant", or "linear": the learning rate falls to 0 over the run."""
    clip: float = Field(0.5, gt=0)
    """Maximum gradient norm of one optimizer step, per member."""
    eps: float = Field(1e-5, gt=0)
    """Constant added to Adam's denominator."""
    normalise: bool = False
    """Whether to scale observations, and the inputs of central critics and mixers, by their running mean and
    deviation."""
    seat_id: bool = False
    """Whether to add the seat as a one-hot vector to the observations of a policy that plays several seats."""


class AlgorithmConfig(Strict, ABC):
    """Base of the configs of algorithms that train networks on rollouts of `horizon` steps of every game."""

    @abstractmethod
    def teacher(self) -> Callable[..., NetLearner]:
        """Returns the learner class of this config."""

    def learner(
        self,
        env: VectorEnv,
        seats: Mapping[str, list[int]],
        policies: Mapping[str, NetPolicyConfig],
        seeds: Mapping[str, int],
        together: Together | None = None,
    ) -> Any:
        """Creates the learner. `seats` are the seat numbers of each policy, `policies` their settings, `seeds` their
        seeds. Raises ValueError if they do not fit the env."""
        return self.teacher()(self, Pupils(env, dict(seats), policies, seeds, together or Together()))


class Diverged(FloatingPointError):
    """A gradient is not finite. `policy` is the name of the affected policy."""

    def __init__(self, policy: str) -> None:
        super().__init__(f"the loss of policy {policy} is not a finite number")
        self.policy = policy


def alone(x: Tensor) -> Tensor:
    """Returns `x`: the sum over a single process."""
    return x


@dataclass(frozen=True)
class Together:
    """Gradient synchronisation of several processes that train the same networks. With one process it does nothing."""

    total: Sum = alone
    processes: int = 1

    def all(self, can: bool) -> bool:
        """Returns whether `can` is true in every process: they average their gradients, so all must take part in an
        update."""
        return bool(self.total(torch.tensor([float(can)])) == self.processes)


class Optimizer:
    """Adam over a stack of networks (Kingma & Ba, 2015); each member's gradient is clipped separately.

    All parameters are stored in one float32 array [P, D], of which the module's parameters are views: a step takes a
    handful of operations for any number of layers. For small networks the number of operations determines the cost.
    """

    def __init__(self, module: nn.Module, names: Sequence[str], config: NetPolicyConfig, together: Together) -> None:
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.names, self.config, self.together = names, config, together
        self.flat = torch.cat([p.detach().flatten(1) for p in self.parameters], 1)
        for p, own in zip(self.parameters, self.flat.split([p[0].numel() for p in self.parameters], 1), strict=True):
            p.data = own.view(p.shape)
        self.adam = torch.optim.Adam([self.flat], config.lr, eps=config.eps, fused=True)

    def step(self, loss: Tensor, progress: float) -> Tensor:
        """Makes one step on the sum of the members' losses; returns the norms of their gradients [P] float32.

        Raises `Diverged` if a gradient is not finite, before anything is changed.
        """
        parts = torch.autograd.grad(loss, self.parameters, materialize_grads=True)
        gradient = torch.cat([part.flatten(1) for part in parts], 1)
        if self.together.processes > 1:
            gradient = self.together.total(gradient) / self.together.processes
        norms = torch.linalg.vector_norm(gradient, dim=1)
        if not torch.isfinite(norms).all():
            raise Diverged(self.names[int(torch.argmin(torch.isfinite(norms).int()))])
        gradient *= (self.config.clip / (norms + 1e-6)).clamp(max=1.0)[:, None]
        for group in self.adam.param_groups:
            group["lr"] = self.config.lr * (1 - progress if self.config.schedule == "linear" else 1.0)
        self.flat.grad = gradient
        self.adam.step()
        return norms

    def arrays(self) -> Arrays:
        """Returns Adam's moments and step counts."""
        state = self.adam.state_dict()["state"]
        return {f"{i}.{key}": value.numpy() for i, own in state.items() for key, value in own.items()}

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Restores what `arrays` returned."""
        state: dict[int, dict[str, Tensor]] = {}
        for name, array in arrays.items():
            number, _, key = name.partition(".")
            state.setdefault(int(number), {})[key] = torch.from_numpy(np.array(array))
        self.adam.load_state_dict({"state": state, "param_groups": self.adam.state_dict()["param_groups"]})


@dataclass
class Stack:
    """Policies of one shape, stacked: networks, action distribution, optimizer and observation norm."""

    seating: Seating
    config: NetPolicyConfig
    head: Head
    net: Net
    optimizer: Optimizer
    norm: RunningNorm | None
    version: int = 0

    def rows(self, x: np.ndarray | Tensor, lead: int = 2) -> Tensor:
        """Selects the members' rows: [T, B, N, ...] -> [P, T, B*S, ...]."""
        taken = self.seating.take(x, lead)
        return taken.flatten(lead, lead + 1)

    def views(self, obs: np.ndarray | Tensor, lead: int = 2) -> Tensor:
        """Returns the networks' inputs: [T, B, N, *view] -> [P, T, B*S, *view], normalised if configured."""
        x = self.seating.observe(obs, lead).flatten(lead, lead + 1)
        return self.norm.normalise(x) if self.norm else x

    def actions(self, batch: Batch) -> Tensor:
        """Returns the members' actions [P, T, B*S, ...], int64 or float32."""
        taken = self.rows(batch.actions)
        taken = taken[..., : self.head.width] if self.head.width else taken
        return taken if taken.is_floating_point() else taken.long()

    def player(self, choose: Choose) -> NetPlayer:
        """Returns a player of these policies that selects actions with `choose`."""
        norm = self.norm.normalise if self.norm else None
        return NetPlayer(self.seating, self.net, choose, [self.version] * len(self.seating.names), norm)


class Pupils(NamedTuple):
    """Specification of the policies in training: env, seat numbers, settings, seeds, and gradient synchronisation."""

    env: VectorEnv
    seats: dict[str, list[int]]
    policies: Mapping[str, NetPolicyConfig]
    seeds: Mapping[str, int]
    together: Together


class NetLearner(ABC):
    """Policies of one env in training by one algorithm. `names` are the policies that learn."""

    def __init__(self, pupils: Pupils) -> None:
        self.env, seats, self.policies, self.seeds, self.together = pupils
        self.names = list(seats)
        self.stacks = [self.stack(seating) for seating in seat_stacks(self.env, seats, dict(self.policies))]
        scaled = self.sees_all and any(policy.normalise for policy in self.policies.values())
        self.world = RunningNorm(1, self.whole_size, clip=CLIP) if scaled else None

    def stack(self, seating: Seating) -> Stack:
        """Builds networks, optimizer and norm of policies of one shape."""
        config = self.policies[seating.names[0]]
        head = head_for(seating.space)
        seeds = [self.seeds[name] for name in seating.names]
        net = Net(seating.inputs, self.outputs(head), config, generators(seeds), self.gain, self.aside)
        optimizer = Optimizer(net, seating.names, config, self.together)
        normalised = config.normalise and len(seating.view) == 1
        norm = RunningNorm(len(seating.names), seating.inputs[0], clip=CLIP) if normalised else None
        return Stack(seating, config, head, net, optimizer, norm)

    gain = 0.01  # initialisation gain of the last layer
    aside = False  # whether the policy networks also predict values

    # ---- observations

    @property
    def sees_all(self) -> bool:
        """True if a part of training (a central critic or a mixer) uses the observations of all seats."""
        return False

    @property
    def whole_size(self) -> int:
        """Number of values that `whole` returns."""
        return self.env.state_size or sum(int(np.prod(view)) for view in self.env.views)

    def whole(self, obs: np.ndarray | Tensor, state: np.ndarray | Tensor | None, lead: int) -> Tensor:
        """Returns the global features [..., G] float32, from observations [..., N, *padded] with `lead` dimensions
        before the seats: the env's state, or all observations concatenated if the env has none."""
        if state is None:
            flat, sizes = torch.as_tensor(obs).flatten(lead + 1), [int(np.prod(view)) for view in self.env.views]
            padded = any(size < flat.shape[-1] for size in sizes)
            views = [flat[..., seat, :size] for seat, size in enumerate(sizes)] if padded else []
            found = (torch.cat(views, -1) if padded else flat.flatten(lead)).float()
        else:
            found = torch.as_tensor(state).float()
        return found if self.world is None else self.world.normalise(found[None])[0]

    def see(self, batch: Batch) -> None:
        """Updates the running norms."""
        for stack in self.stacks:
            if stack.norm:
                rows = stack.seating.observe(batch.obs, 2)[:, :-1].flatten(1, 3)
                stack.norm.see(rows, stack.rows(batch.acting[:-1]).flatten(1).float(), self.together.total)
        if self.world:
            world, self.world = self.world, None  # update the norm with unnormalised features
            rows = self.whole(batch.obs, batch.state, 2)[:-1].flatten(0, 1)[None]
            world.see(rows, torch.ones(rows.shape[:2]), self.together.total)
            self.world = world

    def outputs(self, head: Head) -> int:
        """Returns the number of outputs of a policy's network."""
        return head.outputs

    @abstractmethod
    def update(self, batch: Batch, progress: float) -> dict[str, Metrics]:
        """Trains on a rollout; returns metrics by policy. `progress` in [0, 1] is the finished share of the run."""

    def players(self, progress: float) -> Sequence[Player]:
        """Returns the policies as they play in training, with exploration."""
        return [stack.player(sampling(stack.head)) for stack in self.stacks]

    def drawing(self) -> Sequence[Player]:
        """Returns the policies without exploration, sampling their actions."""
        return self.players(1.0)

    def greedy(self) -> list[NetPlayer]:
        """Returns the policies with greedy actions."""
        return [stack.player(greedy(stack.head)) for stack in self.stacks]

    def acting(self) -> list[Tensor]:
        """Returns the tensors that players act by (weights and norms) of every stack, in order."""
        kept = [stack.net for stack in self.stacks] + [stack.norm for stack in self.stacks if stack.norm]
        return [tensor for module in kept for tensor in module.state_dict().values()]

    def modules(self) -> dict[str, nn.Module]:
        """Returns all modules with weights, by name."""
        norms: dict[str, nn.Module] = {f"norm.{i}": s.norm for i, s in enumerate(self.stacks) if s.norm}
        nets: dict[str, nn.Module] = {f"net.{i}": stack.net for i, stack in enumerate(self.stacks)}
        return nets | norms | ({"world": self.world} if self.world else {})

    def optimizers(self) -> dict[str, Optimizer]:
        """Returns all optimizers, by name."""
        return {f"adam.{i}": stack.optimizer for i, stack in enumerate(self.stacks)}

    def members(self) -> dict[str, Callable[[Path], None]]:
        """Returns for each policy a function that writes it to a folder: its weights and what is needed to play it
        alone."""
        return {
            name: partial(write_member, stack, p) for stack in self.stacks for p, name in enumerate(stack.seating.names)
        }

    def write(self, folder: Path) -> None:
        """Writes the full training state to `folder`; `read` restores it."""
        write_arrays(folder / "learner.safetensors", self.arrays())

    def read(self, folder: Path) -> None:
        """Restores what `write` wrote; training resumes exactly there."""
        self.load(read_arrays(folder / "learner.safetensors"))

    def arrays(self) -> Arrays:
        """Returns the full training state; `load` restores it."""
        found: Arrays = {"versions": np.array([stack.version for stack in self.stacks])}
        for name, module in self.modules().items():
            found |= {f"{name}/{key}": value.numpy() for key, value in module.state_dict().items()}
        for name, optimizer in self.optimizers().items():
            found |= {f"{name}/{key}": value for key, value in optimizer.arrays().items()}
        return found

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Restores the training state that `arrays` returned."""
        for stack, version in zip(self.stacks, arrays["versions"], strict=True):
            stack.version = int(version)
        for name, module in self.modules().items():
            module.load_state_dict({k: torch.from_numpy(np.array(v)) for k, v in part(arrays, name).items()})
        for name, optimizer in self.optimizers().items():
            optimizer.load(part(arrays, name))


HEADS: dict[str, Callable[[Any], Head]] = {
    "CategoricalHead": CategoricalHead,
    "MultiCategoricalHead": MultiCategoricalHead,
    "GaussianHead": GaussianHead,
    "SquashedHead": SquashedHead,
    "TanhHead": TanhHead,
    "ValueHead": CategoricalHead,  # outputs are action values: the mode is the best action, sampling is not used
}


def write_member(stack: Stack, p: int, folder: Path) -> None:
    """Writes one policy of a stack: weights to policy.safetensors; shape, config and version to member.json."""
    weights = {name: value.numpy() for name, value in member_of(stack.net, p).items()}
    norm = {} if stack.norm is None else {f"norm/{k}": v[p].numpy() for k, v in stack.norm.state_dict().items()}
    write_arrays(folder / "policy.safetensors", weights | norm)
    facts = {
        "name": stack.seating.names[p],
        "head": type(stack.head).__name__,
        "version": stack.version,
        "seat_id": stack.seating.seat_id,
        "config": stack.config.model_dump(),
    }
    (folder / "member.json").write_text(json.dumps(facts, indent=2) + "\n")


def read_frozen(folder: Path, env: VectorEnv, seats: Sequence[int], *, best: bool = False) -> tuple[NetMember, int]:
    """Loads a policy that `write_member` wrote, for the seats `seats` of an env; returns it and its version. `best`
    plays the most likely actions instead of sampling.

    Raises ValueError if it does not fit these seats.
    """
    facts = json.loads((folder / "member.json").read_text())
    config = NetPolicyConfig(**facts["config"])
    (alone,) = seat_stacks(env, {facts["name"]: list(seats)}, {facts["name"]: config})
    seating = replace(alone, seat_id=facts["seat_id"])
    head = HEADS[facts["head"]](seating.space)
    net = Net(seating.inputs, head.outputs, config, generators([0]))
    arrays = read_arrays(folder / "policy.safetensors")
    put_member(net, 0, arrays)
    norm = None
    if config.normalise and (kept := part(arrays, "norm")):
        norm = RunningNorm(1, seating.inputs[0], clip=CLIP)
        norm.load_state_dict({key: torch.from_numpy(value[None].copy()) for key, value in kept.items()})
    return NetMember(seating, net, head, norm, best or facts["head"] == "ValueHead"), facts["version"]


def read_member(folder: Path, env: VectorEnv, seats: Sequence[int], *, best: bool = False) -> NetPlayer:
    """Loads a policy like `read_frozen`, as a separate player."""
    member, version = read_frozen(folder, env, seats, best=best)
    choose = greedy(member.head) if member.best else sampling(member.head)
    normalise = member.norm.normalise if member.norm else None
    return NetPlayer(member.seating, member.net, choose, [version], normalise)


def part(arrays: Mapping[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    """Returns the arrays whose names begin with `name/`, without that prefix."""
    return {key[len(name) + 1 :]: value for key, value in arrays.items() if key.startswith(f"{name}/")}


def means(lines: Sequence[Mapping[str, Any]]) -> Metrics:
    """Returns the mean of each metric over `lines`."""
    return {key: float(sum(float(line[key]) for line in lines) / len(lines)) for key in (lines[0] if lines else {})}
