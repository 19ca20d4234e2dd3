"""Answers as actions: rewards, values and advantages of one entry for each answer, and what a central critic reads.

With tokens as actions a value is that of the state before each token. With answers as actions it is that of the state
before the answer, after its prompt, and the log-probability of an answer is the sum over its tokens.

Shapes: `T` tokens of an answer, `M` actions of several sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from palestra.types import Node, Seat

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


def joint_prompt(nodes: Sequence[Node], seats: Sequence[Seat], seat: Seat) -> np.ndarray:
    """Returns the tokens [P] int32 that a central critic reads before `seat` answers at the last of `nodes`, the
    trajectory up to then.

    These are the newest prompts of the other seats in their order, with the answer to it if that was given in an
    earlier step, and at the end the seat's own prompt. Seats whose policies have no tokens are not in it.
    """
    parts = [_newest(nodes, other) for other in seats if other != seat]
    return np.concatenate([*parts, nodes[-1].answers[seat].prompt_ids]).astype(np.int32)


def _newest(nodes: Sequence[Node], seat: Seat) -> np.ndarray:
    now = nodes[-1].answers.get(seat)
    if now is not None:
        return now.prompt_ids
    earlier = [node.answers[seat] for node in nodes if seat in node.answers]
    return np.concatenate([earlier[-1].prompt_ids, earlier[-1].token_ids]) if earlier else np.zeros(0, np.int32)
