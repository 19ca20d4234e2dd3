"""Actor-critic training shared by PPO and A2C: policies, critics, and credit by GAE or V-trace.

Critics have their own networks and optimizers. A critic sees the observation of its seat (`critic: own`) or everything
(`critic: central`: the env's global state, or all observations together, and a one-hot seat); with `critics: one` a
single critic serves all policies. Independent PPO (de Witt et al., 2020) thus becomes MAPPO (Yu et al., 2022) by one
setting, and likewise every other algorithm here.

Shapes: `P` members, `T` steps, `B` parallel games, `S` seats of a member, `C` = B*S columns, `N` seats, `F` ended
games.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from palestra.envs.vector.base import Arrays
from palestra.learners.nets import AlgorithmConfig, NetLearner, Optimizer, Pupils, Stack, means, part
from palestra.losses.critics import value_loss
from palestra.losses.policy import Figures, Scored
from palestra.nets.layers import Net, generators
from palestra.nets.normalise import RunningNorm
from palestra.nets.returns import Course, gae, vtrace
from palestra.nets.seating import Seating, seat_stacks
from palestra.types import Batch, Metrics


class ActorCriticConfig(AlgorithmConfig):
    """Base config of on-policy actor-critic algorithms: collect a rollout of `horizon` steps, then train on it."""

    horizon: int = Field(128, ge=1)
    """Rollout length: steps of every parallel game per batch."""
    gamma: float = Field(0.99, ge=0, le=1)
    """Discount per decision of a seat."""
    gamma_end: float | None = Field(None, ge=0, le=1)
    """Discount at the end of the run, reached linearly; null keeps `gamma`. A rising discount learns the near future
    first (François-Lavet et al., 2015)."""
    lam: float = Field(0.95, ge=0, le=1)
    """GAE (or V-trace) lambda: 0 trusts the critic, 1 the rewards."""
    epochs: int = Field(1, ge=1)
    """Passes over each rollout."""
    minibatches: int = Field(1, ge=1)
    """Gradient steps per pass."""
    entropy: float = Field(0.0, ge=0)
    """Coefficient of the entropy bonus."""
    entropy_end: float | None = Field(None, ge=0)
    """Entropy coefficient at the end of the run, reached linearly; null keeps `entropy`. In two-player zero-sum games
    self-play cycles without a bonus, and a constant one keeps it off the equilibrium (Sokota et al., 2023)."""
    normalise: bool = True
    """Standardise each policy's advantages over the rollout."""
    critic: Literal["own", "central"] = "own"
    """Input of the critic: the seat's `own` observation, or `central`: the env's state (or all observations) and the
    seat."""
    critics: Literal["each", "one"] = "each"
    """A critic for `each` policy, or `one` for all."""
    value_norm: bool = False
    """Train the critic on returns normalised by their running mean and deviation (Yu et al., 2022)."""
    auxiliary: float = Field(0.0, ge=0)
    """Coefficient of a value loss on the policy network, through a last layer of its own (Cobbe et al., 2021). Useful
    on pixels with a central critic: the critic's targets teach the policy's features. 0 turns it off."""
    correct: Literal["none", "vtrace"] = "none"
    """`vtrace` corrects for actions of an older policy: advantages have bounded importance weights, and the loss's
    ratios are to the policy at the start of the update (the decoupled objective of Hilton et al., 2022)."""

    def entropy_at(self, progress: float) -> float:
        """Returns the entropy coefficient at `progress` in [0, 1]."""
        return _between(self.entropy, self.entropy_end, progress)

    def gamma_at(self, progress: float) -> float:
        """Returns the discount at `progress` in [0, 1]."""
        return _between(self.gamma, self.gamma_end, progress)

    @abstractmethod
    def loss(self, rows: Scored) -> tuple[Tensor, Figures]:
        """Returns the policy loss (a scalar) over transitions, and metrics."""

    def teacher(self) -> Callable[..., NetLearner]:
        return ActorCritic


@dataclass
class Critic:
    """Critic networks for the seats of a stack. `memory` maps each batch source to the recurrent state [P, C, H] at the
    start of its next batch, for recurrent critics."""

    seating: Seating
    net: Net
    optimizer: Optimizer
    norm: RunningNorm | None
    memory: dict[int, Tensor] = field(default_factory=dict)


