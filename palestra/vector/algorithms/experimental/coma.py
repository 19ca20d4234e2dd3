"""Counterfactual multi-agent policy gradients (Foerster et al., 2018).

Each policy has a feed-forward central critic. Its input is everything (the env's global state, or all observations
together), the actions of all other seats at that step, and a one-hot seat; its output is a value for every action of
that seat. An action's advantage is its value minus the expectation over the seat's policy with the others' actions
fixed. Seats that do not learn are part of the env: critics do not see their actions.

Shapes: `P` members of a stack, `T` steps, `B` parallel games, `S` seats of a member, `C` = B*S columns, `N` seats, `A`
actions of the seat that has most, `F` ended games, `D` numbers of a critic's input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from palestra.core.losses import policy_gradient_loss
from palestra.core.seeding import derive_seed
from palestra.core.types import Metrics, RolloutBatch
from palestra.envs.vector_base import Discrete
from palestra.vector.algorithms.critics import CriticEnsemble, frozen_copy
from palestra.vector.algorithms.minibatches import MiniBatch, PolicyRows, normalise_weights, sum_losses
from palestra.vector.learners.nets import AlgorithmConfig, NetLearner, NetLearnerSpec, mean_metrics
from palestra.vector.learners.optimizers import StackedOptimizer
from palestra.vector.learners.policy_stack import PolicyStack
from palestra.vector.losses import value_loss
from palestra.vector.nets.advantages import AdvantageInputs, gae
from palestra.vector.nets.heads import CategoricalHead
from palestra.vector.nets.layers import Net, make_generators
from palestra.vector.nets.on_device import RolloutTensors, constant, exponential_like, identity, make_generator


class COMA(AlgorithmConfig):
    """COMA: trains critics on TD(lambda) returns, then takes one step with each policy."""

    type: Literal["coma"] = "coma"
    gamma: float = Field(0.99, ge=0, le=1)
    """Discount per decision of a seat."""
    td_lambda: float = Field(0.8, ge=0, le=1)
    """Lambda of the TD(lambda) targets: 0 trusts the critic, 1 the rewards."""
    entropy_coef: float = Field(0.01, ge=0)
    """Coefficient of the entropy bonus."""
    epochs: int = Field(4, ge=1)
    """Passes of the critics over each rollout."""
    minibatches: int = Field(4, ge=1)
    """Gradient steps of the critics per pass."""
    critic_lr: float | None = Field(None, gt=0, le=1_000_000)
    """Learning rate of the critics; null uses the policy's."""
    target_interval: int = Field(5, ge=1)
    """Updates between copies of the critics into their target networks."""

    def learner_class(self) -> Callable[..., NetLearner]:
        return COMALearner


def counterfactual_advantages(q: Tensor, policy: Tensor, actions: Tensor) -> Tensor:
    """Returns the counterfactual advantages of actions [...] int64 (Foerster et al., 2018, eq. 4), in units of return:
    the action's value minus its expectation under the policy. `q` [..., A] are values with the others' actions fixed,
    `policy` [..., A] the probabilities the seat sampled with."""
    return q.gather(-1, actions[..., None])[..., 0] - (policy * q).sum(-1)


@dataclass
class CriticInputs:
    """Critic inputs of shape [...]: `inputs` [..., N, D] float32, each seat's action probabilities
    `action_probs` [..., N, A] and `actions` [..., N] int64; zeros for seats that do not learn."""

    inputs: Tensor
    action_probs: Tensor
    actions: Tensor


