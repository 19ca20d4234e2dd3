"""Rewards by terms, and that no shipped env pays for form what it should pay for the task.

For each env with a reward for form: a policy that knows the form and nothing else earns less than one that is right
once in ten episodes and earns nothing in the others.
"""

from __future__ import annotations

import asyncio
import inspect
import random
from collections.abc import Callable
from typing import Any

import pytest

from palestra.envs.base import Env
from palestra.envs.reward_terms import FORM_TERM, REWARD_TERMS_KEY, terms_gained, total_rewards
from palestra.envs.text.code.env import CoderTester
from palestra.envs.text.grid.plan_path import PlanPath
from palestra.envs.text.grid.sokoban import Sokoban
from palestra.envs.text.guessing.env import GuessNumber
from palestra.envs.text.math.env import Math
from palestra.envs.text.sudoku.env import Sudoku
from palestra.envs.text.tools.env import Tools
from palestra.rollouts.metrics import policy_metrics
from palestra.types import Answer, Episode, Node, Step

# An env, and well-formed answers by seat that know nothing of the instance.
CALL = '<tool_call>{"name": "search", "arguments": {"query": "the"}}</tool_call>'
FORM_ONLY: dict[str, tuple[Callable[[], Env], dict[str, list[str]]]] = {
    "math": (lambda: Math(team="single"), {"reasoner": ["#### 12"]}),
    "math_turns": (lambda: Math(team="single", max_turns=4), {"reasoner": ["#### 12", "#### 13"]}),
    "math_compact": (lambda: Math(team="single", rendering="compact"), {"reasoner": ["12"]}),
    "code": (lambda: CoderTester(team="single", unsafe=True), {"coder": ["```python\nx = 1\n```"]}),
    "plan_path": (
        lambda: PlanPath(team="planner_executor", size=5, max_turns=10),
        {"planner": ["#### r0 c0"], "executor": ["#### up", "#### down"]},
    ),
    "plan_path_alone": (lambda: PlanPath(team="single", size=5), {"agent": ["#### up", "#### down"]}),
    "sokoban": (lambda: Sokoban(team="single"), {"agent": ["#### up", "#### down"]}),
    "sudoku": (lambda: Sudoku(team="single"), {"agent": ["#### r1 c1 1"]}),
    "guess_number": (lambda: GuessNumber(), {"guesser": ["#### 50"]}),
    "tools": (
        lambda: Tools(built_in=["search", "read_document"], kinds=["lookup"]),
        {"agent": [CALL] * 5 + ["#### 12"]},
    ),
}
EPISODES = 20
SOLVED = dict.fromkeys(("plan_path", "plan_path_alone", "sokoban"), 2.0)  # all progress and the solution; no experts


async def returns(make_env: Callable[[], Env], say: Callable[[Env, str, int], str], seeds: range) -> list[dict]:
    """What each seat earns in all, with the team's reward, per episode."""
    found = []
    for seed in seeds:
        env, turn = make_env(), 0
        step = await _now(env.reset(seed))
        earned = dict.fromkeys(env.seats, 0.0)
        while not step.done:
            step = await _now(env.step({seat: say(env, seat, turn) for seat in step.observations}))
            check_terms(step)
            turn += 1
            for seat in env.seats:
                earned[seat] += step.team_reward + step.rewards.get(seat, 0.0)
        found.append(earned)
    return found


def check_terms(step: Step) -> None:
    for seat, terms in step.info.get(REWARD_TERMS_KEY, {}).items():
        assert sum(terms.values()) == pytest.approx(step.rewards[seat]) and terms.get(FORM_TERM, 0.0) <= 0


async def _now(result: Any) -> Step:
    return await result if inspect.isawaitable(result) else result


def mean(found: list[dict], seat: str) -> float:
    return sum(earned[seat] for earned in found) / len(found)


@pytest.mark.parametrize("name", FORM_ONLY)
def test_form_alone_earns_less_than_being_right_once_in_ten(name: str) -> None:
    make_env, answers = FORM_ONLY[name]
    seats = make_env().seats

    def adversary(env: Env, seat: str, turn: int) -> str:
        own = answers.get(seat, [""])
        return own[turn % len(own)]

    def honest(env: Env, seat: str, turn: int) -> str:
        return env.expert(seat, random.Random(turn))  # type: ignore[attr-defined]

    formal = asyncio.run(returns(make_env, adversary, range(EPISODES)))
    if name in SOLVED:
        assert all(mean(formal, seat) < 0.1 * SOLVED[name] for seat in seats)
        return
    right = asyncio.run(returns(make_env, honest, range(EPISODES)))
    for seat in seats:
        assert mean(formal, seat) < 0.1 * mean(right, seat), seat


def test_score_changes_sum_to_the_final_score() -> None:
    first, second = {"form": -0.1, "correct": 0.0}, {"form": 0.0, "correct": 1.0}
    gained = [terms_gained(first, {}), terms_gained(second, first)]
    assert gained == [first, {"form": 0.1, "correct": 1.0}]
    assert total_rewards({"a": gained[0], "b": gained[1]}) == {"a": -0.1, "b": 1.1}


def test_terms_are_logged_per_policy() -> None:
    """Means over answers: of two, one cost 0.1 for its form and one earned 1; a step without terms counts as 0."""
    episode = Episode("hand", 0, {"a": "p"})
    for i, terms in enumerate(({"form": -0.1, "correct": 0.0}, {"form": 0.0, "correct": 1.0}, {})):
        info = {REWARD_TERMS_KEY: {"a": terms}} if terms else {}
        rewards = {"a": sum(terms.values())}
        episode.nodes.append(Node(i, None, 0, {}, {"a": Answer("x", "p@0")}, rewards, done=True, info=info))
    metrics = policy_metrics([episode], "p")
    assert metrics["reward/form"] == pytest.approx(-0.1 / 3) and metrics["reward/correct"] == pytest.approx(1 / 3)
    assert metrics["local_reward"] == pytest.approx(0.3)
