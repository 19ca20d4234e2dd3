"""Answers as actions: rewards, values and advantages of one entry for each answer, and what a central critic reads.

With tokens as actions a value is that of the state before each token. With answers as actions it is that of the state
before the answer, after its prompt (or, of a critic of actions, after the answer), and the log-probability of an
answer is the sum over its tokens.

Shapes: `T` tokens of an answer, `M` actions of several sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from palestra.types import Answer, Node, Seat

ActionLevel = Literal["token", "turn"]


def action_sums(tokens: Sequence[np.ndarray], level: ActionLevel) -> np.ndarray:
    """Returns the sum over the tokens of each action [M] float64, from one array [T] for each answer."""
    if level == "turn":
        return np.array([own.astype(np.float64).sum() for own in tokens])
    return np.concatenate(tokens).astype(np.float64)


def action_values(values: Sequence[np.ndarray], level: ActionLevel) -> np.ndarray:
    """Returns the value of the state before each action [M], from the critic's [T] (or, of an answer, [1])."""
    return np.concatenate([own[:1] for own in values] if level == "turn" else values)


def action_counts(lengths: Sequence[int], level: ActionLevel) -> list[int]:
    """Returns the number of actions of each answer, from its number of tokens."""
    return [1] * len(lengths) if level == "turn" else list(lengths)


def by_token(actions_M: np.ndarray, lengths: Sequence[int], level: ActionLevel) -> list[np.ndarray]:
    """Returns the number of each token's action, an array [T] float32 for each answer."""
    parts = np.split(actions_M.astype(np.float32), np.cumsum(action_counts(lengths, level))[:-1])
    return [np.broadcast_to(own, length).copy() for own, length in zip(parts, lengths, strict=True)]


def critic_input(
    nodes: Sequence[Node], seats: Sequence[Seat], seat: Seat, *, joint: bool, with_answers: bool = False
) -> np.ndarray:
    """Returns the tokens [P] int32 that a critic reads about the answer of `seat` at the last of `nodes`, the
    trajectory up to then.

    These are the seat's own prompt, and before it, if `joint`, the newest prompts of the other seats in their order,
    with the answer to it if that was given in an earlier step. `with_answers`: also the answers of this step, each
    after its prompt, so that the critic's value is that of the state and the (joint) action. Seats whose policies have
    no tokens are not in it.
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