class COMALearner(NetLearner):
    """Learner of COMA. Raises ValueError unless every seat has discrete actions."""

    uses_global_features = True
    saved_counts = {"updates": "updates"}

    def __init__(self, config: COMA, spec: NetLearnerSpec) -> None:
        env = spec.env
        sizes = [space.n for space in spec.action_spaces if isinstance(space, Discrete)]
        if len(sizes) < len(spec.action_spaces):
            raise ValueError(
                f'coma needs a value of every action of a seat, and env "{env.name}" has seats without discrete '
                "actions: use ppo or a2c"
            )
        super().__init__(spec)
        self.config = config
        self.num_actions = max(sizes)
        self.updates = 0
        self.learns = torch.zeros(len(env.seats), dtype=torch.bool, device=spec.device)
        self.learns[constant(tuple(spec.learning_seats), spec.device)] = True
        self.critics = [self._critic(stack) for stack in self.stacks]
        self.register("critic", [one.net for one in self.critics], [one.optimizer for one in self.critics])
        self.register("target", [one.target for one in self.critics])

    def _critic(self, stack: PolicyStack) -> CriticEnsemble:
        N = len(self.env.seats)
        seeds = [derive_seed(self.seeds[name], "critic") for name in stack.seat_mapping.names]
        config = stack.config.without_memory().with_lr(self.config.critic_lr)
        net = Net((self.global_size + N * self.num_actions + N,), stack.head.outputs, config, make_generators(seeds))
        net.to(self.device)
        optimizer = StackedOptimizer(net, stack.seat_mapping.names, config, self.process_group)
        return CriticEnsemble(net, frozen_copy(net), optimizer, num_critics=1, value_per_action=True)

    # ---- learning

    def update(self, batch: RolloutBatch, progress: float) -> dict[str, Metrics]:
        """Trains the critics for `epochs` passes, then takes one step with the policies."""
        self.random = make_generator(self.device, derive_seed(self.seeds[self.names[0]], "coma", self.updates))
        rollout = RolloutTensors.of(batch, self.device)
        critic_inputs, targets, known = self._credit(rollout)
        lines: dict[str, Metrics] = {}
        losses = [self._train_critics(i, critic_inputs, targets, known, progress) for i in range(len(self.stacks))]
        q = self._values([critic.net for critic in self.critics], critic_inputs)
        advantages = counterfactual_advantages(q, critic_inputs.action_probs, critic_inputs.actions)[:-1]
        for stack, loss in zip(self.stacks, losses, strict=True):
            for name, line in self._train_policies(stack, rollout, advantages, progress).items():
                lines[name] = {"value_loss": loss} | line
        self.updates += 1
        if self.updates % self.config.target_interval == 0:
            for critic in self.critics:
                critic.target.load_state_dict(critic.net.state_dict())
        self.update_norms(rollout)
        return lines

    @torch.no_grad()
    def _credit(self, batch: RolloutTensors) -> tuple[CriticInputs, Tensor, Tensor]:
        """Returns the critic inputs of the batch [T+1, B], the critics' targets and a mask of the actions that have
        them, [T, B, N] each.

        After the last step, or where a game was truncated, the value is the expectation over the seat's policy, with
        the others' next actions sampled from their policies. At a truncation the seats of the last step are assumed to
        act again, and each seat to have the action mask of its last decision.
        """
        critic_inputs, ends = self._critic_inputs(batch)
        targets = [critic.target for critic in self.critics]
        q = self._values(targets, critic_inputs)
        values = q.gather(-1, critic_inputs.actions[..., None])[..., 0]
        values[-1] = (critic_inputs.action_probs * q).sum(-1)[-1]
        bootstrap = torch.zeros_like(batch.rewards)
        if len(batch.final_obs):
            bootstrap = batch.spread_ends((ends.action_probs * self._values(targets, ends)).sum(-1))
        advantage_inputs = AdvantageInputs(batch.rewards, values, bootstrap, batch.seats_done, batch.agent_mask)
        advantages, known = gae(advantage_inputs, gamma=self.config.gamma, gae_lambda=self.config.td_lambda)
        return critic_inputs, advantages + values[:-1], known

    def _train_critics(
        self, i: int, critic_inputs: CriticInputs, targets: Tensor, known: Tensor, progress: float
    ) -> float:
        """Trains the critics of a stack on their targets; returns the mean loss."""
        stack = self.stacks[i]
        critic = self.critics[i]
        rows = (critic_inputs.inputs[:-1], critic_inputs.actions[:-1], targets, known.float())
        seen, actions, target, weight = (stack.rows(x) for x in rows)
        losses = []
        for part in self._parts(weight[0].numel()):
            q = critic.net(part(seen)[:, 0])[:, None]  # [P, 1, M, A]
            taken = q.gather(-1, part(actions)[..., None])[..., 0]
            loss = value_loss(taken, part(target), normalise_weights(part(weight)))
            critic.optimizer.step(loss, progress)
            losses.append(loss.detach())
        members = len(stack.seat_mapping.names)
        return float(np.mean([loss / members for loss in torch.stack(losses).tolist()]))

    def _parts(self, transitions: int) -> Iterator[MiniBatch]:
        """Yields the minibatches of all epochs."""
        for _ in range(self.config.epochs):
            order = torch.randperm(transitions, generator=self.random, device=self.random.device).to(self.device)
            for index in order.chunk(self.config.minibatches):
                yield MiniBatch(index, columns=False)

    def _train_policies(
        self, stack: PolicyStack, batch: RolloutTensors, advantages: Tensor, progress: float
    ) -> dict[str, Metrics]:
        """Takes one step with the policies of a stack; returns metrics by policy."""
        rows = PolicyRows.of(stack, batch, stack.rows(advantages), stack.rows(batch.agent_mask[:-1]).float())
        out, _ = stack.net.unroll(rows.observations, rows.recurrent_state, rows.is_first)
        share = normalise_weights(rows.weight)
        total, lines = sum_losses(policy_gradient_loss, stack.head, out, rows, share, self.config.entropy_coef)
        norms = stack.optimizer.step(total, progress)
        stack.version += 1
        each = zip(stack.seat_mapping.names, lines, norms, strict=True)
        return {name: mean_metrics([line | {"grad_norm": norm}]) for name, line, norm in each}

    # ---- critic inputs

    def _critic_inputs(self, batch: RolloutTensors) -> tuple[CriticInputs, CriticInputs]:
        """Returns critic inputs of the batch [T+1, B], with sampled actions at the last step, and
        of the ends of games [F], with all actions sampled."""
        (T, B, N), A, F = batch.rewards.shape, self.num_actions, len(batch.final_obs)
        policy, last = (torch.zeros(*shape, N, A, device=self.device) for shape in ((T + 1, B), (F,)))
        for stack in self.stacks:
            seats = stack.seat_mapping.seat_index(self.device)
            choices = stack.head.outputs
            moments, ends = self._probabilities(stack, batch)
            policy[:, :, seats, :choices], last[:, seats, :choices] = moments, ends
        (times, games), agent_mask = batch.end_index, batch.agent_mask
        chosen = batch.actions if batch.actions.dim() == 3 else batch.actions[..., 0]  # of several kinds
        actions = torch.cat([chosen.long() * self.learns, self._draw(policy[-1:])])
        drawn = self._draw(last)
        seen = self._critic_features(batch.obs, batch.state, actions, agent_mask)
        alive = agent_mask[times, games] & ~batch.seats_terminated[times, games]
        final = self._critic_features(batch.final_obs, batch.final_state, drawn, alive)
        return CriticInputs(seen, policy, actions), CriticInputs(final, last, drawn)

    def _probabilities(self, stack: PolicyStack, batch: RolloutTensors) -> tuple[Tensor, Tensor]:
        """Returns action probabilities at every step [T+1, B, P*S, A'] and at the ends of games [F, P*S, A']."""
        out, final = stack.unroll(batch)
        moments = stack.seat_mapping.by_seat(_logits(stack, out, stack.optional_rows(batch.action_mask)).exp())
        if final is None:
            return moments, moments[0, :0]
        ends = _logits(stack, final, stack.optional_rows(batch.last_action_masks(), 1)).exp()
        return moments, stack.seat_mapping.by_seat(ends[:, None])[0]

    def _draw(self, policy: Tensor) -> Tensor:
        """Returns an action sampled from each row of probabilities [..., A]; 0 where all are zero."""
        race = exponential_like(policy, self.random)
        return torch.argmax(policy / race, -1)

    def _critic_features(self, obs: Tensor, state: Tensor | None, actions: Tensor, agent_mask: Tensor) -> Tensor:
        """Returns critic inputs [..., N, D]: global features, the others' actions, the seat."""
        N = len(self.env.seats)
        A = self.num_actions
        ids = identity(len(self.env.seats), self.device)
        whole = self.global_features(obs, state, actions.dim() - 1)
        done = nn.functional.one_hot(actions, A) * (agent_mask & self.learns)[..., None]
        others = (done[..., None, :, :] * (1 - ids)[..., None]).flatten(-2)
        shape = (*actions.shape[:-1], N)
        return torch.cat([whole[..., None, :].expand(*shape, -1), others, ids.expand(*shape, N)], -1)

    @torch.no_grad()
    def _values(self, nets: list[Net], critic_inputs: CriticInputs) -> Tensor:
        """Returns the values of each seat's actions [..., N, A] by `nets`; 0 for those it lacks."""
        q = torch.zeros_like(critic_inputs.action_probs)
        lead = critic_inputs.action_probs.dim() - 2
        for stack, net in zip(self.stacks, nets, strict=True):
            rows = stack.seat_mapping.select_seats(critic_inputs.inputs, lead)  # [P, ..., S, D]
            out = net(rows.flatten(1, -2)).unflatten(1, rows.shape[1:-1])
            seats = stack.seat_mapping.seat_index(self.device)
            q[..., seats, : stack.head.outputs] = out.movedim(0, lead).flatten(lead, lead + 1)
        return q


def _logits(stack: PolicyStack, out: Tensor, action_mask: Tensor | None) -> Tensor:
    """Returns normalised log-probabilities of every action [..., A]."""
    head = stack.head
    assert isinstance(head, CategoricalHead)
    return head.logits(out, action_mask)
