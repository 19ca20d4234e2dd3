"""Conservative Q-learning, CQL(H) (Kumar et al., 2020), on deep Q-learning: offline learning that also pushes down the
values of actions outside the data.

Shapes: `P` members of a stack, `T` = 1, `R` rows (a seat of a transition each), `A` actions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from pydantic import Field
from torch import Tensor

from palestra.core.losses import TensorMetrics
from palestra.vector.algorithms.dqn import DQNLearner
from palestra.vector.algorithms.experimental.offline import OfflineConfig, OfflineLearner
from palestra.vector.algorithms.q_learning import DeepQConfig
from palestra.vector.learners.nets import NetLearner, NetLearnerSpec
from palestra.vector.losses import conservative_gap
from palestra.vector.nets.replay import TransitionBatch
from palestra.vector.nets.sequence_replay import SequenceBatch


class CQL(OfflineConfig, DeepQConfig):
    """CQL: offline deep Q-learning on recorded episodes, for discrete actions. Each seat learns
    from its own rewards; time is counted in its own decisions."""

    type: Literal["cql"] = "cql"
    conservative_coef: float = Field(1.0, ge=0)
    """Weight of the gap between the soft maximum of action values and the value of the action in the data (the paper's
    alpha); 0 is deep Q-learning on the data. Scale it with the size of rewards."""

    def learner_class(self) -> Callable[..., NetLearner]:
        return CQLLearner


class CQLLearner(OfflineLearner, DQNLearner):
    """Learner of CQL. Raises ValueError for recurrent policies, actions that are not discrete, and
    data that do not fit the env or its policies."""

    config: CQL  # type: ignore[assignment]

    def __init__(self, config: CQL, spec: NetLearnerSpec) -> None:
        for name, policy in spec.policies.items():
            if policy.is_recurrent:
                raise ValueError(
                    f"policy {name} is recurrent, but cql learns from single transitions, without the recurrent state "
                    "before them: set gru_units: 0, or imitate with bc"
                )
        super().__init__(config, spec)  # type: ignore[arg-type]  # methods that read replay settings are overridden

    def replay_options(self) -> dict[str, Any]:
        return {"n_step": self.config.n_step, "gamma": self.config.gamma, "seats": self.seats}

    def epsilon_at(self, progress: float) -> float:
        return 0.0

    def priority_beta_at(self, progress: float) -> float:
        return 1.0

    def penalty(
        self, i: int, q: Tensor, taken: Tensor, drawn: TransitionBatch | SequenceBatch, share: Tensor
    ) -> tuple[Tensor, TensorMetrics]:
        gap = conservative_gap(q, taken, self.stacks[i].optional_rows(drawn.action_mask))
        lost = (share * gap).sum((1, 2))
        return self.config.conservative_coef * lost.sum(), {"conservative_gap": lost.detach()}
