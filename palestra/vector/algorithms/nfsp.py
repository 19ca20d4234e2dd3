"""Neural fictitious self-play (Heinrich & Silver, 2016): every policy has two networks. One learns a best response to
the other policies by deep Q-learning; the other imitates the best response over the whole run and so is the average
strategy, which approaches an equilibrium in two-player zero-sum games. The average strategy is saved and evaluated.

In each game a seat plays its best response with probability `eta`, otherwise its average strategy.

Shapes: `P` members of a stack, `B` parallel games, `S` seats of a member, `T` steps, `M` rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from palestra.core.losses import LossInputs, cross_entropy_loss
from palestra.core.seeding import derive_seed
from palestra.core.types import Metrics, RolloutBatch
from palestra.envs.vector_base import Arrays, VectorStep
from palestra.vector.algorithms.dqn import DQNLearner
from palestra.vector.algorithms.q_learning import QLearningConfig
from palestra.vector.learners.nets import NetLearner, NetLearnerSpec, mean_metrics
from palestra.vector.learners.optimizers import StackedOptimizer
from palestra.vector.learners.policy_stack import PolicyStack, policy_writers, strip_prefix
from palestra.vector.nets.heads import make_head
from palestra.vector.nets.normalise import normalise
from palestra.vector.nets.on_device import as_tensor
from palestra.vector.policies.nets import NetVectorPolicy, greedy_selector


class Reservoir:
    """Reservoir of `capacity` rows of some columns, a uniform sample without replacement of all
    rows added (Vitter, 1985, algorithm R)."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.seen = 0
        self.columns: Arrays = {}

    def __len__(self) -> int:
        return min(self.seen, self.capacity)

    def add(self, rows: Mapping[str, np.ndarray], rng: np.random.Generator) -> None:
        """Adds rows [M, ...] of each column. The first `capacity` rows fill the reservoir; after
        that the i-th row replaces a random one with probability capacity / i."""
        count = len(next(iter(rows.values())))
        numbers = self.seen + np.arange(count)
        places = np.where(numbers < self.capacity, numbers, rng.integers(0, numbers + 1))
        kept = places < self.capacity
        for name, values in rows.items():
            if name not in self.columns:
                self.columns[name] = np.zeros((self.capacity, *values.shape[1:]), values.dtype)
            self.columns[name][places[kept]] = values[kept]
        self.seen += count

    def sample(self, count: int, rng: np.random.Generator) -> Arrays:
        """Returns rows sampled with replacement, [count, ...] of each column."""
        places = rng.integers(0, len(self), count)
        return {name: column[places] for name, column in self.columns.items()}

    def arrays(self) -> Arrays:
        """Returns everything that `load` needs to continue exactly."""
        return {"seen": np.array([self.seen])} | {f"rows/{name}": column for name, column in self.columns.items()}

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Restores what `arrays` returned."""
        self.seen = int(arrays["seen"][0])
        self.columns = {name: column.copy() for name, column in strip_prefix(arrays, "rows").items()}


BEST_RESPONSE_LOGP = 1.0  # marks best-response actions in `logp`: no log-probability is above 0


class NFSP(QLearningConfig):
    """NFSP: a DQN best response, and an average strategy trained on a reservoir of its actions."""

    type: Literal["nfsp"] = "nfsp"
    eta: float = Field(0.1, gt=0, le=1)
    """Probability per game and seat of playing the best response."""
    reservoir_size: int = Field(500_000, ge=1)
    """Capacity of the reservoir of best-response actions."""
    average_lr: float = Field(1e-3, gt=0, le=1_000_000)
    """Learning rate of the average strategy."""
    average_updates: int = Field(8, ge=1)
    """Gradient steps of the average strategy per rollout."""
    epsilon: float = Field(0.06, ge=0, le=1)
    epsilon_end: float = Field(0.0, ge=0, le=1)
    epsilon_share: float = Field(1.0, gt=0, le=1)
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount per decision of a seat."""

    def learner_class(self) -> Callable[..., NetLearner]:
        return NFSPLearner


class NFSPPolicy:
    """Policy that plays the best response or the average strategy, sampled per game and seat. Its
    recurrent state [B, S] bool marks where the best response plays."""

    def __init__(self, response: NetVectorPolicy, average: NetVectorPolicy, eta: float) -> None:
        self.response = response
        self.average = average
        self.eta = eta
        self.name = response.name
        self.names = response.names
        self.seats = response.seats
        self.generator = torch.Generator()

    def reset_rng(self, seed: int) -> None:
        self.generator.manual_seed(derive_seed(seed, "which"))
        self.response.reset_rng(derive_seed(seed, "response"))
        self.average.reset_rng(derive_seed(seed, "average"))

    def initial_state(self, num_envs: int) -> Tensor:
        return torch.zeros(num_envs, len(self.seats), dtype=torch.bool)

    def act(
        self, result: VectorStep, recurrent_state: Tensor, is_first: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, Tensor]:
        """Returns actions, log-probabilities and the new recurrent state; log-probabilities are
        BEST_RESPONSE_LOGP where the best response plays."""
        drawn = torch.rand(recurrent_state.shape, generator=self.generator) < self.eta
        recurrent_state = torch.where(torch.from_numpy(is_first)[:, None], drawn, recurrent_state)
        best, _, _ = self.response.act(result, None, is_first)
        average_actions, logp, _ = self.average.act(result, None, is_first)
        assert logp is not None
        return (
            np.where(recurrent_state, best, average_actions),
            np.where(recurrent_state, BEST_RESPONSE_LOGP, logp),
            recurrent_state,
        )


