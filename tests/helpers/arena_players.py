"""Players of the arena that are functions."""

from __future__ import annotations

import random

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
