"""Steps made by chance: a value of any kind at any place of an env's step is used as what it says, or refused in one
line with the name of the env."""

import asyncio
import math
from dataclasses import replace
from datetime import date
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from helpers.scripted_envs import LENGTH, ODD_TIME, PLAIN, ScriptedText
from hypothesis import given
from hypothesis import strategies as st

from palestra.core.failures import RunFailed
from palestra.core.types import Episode, RolloutBatch, Step
from palestra.envs.step_values import checked_step
from palestra.testing import ScriptedPolicy
from palestra.text.rollouts.tree_rollout import Branching, EpisodeRunner, EpisodeSpec
from palestra.vector.build.envs import make_vector_env
from palestra.vector.policies.base import UniformVectorPolicy
from palestra.vector.rollouts.rollout import VectorRollout

NUMBERS = [0, 1, 2, -1, 0.5, 0.0, 1.0, -0.0, math.nan, math.inf, 10**400, 1e300, True, False]
NUMBERS += [Decimal("0.25"), Fraction(1, 4), 1 + 1j, np.float32(0.5), np.int64(1), np.bool_(True), np.complex64(1j)]
ARRAYS = [
    np.array(v) for v in (1.0, [1.0], [0, 1], [0.5, 0.25], [1, 0, 1], [0.5, 0, 1], [-np.inf, 0, 0], [[1, 0, 1]], [])
]
ARRAYS += [
    np.array(["1"]),
    np.array([True, False, True]),
    np.array([1, 0, 1], np.int8),
    np.array([2, 3]),
    np.array([-1, 0]),
]
ARRAYS += [np.full((36, 36, 1), v) for v in (0.5, 200, 255.0, 300, -1, np.uint8(7))] + [np.zeros((36, 36), np.uint8)]
OTHERS = [
    None,
    "",
    "1",
    "no",
    "False",
    b"1",
    date(2026, 1, 1),
    {},
    {"a": 1.0},
    [],
    [1.0],
    [0, 1],
    [1, 0, 1],
    (1, 0),
    {1},
]
OTHERS += [np.datetime64("2026-01-01"), np.array([date(2026, 1, 1)])]
VALUES = st.sampled_from([*NUMBERS, *ARRAYS, *OTHERS]) | st.floats(width=32) | st.integers(-5, 5) | st.text(max_size=3)


def the_number(value: Any) -> float | None:
    """The number that a value says, if it is one number."""
    if isinstance(value, np.ndarray):
        return the_number(value.item()) if value.size == 1 else None
    if isinstance(value, complex | np.complexfloating | str | bytes | np.datetime64) or value is None:
        return None
    return float(value) if isinstance(value, int | float | Decimal | Fraction | np.generic) else None


def collect(config: dict[str, Any]) -> RolloutBatch:
    env = make_vector_env(config | {"num_envs": 1})
    rollout = VectorRollout(env, np.zeros(1, np.int64))
    return rollout.collect([UniformVectorPolicy(env, range(len(env.seats)))], LENGTH - 1, 0)


def is_refused(error: Exception, name: str) -> bool:
    return f'env "{name}" ' in str(error) and len(str(error).splitlines()) == 1


# ---- Gymnasium


def play_gym(place: str, value: Any) -> RolloutBatch | None:
    """Two steps of the env; None if the value is refused as it should be."""
    try:
        return collect({"type": "gymnasium", "id": "any-step", "options": {"place": place, "value": value}})
    except RunFailed as error:
        assert is_refused(error, "any-step"), error
        return None


@given(value=VALUES)
def test_a_reward_is_what_it_says(value: Any) -> None:
    if batch := play_gym("reward", value):
        assert batch.rewards[ODD_TIME - 1, 0, 0] == np.float32(the_number(value))


@pytest.mark.parametrize("flag", ["terminated", "truncated"])
@given(value=VALUES)
def test_a_flag_is_what_it_says(flag: str, value: Any) -> None:
    if batch := play_gym(flag, value):
        assert float(getattr(batch, flag)[ODD_TIME - 1, 0]) == the_number(value)


