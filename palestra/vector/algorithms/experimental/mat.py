"""The multi-agent transformer (MAT; Wen et al., 2022): PPO of teams whose seats act one after another.

The advantage of a joint action is the sum over its seats of the advantages of their actions given those of the seats
before them (the multi-agent advantage decomposition theorem; Wen et al., 2022, theorem 1). So the probability of a
seat's action is conditioned on the actions of the seats before it, and each seat's ratio of new to old probabilities is
clipped and multiplied with its advantage. The critic is the encoder of the policy's transformer, which sees the
observations of the whole team.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, Literal, Self, cast

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from palestra.core.types import Metrics
from palestra.vector.algorithms.actor_critic import ActorCriticLearner
from palestra.vector.algorithms.critics import ValueCritic
from palestra.vector.algorithms.ppo import PPO
from palestra.vector.learners.nets import NetLearner
from palestra.vector.learners.policy_stack import NetPolicyConfig
from palestra.vector.nets.dense import Linear
from palestra.vector.nets.heads import ActionHead
from palestra.vector.nets.layers import Net, Team, make_generators
from palestra.vector.nets.on_device import RolloutTensors
from palestra.vector.nets.seat_mapping import SeatMapping
from palestra.vector.nets.transformer import MultiAgentTransformer


class MAT(PPO):
    """MAT: PPO with a transformer for each team (the seats of one policy), which chooses their actions in order. The
    policy's hidden layers embed observations; `attention_blocks`, `attention_heads` and `attention_type` shape the
    transformer, and `retention_decay` gives it a memory of earlier steps."""

    type: Literal["mat"] = "mat"  # type: ignore[assignment]
    combines: ClassVar[Literal["nothing", "seats", "networks"]] = "seats"
    epochs: int = Field(4, ge=1)
    """Passes over each rollout; fewer than PPO's, since policy and values share a network."""
    minibatches: int = Field(4, ge=1)
    """Gradient steps per pass."""
    aux_value_coef: float = Field(1.0, gt=0)
    """Coefficient of the value loss; policy and values share the encoder."""

    @model_validator(mode="after")
    def _own_critic(self) -> Self:
        if self.critic != "own" or self.critics != "each" or self.sequential or self.value_clip is not None:
            raise ValueError(
                "critic, critics, sequential, value_clip: the critic of mat is its own encoder, which sees the whole "
                "team, and its seats learn together: leave these settings out, or use type: mappo or happo"
            )
        return self

    def learner_class(self) -> Callable[..., NetLearner]:
        return MATLearner


class EncoderValues(nn.Module):
    """The values of a transformer as a critic network."""

    def __init__(self, net: MultiAgentTransformer) -> None:
        super().__init__()
        self.net = net

    @property
    def head(self) -> Linear:
        """The last layer of the values."""
        assert self.net.value_head is not None
        return self.net.value_head

    def unroll(
        self, obs: Tensor, recurrent_state: Tensor | None, is_first: Tensor | None, team: Team
    ) -> tuple[Tensor, None]:
        """Returns values [P, T, R, 1] of observations [P, T, R, *view]."""
        return self.net.unroll_values(obs, team, recurrent_state, is_first)[..., None], None


class EncoderCritic(ValueCritic):
    """The critic of a transformer. With memory it starts from the recurrent state of its policy at the start of a
    rollout, and evaluates the last observation of an episode as one more step of it, in the same pass."""

    @torch.no_grad()
    def evaluate(
        self, observations: Tensor, final_observations: Tensor, batch: RolloutTensors
    ) -> tuple[Tensor, Tensor]:
        state = batch.recurrent_state.get(self.seat_mapping.label)
        if state is None:
            return super().evaluate(observations, final_observations, batch)
        mapping = self.seat_mapping
        steps = StepsWithEnds(batch)
        acts = mapping.select_seats(batch.agent_mask, 2)  # [P, T+1, B, S]
        whole = steps.insert(observations.unflatten(2, acts.shape[2:]), final_observations)
        whole_acts = steps.insert(acts, self.acts_at_end(acts, batch))
        is_first = mapping.repeat_games(steps.insert(batch.is_first[None], batch.is_first.new_zeros(()))[0])
        team = Team(whole_acts.flatten(2, 3))
        out, _ = self.net.unroll(whole.flatten(2, 3), state, is_first, team)
        values, ends = steps.split(self.values(out).unflatten(2, acts.shape[2:]))
        return mapping.by_seat(values.flatten(2, 3)), ends.movedim(0, 1).flatten(1)


class StepsWithEnds:
    """The T+1 steps of a rollout of B games with the last observation of every episode [F] as a step after those of its
    episode: L steps of every game, the last of those with fewer ends empty."""

    def __init__(self, batch: RolloutTensors) -> None:
        times, self.end_games = batch.end_index
        ended = torch.zeros_like(batch.is_first, dtype=torch.int64)  # [T+1, B]
        ended[times, self.end_games] = 1
        steps = torch.arange(len(ended), device=ended.device)[:, None]
        self.place = steps + ended.cumsum(0) - ended
        self.games = torch.arange(ended.shape[1], device=ended.device)
        self.end_place = self.place[times, self.end_games] + 1
        self.num_steps = len(ended) + int(ended.sum(0).max())

    def insert(self, x: Tensor, ends: Tensor) -> Tensor:
        """Returns [P, L, B, ...], zeros where there is no step, from `x` [P, T+1, B, ...] and `ends` [P, F, ...]."""
        whole = x.new_zeros(len(x), self.num_steps, *x.shape[2:])
        whole[:, self.place, self.games] = x
        whole[:, self.end_place, self.end_games] = ends
        return whole

    def split(self, whole: Tensor) -> tuple[Tensor, Tensor]:
        """Returns [P, T+1, B, ...] and [P, F, ...] of what `insert` returned."""
        return whole[:, self.place, self.games], whole[:, self.end_place, self.end_games]


class MATLearner(ActorCriticLearner):
    """Learner of MAT."""

    value_output_metric = "value_loss"
    trains_transformers = True

    def build_net(
        self, seat_mapping: SeatMapping, head: ActionHead, config: NetPolicyConfig, seeds: Sequence[int]
    ) -> Net:
        return MultiAgentTransformer(
            seat_mapping.input_shape,
            seat_mapping.action_space,
            config,
            make_generators(seeds),
            self.output_gain,
            len(seat_mapping.seats[0]),
            seat_mapping.layout,
        )

    def _critic(self, seat_mapping: SeatMapping) -> ValueCritic:
        stack = next(stack for stack in self.stacks if stack.seat_mapping == seat_mapping)
        norm = self.build_value_norm(seat_mapping)
        values = cast(Net, EncoderValues(cast(MultiAgentTransformer, stack.net)))
        return EncoderCritic(seat_mapping, values, stack.optimizer, norm, self.config.value_norm == "popart")

    def register_critics(self) -> None:
        """Does nothing: the critics are the policies' networks."""

    def _train_critic(
        self, critic: ValueCritic, batch: RolloutTensors, targets: Tensor, known: Tensor, progress: float
    ) -> Metrics:
        """Updates the statistics of returns; values are trained with the policy."""
        self._update_norm(critic, targets, known)
        return {}
