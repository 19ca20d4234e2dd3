"""Parallelised Q-learning (PQN; Gallici et al., 2024): Q(lambda) on short rollouts of many parallel games, without a
replay buffer or target networks. Layer normalisation keeps it from diverging.

Policies learn independently, each from its own rewards, or as a team whose value is the sum of the seats' values (VDN;
Sunehag et al., 2018) and whose reward is the mean reward of the seats that learn.

Shapes: `P` members of a stack, `T` steps, `B` parallel games, `N` seats, `S` seats of a member, `M` games or joint
transitions of a minibatch, `A` actions, `F` ended games.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from palestra.core.losses import TensorMetrics
from palestra.core.seeding import derive_seed
from palestra.core.types import Metrics, RolloutBatch
from palestra.vector.algorithms.minibatches import MiniBatch, iterate_minibatches, normalise_weights
from palestra.vector.algorithms.q_learning import EpsilonGreedyConfig, ValueLearner
from palestra.vector.learners.nets import WEIGHT_KEY, NetLearner, NetLearnerSpec
from palestra.vector.learners.policy_stack import PolicyStack
from palestra.vector.losses import best_action, gather_values
from palestra.vector.nets.advantages import AdvantageInputs, gae
from palestra.vector.nets.on_device import RolloutTensors, constant, make_generator


class PQN(EpsilonGreedyConfig):
    """PQN: Q(lambda) on rollouts of parallel games, without a replay buffer or target networks."""

    type: Literal["pqn"] = "pqn"
    rollout_length: int = Field(32, ge=1)
    gamma: float = Field(0.99, ge=0, le=1)
    """Discount per decision of a seat (of the team with `mixer: vdn`)."""
    q_lambda: float = Field(0.65, ge=0, le=1)
    """Lambda of the returns: 0 bootstraps after one decision, 1 at the end of the rollout."""
    epochs: int = Field(2, ge=1)
    """Passes over each rollout."""
    minibatches: int = Field(8, ge=1)
    """Gradient steps per pass."""
    mixer: Literal["none", "vdn"] = "none"
    """`none`: each policy learns from its own rewards. `vdn`: the sum of the seats' values is
    trained on the team's reward."""

    @property
    def combines(self) -> Literal["nothing", "seats", "networks"]:
        return "seats" if self.mixer == "vdn" else "nothing"

    def learner_class(self) -> Callable[..., NetLearner]:
        return PQNLearner


NORMED = {"layer_norm": True}


@dataclass(frozen=True)
class StackRows:
    """Training batch of a stack of networks. Arrays are [P, T, B, S, ...]; the recurrent state before the first step is
    `recurrent_state [P, B, S, H]` (None: feed-forward). `weight` is 0 where a seat does not act or has no target."""

    observations: Tensor
    is_first: Tensor
    actions: Tensor
    targets: Tensor
    weight: Tensor
    recurrent_state: Tensor | None


