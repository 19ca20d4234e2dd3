"""Deep Q-learning (Mnih et al., 2015), independent for each policy: the other seats are part of the env (Tan, 1993)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from palestra.core.losses import TensorMetrics
from palestra.vector.algorithms.q_learning import QLearner, QLearningConfig
from palestra.vector.learners.nets import WEIGHT_KEY, NetLearner
from palestra.vector.losses import q_loss, td_target
from palestra.vector.nets.replay import TransitionBatch
from palestra.vector.nets.sequence_replay import SequenceBatch


class DQN(QLearningConfig):
    """DQN with double targets (van Hasselt et al., 2016) and a duelling head (Wang et al., 2016);
    n-step returns (`n_step`) and prioritised replay (Schaul et al., 2016) as in Rainbow (Hessel et
    al., 2018). Each seat learns from its own rewards; time is counted in its own decisions."""

    type: Literal["dqn"] = "dqn"
    gradient_steps: int = Field(32, ge=1)
    batch_size: int = Field(128, ge=1)
    n_step: int = Field(3, ge=1)
    duelling: bool = True

    def learner_class(self) -> Callable[..., NetLearner]:
        return DQNLearner


class DQNLearner(QLearner):
    """Learner of DQN: an independent Q-network for each policy."""

    def train_step(
        self, drawn: TransitionBatch | SequenceBatch, progress: float
    ) -> tuple[list[TensorMetrics], Tensor, Tensor]:
        lines = []
        errors = []
        known = []
        for i, stack in enumerate(self.stacks):
            q, taken, following = self.online_and_target_values(i, drawn)
            target = td_target(stack.rows(drawn.rewards), stack.rows(drawn.discounts), following)
            weight = stack.rows(drawn.weight)
            count = (weight > 0).sum((1, 2), keepdim=True).clamp(min=1)
            loss, error = q_loss(taken, target, weight / count)
            penalty, more = self.penalty(i, q, taken, drawn, weight / count)
            norms = stack.optimizer.step(loss + penalty, progress)
            sums = 0.5 * (weight / count * error.square()).sum((1, 2))
            mean = ((weight > 0) * taken.detach() / count).sum((1, 2))
            lines.append({"q_loss": sums, "q": mean, "grad_norm": norms, WEIGHT_KEY: count[:, 0, 0]} | more)
            errors.append(stack.seat_mapping.by_seat(error.abs() * (weight > 0)))
            known.append(stack.seat_mapping.by_seat(weight > 0))
        counts = torch.cat(known, -1).sum(-1)
        return lines, torch.cat(errors, -1).sum(-1) / counts.clamp(min=1), counts > 0

    def penalty(
        self, i: int, q: Tensor, taken: Tensor, drawn: TransitionBatch | SequenceBatch, share: Tensor
    ) -> tuple[Tensor, TensorMetrics]:
        """Returns a further loss (a scalar) of stack i, and metrics [P]; none here. `q` [P, T, R, A] are the values of
        all actions, `taken` [P, T, R] those of the actions in the batch, `share` [P, T, R] the weights of the rows."""
        return q.new_zeros(()), {}
