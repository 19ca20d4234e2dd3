"""What learners of small networks share: policies in stacks, an optimizer that knows members, state as plain arrays.

Shapes: `P` members of a stack, `T` steps, `B` games, `S` seats of a member, `N` seats.
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

CLIP = 10.0  # deviations from the mean; what is seen for the first time may be any number of them


class NetPolicyConfig(NetConfig):
    """A small network that learns. `schedule: linear` takes the learning rate to 0 over the run; `clip` bounds the norm
    of a step's gradient; `normalise` scales views by their running mean and deviation, and what central critics and
    mixers see; `seat_id` tells a policy of several seats which one it plays."""

    type: Literal["net"] = "net"
    lr: float = Field(3e-4, gt=0, le=1_000_000)
    schedule: Literal["constant", "linear"] = "constant"
    clip: float = Field(0.5, gt=0)
    eps: float = Field(1e-5, gt=0)
    normalise: bool = False
    seat_id: bool = False


class AlgorithmConfig(Strict, ABC):
    """The settings of an algorithm by which networks learn, `horizon` steps of every game at a time."""

    @abstractmethod
    def teacher(self) -> Callable[..., NetLearner]:
        """What learns by this config."""

    def learner(
        self,
        env: VectorEnv,
        seats: Mapping[str, list[int]],
        policies: Mapping[str, NetPolicyConfig],
        seeds: Mapping[str, int],
        together: Together | None = None,
    ) -> Any:
        """A learner of this kind, of policies that have these seats (numbers) of an env, settings and seeds. Raises
        ValueError where they do not fit."""
        return self.teacher()(self, Pupils(env, dict(seats), policies, seeds, together or Together()))


class Diverged(FloatingPointError):
    """A gradient that is not finite. `policy` says whose."""

    def __init__(self, policy: str) -> None:
        super().__init__(f"the loss of policy {policy} is not a finite number")
        self.policy = policy


def alone(x: Tensor) -> Tensor:
    """The sum over one process."""
    return x


@dataclass(frozen=True)
class Together:
    """What several processes that train the same networks do at once. Alone, nothing."""

    total: Sum = alone
    processes: int = 1

    def all(self, can: bool) -> bool:
        """Whether every process can: they average their gradients, so one must not begin without another."""
        return bool(self.total(torch.tensor([float(can)])) == self.processes)


class Optimizer:
    """Adam over a stack (Kingma & Ba, 2015); every member's gradient is clipped by itself.

    All parameters lie in one array [P, D] of which the module's are views: a step is a handful of operations however
    many layers there are. For networks this small their number, not their size, is what a step costs.
    """

    def __init__(self, module: nn.Module, names: Sequence[str], config: NetPolicyConfig, together: Together) -> None:
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.names, self.config, self.together = names, config, together
        self.flat = torch.cat([p.detach().flatten(1) for p in self.parameters], 1)
        for p, own in zip(self.parameters, self.flat.split([p[0].numel() for p in self.parameters], 1), strict=True):
            p.data = own.view(p.shape)
        self.adam = torch.optim.Adam([self.flat], config.lr, eps=config.eps, fused=True)

    def step(self, loss: Tensor, progress: float) -> Tensor:
        """One step on the sum of the members' losses; returns the norms of their gradients [P].

        Raises `Diverged` before anything is changed where a gradient is not finite.
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
        """Adam's moments and counts."""
        state = self.adam.state_dict()["state"]
        return {f"{i}.{key}": value.numpy() for i, own in state.items() for key, value in own.items()}

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        state: dict[int, dict[str, Tensor]] = {}
        for name, array in arrays.items():
            number, _, key = name.partition(".")
            state.setdefault(int(number), {})[key] = torch.from_numpy(np.array(array))
        self.adam.load_state_dict({"state": state, "param_groups": self.adam.state_dict()["param_groups"]})


@dataclass
class Stack:
    """The acting side of policies of one shape: networks, the distribution over actions, an optimizer."""

    seating: Seating
    config: NetPolicyConfig
    head: Head
    net: Net
    optimizer: Optimizer
    norm: RunningNorm | None
    version: int = 0

    def rows(self, x: np.ndarray | Tensor, lead: int = 2) -> Tensor:
        """[T, B, N, ...] -> [P, T, B*S, ...]."""
        taken = self.seating.take(x, lead)
        return taken.flatten(lead, lead + 1)

    def views(self, obs: np.ndarray | Tensor, lead: int = 2) -> Tensor:
        """What the networks see: [T, B, N, *view] -> [P, T, B*S, *view], normalised where they want it."""
        x = self.seating.observe(obs, lead).flatten(lead, lead + 1)
        return self.norm.normalise(x) if self.norm else x

    def actions(self, batch: Batch) -> Tensor:
        """What the members did [P, T, B*S, ...], int64 or float32."""
        taken = self.rows(batch.actions)
        taken = taken[..., : self.head.width] if self.head.width else taken
        return taken if taken.is_floating_point() else taken.long()

    def player(self, choose: Choose) -> NetPlayer:
        norm = self.norm.normalise if self.norm else None
        return NetPlayer(self.seating, self.net, choose, [self.version] * len(self.seating.names), norm)


