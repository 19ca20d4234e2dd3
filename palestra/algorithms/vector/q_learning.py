"""What DQN and QMIX share: networks that say what each action is worth, slow copies of them that targets come from,
epsilon-greedy play, and moments (with memory: whole stretches of games) that are learned from again and again.

Shapes: `P` members of a stack, `T` steps (1 for single moments), `M` moments or stretches, `N` seats, `S` seats of a
member, `R` = M*S rows, `A` actions, `O` outputs, `F` games that were cut off.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from palestra.envs.vector.base import Arrays, Discrete, VectorEnv
from palestra.learners.nets import (
    AlgorithmConfig,
    NetLearner,
    Pupils,
    Stack,
    means,
    part,
    write_member,
)
from palestra.losses.policy import Figures
from palestra.losses.q import best, duelling_values, next_value, sequence_priority, value_of
from palestra.nets.heads import NEVER, Head
from palestra.nets.layers import Net, generators
from palestra.nets.replay import Moves, Replay
from palestra.nets.seating import Seating
from palestra.nets.segments import Segments, Stretches
from palestra.policies.nets import Choose, NetPlayer
from palestra.rollouts.play import derive
from palestra.types import Batch, Metrics


class QLearningConfig(AlgorithmConfig):
    """Play `horizon` steps of every game, remember them, then make `updates` gradient steps, each on `batch` joint
    moments drawn from the last `capacity`, once `warmup` were played at random.

    A share of `epsilon` of all moves is random; it goes to `epsilon_end` over the first `epsilon_share` of the run.
    Rewards are summed over `n` decisions before a value stands for the rest: chosen by the network in training and
    judged by its slow copy (`double`), which after every `period` gradient steps moves `tau` of the way to it (so
    tau: 1, period: 200 copies it now and then). `duelling` makes values out of that of the view and advantages.
    `priority` prefers moments of large errors, to this power; `beta` of what that distorts is made up for, all of it at
    the end of the run. Policies with memory learn from stretches of `horizon` steps, `batch` / `horizon` at a time; the
    first `burn_in` steps of a stretch within a game only bring the memory up to date.
    """

    horizon: int = Field(8, ge=1)
    updates: int = Field(8, ge=1)
    batch: int = Field(256, ge=1)
    warmup: int = Field(1000, ge=0)
    capacity: int = Field(100_000, ge=1)
    gamma: float = Field(0.99, ge=0, le=1)
    n: int = Field(1, ge=1)
    double: bool = True
    duelling: bool = False
    epsilon: float = Field(1.0, ge=0, le=1)
    epsilon_end: float = Field(0.05, ge=0, le=1)
    epsilon_share: float = Field(0.5, gt=0, le=1)
    tau: float = Field(0.005, gt=0, le=1)
    period: int = Field(1, ge=1)
    priority: float = Field(0.0, ge=0)
    beta: float = Field(0.4, ge=0, le=1)
    burn_in: int = Field(0, ge=0)

    @model_validator(mode="after")
    def _learns(self) -> Self:
        if self.burn_in >= self.horizon:
            raise ValueError(
                f"burn_in is {self.burn_in}, but stretches have {self.horizon} steps (horizon), so nothing would be "
                "left to learn from: lower the one or raise the other"
            )
        return self

    def epsilon_at(self, progress: float) -> float:
        """The share of random moves when so much of the run is done."""
        return self.epsilon + (self.epsilon_end - self.epsilon) * min(1.0, progress / self.epsilon_share)


class ValueHead(Head):
    """Outputs are values of actions, of which the best is taken."""

    width = 0

    def __init__(self, space: Discrete, duelling: bool) -> None:
        self.choices, self.duelling, self.outputs = space.n, duelling, space.n + duelling

    def values(self, out: Tensor) -> Tensor:
        """[..., O] -> [..., A]."""
        return duelling_values(out) if self.duelling else out

    def mode(self, out: Tensor, legal: Tensor | None) -> Tensor:
        return best(self.values(out), legal)

    def sample(self, out: Tensor, legal: Tensor | None, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return self.mode(out, legal), out.new_zeros(out.shape[:-1])

    def score(self, out: Tensor, action: Tensor, legal: Tensor | None) -> tuple[Tensor, Tensor]:
        logp = torch.where(action == self.mode(out, legal), 0.0, NEVER)
        return logp, torch.zeros_like(logp)

    def exploring(self, epsilon: float) -> Choose:
        """Takes any legal action in a share of `epsilon` of all moves, the best otherwise."""

        def choose(out: Tensor, legal: Tensor | None, generator: torch.Generator) -> tuple[Tensor, None]:
            action = self.mode(out, legal)
            dice = torch.rand(action.shape, generator=generator)
            lots = torch.rand(*action.shape, self.choices, generator=generator)
            return torch.where(dice < epsilon, best(lots, legal), action), None

        return choose


class QLearner(NetLearner):
    """A subclass says how values and rewards become losses. With `joint` time is that of the team, not of each seat's
    own decisions."""

    joint = False

    def __init__(self, config: QLearningConfig, pupils: Pupils) -> None:
        refuse(config, pupils.env)
        self.config = config
        super().__init__(pupils)
        self.targets = [copy.deepcopy(stack.net).requires_grad_(False) for stack in self.stacks]
        self.heads = [stack.head for stack in self.stacks if isinstance(stack.head, ValueHead)]
        self.seats = [seat for stack in self.stacks for seat in stack.seating.flat]
        self.replay = self._memory()
        self.steps, self.seen = 0, 0

    def _memory(self) -> Replay | Segments:
        config = self.config
        remembered = ["+".join(stack.seating.names) for stack in self.stacks if stack.net.memory_units]
        if not remembered:
            return Replay(
                config.capacity,
                n=config.n,
                gamma=config.gamma,
                priority=config.priority,
                seats=self.seats,
                joint=self.joint,
                team=self.seats if self.joint else (),
            )
        return Segments(
            max(1, config.capacity // config.horizon),
            n=config.n,
            gamma=config.gamma,
            priority=config.priority,
            burn_in=config.burn_in,
            joint=self.joint,
            team=self.seats if self.joint else (),
            remembered=remembered,
        )

    def stack(self, seating: Seating) -> Stack:
        made = super().stack(seating)
        assert isinstance(seating.space, Discrete)
        made.head = ValueHead(seating.space, self.config.duelling)
        return made

    def outputs(self, head: Head) -> int:
        return head.outputs + self.config.duelling

    # ---- play

    def players(self, progress: float) -> list[NetPlayer]:
        warm = self.seen >= self.config.warmup
        epsilon = self.config.epsilon_at(progress) if warm else 1.0
        return [stack.player(head.exploring(epsilon)) for stack, head in zip(self.stacks, self.heads, strict=True)]

    # ---- learning

    def update(self, batch: Batch, progress: float) -> dict[str, Metrics]:
        """Remembers the batch; then `updates` gradient steps, once it is time."""
        self.replay.add(batch)
        self.seen += batch.terminated.size
        self.see(batch)
        lines: list[list[Figures]] = [[] for _ in self.stacks]
        if self._ready():
            rng = np.random.default_rng(derive(self.seeds[self.names[0]], "moments", self.steps))
            for _ in range(self.config.updates):
                for own, line in zip(lines, self._step(rng, progress), strict=True):
                    own.append(line)
        return {
            name: means([{key: value[p] for key, value in line.items()} for line in own])
            for stack, own in zip(self.stacks, lines, strict=True)
            for p, name in enumerate(stack.seating.names)
        }

    def _ready(self) -> bool:
        """Whether all processes can learn."""
        return self.together.all(self.seen >= self.config.warmup and self.replay.ring.ready)

    def _step(self, rng: np.random.Generator, progress: float) -> list[Figures]:
        """One gradient step; figures by stack."""
        config = self.config
        recurrent = isinstance(self.replay, Segments)
        count = max(1, config.batch // config.horizon) if recurrent else config.batch
        drawn = self.replay.sample(count, rng, config.beta + (1 - config.beta) * progress)
        lines, error, known = self.learn(drawn if isinstance(drawn, Stretches) else as_stretch(drawn), progress)
        self.replay.prioritise(drawn.index, sequence_priority(error, known) if recurrent else error[0])
        self.steps += 1
        for stack in self.stacks:
            stack.version += 1
        if self.steps % config.period == 0:
            for net, target in self.followed():
                follow(net, target, config.tau)
        return lines

    @abstractmethod
    def learn(self, drawn: Moves | Stretches, progress: float) -> tuple[list[Figures], Tensor, Tensor]:
        """Improves the policies; figures by stack, mean errors [T, M] without sign, and which are known [T, M]."""

    def judged(self, i: int, drawn: Moves | Stretches) -> tuple[Tensor, Tensor]:
        """What stack i says of the actions taken, and what targets say of those that follow, both [P, T, R]."""
        stack, head, target = self.stacks[i], self.heads[i], self.targets[i]
        if isinstance(drawn, Stretches):
            q, chooser = unrolled(stack, head, stack.net, drawn)
            with torch.no_grad():
                judge = unrolled(stack, head, target, drawn)[1]
        else:
            q = head.values(stack.net.unroll(stack.views(drawn.obs))[0])
            with torch.no_grad():
                after = stack.views(drawn.next_obs)
                judge = head.values(target.unroll(after)[0])
                chooser = head.values(stack.net.unroll(after)[0]) if self.config.double else judge
        legal = None if drawn.next_legal is None else stack.rows(drawn.next_legal)
        following = next_value(judge, chooser if self.config.double else judge, legal)
        return value_of(q, stack.rows(drawn.actions)), following

    # ---- state

    def members(self) -> dict[str, Callable[[Path], None]]:
        """Written as networks whose outputs are values of actions, so that whoever reads them need not know how these
        were made."""
        return {
            name: partial(write_member, replace(stack, net=plain(stack, head)), p)
            for stack, head in zip(self.stacks, self.heads, strict=True)
            for p, name in enumerate(stack.seating.names)
        }

    def followed(self) -> list[tuple[nn.Module, nn.Module]]:
        """Networks and the copies that follow them."""
        return [(stack.net, target) for stack, target in zip(self.stacks, self.targets, strict=True)]

    def modules(self) -> dict[str, nn.Module]:
        return super().modules() | {f"target.{i}": target for i, target in enumerate(self.targets)}

    def arrays(self) -> Arrays:
        replay = {f"replay/{name}": array for name, array in self.replay.arrays().items()}
        return super().arrays() | replay | {"steps": np.array([self.steps]), "seen": np.array([self.seen])}

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        super().load(arrays)
        self.replay.load(part(arrays, "replay"))
        self.steps, self.seen = int(arrays["steps"][0]), int(arrays["seen"][0])


def refuse(config: QLearningConfig, env: VectorEnv) -> None:
    """Raises ValueError for an env that values of single actions do not fit."""
    if not all(isinstance(space, Discrete) for space in env.actions):
        kind = getattr(config, "type", "this algorithm")
        raise ValueError(
            f'{kind} compares the values of single actions, but env "{env.name}" takes {env.actions[0]}: '
            "use ppo or a2c, or for continuous actions sac, ddpg or td3"
        )


def as_stretch(moves: Moves) -> Moves:
    """Single moments as stretches of one step: [M, ...] -> [1, M, ...], `index` but for it."""
    found = {each.name: getattr(moves, each.name) for each in fields(moves) if each.name != "index"}
    longer: dict[str, Any] = {name: None if x is None else x[None] for name, x in found.items()}
    return replace(moves, **longer)


def unrolled(stack: Stack, head: ValueHead, net: Net, drawn: Stretches) -> tuple[Tensor, Tensor]:
    """Values of every step, and without gradients those of each seat's own next moment, both [P, T, R, A]."""
    P, S = len(stack.seating.names), len(stack.seating.seats[0])
    fresh = drawn.fresh.repeat_interleave(S, 1)
    memory = drawn.memory.get("+".join(stack.seating.names))
    out, memories = net.unroll(stack.views(drawn.obs), memory, fresh.expand(P, *fresh.shape))
    q = head.values(out)
    with torch.no_grad():
        times, stretches = drawn.cuts
        ends = torch.zeros_like(q[:, :-1])
        if len(times):
            before = None if memories is None else memories.unflatten(2, (-1, S))[:, times, stretches].flatten(1, 2)
            last, _ = net.unroll(stack.views(drawn.final_obs, 1)[:, None], before)
            ends.unflatten(2, (-1, S))[:, times, stretches] = head.values(last[:, 0]).unflatten(1, (-1, S))
        moment = stack.rows(drawn.moment)[..., None].expand(*q[:, :-1].shape)
        following = torch.cat([q, ends], 1).gather(1, moment)
    return q[:, :-1], following


def by_row(stack: Stack, x: Tensor) -> Tensor:
    """[P, T, R] -> [T, M, P*S]."""
    return x.unflatten(2, (-1, len(stack.seating.seats[0]))).permute(1, 2, 0, 3).flatten(2)


@torch.no_grad()
def follow(fast: nn.Module, slow: nn.Module, tau: float) -> None:
    """Moves `slow` a share of `tau` towards `fast`."""
    for target, source in zip(slow.parameters(), fast.parameters(), strict=True):
        target.lerp_(source, tau)


@torch.no_grad()
def plain(stack: Stack, head: ValueHead) -> Net:
    """Networks whose outputs are the values of actions themselves: those of a duel are sums of its outputs, which the
    last layer can make."""
    if not head.duelling:
        return stack.net
    net = Net(stack.seating.inputs, head.choices, stack.config, generators([0] * len(stack.seating.names)))
    weights = stack.net.state_dict()
    for name in ("head.weight", "head.bias"):
        weights[name] = duelling_values(weights[name])
    net.load_state_dict(weights)
    return net
