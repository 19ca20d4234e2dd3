"""Q-learning shared by DQN and QMIX: Q-networks with target networks, epsilon-greedy exploration, and a replay buffer
of transitions (of sequences for recurrent networks).

Shapes: `P` members of a stack, `T` steps (1 for single transitions), `M` transitions or sequences, `N` seats, `S` seats
of a member, `R` = M*S rows, `A` actions, `O` outputs, `F` truncated games.
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
    """Base config of Q-learning: collect `horizon` steps, add them to the replay buffer, then take `updates` gradient
    steps.

    Recurrent policies train on sequences of `horizon` steps, `batch` / `horizon` of them per gradient step.
    """

    horizon: int = Field(8, ge=1)
    """Rollout length: steps of every parallel game between updates; also the sequence length of recurrent policies."""
    updates: int = Field(8, ge=1)
    """Gradient steps per rollout."""
    batch: int = Field(256, ge=1)
    """Joint transitions per gradient step."""
    warmup: int = Field(1000, ge=0)
    """Joint steps collected with random actions before training starts."""
    capacity: int = Field(100_000, ge=1)
    """Size of the replay buffer, in joint transitions."""
    gamma: float = Field(0.99, ge=0, le=1)
    """Discount per decision of a seat (per env step for QMIX)."""
    n: int = Field(1, ge=1)
    """Decisions of n-step returns: rewards are summed over them before bootstrapping."""
    double: bool = True
    """Double Q-learning: the online network selects the next action, the target network evaluates it."""
    duelling: bool = False
    """Compute action values as a state value plus advantages (Wang et al., 2016)."""
    epsilon: float = Field(1.0, ge=0, le=1)
    """Share of random actions at the start of the run."""
    epsilon_end: float = Field(0.05, ge=0, le=1)
    """Share of random actions after the decay."""
    epsilon_share: float = Field(0.5, gt=0, le=1)
    """Share of the run over which epsilon decays, linearly."""
    tau: float = Field(0.005, gt=0, le=1)
    """Polyak coefficient: how far the target networks move to the online networks per target update. `tau: 1` with
    `period: 200` copies them every 200 steps."""
    period: int = Field(1, ge=1)
    """Gradient steps between target updates."""
    priority: float = Field(0.0, ge=0)
    """Exponent of TD errors in prioritised replay (Schaul et al., 2016); 0 samples uniformly."""
    beta: float = Field(0.4, ge=0, le=1)
    """Initial exponent of the importance weights that correct prioritised sampling; it rises to 1 over the run."""
    burn_in: int = Field(0, ge=0)
    """First steps of a sequence that only update the recurrent state and are not trained on, unless the game began
    within the sequence. Less than `horizon`."""

    @model_validator(mode="after")
    def _learns(self) -> Self:
        if self.burn_in >= self.horizon:
            raise ValueError(
                f"burn_in is {self.burn_in}, but stretches have {self.horizon} steps (horizon), so nothing would be "
                "left to learn from: lower the one or raise the other"
            )
        return self

    def epsilon_at(self, progress: float) -> float:
        """Returns the share of random actions at `progress` in [0, 1]."""
        return self.epsilon + (self.epsilon_end - self.epsilon) * min(1.0, progress / self.epsilon_share)


class ValueHead(Head):
    """Head whose outputs are action values; it selects the best action."""

    width = 0

    def __init__(self, space: Discrete, duelling: bool) -> None:
        self.choices, self.duelling, self.outputs = space.n, duelling, space.n + duelling

    def values(self, out: Tensor) -> Tensor:
        """Returns action values: outputs [..., O] -> [..., A]."""
        return duelling_values(out) if self.duelling else out

    def mode(self, out: Tensor, legal: Tensor | None) -> Tensor:
        return best(self.values(out), legal)

    def sample(self, out: Tensor, legal: Tensor | None, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return self.mode(out, legal), out.new_zeros(out.shape[:-1])

    def score(self, out: Tensor, action: Tensor, legal: Tensor | None) -> tuple[Tensor, Tensor]:
        logp = torch.where(action == self.mode(out, legal), 0.0, NEVER)
        return logp, torch.zeros_like(logp)

    def exploring(self, epsilon: float) -> Choose:
        """Returns an epsilon-greedy action function: with probability `epsilon` a uniform legal action, otherwise the
        best."""

        def choose(out: Tensor, legal: Tensor | None, generator: torch.Generator) -> tuple[Tensor, None]:
            action = self.mode(out, legal)
            dice = torch.rand(action.shape, generator=generator)
            lots = torch.rand(*action.shape, self.choices, generator=generator)
            return torch.where(dice < epsilon, best(lots, legal), action), None

        return choose


class QLearner(NetLearner):
    """Base learner of Q-learning; a subclass defines the loss. With `joint` time is counted in env steps, not in each
    seat's own decisions. Raises ValueError for envs without discrete actions."""

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
        """Adds the batch to the replay buffer, then takes `updates` gradient steps once `warmup` is over; returns
        metrics by policy."""
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
        """Returns True if all processes can train."""
        return self.together.all(self.seen >= self.config.warmup and self.replay.ring.ready)

    def _step(self, rng: np.random.Generator, progress: float) -> list[Figures]:
        """Takes one gradient step; returns metrics by stack."""
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
        """Trains the policies on a replay batch; returns metrics by stack, mean absolute TD errors [T, M], and a mask
        of the known ones [T, M]."""

    def judged(self, i: int, drawn: Moves | Stretches) -> tuple[Tensor, Tensor]:
        """Returns the online values of stack i for the actions taken and the target values of the following decisions,
        both [P, T, R]."""
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
        """Returns writers of the policies as plain Q-networks, so that readers need no duelling."""
        return {
            name: partial(write_member, replace(stack, net=plain(stack, head)), p)
            for stack, head in zip(self.stacks, self.heads, strict=True)
            for p, name in enumerate(stack.seating.names)
        }

    def followed(self) -> list[tuple[nn.Module, nn.Module]]:
        """Returns pairs of online and target networks."""
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
    """Raises ValueError if the env has a seat without discrete actions."""
    if not all(isinstance(space, Discrete) for space in env.actions):
        kind = getattr(config, "type", "this algorithm")
        raise ValueError(
            f'{kind} compares the values of single actions, but env "{env.name}" takes {env.actions[0]}: '
            "use ppo or a2c, or for continuous actions sac, ddpg or td3"
        )


