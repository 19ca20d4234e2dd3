"""Rewards by named terms: an env names the parts of each seat's reward, and logs and alarms treat them separately.

An env puts them into `info["reward_terms"]` of its step, by seat and term; the terms of a seat sum to its reward. The
term `form` is the penalty for an answer that cannot be read. Its sum over an episode is never positive: a policy learns
a reward for form alone first, and perhaps nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from palestra.core.types import Seat, Step

REWARD_TERMS_KEY = "reward_terms"  # key in a step's info
TEAM_TERMS_KEY = "team_reward_terms"  # likewise of the team's reward, by term
MAX_ROUNDING = 1e-6  # by which the sum of terms may differ from the reward
FORM_TERM = "form"
OUTCOME_TERM = "outcome"  # the result of a game, paid at its end
VERDICT_TERM = "verdict"  # what a judge's verdict pays a seat that is judged
# key in a step's info: by judged seat, what the verdict would pay if it were right; paid to and observed by no seat
EXACT_GRADE_KEY = "exact_grade"
Terms = Mapping[str, float]


def total_rewards(terms: Mapping[Seat, Terms]) -> dict[Seat, float]:
    """Returns the reward of each seat: the sum of its terms."""
    return {seat: float(sum(own.values())) for seat, own in terms.items()}


def terms_info(terms: Mapping[Seat, Terms]) -> dict[str, Any]:
    """Returns the terms as an entry of a step's info; no entry if no seat has any."""
    return {REWARD_TERMS_KEY: {seat: dict(own) for seat, own in terms.items()}} if any(terms.values()) else {}


def form_or(name: str, reward: float, *, is_invalid: bool) -> dict[str, float]:
    """Returns the terms of a reward: `form` has all of it if the answer is invalid, else the term `name`."""
    return {FORM_TERM: reward, name: 0.0} if is_invalid else {FORM_TERM: 0.0, name: reward}


def terms_gained(now: Terms, before: Terms) -> dict[str, float]:
    """Returns the change of each term of a score, for rewards that sum to the last score of an episode."""
    return {name: value - before.get(name, 0.0) for name, value in now.items()}


def check_terms(step: Step) -> None:
    """Raises ValueError if the terms of a seat's reward, or of the team's, do not sum to its reward in this step."""
    terms = step.info.get(REWARD_TERMS_KEY, {})
    team = step.info.get(TEAM_TERMS_KEY)
    if team is not None and abs(step.team_reward - sum(team.values())) > MAX_ROUNDING:
        raise ValueError(
            f'the team earns {step.team_reward:g}, and its terms are {team}: correct info["{TEAM_TERMS_KEY}"], or '
            "leave it out"
        )
    for seat in {**step.rewards, **terms}:
        reward = step.rewards.get(seat, 0.0)
        named = terms.get(seat, {})
        if abs(reward - sum(named.values())) > MAX_ROUNDING:
            raise ValueError(
                f'seat "{seat}" earns {reward:g}, and its terms are {named or "none"}: put what the reward is made of '
                f'into info["{REWARD_TERMS_KEY}"], by seat and name'
            )
