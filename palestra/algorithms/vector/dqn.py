"""Deep Q-learning (Mnih et al., 2015), independent for each policy: the other seats are part of the env (Tan, 1993)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from palestra.algorithms.vector.q_learning import QLearner, QLearningConfig, by_row
from palestra.learners.nets import NetLearner
from palestra.losses.policy import Figures
from palestra.losses.q import q_loss, q_target
from palestra.nets.replay import Moves
from palestra.nets.segments import Stretches


class DQN(QLearningConfig):
    """DQN with double targets (van Hasselt et al., 2016) and a duelling head (Wang et al., 2016); n-step returns (`n`)
    and prioritised replay (Schaul et al., 2016) as in Rainbow (Hessel et al., 2018). Each seat learns from its own
    rewards; time is counted in its own decisions."""

    type: Literal["dqn"] = "dqn"
    """Selects DQN."""
    duelling: bool = True
    """Compute action values as a state value plus advantages (Wang et al., 2016)."""

    def teacher(self) -> Callable[..., NetLearner]:
        return Independent


class Independent(QLearner):
    """Learner of DQN: an independent Q-network for each policy."""

    def learn(self, drawn: Moves | Stretches, progress: float) -> tuple[list[Figures], Tensor, Tensor]:
        lines, errors, known = [], [], []
        for i, stack in enumerate(self.stacks):
            taken, following = self.judged(i, drawn)
            target = q_target(stack.rows(drawn.rewards), stack.rows(drawn.discounts), following)
            weight = stack.rows(drawn.weight)
            count = (weight > 0).sum((1, 2), keepdim=True).clamp(min=1)
            loss, error = q_loss(taken, target, weight / count)
            norms = stack.optimizer.step(loss, progress)
            sums = 0.5 * (weight / count * error.square()).sum((1, 2))
            mean = ((weight > 0) * taken.detach() / count).sum((1, 2))
            lines.append({"q_loss": sums, "q": mean, "gradient": norms})
            errors.append(by_row(stack, error.abs() * (weight > 0)))
            known.append(by_row(stack, weight > 0))
        counts = torch.cat(known, -1).sum(-1)
        return lines, torch.cat(errors, -1).sum(-1) / counts.clamp(min=1), counts > 0