class PQNLearner(ValueLearner):
    """Learner of PQN. Networks have layer normalisation unless `layer_norm: false`."""

    config: PQN

    def __init__(self, config: PQN, spec: NetLearnerSpec) -> None:
        policies = {
            name: policy if policy.layer_norm is not None or policy.network else policy.model_copy(update=NORMED)
            for name, policy in spec.policies.items()
        }
        super().__init__(config, spec._replace(policies=policies))

    # ---- learning

    def update(self, batch: RolloutBatch, progress: float) -> dict[str, Metrics]:
        """Trains for `epochs` passes in `minibatches` of joint transitions, or of whole games."""
        rollout = RolloutTensors.of(batch, self.device)
        targets, known = self.targets(rollout)
        rows = [self._rows(stack, rollout, targets, known) for stack in self.stacks]
        seed = derive_seed(self.seeds[self.names[0]], "pqn", sum(stack.version for stack in self.stacks))
        minibatches = iterate_minibatches(
            known[..., constant(tuple(self.seats), self.device)].any(-1)[None].float(),
            epochs=self.config.epochs,
            minibatches=self.config.minibatches,
            recurrent=any(stack.net.recurrent_units for stack in self.stacks),
            generator=make_generator(self.device, seed),
        )
        lines = [self._step(rows, minibatch, progress) for minibatch in minibatches]
        self.update_norms(rollout)
        return self.policy_metrics(list(zip(*lines, strict=True)))

    def targets(self, batch: RolloutTensors) -> tuple[Tensor, Tensor]:
        """Returns Q(lambda) targets (Gallici et al., 2024, eq. 14) and a mask of the actions that
        have them, [T, B, N] each: reward + gamma * (lambda * the next target + (1 - lambda) * the
        next best value). In a team, all seats that act have the team's target."""
        values, bootstrap = self._best_values(batch)
        rewards = batch.rewards
        done = batch.seats_done
        acts = batch.agent_mask
        if self.config.mixer == "vdn":
            team = constant(tuple(self.seats), self.device)
            values = (values * acts)[..., team].sum(-1, keepdim=True)
            bootstrap = (bootstrap * acts[:-1])[..., team].sum(-1, keepdim=True)
            rewards = rewards[..., team].mean(-1, keepdim=True)
            done = done[..., team].all(-1, keepdim=True)
            acts = acts[..., team].any(-1, keepdim=True)
        inputs = AdvantageInputs(rewards, values, bootstrap, done, acts)
        error, known = gae(inputs, gamma=self.config.gamma, gae_lambda=self.config.q_lambda)
        own = batch.agent_mask[:-1]
        return (error + values[:-1]).expand(own.shape), known & own

    @torch.no_grad()
    def _best_values(self, batch: RolloutTensors) -> tuple[Tensor, Tensor]:
        """Returns the value of each seat's best legal action at every step [T+1, B, N], and at the
        last observation where a game ended [T, B, N]: 0 for seats that terminated. The actions
        legal there are taken to be those of the seat's last decision."""
        values = torch.zeros(batch.agent_mask.shape, device=self.device)
        ends = values.new_zeros(len(batch.final_obs), values.shape[2])  # [F, N]
        for stack in self.stacks:
            seats = stack.seat_mapping.seat_index(self.device)
            q, final = stack.unroll(batch)
            best = best_action(q, stack.optional_rows(batch.action_mask))
            values[..., seats] = stack.seat_mapping.by_seat(gather_values(q, best))
            if final is not None:
                best = best_action(final, stack.optional_rows(batch.last_action_masks(), 1))
                ends[:, seats] = stack.seat_mapping.by_seat(gather_values(final, best)[:, None])[0]
        return values, batch.spread_ends(ends)

    def _rows(self, stack: PolicyStack, batch: RolloutTensors, targets: Tensor, known: Tensor) -> StackRows:
        """Returns the training batch of a stack."""
        shape = (-1, len(stack.seat_mapping.seats[0]))
        memory = batch.recurrent_state.get(stack.seat_mapping.label)
        return StackRows(
            stack.observations(batch.obs)[:, :-1].unflatten(2, shape),
            stack.seat_mapping.repeat_games(batch.is_first)[:, :-1].unflatten(2, shape),
            stack.actions(batch).unflatten(2, shape),
            stack.seat_mapping.select_seats(targets, 2),
            stack.seat_mapping.select_seats(known.float(), 2),
            None if memory is None else memory.unflatten(1, shape),
        )

    def _step(self, rows: list[StackRows], minibatch: MiniBatch, progress: float) -> list[TensorMetrics]:
        """Takes a gradient step of every stack on a minibatch; returns metrics by stack, [P] each."""
        taken = [self._action_values(stack, own, minibatch) for stack, own in zip(self.stacks, rows, strict=True)]
        total = None
        if self.config.mixer == "vdn":  # [T, M]
            sums = [(q.detach() * minibatch(own.weight)).sum((0, 3)) for q, own in zip(taken, rows, strict=True)]
            total = torch.stack(sums).sum(0)[None, ..., None]
        lines: list[TensorMetrics] = []
        for stack, own, q in zip(self.stacks, rows, taken, strict=True):
            weight = self._shares(rows, own, minibatch)
            value = q.detach() if total is None else total
            error = minibatch(own.targets) - value
            norms = stack.optimizer.step(-(weight * error * q).sum(), progress)
            stack.version += 1
            mean = weight / weight.sum((1, 2, 3), keepdim=True).clamp(min=1e-8)
            loss = 0.5 * (mean * error.square()).sum((1, 2, 3))
            worth = (mean * value).sum((1, 2, 3))
            count = minibatch(own.weight).sum((1, 2, 3))
            lines.append({"q_loss": loss, "q": worth, "grad_norm": norms, WEIGHT_KEY: count})
        return lines

    @staticmethod
    def _action_values(stack: PolicyStack, rows: StackRows, minibatch: MiniBatch) -> Tensor:
        """Returns the values of a minibatch's actions [P, T, M, S]."""
        memory = minibatch.column_recurrent_states(rows.recurrent_state)
        q, _ = stack.net.unroll(
            minibatch(rows.observations).flatten(2, 3),
            None if memory is None else memory.flatten(1, 2),
            minibatch(rows.is_first).flatten(2, 3),
        )
        actions = minibatch(rows.actions)
        return gather_values(q, actions.flatten(2, 3)).view(actions.shape)

    def _shares(self, rows: list[StackRows], own: StackRows, minibatch: MiniBatch) -> Tensor:
        """Returns the weights [P, T, M, S] of a minibatch. They sum to one over the actions of each
        member; with `mixer: vdn` over the joint transitions of the team, and each seat that acts
        has the weight of its transition."""
        weight = minibatch(own.weight)
        if self.config.mixer == "none":
            return normalise_weights(weight.flatten(2, 3)).view(weight.shape)
        known = torch.stack([minibatch(each.weight).amax((0, 3)) for each in rows]).amax(0)  # [T, M]
        return weight / known.sum().clamp(min=1)