class Pupils(NamedTuple):
    """Policies that learn: their seats (numbers) of an env, settings and seeds, and the processes that train them."""

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
        config = self.policies[seating.names[0]]
        head = head_for(seating.space)
        seeds = [self.seeds[name] for name in seating.names]
        net = Net(seating.inputs, self.outputs(head), config, generators(seeds), self.gain, self.aside)
        optimizer = Optimizer(net, seating.names, config, self.together)
        normalised = config.normalise and len(seating.view) == 1
        norm = RunningNorm(len(seating.names), seating.inputs[0], clip=CLIP) if normalised else None
        return Stack(seating, config, head, net, optimizer, norm)

    gain = 0.01  # of the last layer
    aside = False  # whether policies predict values besides

    # ---- what is seen

    @property
    def sees_all(self) -> bool:
        """Whether something in training, a central critic or a mixer, sees more than one seat does."""
        return False

    @property
    def whole_size(self) -> int:
        """How many numbers `whole` gives."""
        return self.env.state_size or sum(int(np.prod(view)) for view in self.env.views)

    def whole(self, obs: np.ndarray | Tensor, state: np.ndarray | Tensor | None, lead: int) -> Tensor:
        """Everything there is to see [..., G], of views [..., N, *padded] with `lead` dimensions before the seats: the
        env's state, or where it has none all views side by side."""
        if state is None:
            flat, sizes = torch.as_tensor(obs).flatten(lead + 1), [int(np.prod(view)) for view in self.env.views]
            padded = any(size < flat.shape[-1] for size in sizes)
            views = [flat[..., seat, :size] for seat, size in enumerate(sizes)] if padded else []
            found = (torch.cat(views, -1) if padded else flat.flatten(lead)).float()
        else:
            found = torch.as_tensor(state).float()
        return found if self.world is None else self.world.normalise(found[None])[0]

    def see(self, batch: Batch) -> None:
        """What running norms are made of."""
        for stack in self.stacks:
            if stack.norm:
                rows = stack.seating.observe(batch.obs, 2)[:, :-1].flatten(1, 3)
                stack.norm.see(rows, stack.rows(batch.acting[:-1]).flatten(1).float(), self.together.total)
        if self.world:
            world, self.world = self.world, None  # what it is made of is not scaled by it
            rows = self.whole(batch.obs, batch.state, 2)[:-1].flatten(0, 1)[None]
            world.see(rows, torch.ones(rows.shape[:2]), self.together.total)
            self.world = world

    def outputs(self, head: Head) -> int:
        """How many numbers a policy's network puts out."""
        return head.outputs

    @abstractmethod
    def update(self, batch: Batch, progress: float) -> dict[str, Metrics]:
        """Learns from a batch; figures by policy. `progress` in [0, 1] is how far the run is."""

    def players(self, progress: float) -> Sequence[Player]:
        """The policies as they play in training, exploring."""
        return [stack.player(sampling(stack.head)) for stack in self.stacks]

    def drawing(self) -> Sequence[Player]:
        """The policies as they are when all is learned, drawing their moves."""
        return self.players(1.0)

    def greedy(self) -> list[NetPlayer]:
        """The policies at their best."""
        return [stack.player(greedy(stack.head)) for stack in self.stacks]

    def acting(self) -> list[Tensor]:
        """The weights, and other numbers, that players act by: those of every stack, in order."""
        kept = [stack.net for stack in self.stacks] + [stack.norm for stack in self.stacks if stack.norm]
        return [tensor for module in kept for tensor in module.state_dict().values()]

    def modules(self) -> dict[str, nn.Module]:
        """Everything with weights, by name."""
        norms: dict[str, nn.Module] = {f"norm.{i}": s.norm for i, s in enumerate(self.stacks) if s.norm}
        nets: dict[str, nn.Module] = {f"net.{i}": stack.net for i, stack in enumerate(self.stacks)}
        return nets | norms | ({"world": self.world} if self.world else {})

    def optimizers(self) -> dict[str, Optimizer]:
        return {f"adam.{i}": stack.optimizer for i, stack in enumerate(self.stacks)}

    def members(self) -> dict[str, Callable[[Path], None]]:
        """For each policy, what writes it to a folder: weights, and what is needed to play it elsewhere."""
        return {
            name: partial(write_member, stack, p) for stack in self.stacks for p, name in enumerate(stack.seating.names)
        }

    def write(self, folder: Path) -> None:
        """Everything that `read` needs to go on exactly."""
        write_arrays(folder / "learner.safetensors", self.arrays())

    def read(self, folder: Path) -> None:
        self.load(read_arrays(folder / "learner.safetensors"))

    def arrays(self) -> Arrays:
        """Everything that `load` needs to go on exactly."""
        found: Arrays = {"versions": np.array([stack.version for stack in self.stacks])}
        for name, module in self.modules().items():
            found |= {f"{name}/{key}": value.numpy() for key, value in module.state_dict().items()}
        for name, optimizer in self.optimizers().items():
            found |= {f"{name}/{key}": value for key, value in optimizer.arrays().items()}
        return found

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Goes on exactly where `arrays` was taken."""
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
    "ValueHead": CategoricalHead,  # values of actions: the best is the likeliest, and nothing is drawn
}


def write_member(stack: Stack, p: int, folder: Path) -> None:
    """One policy of a stack: its weights, and in member.json its shape and version."""
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
    """A policy that `write_member` kept, for seats of an env, and its version; `best` plays its likeliest actions
    instead of drawing.

    Raises ValueError where it does not fit these seats.
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
    """What `read_frozen` reads, as a player of its own."""
    member, version = read_frozen(folder, env, seats, best=best)
    choose = greedy(member.head) if member.best else sampling(member.head)
    normalise = member.norm.normalise if member.norm else None
    return NetPlayer(member.seating, member.net, choose, [version], normalise)


def part(arrays: Mapping[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    """The arrays under `name/`, without it."""
    return {key[len(name) + 1 :]: value for key, value in arrays.items() if key.startswith(f"{name}/")}


def means(lines: Sequence[Mapping[str, Any]]) -> Metrics:
    """The mean of each figure over several lines."""
    return {key: float(sum(float(line[key]) for line in lines) / len(lines)) for key in (lines[0] if lines else {})}
