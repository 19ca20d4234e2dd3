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
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from palestra.core.losses import LossInputs, TensorMetrics, check_loss
from palestra.core.types import Metrics, RolloutBatch
from palestra.vector.algorithms.critics import CriticRows, ValueCritic
from palestra.vector.algorithms.minibatches import (
    MiniBatch,
    PolicyRows,
    check_targets,
    iterate_minibatches,
    normalise_weights,
    standardise,
    sum_losses,
)
from palestra.vector.learners.nets import WEIGHT_KEY, AlgorithmConfig, NetLearner, NetLearnerSpec, mean_metrics
from palestra.vector.learners.optimizers import StackedOptimizer
from palestra.vector.learners.policy_stack import PolicyStack
from palestra.vector.losses import value_loss
from palestra.vector.nets.advantages import AdvantageInputs, gae, vtrace
from palestra.vector.nets.heads import ActionHead
from palestra.vector.nets.images import image_layout
from palestra.vector.nets.layers import Net, make_generators
from palestra.vector.nets.normalise import RunningNorm, normalise
from palestra.vector.nets.on_device import RolloutTensors, make_generator
from palestra.vector.nets.seat_mapping import SeatMapping


class ActorCriticConfig(AlgorithmConfig):
    """Base config of on-policy actor-critic algorithms: collect a rollout, then train on it."""

    rollout_length: int = Field(128, ge=1)
    gamma: float = Field(0.99, ge=0, le=1)
    """Discount per decision of a seat."""
    gamma_end: float | None = Field(None, ge=0, le=1)
    """Discount at the end of the run, reached linearly; null keeps `gamma`. A rising discount
    learns the near future first (François-Lavet et al., 2015)."""
    gae_lambda: float = Field(0.95, ge=0, le=1)
    """GAE (or V-trace) lambda: 0 trusts the critic, 1 the rewards."""
    epochs: int = Field(1, ge=1)
    """Passes over each rollout."""
    minibatches: int = Field(1, ge=1)
    """Gradient steps per pass."""
    entropy_coef: float = Field(0.0, ge=0)
    """Coefficient of the entropy bonus."""
    entropy_coef_end: float | None = Field(None, ge=0)
    """Entropy coefficient at the end of the run, reached linearly; null keeps `entropy_coef`. In
    two-player zero-sum games self-play cycles without a bonus, and a constant bonus keeps it away
    from the equilibrium (Sokota et al., 2023)."""
    normalize_advantages: bool = True
    """Standardise each policy's advantages over the rollout."""
    critic: Literal["own", "central"] = "own"
    """Input of the critic: the seat's `own` observation, or `central`: the env's state (or all
    observations) and the seat."""
    critics: Literal["each", "one"] = "each"
    """A critic for `each` policy, or `one` for all."""
    value_norm: bool | Literal["popart"] = False
    """Train the critic on returns normalised by their running mean and deviation (Yu et al., 2022). With `popart` the
    critic's last layer is rescaled when these change, so that its values do not (Hessel et al., 2019)."""
    value_clip: float | None = Field(None, gt=0)
    """Clipping distance of the critic's value from its value before the update, in units of return
    (normalised with `value_norm`); null does not clip."""
    aux_value_coef: float = Field(0.0, ge=0)
    """Coefficient of a value loss on the policy network, through a last layer of its own (Cobbe et al., 2021). Useful
    on pixels with a central critic: the critic's targets teach the policy's features. 0 turns it off."""
    off_policy_correction: Literal["none", "vtrace"] = "none"
    """`vtrace` corrects for actions of an older policy: advantages have bounded importance weights, and the loss's
    ratios are to the policy at the start of the update (the decoupled objective of Hilton et al., 2022)."""

    sequential: bool = False
    """Train the policies one after another, in a random order for each rollout, with the advantages of each weighted by
    the ratio of new to old probabilities of the earlier policies' actions (HAPPO; Kuba et al., 2022, algorithm 2)."""

    def entropy_at(self, progress: float) -> float:
        return _between(self.entropy_coef, self.entropy_coef_end, progress)

    def gamma_at(self, progress: float) -> float:
        return _between(self.gamma, self.gamma_end, progress)

    @abstractmethod
    def loss(self, rows: LossInputs) -> tuple[Tensor, TensorMetrics]:
        """Returns the policy loss (a scalar) over transitions, and metrics."""

    def policy_loss(
        self, head: ActionHead, out: Tensor, rows: PolicyRows, weight: Tensor, bonus: float
    ) -> tuple[Tensor, list[dict[str, Any]]]:
        """Returns the policy loss minus `bonus` times the entropy, summed over members (a scalar), and the metrics of
        each, from outputs [P, T, M, O] and the normalised weights [P, T, M] of rows."""

        def checked_loss(own: LossInputs) -> tuple[Tensor, TensorMetrics]:
            label = f"{type(self).__name__}.loss"
            return check_loss(self.loss(own), label, has_gradient=own.logp_M.requires_grad)

        return sum_losses(checked_loss, head, out, rows, weight, bonus)

    @property
    def combines(self) -> Literal["nothing", "seats", "networks"]:
        return "networks" if self.sequential else "nothing"

    def learner_class(self) -> Callable[..., NetLearner]:
        return ActorCriticLearner


