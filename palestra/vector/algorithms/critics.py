"""Critics: of state values, and of action values with target networks.

Shapes: `K` critics, `P` members of a stack, `R` rows, `A` numbers of an encoded action, `O` outputs,
`T` steps, `C` columns (a seat of a parallel game each).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from palestra.envs.vector_base import Arrays
from palestra.parallel.process_group import SumOverProcesses
from palestra.vector.algorithms.minibatches import MiniBatch, normalise_weights
from palestra.vector.learners.nets import WEIGHT_KEY, mean_metrics
from palestra.vector.learners.optimizers import StackedOptimizer
from palestra.vector.losses import value_loss
from palestra.vector.nets.layers import Net, Team, acting_team, states_at
from palestra.vector.nets.normalise import RunningNorm, normalise, rescale_outputs
from palestra.vector.nets.on_device import RolloutTensors, as_tensor
from palestra.vector.nets.seat_mapping import SeatMapping

M = TypeVar("M", bound=nn.Module)


@dataclass
class ValueCritic:
    """Critic networks for the seats of a stack. `recurrent_states` maps each batch source to the state [P, C, H] at the
    start of its next batch, for recurrent critics. With `preserve_outputs` the last layer is rescaled when the
    statistics of `norm` change, so that values do not (PopArt)."""

    seat_mapping: SeatMapping
    net: Net
    optimizer: StackedOptimizer
    norm: RunningNorm | None
    preserve_outputs: bool = False
    recurrent_states: dict[int, Tensor] = field(default_factory=dict)

    def values(self, out: Tensor) -> Tensor:
        """Returns state values [...] in units of reward from the network's outputs [..., 1]."""
        if self.norm is not None:
            out = self.norm.denormalise(out)
        return out[..., 0]

    @torch.no_grad()
    def evaluate(
        self, observations: Tensor, final_observations: Tensor, batch: RolloutTensors
    ) -> tuple[Tensor, Tensor]:
        """Returns the values of all seats at every step [T+1, B, P*S], from observations [P, T+1,
        B*S, ...], and at the ends of games [F, P*S], from `final_observations` [P, F, S, ...]."""
        mapping, (times, games) = self.seat_mapping, batch.end_index
        acts = mapping.select_seats(batch.agent_mask, 2)  # [P, T+1, B, S]
        state = self.recurrent_states.get(batch.worker)
        is_first = mapping.repeat_games(batch.is_first)
        out, memories = self.net.unroll(observations, state, is_first, Team(acts.flatten(2, 3)))
        values = mapping.by_seat(self.values(out))
        if not len(times):
            return values, values[0, :0]
        last = self.acts_at_end(acts, batch)
        at_end = states_at(memories, acts.shape[3], times, games)
        team = Team(last.flatten(1)[:, None])
        ends, _ = self.net.unroll(final_observations.flatten(1, 2)[:, None], at_end, None, team)
        return values, self.values(ends[:, 0]).view(last.shape).movedim(0, 1).flatten(1)

    def acts_at_end(self, acts: Tensor, batch: RolloutTensors) -> Tensor:
        """Returns which seats the final observations of episodes [P, F, S] are of: those that
        acted, `acts` [P, T+1, B, S], and have not terminated."""
        times, games = batch.end_index
        if batch.seat_terminated is None:
            return acts[:, times, games]
        gone = self.seat_mapping.select_seats(batch.seat_terminated, 2)
        return acts[:, times, games] & ~gone[:, times, games]

    def normalise(self, target: Tensor) -> Tensor:
        """Returns targets [P, ...] in the units of the network's outputs."""
        return normalise(self.norm, target[..., None])[..., 0]

    def update_norm(self, target: Tensor, weight: Tensor, all_reduce: SumOverProcesses) -> None:
        """Adds targets with their weights, [P, T, C] each, to the running statistics."""
        if self.norm is None:
            return
        before = self.norm.mean.clone(), self.norm.std()
        self.norm.update(target.flatten(1)[..., None], weight.flatten(1), all_reduce)
        if self.preserve_outputs:
            head = self.net.head
            rescale_outputs(head.weight, head.bias, before, (self.norm.mean, self.norm.std()))

    def train(self, rows: CriticRows, minibatches: Iterable[MiniBatch], clip: float | None, progress: float) -> float:
        """Trains the networks on normalised targets; returns the mean loss of a member. `clip` is
        the distance of value clipping in units of the outputs (None: no clipping). Afterwards
        `recurrent_states` has the states after the last step."""
        recurrent_state = self.recurrent_states.get(rows.worker)
        old = self._unroll(rows, recurrent_state)[0][..., 0] if clip is not None else None
        losses = []
        counts = []
        for minibatch in minibatches:
            out, _ = self.net.unroll(
                minibatch(rows.observations),
                minibatch.column_recurrent_states(recurrent_state),
                minibatch.optional(rows.is_first),
                acting_team(minibatch.optional(rows.acts)),
            )
            weight = normalise_weights(minibatch(rows.weight))
            loss = value_loss(out.squeeze(-1), minibatch(rows.target), weight, minibatch.optional(old), clip)
            self.optimizer.step(loss, progress)
            losses.append(loss.detach())
            counts.append(minibatch(rows.weight).sum())
        if self.net.recurrent_units:  # computed with the trained weights, which evaluate the next batch
            memories = self._unroll(rows, recurrent_state)[1]
            assert memories is not None
            self.recurrent_states[rows.worker] = memories[:, -1]
        lines = [{"loss": loss, WEIGHT_KEY: count} for loss, count in zip(losses, counts, strict=True)]
        return mean_metrics(lines)["loss"] / len(self.seat_mapping.names)

    def arrays(self) -> Arrays:
        """Returns the recurrent states."""
        return {str(source): state.cpu().numpy() for source, state in self.recurrent_states.items()}

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Restores what `arrays` returned."""
        device = self.net.head.weight.device
        self.recurrent_states = {int(source): as_tensor(state.copy(), device) for source, state in arrays.items()}

    @torch.no_grad()
    def _unroll(self, rows: CriticRows, recurrent_state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return self.net.unroll(rows.observations, recurrent_state, rows.is_first, acting_team(rows.acts))


class CriticRows(NamedTuple):
    """Training rows of a critic: observations [P, T, C, ...], first steps `is_first` (None: the
    networks are feed-forward), seats that act `acts` (None: they play no teams), normalised targets
    and their weights [P, T, C] each, and the number of the rollout worker."""

    observations: Tensor
    is_first: Tensor | None
    acts: Tensor | None
    target: Tensor
    weight: Tensor
    worker: int


@dataclass
class CriticEnsemble:
    """The `K` critics of each policy of a stack: network k*P + p is the k-th critic of policy p.
    `target` is the target network. With `value_per_action` a critic outputs a value for each
    discrete action of its seat and does not take the action as input."""

    net: Net
    target: Net
    optimizer: StackedOptimizer
    num_critics: int
    value_per_action: bool

    def q_values(self, net: Net, seen: Tensor, code: Tensor) -> Tensor:
        """Returns values [K, P, R, O] float32 for inputs `seen` [P, R, ...] and encoded actions
        `code` [P, R, A]. O is 1, or A with `value_per_action`."""
        if not self.value_per_action:
            seen = torch.cat([seen, code], -1)
        return net(seen.expand(self.num_critics, *seen.shape).flatten(0, 1)).unflatten(0, (self.num_critics, -1))

    def taken_q_values(self, seen: Tensor, code: Tensor, net: Net | None = None) -> Tensor:
        """Returns the values [K, P, R] of the encoded actions `code` [P, R, A] by `net` (None: the online network)."""
        q = self.q_values(net or self.net, seen, code)
        return (q * code).sum(-1) if self.value_per_action else q[..., 0]


def frozen_copy(net: M) -> M:
    """Returns a copy of the network without gradients."""
    return copy.deepcopy(net).requires_grad_(False)


PolyakPairs = list[tuple[nn.Module, nn.Module]]  # online networks, each with its target


@torch.no_grad()
def polyak_update(pairs: PolyakPairs, tau: float) -> None:
    """Polyak update: moves the parameters of each target towards those of its network by a share of `tau`."""
    for net, target in pairs:
        for slow, fast in zip(target.parameters(), net.parameters(), strict=True):
            slow.lerp_(fast, tau)


@contextmanager
def frozen_parameters(net: Net) -> Iterator[None]:
    """Context in which gradients flow through `net` to its inputs but not to its parameters."""
    net.requires_grad_(False)
    try:
        yield
    finally:
        net.requires_grad_(True)