@given(value=VALUES)
def test_a_success_is_what_it_says(value: Any) -> None:
    """It is read in every step, and counted at the end."""
    if play_gym("is_success", value):
        assert the_number(value) in (0, 1)


@given(value=VALUES)
def test_an_action_mask_is_what_it_says(value: Any) -> None:
    if batch := play_gym("action_mask", value):
        assert batch.action_mask is not None
        assert batch.action_mask[ODD_TIME, 0, 0].tolist() == [float(v) for v in value]


def encoded(kind: str, value: Any) -> np.ndarray:
    """What the value says in its space; raises if it is not in the space."""
    if kind not in ("discrete", "multi discrete"):
        return np.asarray(value)
    sizes, parts = ((3,) if kind == "discrete" else (3, 2)), np.ravel(value).tolist()
    return np.concatenate([np.eye(size)[range(size).index(v)] for size, v in zip(sizes, parts, strict=True)])


@pytest.mark.parametrize("kind", ["box", "discrete", "multi discrete", "image"])
@given(value=VALUES)
def test_an_observation_is_what_it_says(kind: str, value: Any) -> None:
    if batch := play_gym(kind, value):
        expected = np.asarray(encoded(kind, value)).astype(np.float32)
        np.testing.assert_array_equal(batch.obs[ODD_TIME, 0, 0].astype(np.float32), expected)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        *(("reward", value) for value in (2, 0.5, True, np.float32(0.5), np.array([1.0]), Decimal("0.25"))),
        ("reward", torch.tensor(0.5)),
        *(("terminated", value) for value in (True, 1, np.bool_(True), np.array([True]), 0.0)),
        *(("is_success", value) for value in (True, np.float32(1.0), 0)),
        *(("action_mask", value) for value in ([1, 0, 1], np.array([True, False, True]), np.array([1.0, 0, 1]))),
        *(("image", np.full((36, 36, 1), value)) for value in (200, 255.0)),
        *PLAIN.items(),
        ("box", [0.5, 1]),
    ],
)
def test_usual_values_are_used(place: str, value: Any) -> None:
    assert play_gym(place, value) is not None


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("dict", {"a": np.zeros(2)}, "differ in the parts 'b'"),
        ("dict", {"a": np.zeros(2), "b": np.zeros(1), "c": np.ones(1)}, "differ in the parts 'c'"),
        ("dict", {"a": np.zeros(1), "b": np.zeros(2)}, "part 'a' of an observation has 1 numbers.* says 2"),
        ("tuple", (np.zeros(2), np.ones(1)), "differ in the parts 1"),
        ("discrete", 1.0, r"observation 1.0 is not in Discrete\(3\)"),
        ("box", np.array(["2026-01-01", "2026-01-02"], "datetime64[D]"), "has dates or durations"),
    ],
)
def test_an_observation_that_would_lose_a_part_is_refused(place: str, value: Any, message: str) -> None:
    with pytest.raises(RunFailed, match=message):
        collect({"type": "gymnasium", "id": "any-step", "options": {"place": place, "value": value}})


# ---- PettingZoo


def play_pettingzoo(factory: str, place: str, agent: str, value: Any) -> RolloutBatch | None:
    options = {"place": place, "agent": agent, "value": value}
    try:
        return collect({"type": "pettingzoo", "env": f"helpers.scripted_envs:{factory}", "options": options})
    except RunFailed as error:
        assert is_refused(error, f"helpers.scripted_envs:{factory}"), error
        return None


PARTS = st.sampled_from(["rewards", "terminations", "truncations", "observations", "agents"])


