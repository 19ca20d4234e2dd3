"""The describe-and-guess env against episodes worked by hand."""

import random

import pytest

from palestra.core.chat import Chat
from palestra.environments.guessing.describe import (
    DESCRIPTIONS,
    DescribeGuess,
    draw_instance,
    kinds_of_nouns,
    named_choice,
    names_thing,
)
from palestra.envs import check_env
from palestra.envs.support.splits import split_of_text


def test_episode_by_hand():
    env = DescribeGuess(choices=3, shots=0)
    assert env.reset(0).observations == {"describer": "The thing: apron"}
    step = env.step({"describer": "you wear it\nto cook"})
    listed = ", ".join(env.instance.choices)
    assert step.observations == {"guesser": f"Your colleague says: you wear it to cook\nThe list: {listed}"}
    assert "apron" in env.instance.choices and (step.rewards, step.team_reward) == ({}, 0.0)
    last = env.step({"guesser": "An apron."})
    assert last.done and not last.rewards and last.team_reward == 1.0
    invalid = {"describer": False, "guesser": False}
    assert last.info == {"turn": 2, "success": True, "withheld": False, "invalid": invalid, "gold": "apron"}


def test_description_with_the_name_is_withheld():
    env = DescribeGuess(choices=3, shots=0)
    env.reset(0)
    step = env.step({"describer": "aprons"})
    assert step.observations["guesser"].startswith("Your colleague says: (nothing)\n")
    assert step.info["withheld"] and step.info["invalid"] == {"describer": True}


@pytest.mark.parametrize(
    ("description", "thing", "named"),
    [
        ("It is called HORSE", "horse", True),
        ("what one sits on when on horseback", "horse", True),
        ("h-o-r-s-e", "horse", True),
        ("h o r s e", "horse", True),
        ("a hors", "horse", True),
        ("hor-se", "horse", True),
        ("the hor ses", "horse", True),
        ("thehorseyouride", "horse", True),
        ("hörse", "horse", True),
        ("an t", "ant", True),
        ("each air", "chair", False),
        ("an animal to ride on", "horse", False),
        ("it is an oven", "ox", False),
        ("two oxen", "ox", True),
        ("a car", "carrot", False),
        ("giant elephants", "ant", False),
        ("", "ant", False),
    ],
)
def test_names_in_a_text_are_recognised(description, thing, named):
    assert names_thing(description, thing) == named


def test_no_noun_is_named_by_its_worked_description_or_its_kind():
    kinds = kinds_of_nouns()
    assert len(kinds) == 376 and all(noun.isascii() and noun.islower() for noun in kinds)
    assert not [noun for noun, said in DESCRIPTIONS.items() if names_thing(said, noun)]
    assert [noun for noun, kind in kinds.items() if names_thing(f"a kind of {kind}", noun)] == []


@pytest.mark.parametrize(
    ("reply", "named"), [("The owl!", "owl"), ("owl or ant", None), ("an owlet", None), ("", None), ("ant, ant", "ant")]
)
def test_guess_is_the_only_named_thing_of_the_list(reply, named):
    assert named_choice(reply, ["owl", "ant", "fig"]) == named


def test_splits_have_different_things_and_examples_are_of_base():
    for split in ("train", "dev", "test", "base"):
        instances = [draw_instance(seed, 8, split) for seed in range(200)]
        assert {split_of_text(f"describe {each.thing}") for each in instances} == {split}
        assert all(each.thing in each.choices and len(set(each.choices)) == 8 for each in instances)
        assert len({each.thing for each in instances}) > 25
        first = sum(each.choices[0] == each.thing for each in instances)
        assert 10 < first < 45  # its index in the list has no information: 25 of 200 on average
    assert {split_of_text(f"describe {noun}") for noun in DESCRIPTIONS} == {"base"}


def test_shots_are_earlier_turns():
    env = DescribeGuess(shots=2)
    asked = env.reset(0).observations["describer"]
    assert isinstance(asked, Chat) and asked.num_shared == len(asked.messages) - 1 == 5
    assert [m["content"] for m in asked.messages[2:5:2]] == list(DESCRIPTIONS.values())[:2]
    seen = env.step({"describer": "hm"}).observations["guesser"].messages
    assert [m["content"] for m in seen[2:5:2]] == list(DESCRIPTIONS)[:2]


def test_kinds_identify_things_more_often_than_chance():
    env, rng, right = DescribeGuess(split="test", choices=4), random.Random(0), 0
    kinds = kinds_of_nouns()
    for seed in range(50):
        env.reset(seed)
        kind = env.expert("describer", rng).removeprefix("a kind of ")
        env.step({"describer": kind})
        guess = next(each for each in env.instance.choices if kinds[each] == kind)
        right += env.step({"guesser": guess}).info["success"]
    assert right > 40


def test_env_passes_the_env_check():
    check_env(lambda: DescribeGuess(shots=1))


@pytest.mark.parametrize("options", [{"choices": 1}, {"shots": 9}])
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        DescribeGuess(**options)
