"""Conservative Q-learning for continuous actions (Kumar et al., 2020): soft actor-critic on recorded episodes. The
critics' soft maximum over all actions is pushed down, their values of the actions in the data up: CQL(H).

Shapes: `K` critics, `P` members of a stack, `R` rows (a seat of a transition each), `n` sampled actions of a kind, `A`
numbers of an encoded action.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from palestra.envs.vector_base import Continuous
from palestra.vector.algorithms.action_values import ActionValueConfig, UpdateBatch
from palestra.vector.algorithms.experimental.offline import OfflineConfig, OfflineLearner
from palestra.vector.algorithms.sac import SACLearner, SoftConfig
from palestra.vector.learners.nets import NetLearner, NetLearnerSpec
from palestra.vector.losses import sampled_soft_maximum
from palestra.vector.nets.continuous_heads import LOG_2, SquashedHead
from palestra.vector.nets.replay import TransitionBatch


class CQLSAC(OfflineConfig, SoftConfig, ActionValueConfig):
    """CQL for continuous actions: offline soft actor-critic on recorded episodes, with conservative critics."""

    type: Literal["cql_sac"] = "cql_sac"
    conservative_coef: float = Field(5.0, ge=0)
    """Weight of the gap between the soft maximum of action values and the value of the action in the data (the paper's
    alpha); 0 is soft actor-critic on the data. Scale it with the size of rewards."""
    sampled_actions: int = Field(10, ge=1)
    """Sampled actions of each kind that estimate the soft maximum: uniform ones, the policy's in
    the same state, and the policy's in the next state."""

    def learner_class(self) -> Callable[..., NetLearner]:
        return CQLSACLearner


class CQLSACLearner(OfflineLearner, SACLearner):
    """Learner of CQL for continuous actions. Raises ValueError for discrete actions, for recurrent
    policies, and for data that do not fit the env or its policies."""

    config: CQLSAC
    noise_correlation = 0.0

    def __init__(self, config: CQLSAC, spec: NetLearnerSpec) -> None:
        for space in spec.action_spaces:
            if not isinstance(space, Continuous):
                raise ValueError(
                    f'cql_sac samples actions between their bounds, but env "{spec.env.name}" takes {space}: use type: '
                    "cql, or iql"
                )
        super().__init__(config, spec)  # type: ignore[arg-type]  # methods that read replay settings are overridden

    def penalty(
        self, i: int, batch: UpdateBatch, transitions: TransitionBatch, generator: torch.Generator
    ) -> Callable[[Tensor], Tensor]:
        codes, logp = self.sampled_actions(i, batch, transitions, generator)
        seen = batch.critic_inputs[:, :, None].expand(*codes.shape[:3], *batch.critic_inputs.shape[2:])
        values = self.critics[i].taken_q_values(seen.flatten(1, 2), codes.flatten(1, 2)).unflatten(2, codes.shape[1:3])

        def conservative(taken: Tensor) -> Tensor:
            gap = sampled_soft_maximum(values, logp) - taken  # [K, P, R]
            return self.config.conservative_coef * (batch.critic_weights * gap).sum((0, 2))

        return conservative

    @torch.no_grad()
    def sampled_actions(
        self, i: int, batch: UpdateBatch, transitions: TransitionBatch, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Returns encoded actions [P, R, 3n, A] at the states of a batch, and their log-densities [P, R, 3n]: uniform
        ones, those of stack i's policies there, and those of its policies in the next states (where the game
        terminated, in the same states again, since a terminal observation may be undefined)."""
        stack = self.stacks[i]
        n = self.config.sampled_actions
        assert isinstance(stack.head, SquashedHead)
        P, R = batch.critic_weights.shape
        goes_on = (stack.rows(transitions.discounts, 1) > 0).view(P, R, *[1] * (batch.observations.dim() - 2))
        following = torch.where(goes_on, stack.observations(transitions.next_obs, 1), batch.observations)
        uniform = torch.empty(P, R, n, stack.head.width, device=generator.device)
        uniform = uniform.uniform_(-1, 1, generator=generator).to(self.device)
        codes = [uniform]
        logp = [uniform.new_full((P, R, n), -stack.head.width * LOG_2)]
        for observations in (batch.observations, following):
            out = stack.net(observations)[:, :, None].expand(P, R, n, -1)
            unit, density = stack.head.sample_units(out, generator)
            codes.append(unit)
            logp.append(density)
        return torch.cat(codes, 2), torch.cat(logp, 2)