class NFSPLearner(DQNLearner):
    """Learner of NFSP. Raises ValueError for recurrent policies."""

    config: NFSP

    def __init__(self, config: NFSP, spec: NetLearnerSpec) -> None:
        super().__init__(config, spec)
        if any(stack.net.recurrent_units for stack in self.stacks):
            raise ValueError("nfsp does not train recurrent policies: leave out gru_units in policies")
        self.averages = [self._average(stack) for stack in self.stacks]
        self.register("average", [stack.net for stack in self.averages], [stack.optimizer for stack in self.averages])
        self.reservoirs = {name: Reservoir(self.config.reservoir_size) for name in self.names}
        self.saved_parts |= {f"reservoir.{name}": reservoir for name, reservoir in self.reservoirs.items()}

    def _average(self, stack: PolicyStack) -> PolicyStack:
        """Returns a stack of the same shape for the average strategies."""
        seat_mapping = stack.seat_mapping
        head = make_head(seat_mapping.action_space).to(self.device)
        config = stack.config.with_lr(self.config.average_lr)
        seeds = [derive_seed(self.seeds[name], "average") for name in seat_mapping.names]
        net = self.build_net(seat_mapping, head, config, seeds).to(self.device)
        optimizer = StackedOptimizer(net, seat_mapping.names, config, self.process_group)
        return PolicyStack(seat_mapping, config, head, net, optimizer, stack.norm)

    # ---- play

    def rollout_policies(self, progress: float) -> list[Any]:
        responses = super().rollout_policies(progress)
        averages = [stack.build_policy(stack.head.sample) for stack in self.averages]
        pairs = zip(responses, averages, strict=True)
        return [NFSPPolicy(response, average, self.config.eta) for response, average in pairs]

    def sampling_policies(self) -> list[NetVectorPolicy]:
        return [stack.build_policy(stack.head.sample) for stack in self.averages]

    def greedy_policies(self) -> list[NetVectorPolicy]:
        return [stack.build_policy(greedy_selector(stack.head)) for stack in self.averages]

    # ---- learning

    def update(self, batch: RolloutBatch, progress: float) -> dict[str, Metrics]:
        lines = super().update(batch, progress)
        rng = np.random.default_rng(derive_seed(self.seeds[self.names[0]], "reservoir", self.env_steps_seen))
        for stack in self.averages:
            self._remember(stack, batch, rng)
        all_remember = all(len(reservoir) for reservoir in self.reservoirs.values())
        if self._ready() and self.process_group.all_ranks(all_remember):
            for stack in self.averages:
                own = [self._imitate(stack, rng, progress) for _ in range(self.config.average_updates)]
                for p, name in enumerate(stack.seat_mapping.names):
                    lines[name] |= mean_metrics([{"average_loss": losses[p]} for losses in own])
        return lines

    def _remember(self, stack: PolicyStack, batch: RolloutBatch, rng: np.random.Generator) -> None:
        """Adds the observations and actions of best responses to the reservoirs."""
        obs = stack.seat_mapping.network_inputs(batch.obs, 2).flatten(2, 3)[:, :-1]
        chosen = (stack.rows(batch.logp) == BEST_RESPONSE_LOGP) & stack.rows(batch.agent_mask)[:, :-1]
        actions = stack.actions(batch)
        action_mask = stack.action_masks(batch)
        for p, name in enumerate(stack.seat_mapping.names):
            kept = chosen[p]
            rows = {"obs": obs[p][kept].numpy(), "actions": actions[p][kept].numpy()}
            if action_mask is not None:
                rows["action_mask"] = action_mask[p][kept].numpy()
            self.reservoirs[name].add(rows, rng)

    def _imitate(self, stack: PolicyStack, rng: np.random.Generator, progress: float) -> Tensor:
        """Takes one gradient step of the average strategies; returns their losses [P]."""
        names = stack.seat_mapping.names
        count = self.config.batch_size
        first, *others = [self.reservoirs[name].sample(count, rng) for name in names]
        rows = {key: as_tensor(np.stack([x, *(own[key] for own in others)]), self.device) for key, x in first.items()}
        obs = normalise(stack.norm, rows["obs"])
        logp, entropy = stack.head.evaluate_actions(stack.net(obs), rows["actions"], rows.get("action_mask"))
        losses = []
        for own, spread in zip(logp, entropy, strict=True):
            share = torch.full_like(own, 1 / count)
            losses.append(cross_entropy_loss(LossInputs(own, spread, own, None, torch.ones_like(own), share))[0])
        stacked = torch.stack(losses)
        stack.optimizer.step(stacked.sum(), progress)
        stack.version += 1
        return stacked.detach()

    # ---- state

    def member_writers(self) -> dict[str, Callable[[Path], None]]:
        """Returns writers of the average strategies."""
        return policy_writers(self.averages)

    def state_arrays(self) -> Arrays:
        return super().state_arrays() | {"average_versions": np.array([stack.version for stack in self.averages])}

    def load_arrays(self, arrays: Mapping[str, np.ndarray]) -> None:
        super().load_arrays(arrays)
        for stack, version in zip(self.averages, arrays["average_versions"], strict=True):
            stack.version = int(version)
