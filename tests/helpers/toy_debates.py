"""Plays a debate to its end, for tests."""

import random
from collections.abc import Callable
from typing import Any

from palestra.core.types import Step
from palestra.environments.debate.env import Debate

Talk = Callable[[str, Any, Debate], str]  # seat, observation, env -> answer


def expert(seat: str, observation: Any, env: Debate) -> str:
    return env.expert(seat, random.Random(0))


def play(env: Debate, seed: int = 0, **talks: Talk | str) -> tuple[list[Step], dict[str, float]]:
    """All steps of a debate and each seat's return; seats without a talk are played by experts."""
    steps, earned = [env.reset(seed)], dict.fromkeys((*env.seats, "team"), 0.0)
    while not steps[-1].done:
        answers = {
            seat: _said(talks.get(seat, expert), seat, view, env) for seat, view in steps[-1].observations.items()
        }
        steps.append(env.step(answers))
        for seat, reward in (*steps[-1].rewards.items(), ("team", steps[-1].team_reward)):
            earned[seat] += reward
    return steps, earned


def _said(talk: Talk | str, seat: str, observation: Any, env: Debate) -> str:
    return talk if isinstance(talk, str) else talk(seat, observation, env)
