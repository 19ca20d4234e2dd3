"""What an env's step may hold: what does not fit fails its episode with the env's name, and the run goes on."""

import re

import pytest
from helpers.env_servers import serving
from helpers.toys_odd import ODD_STEPS, Odd

import palestra as pl
from palestra.core.types import Step
from palestra.envs.step_values import checked_step, number

REFUSED = {
    "unknown seat": "gives a reward to seat 'Agent', and its seats are agent",
    "terms of an unknown seat": "gives a reward to seat 'Agent'",
    "no reward": 'gives seat "agent" a reward of None',
    "reward as text": "a reward of '1.0' (str)",
    "reward as an array": "(ndarray): rewards must be finite numbers",
    "infinite team reward": "gives the team a reward of inf",
    "success as text": "reports the success 'false' (str)",
    "success above 1": "reports the success 3 (int)",
    "opaque info": "Opaque into info['thing'], which cannot be stored",
    "keys of bytes": "the key b'x' into info['cells']",
    "equal keys": "puts two keys that are '1' as text into info",
    "surrogate": "a lone surrogate, '\\ud83d' into info['text']",
}
LEGAL = {
    "text": ({"a": "xyz"}, "gives seat \"a\" the legal actions 'xyz': list one or more, or leave out a seat"),
    "nothing": ({"a": []}, 'gives seat "a" the legal actions []: list one or more'),
    "None": ({"a": None}, 'gives seat "a" the legal actions None'),
}
STORED = {
    "decimal reward": {"success": True},
    "tuple keys": {"cells": {"(0, 1)": "x"}},
    "mixed set": {"seen": [1, "a"]},
    "date": {"when": "2026-01-02"},
    "numpy": {"success": True, "grid": [0.0, 0.0], "n": 3},
    "partial success": {"success": 0.25},
}


def train(env, root, **options):
    return pl.train(
        env=env,
        policies={"default": pl.Lora("tiny", rank=2, sampling={"max_tokens": 3})},
        algorithm=pl.GRPO(group_size=2, branch_at="root"),
        evals={"test": {"episodes": 4}},
        steps=2,
        episodes=4,
        root=root,
        **options,
    )


def errors_of(run):
    return {e.seed % 2: e.error for step in range(2) for e in run.trees(step)}


@pytest.mark.parametrize("case", LEGAL)
def test_legal_actions_that_are_no_list_are_refused(case):
    legal, message = LEGAL[case]
    with pytest.raises(ValueError, match=re.escape(message)):
        checked_step(Step({"a": "go"}, legal_actions=legal), "odd", ["a"])
    assert checked_step(Step({}, legal_actions={"a": []}), "odd", ["a"]).legal_actions == {"a": []}


def test_every_case_is_named():
    assert ODD_STEPS.keys() == {"plain", *REFUSED, *STORED}


@pytest.mark.parametrize("part", REFUSED)
@pytest.mark.few(2)
def test_what_does_not_fit_fails_its_episode_with_the_name_of_the_env(part, tmp_path):
    run = train({"type": "helpers.toys_odd:Odd", "part": part}, tmp_path)
    errors = errors_of(run)
    assert errors[0] is None and errors[1].startswith('ValueError: env "odd" ') and REFUSED[part] in errors[1]
    assert "\n" not in errors[1]
    team = run.metrics[run.metrics["policy"] == "team"]
    assert team["failed"].tolist() == [2.0, 2.0] and team["episodes"].tolist() == [4.0, 4.0]
    assert run.evals["failed"].tolist() == [2.0, 2.0]
    with pytest.raises(ValueError, match=r"env Odd, seed 1|earns"):
        pl.check_env(lambda: Odd(part))


@pytest.mark.parametrize("options", [{}, {"staleness": 1}], ids=["sync", "async"])
@pytest.mark.parametrize("part", STORED)
@pytest.mark.few(2)
def test_what_can_be_stored_is_stored(part, options, tmp_path):
    run = train({"type": "helpers.toys_odd:Odd", "part": part}, tmp_path, **options)
    assert errors_of(run) == {0: None, 1: None}
    infos = [node.info for e in run.trees() if e.seed % 2 for node in e.nodes]
    assert infos == [STORED[part]] * 4
    if part == "partial success":
        assert set(run.evals["success"]) == {(1 + 0.25) / 2}
    if part == "decimal reward":
        assert {n.rewards["agent"] for e in run.trees() if e.seed % 2 for n in e.nodes} == {0.5}


def test_observations_that_cannot_be_stored_fail_their_episode(tmp_path):
    errors = errors_of(train("helpers.toys_odd:OddSight", tmp_path))
    assert errors[0] is None and 'env "odd sight" puts a mapping with the key b' in errors[1]


@pytest.mark.parametrize("part", ["opaque info", "unknown seat", "success as text"])
@pytest.mark.few(1)
def test_steps_of_a_remote_env_are_checked_too(part, tmp_path):
    with serving("helpers.toys_odd:Odd") as server:
        run = train({"type": "helpers.toys_odd:Odd", "part": part, "at": [server.address]}, tmp_path)
    errors = errors_of(run)
    assert errors[0] is None and errors[1] is not None


@pytest.mark.parametrize("value", ["1", None, [1], {}, 1j, b"1"])
def test_other_types_are_no_numbers(value):
    assert number(value) is None


def test_rewards_of_a_seat_that_has_no_policy_now_are_known(tmp_path):
    """A seat of the env may be paid before it acts for the first time."""

    class Two(Odd):
        seats = ("agent", "other")

        def step(self, actions):
            return Step({}, {"agent": float(len(actions["agent"]) % 3), "other": 2.0})

    run = train(lambda: Two(), tmp_path)
    assert run.evals.iloc[-1]["returns.other"] == 2.0
