"""Supervised fine-tuning: cross-entropy on all, successful or best trajectories, optionally plus next-observation
prediction.

With a teacher at the seat (`policies.NAME.teacher`) or on recorded episodes (`data:`), imitation is behaviour cloning.
Without either a policy imitates its own successes: rejection-sampling fine-tuning (expert iteration, Anthony et al.,
2017). A world model predicts each next observation from the tokens before it, answer included (Ha & Schmidhuber, 2018;
for language agents: Zhang et al., 2025, arXiv:2510.08558, "implicit world modeling").
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from palestra.core.losses import LOSSES, LossFunction
from palestra.core.types import AlgorithmState, Answer, Episode, Metrics, Node, Sample, Seat
from palestra.engine.forward.tree_attention import common_prefix
from palestra.text.algorithms.base import TextAlgorithm
from palestra.text.rollouts.metrics import member_name
from palestra.text.rollouts.tree_rollout import Branching


@dataclass(frozen=True)
class SeatTrajectory:
    """One seat's part of a trajectory: the nodes where the policy answered, the seat's return, and whether the
    trajectory succeeded."""

    seat: Seat
    nodes: list[Node]
    value: float
    success: bool

    @property
    def answers(self) -> list[Answer]:
        return [node.answers[self.seat] for node in self.nodes]


class SFT(TextAlgorithm):
    """Imitates the answers of trajectories, and optionally predicts the seat's next observations. Nodes that several
    trajectories share count once."""

    type: Literal["sft"] = "sft"
    needs_old_logprobs: ClassVar[bool] = False
    imitate: Literal["success", "best", "all", "none"] = "success"
    """Trajectories whose answers are imitated: those that ended in `success`; the `best` of each start, by its seat's
    return, the first of equals (best-of-n distillation); `all`; or `none` (observation prediction only, on every
    trajectory)."""
    world_model_weight: float = Field(0.0, ge=0)
    """Weight per token of predicting the seat's next observation (imitation has 1); 0 turns it off."""
    min_return: float | None = None
    """Minimum return of a seat (team_weight * team + local) for a trajectory to be used; null uses all."""
    group_size: int = Field(1, ge=1, le=4096)
    """Trajectories per start: the n of best-of-n with `imitate: best`."""
    team_weight: float = Field(1.0, ge=0)
    """Weight of the team's reward in the return that `imitate: best` and `min_return` compare: team_weight * team +
    local."""

    @model_validator(mode="after")
    def _learns(self) -> Self:
        if self.imitate == "none" and not self.world_model_weight:
            raise ValueError(
                "imitate: none leaves nothing to learn: set world_model_weight: 1 for a world model, or imitate: all"
            )
        return self

    @property
    def branching(self) -> Branching:
        return Branching("root", self.group_size)

    @property
    def loss(self) -> LossFunction:
        return LOSSES["cross_entropy"]

    def build_samples(
        self, episodes: Sequence[Episode], policy: str, state: AlgorithmState | None = None
    ) -> tuple[list[Sample], Metrics]:
        """Returns the answers to imitate, with advantage 1 at their nodes, then the observations to predict, and
        metrics.

        `target_fraction` is the share of the policy's (seat, trajectory) pairs whose answers are imitated;
        `world_model_fraction`, only with `world_model_weight`, the share of answers in the used trajectories
        that are followed by an observation with new tokens.
        """
        by_episode = [list(_parts(episode, policy, self.team_weight)) for episode in episodes]
        trajectories = list(chain.from_iterable(by_episode))
        if self.imitate == "best":
            by_episode = [_best_of_seats(group) for group in by_episode]
        worthy = [trajectory for trajectory in chain.from_iterable(by_episode) if self._worthy(trajectory)]
        copied = [] if self.imitate == "none" else worthy
        samples = _imitations(copied)
        metrics = {"target_fraction": len(copied) / len(trajectories) if trajectories else 0.0}
        if self.world_model_weight:
            predicted = _observation_samples(worthy, self.world_model_weight)
            samples += [sample for _, sample in predicted]
            turns = set(map(id, chain.from_iterable(trajectory.answers for trajectory in worthy)))
            num_predicted = len({id(answer) for answer, _ in predicted})
            metrics["world_model_fraction"] = num_predicted / len(turns) if turns else 0.0
        return samples, metrics

    def _worthy(self, trajectory: SeatTrajectory) -> bool:
        return (self.imitate != "success" or trajectory.success) and (
            self.min_return is None or trajectory.value >= self.min_return
        )