def as_stretch(moves: Moves) -> Moves:
    """Returns transitions as sequences of one step: every array [M, ...] -> [1, M, ...], except `index`."""
    found = {each.name: getattr(moves, each.name) for each in fields(moves) if each.name != "index"}
    longer: dict[str, Any] = {name: None if x is None else x[None] for name, x in found.items()}
    return replace(moves, **longer)


def unrolled(stack: Stack, head: ValueHead, net: Net, drawn: Stretches) -> tuple[Tensor, Tensor]:
    """Returns values of every step, and those of each seat's own next decision without gradients, both [P, T, R, A]."""
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
    """Reorders rows: [P, T, R] -> [T, M, P*S]."""
    return x.unflatten(2, (-1, len(stack.seating.seats[0]))).permute(1, 2, 0, 3).flatten(2)


@torch.no_grad()
def follow(fast: nn.Module, slow: nn.Module, tau: float) -> None:
    """Polyak update: moves the parameters of `slow` towards those of `fast` by a share of `tau`."""
    for target, source in zip(slow.parameters(), fast.parameters(), strict=True):
        target.lerp_(source, tau)


@torch.no_grad()
def plain(stack: Stack, head: ValueHead) -> Net:
    """Returns networks whose outputs are the action values themselves. Duelling values are linear in the outputs, so
    the last layer can absorb them."""
    if not head.duelling:
        return stack.net
    net = Net(stack.seating.inputs, head.choices, stack.config, generators([0] * len(stack.seating.names)))
    weights = stack.net.state_dict()
    for name in ("head.weight", "head.bias"):
        weights[name] = duelling_values(weights[name])
    net.load_state_dict(weights)
    return net
