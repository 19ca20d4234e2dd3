"""Learning from demonstrations: behaviour cloning, and generative adversarial imitation learning (GAIL, Ho & Ermon,
2016).

Demonstrations are recorded transitions of players of any kind, in a file written by `record`. A policy imitates the
actions at its own seats. Rewards of the env are not used.

Shapes: `P` members of a stack, `T` steps, `B` parallel games, `S` seats of a member, `C` = B*S columns, `N` seats, `A`
actions, `L` steps of a sequence, `M` transitions or sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal
from zipfile import BadZipFile

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from palestra.algorithms.vector.actor_critic import ActorCritic, ActorCriticConfig, shares
from palestra.envs.vector.base import Continuous, Discrete, MultiDiscrete, Space, VectorEnv
from palestra.learners.nets import AlgorithmConfig, NetLearner, Optimizer, Pupils, Stack, means
from palestra.losses.imitation import Reward, discriminator_loss, gradient_penalty, imitation_reward
from palestra.losses.policy import Figures, Scored, clipped_policy_loss, cross_entropy_loss
from palestra.nets.heads import GaussianHead, head_for
from palestra.nets.layers import Net, generators
from palestra.policies.vector import Player
from palestra.rollouts.play import derive
from palestra.rollouts.sweep import Sweeper
from palestra.types import Batch, Metrics


@dataclass(frozen=True)
class Demonstrations:
    """T joint steps of B games: `obs [T, B, N, *view]` float32 or uint8, `actions [T, B, N, ...]` int32 or float32,
    agent mask `acting [T, B, N]` bool, first steps of games (`fresh [T, B]` bool), and action masks `legal [T, B, N,
    A]` bool if the env has them."""

    obs: np.ndarray
    actions: np.ndarray
    acting: np.ndarray
    fresh: np.ndarray
    legal: np.ndarray | None = None


def record(env: VectorEnv, players: Sequence[Player], steps: int, path: str | Path, *, seed: int = 0) -> None:
    """Plays `steps` joint steps of every parallel game and writes them as demonstrations to an .npz file. The games
    have consecutive seeds from `seed` on."""
    batch = Sweeper(env, seed + np.arange(env.games)).sweep(players, steps, seed)
    kept: dict[str, Any] = {key: value for key, value in vars(moves_of(batch)).items() if value is not None}
    with Path(path).open("wb") as file:  # NumPy would append .npz to a path
        np.savez_compressed(file, **kept)


def moves_of(batch: Batch) -> Demonstrations:
    """Returns the transitions of a batch as demonstrations that share its arrays."""
    legal = None if batch.legal is None else batch.legal[:-1]
    return Demonstrations(batch.obs[:-1], batch.actions, batch.acting[:-1], batch.fresh[:-1], legal)


def read_demonstrations(path: str | Path, env: VectorEnv) -> Demonstrations:
    """Returns the demonstrations in a file that `record` wrote. Raises ValueError if it holds none or belongs to
    another env."""
    fix = "record them with palestra collect"
    other = f"the demonstrations in {path} are of another env"
    try:
        with Path(path).open("rb") as opened, np.load(opened) as file:  # NumPy does not close a broken file
            found = Demonstrations(**{name: file[name] for name in file.files})
    except (OSError, TypeError, ValueError, BadZipFile) as error:
        raise ValueError(f"{path} does not hold demonstrations ({error}): {fix}") from error
    shapes = {"obs": [len(env.seats), *np.max(env.views, axis=0)], "actions": [len(env.seats), *_action_shape(env)]}
    for name, want in shapes.items():
        have = list(getattr(found, name).shape[2:])
        if have != want:
            raise ValueError(
                f'{other}: {name} of a moment is {have}, and in env "{env.name}" {[int(size) for size in want]}; {fix}'
            )
    for seat, space in enumerate(env.actions):
        done = found.actions[:, :, seat][found.acting[:, :, seat]]
        if isinstance(space, Discrete) and done.size and done.max() >= space.n:
            raise ValueError(
                f'{other}: action {done.max()} of seat {env.seats[seat]}, which has {space.n} in "{env.name}"; {fix}'
            )
    return found


def _action_shape(env: VectorEnv) -> list[int]:
    """Returns the shape of a seat's recorded action: that of the seat with the longest."""
    widths = [head_for(space).width for space in env.actions]
    return [max(widths)] if any(widths) else []