def _parts(episode: Episode, policy: str, team_weight: float) -> Iterator[SeatTrajectory]:
    """Yields the trajectories of `policy` at each of its seats in an episode; none if it failed."""
    for leaf in [] if episode.error is not None else episode.leaves():
        trajectory = episode.trajectory(leaf)
        for seat in dict.fromkeys(chain.from_iterable(node.answers for node in trajectory)):
            if nodes := [node for node in trajectory if seat in node.answers and _is_of(node.answers[seat], policy)]:
                value = sum(node.reward(seat, team_weight) for node in trajectory)
                success = leaf.seat_success.get(seat, leaf.success or 0.0)
                yield SeatTrajectory(seat, nodes, value, success >= 0.5)


def _best_of_seats(trajectories: Sequence[SeatTrajectory]) -> list[SeatTrajectory]:
    """Returns the trajectory with the highest return of each seat, the first of equals."""
    best: dict[Seat, SeatTrajectory] = {}
    for trajectory in trajectories:
        if trajectory.seat not in best or trajectory.value > best[trajectory.seat].value:
            best[trajectory.seat] = trajectory
    return list(best.values())


def _is_of(answer: Answer, policy: str) -> bool:
    return member_name(answer.policy) == policy and len(answer.token_ids) > 0


def _imitations(trajectories: Sequence[SeatTrajectory]) -> list[Sample]:
    """Returns the answers as samples and writes advantage 1 to their nodes; an answer in several trajectories or
    siblings counts once."""
    answers: dict[int, Answer] = {}
    for trajectory in trajectories:
        for node in trajectory.nodes:
            node.advantages[trajectory.seat] = 1.0
            answers[id(node.answers[trajectory.seat])] = node.answers[trajectory.seat]
    return [
        Sample(
            answer.prompt_ids,
            answer.token_ids,
            answer.logprobs,
            np.ones(len(answer.token_ids), np.float32),
            sampling_mask=answer.sampling_mask and answer.sampling_mask.forced_only(),
        )
        for answer in answers.values()
    ]


def _observation_samples(trajectories: Sequence[SeatTrajectory], weight: float) -> list[tuple[Answer, Sample]]:
    """Returns each new observation that follows an answer, with that answer; an observation that siblings share counts
    once."""
    samples: dict[tuple[int, int | None], tuple[Answer, Sample]] = {}
    for trajectory in trajectories:
        for node, later in zip(trajectory.nodes, trajectory.nodes[1:], strict=False):
            answer = node.answers[trajectory.seat]
            new = new_tokens(answer, later.answers[trajectory.seat])
            if len(new):
                known = np.concatenate([answer.prompt_ids, answer.token_ids])
                blank = np.zeros(len(new), np.float32)
                ones = np.ones(len(new), np.float32)
                samples[id(answer), later.parent] = answer, Sample(known, new, blank, ones, weight=weight)
    return list(samples.values())


def new_tokens(answer: Answer, later: Answer) -> np.ndarray:
    """Returns the token ids [T] that `later`'s prompt adds to the prompt and answer of `answer`.

    In a conversation the next prompt begins with prompt and answer, and everything after them is new. If each prompt
    stands alone, everything after the common prefix of the two prompts is new, since role and template are part of
    every prompt.
    """
    known = np.concatenate([answer.prompt_ids, answer.token_ids])
    after = common_prefix(known, later.prompt_ids)
    if after < len(known):
        after = common_prefix(answer.prompt_ids, later.prompt_ids)
    return later.prompt_ids[after:]
