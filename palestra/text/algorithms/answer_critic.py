"""Answers as actions: one reward, value and advantage for each answer, and the input of a central critic.

With tokens as actions, there is a value of the state before each token. With answers as actions, there is one value
for each answer, of the state between prompt and answer (or after the answer, from a critic of actions). The
log-probability of an answer is the sum over its tokens, so clipped losses bound the ratio of the whole answer.

Shapes: `T` tokens of an answer, `M` actions of several sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from torch import Tensor

from palestra.core.losses import LossInputs, TensorMetrics, actor_critic_loss, clipped_policy_loss
from palestra.core.types import Answer, Node, Seat

ActionLevel = Literal["token", "turn"]


def action_sums(tokens: Sequence[np.ndarray], level: ActionLevel) -> np.ndarray:
    """Returns the sum over the tokens of each action [M] float64, from one array [T] for each answer."""
    if level == "turn":
        return np.array([own.astype(np.float64).sum() for own in tokens])
    return np.concatenate(tokens).astype(np.float64)


def action_values(values: Sequence[np.ndarray], level: ActionLevel) -> np.ndarray:
    """Returns the value of the state before each action [M], from one array of the critic's values for each answer:
    [T], or [1] if the critic has one value per answer."""
    return np.concatenate([own[:1] for own in values] if level == "turn" else values)


def action_counts(lengths: Sequence[int], level: ActionLevel) -> list[int]:
    """Returns the number of actions of each answer, from its number of tokens."""
    return [1] * len(lengths) if level == "turn" else list(lengths)


def by_token(actions_M: np.ndarray, lengths: Sequence[int], level: ActionLevel) -> list[np.ndarray]:
    """Returns an array [T] float32 for each answer: for each token, the entry of `actions_M` of its action."""
    parts = np.split(actions_M.astype(np.float32), np.cumsum(action_counts(lengths, level))[:-1])
    return [np.broadcast_to(own, length).copy() for own, length in zip(parts, lengths, strict=True)]


def answer_clipped_loss(tokens: LossInputs, **options: Any) -> tuple[Tensor, TensorMetrics]:
    """`clipped_policy_loss` with the ratios of whole answers."""
    return clipped_policy_loss(with_answer_ratios(tokens), **options)


def answer_actor_critic_loss(tokens: LossInputs, **options: Any) -> tuple[Tensor, TensorMetrics]:
    """`actor_critic_loss` with the ratios of whole answers."""
    return actor_critic_loss(with_answer_ratios(tokens), **options)


def with_answer_ratios(tokens: LossInputs) -> LossInputs:
    """Returns the tokens with `old_logp_M` moved so that each token's ratio has the value of its answer's ratio (the
    product over the answer's tokens) and the gradient of its own log-probability. Summed over an answer, this is the
    gradient of the answer's ratio. The sampler's log-probability moves by the same amount, so the importance ratio does
    not change. Raises ValueError without `sequence_M`.
    """
    sequence_M = tokens.sequence_M
    if sequence_M is None:
        raise ValueError("the ratio of an answer needs the number of each token's sequence")
    gap_M = (tokens.logp_M - tokens.old_logp_M).detach()
    count = int(sequence_M.max()) + 1 if len(sequence_M) else 0
    others_M = gap_M.new_zeros(count).index_add_(0, sequence_M, gap_M)[sequence_M] - gap_M
    sampler_M = None if tokens.sampler_logp_M is None else tokens.sampler_logp_M - others_M
    return tokens._replace(old_logp_M=tokens.old_logp_M - others_M, sampler_logp_M=sampler_M)


def critic_input(
    nodes: Sequence[Node], seats: Sequence[Seat], seat: Seat, *, joint: bool, with_answers: bool = False
) -> np.ndarray:
    """Returns the tokens [P] int32 that a critic reads about the answer of `seat` at the last of `nodes`, the
    trajectory up to this step.

    These are the seat's own prompt and, if `joint`, before it the newest prompt of each other seat, in the order of
    `seats`, followed by its answer if that is from an earlier step. `with_answers` adds the answers of this step, each
    after its prompt: the critic then values the state and the (joint) action. Seats whose policies have no tokens add
    nothing.
    """
    others = [_newest(nodes, other, with_answers) for other in seats if other != seat] if joint else []
    return np.concatenate([*others, _read(nodes[-1].answers[seat], with_answers)]).astype(np.int32)


def _newest(nodes: Sequence[Node], seat: Seat, with_answers: bool) -> np.ndarray:
    now = nodes[-1].answers.get(seat)
    if now is not None:
        return _read(now, with_answers)
    earlier = [node.answers[seat] for node in nodes if seat in node.answers]
    return _read(earlier[-1], with_answer=True) if earlier else np.zeros(0, np.int32)


def _read(answer: Answer, with_answer: bool) -> np.ndarray:
    return np.concatenate([answer.prompt_ids, answer.token_ids]) if with_answer else answer.prompt_ids
