"""Minibatches of a rollout, and the normalisation of their weights and advantages.

Shapes: `P` members, `T` steps, `C` columns (a seat of a parallel game each), `M` items of a minibatch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from palestra.core.losses import LossInputs, TensorMetrics
from palestra.core.seeding import derive_seed
from palestra.parallel.process_group import ProcessGroup
from palestra.vector.learners.optimizers import NonFiniteGradient
from palestra.vector.learners.policy_stack import PolicyStack
from palestra.vector.nets.heads import ActionHead
from palestra.vector.nets.layers import Team, acting_team
from palestra.vector.nets.on_device import RolloutTensors


@dataclass(frozen=True)
class MiniBatch:
    """A minibatch of `[P, T, C, ...]`: columns, giving `[P, T, M, ...]`, or single transitions,
    numbered t * C + c, giving `[P, 1, M, ...]`. `index` [M] is int64."""

    index: Tensor
    columns: bool

    def __call__(self, x: Tensor) -> Tensor:
        """Returns the minibatch's part of `x` [P, T, C, ...]."""
        if self.columns:
            return x.index_select(2, self.index)
        return x.reshape(x.shape[0], -1, *x.shape[3:]).index_select(1, self.index)[:, None]

    def optional(self, x: Tensor | None) -> Tensor | None:
        """Returns the minibatch's part of `x`; None stays None."""
        return None if x is None else self(x)

    def column_recurrent_states(self, recurrent_state: Tensor | None) -> Tensor | None:
        """Returns the initial recurrent states [P, M, H] of the minibatch's columns; None for single transitions."""
        if recurrent_state is None or not self.columns:
            return None
        return recurrent_state.index_select(1, self.index)


class PolicyRows(NamedTuple):
    """Training rows of several policies: observations [P, T, C, ...], first steps, actions, their log-probabilities
    when they were played, action masks (None: all actions are legal), advantages and weights [P, T, C, ...] each, and
    the recurrent states [P, C, H] before the first step (None: none). `is_first` is None for feed-forward networks.
    `acts` [P, T, C] are the seats that act (None: the networks play no teams)."""

    observations: Tensor
    is_first: Tensor | None
    actions: Tensor
    logp: Tensor
    action_mask: Tensor | None
    advantage: Tensor
    weight: Tensor
    recurrent_state: Tensor | None
    acts: Tensor | None

    @property
    def team(self) -> Team | None:
        """Masks [P, T, C] and actions of the rows, as input of networks that play all seats of a team."""
        return acting_team(self.acts, self.actions)

    @classmethod
    def of(cls, stack: PolicyStack, batch: RolloutTensors, advantage: Tensor, weight: Tensor) -> PolicyRows:
        """Returns the rows of a rollout for a stack, with advantages and weights [P, T, C]."""
        is_first = None
        acts = None
        if stack.net.recurrent_units:
            is_first = stack.seat_mapping.repeat_games(batch.is_first)[:, :-1]
        if stack.net.plays_team:
            acts = stack.rows(batch.agent_mask[:-1])
        return cls(
            stack.observations(batch.obs)[:, :-1],
            is_first,
            stack.actions(batch),
            stack.rows(batch.logp),
            stack.action_masks(batch),
            advantage,
            weight,
            batch.recurrent_state.get(stack.seat_mapping.label),
            acts,
        )

    def minibatch(self, minibatch: MiniBatch) -> PolicyRows:
        """Returns the minibatch's part of everything."""
        parts: Iterable[Any] = map(minibatch.optional, self._replace(recurrent_state=None))
        return PolicyRows(*parts)._replace(recurrent_state=minibatch.column_recurrent_states(self.recurrent_state))


def check_targets(stacks: Sequence[PolicyStack], targets: Tensor, known: Tensor) -> None:
    """Raises `NonFiniteGradient` if a policy has a `known` target [T, B, N] that is not finite,
    before any minibatch changes the weights. On a GPU this check would wait for the device and is
    left out: there the gradient step of that target's minibatch detects it."""
    if not targets.is_cpu or bool(torch.isfinite(targets).all()):
        return
    for stack in stacks:
        failed = (stack.rows(known) & ~torch.isfinite(stack.rows(targets))).flatten(1).any(1)
        for name in compress(stack.seat_mapping.names, failed.tolist()):
            raise NonFiniteGradient(name)