class ActorCriticLearner(NetLearner):
    """Learner of on-policy actor-critic algorithms. Raises ValueError if `critics: one` with
    `critic: own` meets seats whose observations differ in shape."""

    def __init__(self, config: ActorCriticConfig, spec: NetLearnerSpec) -> None:
        self.config = config
        self.has_value_output = config.aux_value_coef > 0
        super().__init__(spec)
        self.critics = [self._critic(seat_mapping) for seat_mapping in self._critic_seat_mappings(spec.seats)]
        self.register_critics()
        self.saved_parts |= {f"critic_memory.{i}": critic for i, critic in enumerate(self.critics)}
        self.extra_modules |= {f"value_norm.{i}": critic.norm for i, critic in enumerate(self.critics) if critic.norm}

    trains_teams = True
    value_output_metric = "auxiliary_loss"  # the loss of the value output of policies' networks

    @property
    def uses_global_features(self) -> bool:
        return self.config.critic == "central"

    def seat_mappings(self, seats: dict[str, list[int]]) -> list[SeatMapping]:
        if not self.config.sequential:
            return super().seat_mappings(dict(seats))
        mappings: list[SeatMapping] = []
        for name, own in seats.items():
            mappings += super().seat_mappings({name: own})
        return mappings

    def register_critics(self) -> None:
        """Adds the networks of the critics to the training state."""
        self.register("critic", [one.net for one in self.critics], [one.optimizer for one in self.critics])

    def _critic_seat_mappings(self, seats: dict[str, list[int]]) -> list[SeatMapping]:
        """Returns the seat mapping of each critic: which seats share its networks."""
        if self.config.critics == "each":
            return self.seat_mappings(seats)
        flat = tuple(chain.from_iterable(seats.values()))
        seen = {(self.env.observation_shapes[seat], self.env.images_of(seat)) for seat in flat}
        if self.config.critic == "own" and len(seen) > 1:
            raise ValueError(
                "critics: one needs seats with observations of the same shape, and these differ: set critic: central, "
                "or critics: each"
            )
        shape = self.env.observation_shapes[flat[0]]
        space = self.env.action_spaces[flat[0]]
        layout = image_layout(self.env, flat[0])
        return [SeatMapping(("critic",), (flat,), len(self.env.seats), shape, space, layout=layout)]

    def _critic(self, seat_mapping: SeatMapping) -> ValueCritic:
        config = self.policies.get(seat_mapping.names[0], self.policies[self.names[0]])
        config = config.model_copy(update={"communication_rounds": 0})  # `critic: central` sees the other seats
        seeds = [self.seeds.get(name, self.seeds[self.names[0]]) ^ 1 for name in seat_mapping.names]
        shape: tuple[int, ...] = (self.global_size + len(self.env.seats),)
        layout = None
        if self.config.critic == "own":
            shape = seat_mapping.input_shape
            layout = seat_mapping.layout
        net = Net(shape, 1, config, make_generators(seeds), layout=layout).to(self.device)
        optimizer = StackedOptimizer(net, seat_mapping.names, config, self.process_group)
        norm = self.build_value_norm(seat_mapping)
        return ValueCritic(seat_mapping, net, optimizer, norm, self.config.value_norm == "popart")

    def build_value_norm(self, seat_mapping: SeatMapping) -> RunningNorm | None:
        """Builds the statistics of the returns of a critic; None without `value_norm`."""
        if not self.config.value_norm:
            return None
        return RunningNorm(len(seat_mapping.names), 1, 0.99).to(self.device)

    # ---- learning

    def update(self, batch: RolloutBatch, progress: float) -> dict[str, Metrics]:
        """Trains critics, then policies, for `epochs` passes in `minibatches`."""
        return self.train(RolloutTensors.of(batch, self.device), progress)

    def train(self, batch: RolloutTensors, progress: float) -> dict[str, Metrics]:
        """Trains like `update`, on the tensors of a rollout."""
        metrics: dict[str, list[dict[str, Any]]] = {name: [] for name in self.names}
        self.shuffle = make_generator(self.device, int(sum(s.version for s in self.stacks)) * 7919 + 1)
        now = batch
        if self.config.off_policy_correction == "vtrace":
            now = replace(batch, logp=self._logp(batch))
        advantages, targets, known = self._credit(batch, now.logp, progress)
        if self.process_group.world_size == 1:
            check_targets(self.stacks, targets, known)
        for critic in self.critics:
            line = self._train_critic(critic, batch, targets, known, progress)
            for name, own in metrics.items():
                if self.config.critics == "one" or name in critic.seat_mapping.names:
                    own.append(line)
        lines = {name: mean_metrics(own) for name, own in metrics.items()}
        scaled_targets = self._scaled_targets(targets)
        factor = torch.ones_like(advantages)
        for stack in self._update_order():
            rows = self.policy_rows(stack, now, advantages, factor, known)
            for name, line in self._train_policies(stack, rows, scaled_targets, progress).items():
                lines[name] |= line
            if self.config.sequential:
                factor = factor * self._joint_ratio(stack, now)[..., None]
        self.update_norms(batch)
        return lines

    def _update_order(self) -> list[PolicyStack]:
        """Returns the stacks in the order in which they are trained."""
        if not self.config.sequential:
            return self.stacks
        order = torch.randperm(len(self.stacks), generator=self.shuffle, device=self.shuffle.device)
        return [self.stacks[i] for i in order.tolist()]

    def _credit(self, batch: RolloutTensors, logp: Tensor, progress: float) -> tuple[Tensor, Tensor, Tensor]:
        """Returns advantages, critic targets (float32) and a mask of the actions that have them, [T, B, N] each. `logp`
        [T, B, N] are log-probabilities under the current policies, for V-trace."""
        values, bootstrap = self._values(batch)
        advantage_inputs = AdvantageInputs(batch.rewards, values, bootstrap, batch.seats_done, batch.agent_mask)
        gamma = self.config.gamma_at(progress)
        lam = self.config.gae_lambda
        if self.config.off_policy_correction == "vtrace":
            gap = logp - batch.logp
            ratio = torch.from_numpy(np.exp(gap.numpy())) if gap.is_cpu else gap.exp()
            advantages, targets, known = vtrace(advantage_inputs, ratio, gamma=gamma, gae_lambda=lam)
        else:
            advantages, known = gae(advantage_inputs, gamma=gamma, gae_lambda=lam)
            targets = advantages + values[:-1]
        return advantages, targets, known

    @torch.no_grad()
    def _values(self, batch: RolloutTensors) -> tuple[Tensor, Tensor]:
        """Returns the critics' values at every step [T+1, B, N], and those where a game ended [T, B, N]."""
        values = torch.zeros(batch.agent_mask.shape, device=self.device)
        ends = values.new_zeros(len(batch.final_obs), values.shape[2])  # [F, N]
        for critic in self.critics:
            seats = critic.seat_mapping.seat_index(self.device)
            values[..., seats], ends[:, seats] = critic.evaluate(
                self._critic_observations(critic, batch),
                self._critic_input(critic, batch.final_obs, batch.final_state, 1),
                batch,
            )
        return values, batch.spread_ends(ends)

    def _train_critic(
        self, critic: ValueCritic, batch: RolloutTensors, targets: Tensor, known: Tensor, progress: float
    ) -> Metrics:
        """Trains a critic on its targets; returns its metrics."""
        target, weight = self._update_norm(critic, targets, known)
        is_first = None
        acts = None
        if critic.net.recurrent_units:
            is_first = critic.seat_mapping.repeat_games(batch.is_first)[:, :-1]
        if critic.net.plays_team:
            acts = critic.seat_mapping.select_seats(batch.agent_mask[:-1], 2).flatten(2, 3)
        observations = self._critic_observations(critic, batch)[:, :-1]
        rows = CriticRows(observations, is_first, acts, critic.normalise(target), weight, batch.worker)
        loss = critic.train(rows, self._minibatches(weight, critic.net), self.config.value_clip, progress)
        return {"value_loss": loss}

    def _update_norm(self, critic: ValueCritic, targets: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
        """Updates the statistics of returns of a critic; returns its targets and their weights [P, T, B*S]."""
        take = critic.seat_mapping.select_seats
        target = take(targets, 2).flatten(2, 3)
        weight = take(known.float(), 2).flatten(2, 3)
        critic.update_norm(target, weight, self.process_group.all_reduce)
        return target, weight

    def _scaled_targets(self, targets: Tensor) -> Tensor:
        """Returns the critics' targets [T, B, N] in the units of their outputs (normalised with
        `value_norm`). Only networks with a value output learn from them."""
        if not self.has_value_output:
            return targets
        scaled = targets.clone()
        for critic in self.critics:
            if critic.norm:
                own = critic.seat_mapping.select_seats(targets, 2).flatten(2, 3)  # [P, T, B*S]
                seats = critic.seat_mapping.seat_index(self.device)
                scaled[..., seats] = critic.seat_mapping.by_seat(critic.normalise(own))
        return scaled

    def _train_policies(
        self, stack: PolicyStack, rows: PolicyRows, scaled_targets: Tensor, progress: float
    ) -> dict[str, Metrics]:
        """Trains the policies of a stack on `rows`, and the value output of their networks, if they
        have one, on the critics' `scaled_targets` [T, B, N]; returns metrics by policy."""
        names = stack.seat_mapping.names
        targets = stack.rows(scaled_targets)
        lines: list[list[dict[str, Any]]] = [[] for _ in names]
        bonus = self.config.entropy_at(progress)
        for minibatch in self._minibatches(rows.weight, stack.net):
            part = rows.minibatch(minibatch)
            out, value = stack.net.unroll_with_values(part.observations, part.recurrent_state, part.is_first, part.team)
            share = normalise_weights(part.weight)
            total, metrics = self.config.policy_loss(stack.head, out, part, share, bonus)
            if value is not None:
                for line, value_p, target_p, own in zip(metrics, value, minibatch(targets), share, strict=True):
                    aux_loss = value_loss(value_p, target_p, own)
                    total = total + self.config.aux_value_coef * aux_loss
                    line[self.value_output_metric] = aux_loss.detach()
            norms = stack.optimizer.step(total, progress)
            weights = part.weight.sum((1, 2)).unbind()
            for own_lines, line, norm, weight in zip(lines, metrics, norms.unbind(), weights, strict=True):
                own_lines.append(line | {"grad_norm": norm, WEIGHT_KEY: weight})
        stack.version += len(lines[0])
        return {name: mean_metrics(own) for name, own in zip(names, lines, strict=True)}

    def policy_rows(
        self, stack: PolicyStack, batch: RolloutTensors, advantages: Tensor, factor: Tensor, known: Tensor
    ) -> PolicyRows:
        """Returns the training rows of a stack's policies: `advantages` [T, B, N], normalised and
        then times `factor` [T, B, N], with weight 0 where they are not `known` [T, B, N]."""
        advantage = stack.rows(advantages)
        weight = stack.rows(known.float())
        if self.config.normalize_advantages:
            advantage = standardise(advantage, weight, self.process_group.all_reduce)
        return PolicyRows.of(stack, batch, advantage * stack.rows(factor), weight)

    def _logp(self, batch: RolloutTensors) -> Tensor:
        """Returns the log-probability of each action under the current policies [T, B, N]; the
        recorded one where no learning seat acts."""
        found = batch.logp.clone()
        for stack in self.stacks:
            found[..., stack.seat_mapping.seat_index(self.device)] = stack.action_logp(batch)
        return torch.where(batch.agent_mask[:-1], found, batch.logp)

    def _joint_ratio(self, stack: PolicyStack, batch: RolloutTensors) -> Tensor:
        """Returns the probability of the stack's actions at each step under its current policies,
        over that under the policies that played [T, B]; seats that do not act count as 1."""
        seats = stack.seat_mapping.seat_index(self.device)
        change = stack.action_logp(batch) - batch.logp[..., seats]
        acts = batch.agent_mask[:-1][..., seats]
        return torch.where(acts, change, 0.0).sum(-1).exp()

    # ---- observations, rows, minibatches

    def _critic_observations(self, critic: ValueCritic, batch: RolloutTensors) -> Tensor:
        """Returns a critic's inputs at every step [P, T+1, B*S, ...]."""
        return self._critic_input(critic, batch.obs, batch.state, 2).flatten(2, 3)

    def _critic_input(self, critic: ValueCritic, obs: Tensor, state: Tensor | None, lead: int) -> Tensor:
        """Returns a critic's inputs: [..., N, *view] -> [P, ..., S, *input]."""
        seat_mapping = critic.seat_mapping
        if self.config.critic == "own":
            x = seat_mapping.network_inputs(obs, lead)
            norm = next((s.norm for s in self.stacks if s.seat_mapping.names == seat_mapping.names), None)
            return normalise(norm, x)
        whole = self.global_features(obs, state, lead)
        N = len(self.env.seats)
        P = len(seat_mapping.names)
        S = len(seat_mapping.seats[0])
        ids = seat_mapping.one_hot_seats(self.device).view(P, *[1] * lead, S, N)
        shape = (P, *whole.shape[:lead], S)
        return torch.cat([whole[None, ..., None, :].expand(*shape, -1), ids.expand(*shape, N)], -1)

    def _minibatches(self, weight: Tensor, net: Net) -> Iterator[MiniBatch]:
        config = self.config
        team_size = net.team_size if net.plays_team else 1
        return iterate_minibatches(
            weight,
            epochs=config.epochs,
            minibatches=config.minibatches,
            recurrent=bool(net.recurrent_units),
            generator=self.shuffle,
            team_size=team_size,
        )


def _between(start: float, end: float | None, progress: float) -> float:
    """Returns the linear interpolation from `start` to `end` at `progress`; `start` if `end` is None."""
    return start if end is None else start + (end - start) * progress
