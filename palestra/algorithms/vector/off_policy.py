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

from palestra.algorithms.vector.critics import Critic, copy_of, follow, held
from palestra.envs.vector.base import Arrays, MultiDiscrete, Space, VectorEnv
from palestra.learners.nets import AlgorithmConfig, NetLearner, NetPolicyConfig, Optimizer, Pupils, Stack, part
from palestra.losses.critics import critic_loss, td_target
from palestra.losses.policy import Figures
from palestra.nets.heads import NEVER, Head
from palestra.nets.layers import Net, generators
from palestra.nets.replay import Moves, Replay
from palestra.nets.seating import Seating
from palestra.nets.squashed import LOG_2, BoundedHead, Codes, idle
from palestra.policies.nets import Choose, NetPlayer, sampling
from palestra.rollouts.play import derive
from palestra.types import Batch, Metrics


class OffPolicyConfig(AlgorithmConfig):
    """Base config of off-policy actor-critics: collect `horizon` steps, add them to the replay buffer, then take
    `updates` gradient steps."""

    horizon: int = Field(8, ge=1)
    """Rollout length: steps of every parallel game between updates."""
    updates: int = Field(8, ge=1)
    """Gradient steps per rollout."""
    batch: int = Field(256, ge=1)
    """Joint transitions per gradient step."""
    warmup: int = Field(1000, ge=1)
    """Joint transitions collected with random actions before training starts; at most `capacity`."""
    capacity: int = Field(100_000, ge=1)
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
        if self.warmup > self.capacity:
            raise ValueError(
                f"warmup is {self.warmup}, but only {self.capacity} moments are remembered (capacity), so learning "
                "would never begin: lower the one or raise the other"
            )
        return self


@dataclass
class Answer:
    """Output of a stack's policies: network outputs `out` [P, R, O], encoded actions `code` [P, R, A], and
    log-probabilities if the algorithm needs them: [P, R] of the sampled actions, or [P, R, A] of every discrete action.
    All float32."""

    out: Tensor
    code: Tensor
    logp: Tensor | None = None


@dataclass
class Scene:
    """Update batch of one stack: policy inputs `views` [P, R, *view] and action masks, critic inputs `seen` [P, R,
    ...], encoded actions `code` [P, R, A], row weights for the critics (`judged`) and for the policies (`share`) [P,
    R]. The policies' are 0 for rows in which the seat did not act; both sum to one for each seat."""

    views: Tensor
    legal: Tensor | None
    seen: Tensor
    code: Tensor
    judged: Tensor
    share: Tensor


