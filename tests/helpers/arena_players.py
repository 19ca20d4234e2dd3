"""Players of the arena that are functions."""

from __future__ import annotations

import random

from palestra.core.failures import ContextLengthExceeded
from palestra.text.policies.base import Query


def say_first(query: Query, rng: random.Random) -> str:
    """Says the first word that is listed."""
    assert query.legal_actions
    return f"Easy. #### {query.legal_actions[0]}"


def babble(query: Query, rng: random.Random) -> str:
    return "hello"


def stumble(query: Query, rng: random.Random) -> str:
    """Answers in vain at every second question."""
    assert query.legal_actions
    return query.legal_actions[0] if len(query.observation) % 2 else "hello"


def fall(query: Query, rng: random.Random) -> str:
    raise RuntimeError("no power")


def overflow(query: Query, rng: random.Random) -> str:
    """Takes no prompt that tells of a move."""
    assert query.legal_actions
    if "bet" in query.observation.partition("Say")[0] or "pass" in query.observation.partition("Say")[0]:
        raise ContextLengthExceeded("this prompt is too long")
    return query.legal_actions[0]