def sum_losses(
    loss: Callable[[LossInputs], tuple[Tensor, TensorMetrics]],
    head: ActionHead,
    out: Tensor,
    rows: PolicyRows,
    weight: Tensor,
    bonus: float,
) -> tuple[Tensor, list[dict[str, Any]]]:
    """Returns the policy loss minus `bonus` times the entropy, summed over members (a scalar), and the metrics of each,
    from outputs [P, T, M, O] and the normalised weights [P, T, M] of rows."""
    score = head.evaluate_actions(out, rows.actions, rows.action_mask)
    inputs = map(_rows_by_member, (*score, rows.logp, rows.advantage, weight))
    total = out.new_zeros(())
    lines = []
    for logp, entropy, old_logp, advantage, own in zip(*inputs, strict=True):
        policy_loss, metrics = loss(LossInputs(logp, entropy, old_logp, None, advantage, own))
        total = total + policy_loss
        if bonus:
            total = total - bonus * (own * entropy).sum()
        lines.append({"policy_loss": policy_loss.detach(), **metrics})
    return total, lines


def _rows_by_member(x: Tensor) -> Sequence[Tensor]:
    """Returns the rows [T*M] of each member of [P, T, M]; of a single one as a view, whose gradient needs no copy."""
    return (x.flatten(),) if len(x) == 1 else x.flatten(1).unbind()


def normalise_weights(weight: Tensor) -> Tensor:
    """Returns weights [P, T, M] divided by their sum per member; zeros where it is zero."""
    return weight / weight.sum((1, 2), keepdim=True).clamp(min=1e-8)


def minibatch_seed(seed: int, process_group: ProcessGroup, *key: object) -> int:
    """Returns a seed for sampling minibatches, derived from `seed` and `key`. Each of several processes gets another:
    on the same data, equal seeds would draw equal minibatches, whose mean gradient is the same as one process's."""
    if process_group.world_size > 1:
        key = (*key, process_group.rank)
    return derive_seed(seed, *key)


def standardise(advantage: Tensor, weight: Tensor, all_reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns advantages [P, T, C] with weighted mean 0 and deviation 1 for each member, over all
    processes: `all_reduce` sums a tensor over them."""
    count, total = all_reduce(torch.stack([weight.sum((1, 2)), (weight * advantage).sum((1, 2))]))
    count = count.clamp(min=1)
    # A mean of squares minus the square of the mean would cancel in float32 where the mean is far from 0.
    centred = advantage - (total / count)[:, None, None]
    weighted = weight * centred
    first, second = all_reduce(torch.stack([weighted.sum((1, 2)), (weighted * centred).sum((1, 2))])) / count
    deviation = (second - first**2).clamp(min=0).sqrt()  # `first` is the rounding error of the mean
    return (centred - first[:, None, None]) / (deviation[:, None, None] + 1e-8)


def iterate_minibatches(
    weight: Tensor, *, epochs: int, minibatches: int, recurrent: bool, generator: torch.Generator, team_size: int = 1
) -> Iterator[MiniBatch]:
    """Yields the minibatches of all epochs over transitions of weights `weight` [P, T, C], each
    epoch in a new random order. Recurrent networks get whole columns (all steps of a seat); others
    single transitions (with one member, only those whose weight is not 0). The `team_size`
    consecutive columns of a team stay together, also those of weight 0."""
    P, _, C = weight.shape
    device = weight.device
    seats = torch.arange(team_size, device=device)
    some = None
    count = C // team_size
    if not recurrent:
        known = weight.reshape(P, -1, team_size).any(2)
        count = known.shape[1]
        if P == 1 and not bool(known.all()):
            some = known[0].nonzero()[:, 0]
            count = len(some)
    for _ in range(epochs):
        order = torch.randperm(count, generator=generator, device=generator.device).to(device)
        if some is not None:
            order = some[order]
        # With few transitions some minibatches are empty: they repeat one (or take one of weight 0), since other
        # processes may be waiting for this one's gradients.
        spare = order[:1] if len(order) else order.new_zeros(1)
        for teams in order.tensor_split(minibatches):
            if not len(teams):
                teams = spare
            yield MiniBatch((teams[:, None] * team_size + seats).flatten(), recurrent)