def encoded(space: Space, actions: Tensor) -> Tensor:
    """Returns actions [...] as float32 vectors [..., A']: one-hot, or for continuous ones half-widths around the middle
    of the space, clamped to its bounds."""
    if isinstance(space, Discrete):
        return nn.functional.one_hot(actions.long(), space.n).float()
    if isinstance(space, MultiDiscrete):
        parts = [encoded(Discrete(size), actions[..., i]) for i, size in enumerate(space.sizes)]
        return torch.cat(parts, -1)
    head, bounded = GaussianHead(space), torch.isfinite(torch.tensor(space.high) - torch.tensor(space.low))
    unit = (actions[..., : head.width] - head.middle) / head.half
    return torch.where(bounded, unit.clamp(-1, 1), unit)


def code_size(space: Space) -> int:
    """Returns the length of the vectors that `encoded` returns."""
    if isinstance(space, Continuous):
        return len(space.low)
    return space.n if isinstance(space, Discrete) else sum(space.sizes)


class Shown:
    """Demonstrations at the seats of a stack, each array [P, T, C, ...]. `draw` samples transitions for each member, or
    with `memory` sequences that start with a game."""

    def __init__(self, stack: Stack, moves: Demonstrations, memory: bool) -> None:
        self.stack = stack
        self.views = stack.seating.observe(moves.obs, 2).flatten(2, 3)
        self.actions, self.acting = stack.rows(moves.actions), stack.rows(moves.acting)
        if stack.head.width:  # padded to the longest action of any seat
            self.actions = self.actions[..., : stack.head.width]
        self.actions = self.actions if self.actions.is_floating_point() else self.actions.long()
        self.legal = None if moves.legal is None else stack.rows(moves.legal)
        seats = len(stack.seating.seats[0])
        self.fresh = torch.from_numpy(moves.fresh).repeat_interleave(seats, 1).expand(self.acting.shape)
        begin = self.fresh if memory else self.acting
        self.starts = [own.flatten().nonzero()[:, 0] for own in begin]  # t * C + c, where sequences may start

    @property
    def idle(self) -> list[str]:
        """The policies without any action in the demonstrations."""
        return [name for name, acting in zip(self.stack.seating.names, self.acting, strict=True) if not acting.any()]

    def draw(self, count: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Samples `count` sequences of `length` steps: returns their indices t * C + c (int64) and a mask of the
        actions to imitate, [P, L, M] each."""
        _, T, C = self.acting.shape
        first = torch.stack([own[torch.randint(len(own), (count,), generator=generator)] for own in self.starts])
        at = first[:, None] + C * torch.arange(length)[:, None]
        inside = at < T * C
        at = at.clamp(max=T * C - 1)
        return at, inside & self.take(self.acting, at)

    @staticmethod
    def take(x: Tensor, at: Tensor) -> Tensor:
        """Gathers indices from an array: [P, T, C, ...] -> [P, L, M, ...]."""
        return x.flatten(1, 2)[torch.arange(len(x))[:, None, None], at]

    def seen(self, at: Tensor) -> Tensor:
        """Returns the network inputs at the indices [P, L, M], normalised if the stack does so."""
        views = self.take(self.views, at)
        return self.stack.norm.normalise(views) if self.stack.norm else views

    def moves(self, at: Tensor) -> Tensor:
        """Returns observations and encoded actions at indices [P, 1, M], concatenated: [P, M, D] float32."""
        code = encoded(self.stack.seating.space, self.take(self.actions, at))
        return torch.cat([self.seen(at).flatten(3).float(), code], -1)[:, 0]


def demonstrated(path: str, learner: NetLearner, *, memory: bool) -> list[Shown]:
    """Returns the demonstrations of each stack. Raises ValueError if a policy has no action in them, or if a recurrent
    policy has no first step of a game."""
    moves = read_demonstrations(path, learner.env)
    found = [Shown(stack, moves, memory and bool(stack.config.memory)) for stack in learner.stacks]
    for shown in found:
        if shown.idle:
            raise ValueError(f"in {path} nobody acts at the seats of policy {shown.idle[0]}: record more steps")
        if not all(map(len, shown.starts)):
            raise ValueError(f"in {path} no game begins, and a policy with memory learns from there: record more steps")
    return found


# ---- behaviour cloning


class BC(AlgorithmConfig):
    """Behaviour cloning: maximises the likelihood of the actions in a demonstrations file (see `record`). Play in the
    env only measures the policy."""

    type: Literal["bc"] = "bc"
    """Selects behaviour cloning."""
    demonstrations: str
    """Path of the demonstrations file (.npz)."""
    horizon: int = Field(16, ge=1)
    """Env steps between updates, of every parallel game; they measure the policy and are not trained on."""
    updates: int = Field(8, ge=1)
    """Gradient steps per rollout."""
    batch: int = Field(256, ge=1)
    """Actions per gradient step."""
    window: int = Field(64, ge=1)
    """Sequence length of recurrent policies; sequences start with a game."""
    entropy: float = Field(0.0, ge=0)
    """Coefficient of the entropy bonus."""

    def teacher(self) -> Callable[..., NetLearner]:
        return Clone


class Clone(NetLearner):
    """Learner of behaviour cloning. Raises ValueError if the demonstrations do not fit the env or its policies."""

    def __init__(self, config: BC, pupils: Pupils) -> None:
        super().__init__(pupils)
        self.config = config
        self.shown = demonstrated(config.demonstrations, self, memory=True)
        for shown in self.shown:
            if norm := shown.stack.norm:
                norm.see(shown.views.flatten(1, 2), shown.acting.flatten(1).float(), self.together.total)

    def update(self, batch: Batch, progress: float) -> dict[str, Metrics]:
        """Takes `updates` gradient steps on the demonstrations; ignores the batch. Returns metrics by policy."""
        lines: dict[str, list[Figures]] = {name: [] for name in self.names}
        for shown in self.shown:
            names = shown.stack.seating.names
            seed = derive(self.seeds[names[0]], "bc", shown.stack.version)
            generator = torch.Generator().manual_seed(seed)
            for _ in range(self.config.updates):
                for name, line in zip(names, self._learn(shown, generator, progress), strict=True):
                    lines[name].append(line)
        return {name: means(own) for name, own in lines.items()}

    def _learn(self, shown: Shown, generator: torch.Generator, progress: float) -> list[Figures]:
        """Takes one gradient step; returns metrics of each member."""
        stack, length = shown.stack, self.config.window if shown.stack.config.memory else 1
        at, moves = shown.draw(max(1, self.config.batch // length), length, generator)
        out, _ = stack.net.unroll(shown.seen(at), None, shown.take(shown.fresh, at))
        legal = None if shown.legal is None else shown.take(shown.legal, at)
        logp, entropy = stack.head.score(out, shown.take(shown.actions, at), legal)
        share = shares(moves.float())
        total, lines = out.new_zeros(()), []
        for own, spread, weight in zip(logp.flatten(1), entropy.flatten(1), share.flatten(1), strict=True):
            loss, figures = cross_entropy_loss(Scored(own, spread, own, None, torch.ones_like(own), weight))
            uncertainty = (weight * spread).sum()
            total = total + loss - self.config.entropy * uncertainty
            lines.append(figures | {"entropy": uncertainty.detach()})
        norms = stack.optimizer.step(total, progress)
        stack.version += 1
        return [line | {"gradient": norm} for line, norm in zip(lines, norms, strict=True)]


# ---- generative adversarial imitation


class GAIL(ActorCriticConfig):
    """GAIL: PPO (see there) on the rewards of a discriminator that separates the policy's transitions from those in a
    demonstrations file (see `record`)."""

    type: Literal["gail"] = "gail"
    """Selects GAIL."""
    demonstrations: str
    """Path of the demonstrations file (.npz)."""
    reward: Reward = "positive"
    """Reward of a transition: `positive` is -log(1 - D), which favours long games; `logit` may be negative."""
    rounds: int = Field(16, ge=1)
    """Gradient steps of the discriminator per rollout."""
    pairs: int = Field(256, ge=1)
    """Transitions of either kind per discriminator step."""
    penalty: float = Field(1.0, ge=0)
    """Coefficient of the gradient penalty, the squared distance of the discriminator's gradient norm from 1."""
    discriminator_lr: float | None = Field(None, gt=0, le=1_000_000)
    """Learning rate of the discriminator; null uses the policy's."""
    epochs: int = Field(4, ge=1)
    """Passes over each rollout."""
    minibatches: int = Field(4, ge=1)
    """Gradient steps per pass."""
    clip: float = Field(0.2, gt=0)
    """Clipping distance of the probability ratio from 1."""

    def loss(self, rows: Scored) -> tuple[Tensor, Figures]:
        return clipped_policy_loss(rows, clip=self.clip)

    def teacher(self) -> Callable[..., NetLearner]:
        return Gail


@dataclass
class Discriminator:
    """Discriminators of a stack, one network per member: transitions [P, R, D] -> logits [P, R] of being the
    expert's."""

    net: Net
    optimizer: Optimizer

    def __call__(self, moves: Tensor) -> Tensor:
        return self.net(moves)[..., 0]


class Gail(ActorCritic):
    """Learner of GAIL. Raises ValueError for pixel observations, and if the demonstrations do not fit the env or its
    policies."""

    def __init__(self, config: GAIL, pupils: Pupils) -> None:
        if any(len(view) == 3 for view in pupils.env.views):
            raise ValueError(f'gail cannot see the pixels of env "{pupils.env.name}" beside actions: use bc')
        super().__init__(config, pupils)
        self.imitation = config
        self.shown = demonstrated(config.demonstrations, self, memory=False)
        self.discriminators = [self._discriminator(stack) for stack in self.stacks]

    def _discriminator(self, stack: Stack) -> Discriminator:
        seating = stack.seating
        lr = self.imitation.discriminator_lr or stack.config.lr
        config = stack.config.model_copy(update={"memory": 0, "lr": lr})
        seeds = [derive(self.seeds[name], "discriminator") for name in seating.names]
        net = Net((int(np.prod(seating.inputs)) + code_size(seating.space),), 1, config, generators(seeds))
        return Discriminator(net, Optimizer(net, seating.names, config, self.together))

    def update(self, batch: Batch, progress: float) -> dict[str, Metrics]:
        """Trains the discriminators, replaces the rewards by theirs, and trains the policies on them; returns metrics
        by policy."""
        rewards = np.zeros_like(batch.rewards)
        lines: dict[str, Metrics] = {name: {} for name in self.names}
        for shown, judge in zip(self.shown, self.discriminators, strict=True):
            seating = shown.stack.seating
            played = Shown(shown.stack, moves_of(batch), memory=False)
            idle = self.together.total(torch.tensor([float(len(played.idle))]))
            if not idle.item():  # in any process: a rollout may be too short for every policy to act
                lines |= self._tell_apart(judge, shown, played, progress)
            earned = self._by_seat(self._earned(judge, played), len(seating.seats[0]))
            rewards[..., seating.flat] = earned.numpy()
        learned = super().update(replace(batch, rewards=rewards), progress)
        return {name: lines[name] | line for name, line in learned.items()}

    def _tell_apart(self, judge: Discriminator, expert: Shown, policy: Shown, progress: float) -> dict[str, Metrics]:
        """Trains the discriminators of a stack; returns metrics by policy."""
        config, names = self.imitation, expert.stack.seating.names
        seed = derive(self.seeds[names[0]], "gail", expert.stack.version)
        generator = torch.Generator().manual_seed(seed)
        lines: list[Figures] = []
        for _ in range(config.rounds):
            theirs, ours = (side.moves(side.draw(config.pairs, 1, generator)[0]) for side in (expert, policy))
            loss, figures = discriminator_loss(judge(theirs), judge(ours))
            if config.penalty:
                mix = torch.rand(*theirs.shape[:2], 1, generator=generator)
                loss = loss + config.penalty * gradient_penalty(judge, theirs, ours, mix)
            judge.optimizer.step(loss.sum(), progress)
            lines.append(figures)
        return {name: means([{k: v[p] for k, v in line.items()} for line in lines]) for p, name in enumerate(names)}

    @torch.no_grad()
    def _earned(self, judge: Discriminator, played: Shown) -> Tensor:
        """Returns the discriminator's reward of every transition [P, T, C]; 0 where a seat did not act."""
        P, T, C = played.acting.shape
        logit = judge(played.moves(torch.arange(T * C).expand(P, 1, -1))).view(P, T, C)
        return imitation_reward(logit, self.imitation.reward) * played.acting

    # ---- state

    def modules(self) -> dict[str, nn.Module]:
        return super().modules() | {f"discriminator.{i}": judge.net for i, judge in enumerate(self.discriminators)}

    def optimizers(self) -> dict[str, Optimizer]:
        own = {f"discriminator_adam.{i}": judge.optimizer for i, judge in enumerate(self.discriminators)}
        return super().optimizers() | own