class OffPolicy(NetLearner):
    """Base learner of off-policy actor-critics; a subclass defines the policies' actions, target values and losses.
    `twins` critics evaluate each policy; policies and target networks are updated every `delay`-th step. Raises
    ValueError for envs and policies that these algorithms do not support (see `refuse`)."""

    twins = 2
    delay = 1

    def __init__(self, config: OffPolicyConfig, pupils: Pupils) -> None:
        refuse(config, pupils.env, pupils.policies, self.branches(pupils.env.actions[0]))
        self.config = config
        super().__init__(pupils)
        self.codes = Codes({seat: stack.head for stack in self.stacks for seat in stack.seating.flat})
        self.critics = [self._critic(stack) for stack in self.stacks]
        self.replay = Replay(
            config.capacity, gamma=config.gamma, seats=sorted(self.codes.heads), joint=config.critic == "central"
        )
        self.steps = 0
        self.prepare()

    # ---- defined by an algorithm

    def prepare(self) -> None:
        """Builds further parts of the learner."""

    @abstractmethod
    def head(self, space: Space) -> Head:
        """Returns the policies' distribution over actions."""

    def branches(self, space: Space) -> bool:
        """True if critics output a value for each action, see `Critic`."""
        return False

    @abstractmethod
    def answer(self, i: int, views: Tensor, legal: Tensor | None, generator: torch.Generator) -> Answer:
        """Returns the actions of stack i's policies, differentiable with respect to their networks."""

    @abstractmethod
    def foresee(self, i: int, views: Tensor, legal: Tensor | None, generator: torch.Generator) -> Answer:
        """Returns the next actions that targets assume."""

    @abstractmethod
    def worth(self, i: int, q: Tensor, answer: Answer) -> Tensor:
        """Returns the target value [P, R] of a state from the critics' values `q` [K, P, R, O] of the policy's output
        there."""

    @abstractmethod
    def loss(self, i: int, q: Tensor, answer: Answer, scene: Scene) -> tuple[Tensor, Figures]:
        """Returns the policies' losses [P] and metrics [P]."""

    def adapt(self, i: int, answer: Answer, scene: Scene, progress: float) -> Figures:
        """Updates anything else after a policy step; returns metrics."""
        return {}

    # ---- construction

    def stack(self, seating: Seating) -> Stack:
        made = super().stack(seating)
        made.head = self.head(seating.space)
        return made

    def _critic(self, stack: Stack) -> Critic:
        seating, branches = stack.seating, self.branches(stack.seating.space)
        width = len(self.codes.columns[seating.flat[0]])
        view = seating.inputs
        if self.config.critic == "central":
            whole = self.whole_size
            view = (whole + 2 * len(self.env.seats) + self.codes.size,)
        view = view if branches else (view[0] + width,)
        seeds = [derive(self.seeds[name], "critic", k) for k in range(self.twins) for name in seating.names]
        net = Net(view, width if branches else 1, stack.config, generators(seeds))
        config = stack.config.model_copy(update={"lr": self.config.critic_lr or stack.config.lr})
        return Critic(
            net, copy_of(net), Optimizer(net, seating.names * self.twins, config, self.together), self.twins, branches
        )

    # ---- play

    @property
    def warm(self) -> bool:
        """True if the replay buffer holds at least `warmup` transitions."""
        return len(self.replay) >= self.config.warmup

    def players(self, progress: float) -> list[NetPlayer]:
        return [
            stack.player(self.explore(stack, progress) if self.warm else uniform(stack.head)) for stack in self.stacks
        ]

    @property
    def sees_all(self) -> bool:
        return self.config.critic == "central"

    def explore(self, stack: Stack, progress: float) -> Choose:
        """Returns the action function of a stack's policies in training."""
        return sampling(stack.head)

    # ---- learning

    def update(self, batch: Batch, progress: float) -> dict[str, Metrics]:
        """Adds the batch to the replay buffer, then takes `updates` gradient steps once it holds `warmup` transitions;
        returns metrics by policy."""
        self.replay.add(batch)
        self.see(batch)
        lines: list[list[Figures]] = [[] for _ in self.stacks]
        if self.warm:
            rng = np.random.default_rng(derive(self.seeds[self.names[0]], "moments", self.steps))
            generator = torch.Generator().manual_seed(int(rng.integers(2**62)))
            for _ in range(self.config.updates):
                moves = self.replay.sample(self.config.batch, rng)
                for own, line in zip(lines, self.learn(moves, generator, progress), strict=True):
                    own.append(line)
        means = [mean_of(own) for own in lines]
        return {
            name: {key: float(value[p]) for key, value in line.items()}
            for stack, line in zip(self.stacks, means, strict=True)
            for p, name in enumerate(stack.seating.names)
        }

    def learn(self, moves: Moves, generator: torch.Generator, progress: float) -> list[Figures]:
        """Takes one gradient step of all critics, and every `delay`-th time of the policies; returns metrics by
        stack."""
        targets = self.targets(moves, generator)
        joint = self.codes.of(moves.actions, moves.acting)
        scenes = [self._scene(stack, moves, joint) for stack in self.stacks]
        lines = [self._judge(*judged, progress) for judged in zip(self.critics, scenes, targets, strict=True)]
        self.steps += 1
        if self.steps % self.delay == 0:
            for i, scene in enumerate(scenes):
                lines[i] |= self._improve(i, scene, generator, progress)
            for net, target in self.followed():
                follow(net, target, self.config.tau)
        return lines

    @torch.no_grad()
    def targets(self, moves: Moves, generator: torch.Generator) -> list[Tensor]:
        """Returns the critics' targets [P, R] for each stack."""
        answers = [self._next(i, moves, generator) for i in range(len(self.stacks))]
        joint = torch.zeros(len(moves.rewards), self.codes.size)
        for stack, answer in zip(self.stacks, answers, strict=True):
            self.codes.put(joint, stack.seating, answer.code)
        targets = []
        for i, (stack, critic, answer) in enumerate(zip(self.stacks, self.critics, answers, strict=True)):
            seen = self._seen(stack, moves.next_obs, moves.next_state, moves.next_acting, joint)
            value = self.worth(i, critic.judge(critic.target, seen, answer.code), answer)
            targets.append(td_target(stack.rows(moves.rewards, 1), stack.rows(moves.discounts, 1), value))
        return targets

    def _next(self, i: int, moves: Moves, generator: torch.Generator) -> Answer:
        """Returns the next actions of stack i's policies; the idle code, with probability 1, where a seat does not
        act."""
        stack = self.stacks[i]
        answer = self.foresee(i, stack.views(moves.next_obs, 1), rows_of(stack, moves.next_legal), generator)
        if self.config.critic == "own":  # the next step is the seat's own next decision
            return answer
        acting, nothing = stack.rows(moves.next_acting, 1)[..., None], idle(stack.head)
        answer.code = torch.where(acting, answer.code, nothing)
        if answer.logp is not None:
            certain = (1 - nothing) * NEVER if answer.logp.dim() > 2 else torch.zeros(1)
            logp = answer.logp if answer.logp.dim() > 2 else answer.logp[..., None]
            answer.logp = torch.where(acting, logp, certain).view_as(answer.logp)
        return answer

    def _scene(self, stack: Stack, moves: Moves, joint: Tensor) -> Scene:
        weight = stack.seating.take(moves.weight, 1)  # [P, M, S]
        return Scene(
            views=stack.views(moves.obs, 1),
            legal=rows_of(stack, moves.legal),
            seen=self._seen(stack, moves.obs, moves.state, moves.acting, joint),
            code=self.codes.own(joint, stack.seating),
            judged=shares(weight),
            share=shares(weight * stack.seating.take(moves.acting, 1)),
        )

    def _judge(self, critic: Critic, scene: Scene, target: Tensor, progress: float) -> Figures:
        q = critic.of_taken(scene.seen, scene.code)
        loss = critic_loss(q, target, scene.judged)
        critic.optimizer.step(loss.sum(), progress)
        seats = scene.judged.sum(1).clamp(min=1e-8)
        return {"critic_loss": loss.detach(), "q": (scene.judged * q[0].detach()).sum(1) / seats}

    def _improve(self, i: int, scene: Scene, generator: torch.Generator, progress: float) -> Figures:
        stack, critic = self.stacks[i], self.critics[i]
        answer = self.answer(i, scene.views, scene.legal, generator)
        with held(critic.net):
            q = critic.judge(critic.net, scene.seen, answer.code)
        loss, figures = self.loss(i, q, answer, scene)
        norms = stack.optimizer.step(loss.sum(), progress)
        stack.version += 1
        figures = {"policy_loss": loss.detach(), "gradient": norms} | figures
        return figures | self.adapt(i, answer, scene, progress)

    def _seen(self, stack: Stack, obs: Tensor, state: Tensor | None, acting: Tensor, joint: Tensor) -> Tensor:
        """Returns the critics' inputs besides the seat's own action [P, R, ...]."""
        if self.config.critic == "own":
            return stack.views(obs, 1)
        seating, N = stack.seating, len(self.env.seats)
        whole = torch.cat([self.whole(obs, state, 1), acting.float()], -1)[None, :, None]
        others = self.codes.others(joint, seating)
        ids = torch.eye(N)[torch.tensor(seating.seats)][:, None]  # [P, 1, S, N]
        shape = others.shape[:3]
        seen = torch.cat([whole.expand(*shape, -1), ids.expand(*shape, N), others], -1)
        return seen.flatten(1, 2)

    # ---- state

    def followed(self) -> list[tuple[Net, Net]]:
        """Returns pairs of online and target networks."""
        return [(critic.net, critic.target) for critic in self.critics]

    def modules(self) -> dict[str, nn.Module]:
        nets = {f"critic.{i}": critic.net for i, critic in enumerate(self.critics)}
        return super().modules() | nets | {f"target.{i}": critic.target for i, critic in enumerate(self.critics)}

    def optimizers(self) -> dict[str, Optimizer]:
        return super().optimizers() | {f"critic_adam.{i}": critic.optimizer for i, critic in enumerate(self.critics)}

    def arrays(self) -> Arrays:
        replay = {f"replay/{name}": array for name, array in self.replay.arrays().items()}
        return super().arrays() | replay | {"steps": np.array([self.steps])}

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        super().load(arrays)
        self.replay.load(part(arrays, "replay"))
        self.steps = int(arrays["steps"][0])


