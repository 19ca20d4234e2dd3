"""Few-shot prompts: worked examples as earlier turns of the conversation, the same for every policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from palestra.core.chat import Chat
from palestra.core.types import Seat

MAX_SHOTS = 16


def acting_seat(seat: Seat | None, actions: Mapping[Seat, Any]) -> Seat:
    """Returns the seat that acts next. Raises ValueError if the actions are not of this seat alone,
    or if `seat` is None since the episode has ended."""
    if seat is None or actions.keys() != {seat}:
        why = "the game is over: call reset(seed) before step" if seat is None else f"it is the turn of {seat}"
        raise ValueError(f"the actions are for {sorted(actions)}, but {why}")
    return seat


def ask_with_examples(role: str, examples: Sequence[dict[str, str]], question: str) -> Chat | str:
    """Returns the question after the role and the worked examples, which all conversations share;
    without examples the question alone."""
    if not examples:
        return question
    shared = ({"role": "system", "content": role}, *examples)
    return Chat((*shared, {"role": "user", "content": question}), num_shared=len(shared))
