"""Rewards by named terms: an env lists what each part of a seat's reward is for, and logs and alarms tell them apart.

An env puts them into `info["reward_terms"]` of its step, by seat and term; the terms of a seat sum to its reward. The
term `form` is for the form of an answer. It costs where an answer cannot be read, and its sum over an episode is never
positive: what is paid for form alone is learned first, and may be all that is learned.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from palestra.types import Seat

REWARD_TERMS_KEY = "reward_terms"  # key in a step's info
FORM_TERM = "form"
Terms = Mapping[str, float]


def total_rewards(terms: Mapping[Seat, Terms]) -> dict[Seat, float]:
    """Returns the reward of each seat: the sum of its terms."""
    return {seat: float(sum(own.values())) for seat, own in terms.items()}


def terms_info(terms: Mapping[Seat, Terms]) -> dict[str, Any]:
    """Returns the terms as an entry of a step's info; no entry if no seat has any."""
    return {REWARD_TERMS_KEY: {seat: dict(own) for seat, own in terms.items()}} if any(terms.values()) else {}


def form_or(name: str, reward: float, *, is_invalid: bool) -> dict[str, float]:
    """Returns the terms of a reward that is for form if an answer is invalid, else the term `name`."""
    return {FORM_TERM: reward, name: 0.0} if is_invalid else {FORM_TERM: 0.0, name: reward}


def terms_gained(now: Terms, before: Terms) -> dict[str, float]:
    """Returns the change of each term of a score, for rewards that sum to the last score of an episode."""
    return {name: value - before.get(name, 0.0) for name, value in now.items()}