class ActorCritic(NetLearner):
    """Learner of on-policy actor-critic algorithms. Raises ValueError if `critics: one` with `critic: own` meets seats
    whose observations differ in shape."""

    def __init__(self, config: ActorCriticConfig, pupils: Pupils) -> None:
        self.config, self.aside = config, config.auxiliary > 0
        super().__init__(pupils)
        self.critics = [self._critic(seating) for seating in self._judged(pupils.seats)]

    @property
    def sees_all(self) -> bool:
        return self.config.critic == "central"

    def _judged(self, seats: dict[str, list[int]]) -> list[Seating]:
        """Returns the seat mapping of each critic: which seats share its networks."""
        if self.config.critics == "each":
            return seat_stacks(self.env, seats, dict(self.policies))
        if self.config.critic == "own" and len({self.env.views[s] for own in seats.values() for s in own}) > 1:
            raise ValueError(
                "critics: one needs seats that see alike, and these do not: set critic: central, or critics: each"
            )
        flat = tuple(seat for own in seats.values() for seat in own)
        first = flat[0]
        return [Seating(("critic",), (flat,), len(self.env.seats), self.env.views[first], self.env.actions[first])]

    def _critic(self, seating: Seating) -> Critic:
        config = self.policies[seating.names[0] if seating.names[0] in self.policies else self.names[0]]
        seeds = [self.seeds[name if name in self.seeds else self.names[0]] ^ 1 for name in seating.names]
        net = Net(self._judging(seating), 1, config, generators(seeds))
        norm = RunningNorm(len(seating.names), 1, 0.99) if self.config.value_norm else None
        return Critic(seating, net, Optimizer(net, seating.names, config, self.together), norm)

    def _judging(self, seating: Seating) -> tuple[int, ...]:
        """Returns the shape of a critic's input."""
        if self.config.critic == "own":
            return seating.inputs
        return (self.whole_size + len(self.env.seats),)

    # ---- learning

    def update(self, batch: Batch, progress: float) -> dict[str, Metrics]:
        """Trains critics, then policies, for `epochs` passes over the batch in `minibatches`; returns metrics by
        policy."""
        figures: dict[str, list[dict[str, Any]]] = {name: [] for name in self.names}
        self.shuffle = torch.Generator().manual_seed(int(sum(s.version for s in self.stacks)) * 7919 + 1)
        now = replace(batch, logp=self._logp(batch)) if self.config.correct == "vtrace" else batch
        advantages, targets, known = self._credit(batch, now.logp, progress)
        for critic in self.critics:
            losses = self._judge(critic, batch, targets, known, progress)
            for stack in self.stacks:
                shared = self.config.critics == "one"
                for name in stack.seating.names if shared else set(stack.seating.names) & set(critic.seating.names):
                    figures[name].append({"value_loss": losses})
        lines = {name: means(own) for name, own in figures.items()}
        aims = self._aims(targets) if self.aside else targets
        for stack in self.stacks:
            for name, line in self._improve(stack, now, advantages, aims, known, progress).items():
                lines[name] |= line
        self.see(batch)
        return lines

    def _credit(self, batch: Batch, logp: np.ndarray, progress: float) -> tuple[Tensor, Tensor, Tensor]:
        """Returns advantages, critic targets (float32) and a mask of the actions that have them, [T, B, N] each. `logp`
        [T, B, N] are log-probabilities under the current policies, for V-trace."""
        values, bootstrap = self._values(batch)
        course = Course(
            torch.from_numpy(batch.rewards),
            values,
            bootstrap,
            torch.from_numpy(batch.over_seats),
            torch.from_numpy(batch.acting),
        )
        gamma, lam = self.config.gamma_at(progress), self.config.lam
        if self.config.correct == "vtrace":
            ratio = torch.from_numpy(np.exp(logp - batch.logp))
            advantages, targets, known = vtrace(course, ratio, gamma=gamma, lam=lam)
        else:
            advantages, known = gae(course, gamma=gamma, lam=lam)
            targets = advantages + values[:-1]
        return advantages, targets, known

    @torch.no_grad()
    def _values(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns the critics' values at every step [T+1, B, N], and the bootstrap value where a game ended [T, B, N]:
        0 for seats that terminated, whatever ended the game for the others."""
        values = torch.zeros(batch.acting.shape)
        bootstrap = torch.zeros(batch.rewards.shape)
        times, games = (torch.from_numpy(index) for index in batch.ends)
        cut = ~torch.from_numpy(batch.terminated_seats)[times, games]  # [F, N]
        for critic in self.critics:
            P, S = len(critic.seating.names), len(critic.seating.seats[0])
            views = self._judged_views(critic, batch)  # [P, T+1, B*S, ...]
            out, memories = critic.net.unroll(views, critic.memory.get(batch.source), self._fresh(batch, P, S))
            values[..., critic.seating.flat] = self._by_seat(self._restored(critic, out[..., 0]), S)
            if len(times):
                last = self._final_views(critic, batch)  # [P, F, S, ...]
                at_end = None
                if memories is not None:
                    at_end = memories.unflatten(2, (-1, S))[:, times, games].flatten(1, 2)
                ends, _ = critic.net.unroll(last.flatten(1, 2)[:, None], at_end)
                worth = self._restored(critic, ends[:, 0, :, 0]).view(P, -1, S)
                seats = torch.tensor(critic.seating.flat)
                here = torch.where(cut[:, seats], worth.permute(1, 0, 2).flatten(1), 0.0)
                bootstrap[times[:, None], games[:, None], seats[None]] = here
        return values, bootstrap

    def _judge(self, critic: Critic, batch: Batch, targets: Tensor, known: Tensor, progress: float) -> float:
        """Trains a critic on its targets; returns the mean loss."""
        P, S = len(critic.seating.names), len(critic.seating.seats[0])
        take = critic.seating.take
        target, weight = take(targets, 2).flatten(2, 3), take(known.float(), 2).flatten(2, 3)
        if critic.norm:
            critic.norm.see(target.flatten(1)[..., None], weight.flatten(1), self.together.total)
            target = critic.norm.normalise(target[..., None])[..., 0]
        views = self._judged_views(critic, batch)[:, :-1]
        fresh, memory = self._fresh(batch, P, S), critic.memory.get(batch.source)
        losses = []
        for piece in self._parts(weight, bool(critic.net.memory_units)):
            out, _ = critic.net.unroll(piece(views), piece.column(memory), piece(fresh[:, :-1]))
            loss = value_loss(out[..., 0], piece(target), shares(piece(weight)))
            critic.optimizer.step(loss, progress)
            losses.append(loss.item() / P)
        if critic.net.memory_units:  # with the weights that evaluate the next batch
            with torch.no_grad():
                memories = critic.net.unroll(views, memory, fresh[:, :-1])[1]
            assert memories is not None
            critic.memory[batch.source] = memories[:, -1]
        return float(np.mean(losses))

    def _aims(self, targets: Tensor) -> Tensor:
        """Returns the critics' targets [T, B, N] in the units of their outputs (normalised with `value_norm`)."""
        aims = targets.clone()
        for critic in self.critics:
            if critic.norm:
                own = critic.seating.take(targets, 2).flatten(2, 3)  # [P, T, B*S]
                scaled = critic.norm.normalise(own[..., None])[..., 0]
                aims[..., critic.seating.flat] = self._by_seat(scaled, len(critic.seating.seats[0]))
        return aims

    def _improve(
        self, stack: Stack, batch: Batch, advantages: Tensor, aims: Tensor, known: Tensor, progress: float
    ) -> dict[str, Metrics]:
        """Trains the policies of a stack; returns metrics by policy."""
        names, S = stack.seating.names, len(stack.seating.seats[0])
        advantage, aim, weight = stack.rows(advantages), stack.rows(aims), stack.rows(known.float())
        if self.config.normalise:
            advantage = self._standardised(advantage, weight)
        views, fresh = stack.views(batch.obs)[:, :-1], self._fresh(batch, len(names), S)[:, :-1]
        actions, logp = stack.actions(batch), stack.rows(batch.logp)
        legal = None if batch.legal is None else stack.rows(batch.legal)[:, :-1]
        memory = batch.memory.get("+".join(names))
        lines: list[list[dict[str, Any]]] = [[] for _ in names]
        bonus = self.config.entropy_at(progress)
        for piece in self._parts(weight, bool(stack.net.memory_units)):
            out, value = stack.net.unroll_judged(piece(views), piece.column(memory), piece(fresh))
            score = stack.head.score(out, piece(actions), None if legal is None else piece(legal))
            told = [x.flatten(1).unbind() for x in (*score, piece(logp), piece(advantage), shares(piece(weight)))]
            total = out.new_zeros(())
            for p in range(len(names)):
                new, entropy, old, credit, share = (x[p] for x in told)
                loss, figures = self.config.loss(Scored(new, entropy, old, None, credit, share))
                total = total + loss - (bonus * (share * entropy).sum() if bonus else 0.0)
                lines[p].append({"policy_loss": loss.detach(), **figures})
            if value is not None:
                for line, told_p, aim_p, share in zip(lines, value, piece(aim), shares(piece(weight)), strict=True):
                    missed = value_loss(told_p, aim_p, share)
                    total = total + self.config.auxiliary * missed
                    line[-1]["auxiliary_loss"] = missed.detach()
            norms = stack.optimizer.step(total, progress)
            for p in range(len(names)):
                lines[p][-1]["gradient"] = norms[p]
        stack.version += len(lines[0])
        return {name: means(own) for name, own in zip(names, lines, strict=True)}

    @torch.no_grad()
    def _logp(self, batch: Batch) -> np.ndarray:
        """Returns the log-probability of each action under the current policies [T, B, N]; the recorded one where no
        learning seat acts."""
        found = torch.from_numpy(batch.logp.copy())
        for stack in self.stacks:
            names, S = stack.seating.names, len(stack.seating.seats[0])
            fresh, memory = self._fresh(batch, len(names), S)[:, :-1], batch.memory.get("+".join(names))
            legal = None if batch.legal is None else stack.rows(batch.legal)[:, :-1]
            out, _ = stack.net.unroll(stack.views(batch.obs)[:, :-1], memory, fresh)
            logp, _ = stack.head.score(out, stack.actions(batch), legal)
            found[..., stack.seating.flat] = self._by_seat(logp, S)
        return np.where(batch.acting[:-1], found.numpy(), batch.logp)

    # ---- observations, rows, minibatches

    def _judged_views(self, critic: Critic, batch: Batch) -> Tensor:
        """Returns a critic's inputs at every step [P, T+1, B*S, ...]."""
        return self._seen(critic, batch.obs, batch.state, 2).flatten(2, 3)

    def _final_views(self, critic: Critic, batch: Batch) -> Tensor:
        """Returns a critic's inputs at the ends of games [P, F, S, ...]."""
        return self._seen(critic, batch.final_obs, batch.final_state, 1)

    def _seen(self, critic: Critic, obs: np.ndarray, state: np.ndarray | None, lead: int) -> Tensor:
        """Returns a critic's inputs: [..., N, *view] -> [P, ..., S, *input]."""
        seating = critic.seating
        if self.config.critic == "own":
            x = seating.observe(obs, lead)
            norm = next((s.norm for s in self.stacks if s.seating.names == seating.names), None)
            return norm.normalise(x) if norm else x
        whole = self.whole(obs, state, lead)
        N, P, S = len(self.env.seats), len(seating.names), len(seating.seats[0])
        ids = torch.eye(N)[torch.tensor(seating.seats)].view(P, *[1] * lead, S, N)
        shape = (P, *whole.shape[:lead], S)
        return torch.cat([whole[None, ..., None, :].expand(*shape, -1), ids.expand(*shape, N)], -1)

    @staticmethod
    def _fresh(batch: Batch, P: int, S: int) -> Tensor:
        """Returns a mask of the first steps of games, for each column [P, T+1, B*S]."""
        fresh = torch.from_numpy(batch.fresh).repeat_interleave(S, 1)
        return fresh.expand(P, *fresh.shape)

    @staticmethod
    def _by_seat(x: Tensor, S: int) -> Tensor:
        """[P, T, B*S] -> [T, B, P*S]."""
        return x.unflatten(2, (-1, S)).permute(1, 2, 0, 3).flatten(2)

    @staticmethod
    def _restored(critic: Critic, values: Tensor) -> Tensor:
        return critic.norm.restore(values[..., None])[..., 0] if critic.norm else values

    def _standardised(self, advantage: Tensor, weight: Tensor) -> Tensor:
        """Returns advantages with mean 0 and deviation 1 for each member, over all processes."""
        sums = torch.stack([weight.sum((1, 2)), (weight * advantage).sum((1, 2)), (weight * advantage**2).sum((1, 2))])
        count, first, second = self.together.total(sums)
        mean = first / count.clamp(min=1)
        deviation = (second / count.clamp(min=1) - mean**2).clamp(min=0).sqrt()
        return (advantage - mean[:, None, None]) / (deviation[:, None, None] + 1e-8)

    def _parts(self, weight: Tensor, recurrent: bool) -> Iterator[Part]:
        """Yields the minibatches of all epochs. Recurrent networks get whole columns of time; others single transitions
        (with one member, only those that have credit)."""
        P, T, C = weight.shape
        for _ in range(self.config.epochs):
            if recurrent:
                order, columns = torch.randperm(C, generator=self.shuffle), True
            else:
                flat = weight.reshape(P, -1)
                some = flat[0].nonzero()[:, 0] if P == 1 and not bool(flat.all()) else None
                count = T * C if some is None else len(some)
                order, columns = torch.randperm(count, generator=self.shuffle), False
                order = order if some is None else some[order]
            # With few transitions some minibatches are empty: they repeat one (or take one of weight 0), since other
            # processes may be waiting for this one's gradients.
            spare = order[:1] if len(order) else torch.zeros(1, dtype=torch.long)
            for index in order.tensor_split(self.config.minibatches):
                yield Part(index if len(index) else spare, columns)

    # ---- state

    def modules(self) -> dict[str, nn.Module]:
        norms = {f"value_norm.{i}": critic.norm for i, critic in enumerate(self.critics) if critic.norm}
        return super().modules() | {f"critic.{i}": critic.net for i, critic in enumerate(self.critics)} | norms

    def optimizers(self) -> dict[str, Optimizer]:
        return super().optimizers() | {f"critic_adam.{i}": critic.optimizer for i, critic in enumerate(self.critics)}

    def arrays(self) -> Arrays:
        memories = {
            f"critic_memory.{i}/{source}": memory.numpy()
            for i, critic in enumerate(self.critics)
            for source, memory in critic.memory.items()
        }
        return super().arrays() | memories

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        super().load(arrays)
        for i, critic in enumerate(self.critics):
            kept = part(arrays, f"critic_memory.{i}")
            critic.memory = {int(source): torch.from_numpy(np.array(memory)) for source, memory in kept.items()}


@dataclass(frozen=True)
class Part:
    """A minibatch of `[P, T, C, ...]`: columns, giving `[P, T, M, ...]`, or single transitions, numbered t * C + c,
    giving `[P, 1, M, ...]`. `index` [M] is int64."""

    index: Tensor
    columns: bool

    def __call__(self, x: Tensor) -> Tensor:
        """Returns the minibatch's part of `x` [P, T, C, ...]."""
        if self.columns:
            return x.index_select(2, self.index)
        return x.reshape(x.shape[0], -1, *x.shape[3:]).index_select(1, self.index)[:, None]

    def column(self, memory: Tensor | None) -> Tensor | None:
        """Returns the initial recurrent states [P, M, H] of the minibatch's columns; None for single transitions."""
        return None if memory is None or not self.columns else memory.index_select(1, self.index)


def shares(weight: Tensor) -> Tensor:
    """Returns weights [P, T, M] divided by their sum per member; zeros where it is zero."""
    return weight / weight.sum((1, 2), keepdim=True).clamp(min=1e-8)


def _between(start: float, end: float | None, progress: float) -> float:
    """Returns the linear interpolation from `start` to `end` at `progress`; `start` if `end` is None."""
    return start if end is None else start + (end - start) * progress
