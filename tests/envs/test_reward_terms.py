"""Rewards by terms: every shipped text env names its rewards, and rewards the form of an answer less than the task.

For each env with a reward for form, a policy with the right form alone earns less than one that is right in one of ten
episodes and earns nothing in the others.
"""

import asyncio
import inspect
import random
from collections.abc import Callable
from typing import Any

import pytest

from palestra.core.types import Answer, Episode, Node, Step
from palestra.environments.code.env import CoderTester
from palestra.environments.guessing.env import GuessNumber
from palestra.environments.math.env import Math
from palestra.environments.sudoku.env import Sudoku
from palestra.environments.tools.env import Tools
from palestra.envs import TEXT_ENVS, check_env, env_options, load_env_class, make_env
from palestra.envs.base import RANDOM_WORDS, Env
from palestra.envs.reward_terms import (
    EXACT_GRADE_KEY,
    FORM_TERM,
    REWARD_TERMS_KEY,
    VERDICT_TERM,
    check_terms,
    terms_gained,
    terms_info,
    total_rewards,
)
from palestra.envs.text.grid.plan_path import PlanPath
from palestra.envs.text.grid.sokoban import Sokoban
from palestra.text.rollouts.metrics import policy_metrics

# An env, and well-formed answers by seat that do not depend on the instance.
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
    """The total of each seat with the team's reward, per episode."""
    found = []
    for seed in seeds:
        env, turn = make_env(), 0
        step = await awaited(env.reset(seed))
        earned = dict.fromkeys(env.seats, 0.0)
        while not step.done:
            step = await awaited(env.step({seat: say(env, seat, turn) for seat in step.observations}))
            check_terms(step)
            check_form(step)
            turn += 1
            for seat in env.seats:
                earned[seat] += step.team_reward + step.rewards.get(seat, 0.0)
        found.append(earned)
    return found


def check_form(step: Step) -> None:
    assert all(terms.get(FORM_TERM, 0.0) <= 0 for terms in step.info.get(REWARD_TERMS_KEY, {}).values())


async def awaited(result: Any) -> Step:
    return await result if inspect.isawaitable(result) else result


def mean(found: list[dict], seat: str) -> float:
    return sum(earned[seat] for earned in found) / len(found)


@pytest.mark.parametrize("name", FORM_ONLY)
@pytest.mark.few(4)
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
    """Means over answers: of two answers one lost 0.1 for its form and one earned 1; a step without terms counts as
    0."""
    episode = Episode("hand", 0, {"a": "p"})
    for i, terms in enumerate(({"form": -0.1, "correct": 0.0}, {"form": 0.0, "correct": 1.0}, {})):
        info = {REWARD_TERMS_KEY: {"a": terms}} if terms else {}
        rewards = {"a": sum(terms.values())}
        episode.nodes.append(Node(i, None, 0, {}, {"a": Answer("x", "p@0")}, rewards, done=True, info=info))
    metrics = policy_metrics([episode], "p")
    assert metrics["reward/form"] == pytest.approx(-0.1 / 3) and metrics["reward/correct"] == pytest.approx(1 / 3)
    assert metrics["local_reward"] == pytest.approx(0.3)


def test_exact_grade_is_logged_beside_the_verdict_and_paid_to_nobody() -> None:
    """Of two answers a judge passes both, and one is right; the seat is graded in a step in which it does not act."""
    episode = Episode("hand", 0, {"a": "p", "j": "q"})
    for i in range(2):
        episode.nodes.append(Node(2 * i, None, 0, {}, {"a": Answer("x", "p@0")}, {}))
        info = {REWARD_TERMS_KEY: {"a": {VERDICT_TERM: 1.0}}, EXACT_GRADE_KEY: {"a": float(i)}}
        answers = {"j": Answer("yes", "q@0")}
        episode.nodes.append(Node(2 * i + 1, 2 * i, 1, {}, answers, {"a": 1.0}, done=True, info=info))
    metrics = policy_metrics([episode], "p")
    assert (metrics["reward/verdict"], metrics["exact_grade"], metrics["local_reward"]) == (1.0, 0.5, 1.0)
    assert EXACT_GRADE_KEY not in policy_metrics([episode], "q")


# ---- every shipped text env names its rewards

ALONE = {"team": "single"}
NAMED: dict[str, list[dict[str, Any]]] = {  # options by env
    "plan_path": [{}, ALONE],
    "sokoban": [{}, ALONE],
    "math": [ALONE | {"max_turns": 3}, ALONE | {"rendering": "compact"}],
    "math_review": [{}],
    "math_judge": [{}, {"commits_first": True}],
    "math_relay": [{}],
    "tool_review": [{}, {"reward": "outcome"}],
    "code": [{"unsafe": True, "source": "drills", "rendering": "compact"}],
    "debate": [
        {},
        {"order": "simultaneous", "source": "drills", "rendering": "compact"},
        {"order": "simultaneous", "weights": {"repetition": 3.0}},
        {"mode": "truth"},
        {"judge": "seat"},
        {"judge": "seat", "order": "simultaneous"},
        {"judge": "seat", "mode": "truth"},
        {"judge": "seat", "mode": "truth", "commits_first": True},
    ],
    "tools": [{"built_in": ["search", "read_document"], "kinds": ["lookup"]}],
    "workflow": [{"function": "helpers.toy_workflows:relay", "seats": ["guide", "walker"]}],
    "sudoku": [{}, ALONE],
    "guess_number": [{}, {"answers": "seat"}],
    "twenty_questions": [{}, {"answers": "seat"}],
    "describe_guess": [{}],
    "text_kuhn": [{}, {"players": 3}],
    "text_leduc": [{}],
    "text_liars_dice": [{}],
    "text_tic_tac_toe": [{}, {"rendering": "full"}],
    "text_connect_four": [{}],
    "text_bargaining": [{}],
    "arena": [{}],
}
# Their packages have a venv of their own: tests/envs/adapters/peers/text plays these envs and checks their terms.
PEERS = {"textarena", "verifiers", "openenv"}
OWN = {"chain"}  # its rewards are a user's: tests/envs/text/test_chain.py checks their terms
TEAM_ONLY = {"describe_guess"}  # no seat has a reward of its own