def refuse(config: OffPolicyConfig, env: VectorEnv, policies: Mapping[str, NetPolicyConfig], branches: bool) -> None:
    """Raises ValueError for recurrent policies, multi-discrete actions, and critics that would need pixels beside
    actions."""
    kind = getattr(config, "type", "this algorithm")
    for name, policy in policies.items():
        if policy.memory:
            raise ValueError(
                f"policy {name} has memory, but {kind} learns from single moments, before which nothing is "
                "remembered: set memory: 0, or train it with ppo or a2c"
            )
    if isinstance(env.actions[0], MultiDiscrete):
        raise ValueError(f'env "{env.name}" takes several choices at once, which {kind} cannot learn: use ppo or a2c')
    pixels = any(len(view) > 1 for view in env.views)
    if pixels and not (branches if config.critic == "own" else env.state_size):
        raise ValueError(f'critics of {kind} cannot see the pixels of env "{env.name}" beside actions: use ppo or a2c')


def uniform(head: Head) -> Choose:
    """Returns an action function that samples legal actions uniformly."""

    def choose(out: Tensor, legal: Tensor | None, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        if isinstance(head, BoundedHead):
            unit = torch.empty(*out.shape[:-1], head.width).uniform_(-1, 1, generator=generator)
            return head.scale(unit), torch.full(unit.shape[:-1], -head.width * LOG_2)
        return head.sample(torch.zeros_like(out), legal, generator)

    return choose


def shares(weight: Tensor) -> Tensor:
    """Returns weights [P, M, S] divided by their sum per seat, as rows [P, R]; zeros where it is zero."""
    return (weight / weight.sum(1, keepdim=True).clamp(min=1e-8)).flatten(1, 2)


def rows_of(stack: Stack, x: Tensor | None) -> Tensor | None:
    """Reorders an array by stack: [M, N, ...] -> [P, R, ...]; None stays None."""
    return None if x is None else stack.rows(x, 1)


def mean_of(lines: Sequence[Figures]) -> Figures:
    """Returns the mean of each metric over the dicts that contain it."""
    found: dict[str, list[Tensor]] = {}
    for line in lines:
        for key, value in line.items():
            found.setdefault(key, []).append(value)
    return {key: torch.stack(values).mean(0) for key, values in found.items()}