@pytest.mark.parametrize("factory", ["ScriptedPair", "ScriptedTurns"])
@given(place=PARTS, agent=st.sampled_from(["a", "b", "c", "__all__"]), value=VALUES)
def test_what_an_agent_gets_is_what_it_says(factory: str, place: str, agent: str, value: Any) -> None:
    """Also an agent that has terminated, and agents that do not exist."""
    place = {"observations": "observe"}.get(place, place) if factory == "ScriptedTurns" else place
    batch = play_pettingzoo(factory, place, agent, value)
    if batch is None or (place in ("agents", "observe") and factory == "ScriptedTurns"):
        return
    assert agent in ("a", "b"), "an unknown agent is passed over"
    seat = "ab".index(agent)
    if place == "rewards":
        assert batch.rewards[ODD_TIME - 1, 0, seat] == np.float32(the_number(value))
    elif place in ("terminations", "truncations"):
        assert the_number(value) in (0, 1)
        if the_number(value) == 1 and agent == "a" and factory == "ScriptedPair":
            assert batch.done[ODD_TIME - 1, 0]
    elif place == "observations" and agent == "a":
        np.testing.assert_array_equal(batch.obs[ODD_TIME, 0, seat], np.asarray(value, np.float32))


@given(value=VALUES)
def test_what_an_agent_of_a_turn_based_env_sees_is_what_it_says(value: Any) -> None:
    if batch := play_pettingzoo("ScriptedTurns", "observe", "a", value):
        np.testing.assert_array_equal(batch.obs[ODD_TIME, 0, 0], np.asarray(value, np.float32))


# ---- texts

TEXT_PLACES = ["reward", "seat", "observation", "observed seat", "team_reward", "truncated", "legal seat"]
TEXT_PLACES += ["success", "invalid", "why_invalid", "no_reward", "score"]
CHOICES = VALUES | st.sampled_from(
    ["agent", "Agent", {"agent": True}, {"Agent": True}, {"agent": "no"}, ["agent"], ["b"]]
)


def play_text(place: str, value: Any) -> Episode:
    runner = EpisodeRunner(lambda: ScriptedText(place, value), "scripted text", max_steps=20)
    spec = EpisodeSpec(0, {"agent": ScriptedPolicy(["2"], "agent")}, 0)
    return asyncio.run(runner.play(spec, Branching()))


@given(place=st.sampled_from(TEXT_PLACES), value=CHOICES)
def test_what_a_text_env_gives_is_what_it_says(place: str, value: Any) -> None:
    if place in ("seat", "observed seat", "legal seat") and not isinstance(value, str | int | None):
        return
    episode = play_text(place, value)
    if episode.error is not None:
        assert 'env "scripted text" ' in episode.error and len(episode.error.splitlines()) == 1
        return
    if place == "no_reward" and the_number(value) == 1:
        return
    check_text_step(place, value, episode)


def check_text_step(place: str, value: Any, episode: Episode) -> None:
    node = episode.nodes[ODD_TIME - 1]
    if place in ("reward", "team_reward"):
        paid = node.team_reward if place == "team_reward" else node.rewards["agent"]
        assert paid == the_number(value)
    elif place in ("seat", "observed seat", "legal seat"):
        assert value == "agent"
    elif place == "observation":
        assert str(episode.nodes[ODD_TIME].observations["agent"]) == str(value)
    elif place in ("truncated", "no_reward"):
        assert the_number(value) == 0 or not np.size(value) or not value
    elif place == "success" and value is not None:
        assert node.success == the_number(value)
    elif place == "invalid":
        by_seat = {"agent": True} if isinstance(value, list) and value == ["agent"] else value
        flagged = by_seat.get("agent", False) if isinstance(by_seat, dict) else by_seat
        assert bool(node.is_invalid("agent")) == (the_number(flagged) == 1)
    elif place == "score":
        assert "score" in node.info


@pytest.mark.parametrize("part", ["observations", "rewards", "info"])
@pytest.mark.parametrize("value", [None, [1.0], "a"])
def test_a_part_of_a_step_that_is_no_dictionary_is_refused(part: str, value: Any) -> None:
    step = replace(Step({"a": "go"}), **{part: value})
    with pytest.raises(ValueError, match=f'env "mine" gives .* as {part} of a step: give a dictionary'):
        checked_step(step, "mine", ["a"])