def test_every_text_env_is_listed() -> None:
    assert NAMED.keys() | PEERS | OWN == TEXT_ENVS.keys()


def answer(env: Env, step: Step, seat: str, rng: random.Random, expert_share: float) -> str:
    """The expert's answer, or at random a legal one or words."""
    if hasattr(env, "expert") and rng.random() < expert_share:
        return str(env.expert(seat, rng))
    if step.legal_actions and rng.random() < 0.8:
        return str(rng.choice(step.legal_actions[seat]))
    return " ".join(rng.choices(RANDOM_WORDS, k=rng.randint(1, 4)))


async def named_terms(env: Env, seed: int, expert_share: float) -> tuple[set[str], bool]:
    """The names of the terms of an episode, and whether a seat had a reward. Every reward is the sum of its terms."""
    rng, names, paid = random.Random(seed), set[str](), False
    step = await awaited(env.reset(seed))
    while True:
        check_terms(step)
        terms = step.info.get(REWARD_TERMS_KEY, {})
        names |= {name for own in terms.values() for name in own}
        paid |= any(step.rewards.values())
        if step.done:
            await _closed(env)
            return names, paid
        step = await awaited(env.step({seat: answer(env, step, seat, rng, expert_share) for seat in step.observations}))


async def _closed(env: Env) -> None:
    result = env.close()
    if inspect.isawaitable(result):
        await result


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.few(8)
def test_rewards_are_the_sum_of_named_terms(name: str) -> None:
    has_outcome = "reward" in env_options(load_env_class(name)).model_fields
    names, paid = set[str](), False
    for options in NAMED[name]:
        for reward in ("dense", "outcome") if has_outcome else ("",):
            whole = options | ({"reward": reward} if reward else {})
            for seed, expert_share in enumerate((0.0, 0.5, 1.0)):
                found = asyncio.run(named_terms(make_env(name, **whole), seed, expert_share))
                names, paid = names | found[0], paid | found[1]
    assert names - {FORM_TERM} if name not in TEAM_ONLY else not paid


def test_terms_that_do_not_sum_to_the_reward_are_refused() -> None:
    check_terms(Step({}, {"a": 0.9}, info=terms_info({"a": {"form": -0.1, "outcome": 1.0}})))
    for wrong in ({"a": {"outcome": 1.0}}, {}, {"a": {"form": -0.1, "outcome": 1.0}, "b": {"outcome": 1.0}}):
        with pytest.raises(ValueError, match=r'seat ".*" earns .*put what the reward is made of into info'):
            check_terms(Step({}, {"a": 0.9}, info=terms_info(wrong)))


class Miscounted(Env):
    """Pays 1, and names 0.5 of it."""

    seats = ("agent",)
    replaces_state = True

    def reset(self, seed: int) -> Step:
        return Step({"agent": "say something"})

    def step(self, actions: dict[str, Any]) -> Step:
        return Step({}, {"agent": 1.0}, info=terms_info({"agent": {"outcome": 0.5}}))


def test_env_check_adds_up_terms() -> None:
    with pytest.raises(ValueError, match='seat "agent" earns 1, and its terms are'):
        check_env(Miscounted)


def test_debate_pays_the_parts_of_a_speech_and_takes_them_from_the_other_side() -> None:
    """The score's parts by their weights 1, 2 and 1 of 4; what one side earns, the other loses as one term."""
    env = make_env("debate", rounds=1, order="simultaneous")
    step = asyncio.run(_first_speeches(env))
    terms, parts = step.info[REWARD_TERMS_KEY], step.info["parts"]
    for side, other in (("pro", "con"), ("con", "pro")):
        own = {name: parts[side][name] for name in ("structure", "evidence", "rebuttal", "repetition")}
        weights = {"structure": 0.25, "evidence": 0.5, "rebuttal": 0.25, "repetition": -0.25}
        wanted = {name: weights[name] * value for name, value in own.items()} | {"opponent": -parts[other]["worth"]}
        assert terms[side] == pytest.approx(wanted, abs=1e-6) and terms[side]["evidence"] > 0


async def _first_speeches(env: Any) -> Step:
    step = await awaited(env.reset(0))
    return await awaited(env.step({side: env.expert(side, random.Random(0)) for side in step.observations}))


def test_terms_of_a_seat_that_waits_are_logged() -> None:
    """`first` moves, two answers tried; then `second` ends the game in two ways, -1 and 0 for `first`, whose answers
    both get the mean."""
    episode = Episode("hand", 0, {"first": "p", "second": "q"})
    episode.nodes = [Node(i, None, 0, {}, {"first": Answer("x", "p@0")}, chosen=i == 0) for i in range(2)]
    for i, outcome in enumerate((-1.0, 0.0)):
        terms = {"first": {"outcome": outcome}, "second": {"outcome": -outcome}}
        said = {"second": Answer("y", "q@0")}
        info = {REWARD_TERMS_KEY: terms}
        episode.nodes.append(Node(2 + i, 0, 1, {}, said, total_rewards(terms), done=True, info=info))
    loser, winner = policy_metrics([episode], "p"), policy_metrics([episode], "q")
    assert loser["reward/outcome"] == loser["local_reward"] == -0.5 and loser["answers"] == 2
    assert winner["reward/outcome"] == winner["local_reward"] == 0.5 and winner["answers"] == 2
