"""The math relay env against episodes worked by hand."""

import random
import re
from typing import get_args

import pytest

from palestra.core.chat import Chat
from palestra.environments.math.relay import MathRelay, all_signs, relay_story
from palestra.environments.math.review import last_number
from palestra.envs import check_env
from palestra.envs.support.splits import Split

NUMBER = re.compile(r"\d+")
LESS = re.compile(r"loses|gives \d+ to|get off|run away|spends")


def operands(calculation: str) -> list[str]:
    return NUMBER.findall(calculation.partition("=")[0])


def test_episode_by_hand():
    env = MathRelay(shots=0, split="test", limit=30)
    first = env.reset(0)
    assert first.observations == {"first": "27 people are on a bus and 21 of them get off."}
    second = env.step({"first": "27 - 21\n= 6"})
    asked = "Your colleague says: 27 - 21 = 6\nAt the next stop 27 more get on. How many people are on the bus now?"
    assert second.observations == {"second": asked}
    assert (second.rewards, second.team_reward, second.info["success"]) == ({"first": 1.0}, 0.0, False)
    assert second.info["reward_terms"] == {"first": {"message": 1.0}}
    last = env.step({"second": "There are 33 now."})
    assert last.done and not last.rewards and last.team_reward == 1.0
    assert last.info == {
        "turn": 2,
        "success": True,
        "answers": {"first": "6", "second": "33"},
        "invalid": {"first": False, "second": False},
        "answer": "33",
        "gold": "33",
    }


def test_wrong_message_earns_nothing():
    env = MathRelay(limit=30, split="test")
    env.reset(0)
    assert env.step({"first": "27 - 21 = 7"}).rewards == {"first": 0.0}
    last = env.step({"second": "7 + 27 = 34"})
    assert last.team_reward == 0.0 and not last.info["success"]
    env.reset(0)
    assert env.step({"first": "many"}).info["invalid"] == {"first": True}


def test_only_the_team_is_rewarded_for_the_outcome():
    env = MathRelay(limit=30, split="test", reward="outcome")
    env.reset(0)
    assert env.step({"first": "6"}).rewards == {}
    assert env.step({"second": "33"}).team_reward == 1.0


@pytest.mark.parametrize("split", ["train", "dev", "test"])
def test_neither_seat_observes_all_numbers_of_a_story(split):
    env = MathRelay(split=split)
    for seed in range(30):
        opening = env.reset(seed).observations["first"].messages[-1]["content"]
        asked = env.step({"first": "hm"}).observations["second"].messages[-1]["content"]
        assert NUMBER.findall(opening) == operands(env.story.calculations[0])
        assert NUMBER.findall(asked) == operands(env.story.calculations[1])[1:]


def test_words_of_a_story_agree_with_its_calculations():
    for seed in range(200):
        story = relay_story(seed, 30, "train")
        assert bool(LESS.search(story.parts[0])) == ("-" in story.calculations[0])
        assert bool(LESS.search(story.parts[1])) == ("-" in story.calculations[1])
        for calculation in story.calculations:
            a, sign, b, _, result = calculation.split()
            assert int(result) == (int(a) + int(b) if sign == "+" else int(a) - int(b)) >= 1
        assert story.calculations[0].split()[-1] == story.calculations[1].split()[0]


def test_parts_of_a_story_match_its_signs():
    def signs(seed: int, *allowed: str) -> str:
        story = relay_story(seed, 30, "train", *([allowed] if allowed else []))
        return story.calculations[0].split()[1] + story.calculations[1].split()[1]

    assert {signs(seed, "+-") for seed in range(20)} == {"+-"}
    assert {signs(seed, "++", "-+") for seed in range(30)} == {"++", "-+"}
    assert {signs(seed) for seed in range(60)} == {"++", "+-", "-+", "--"}
    assert MathRelay(signs=["-+"], shots=1).examples[0][0][1].split()[1] == "-"


@pytest.mark.parametrize(("limit", "signs"), [(12, ("++",)), (20, ("++",)), (30, all_signs(2))])
def test_held_out_calculations_are_not_in_training_stories(limit, signs):
    """For both seats, and with the operands of a sum in any order."""
    stories = {split: [relay_story(seed, limit, split, signs) for seed in range(300)] for split in get_args(Split)}
    seen = {split: {key for story in own for key in story.keys} for split, own in stories.items()}
    assert not (seen["base"] | seen["train"]) & (seen["dev"] | seen["test"])
    pairs = {split: {story.keys for story in own} for split, own in stories.items()}
    assert not pairs["train"] & pairs["base"] and not pairs["dev"] & pairs["test"]
    sums = [key.split() for key in seen["train"] if "+" in key]
    assert sums and all(int(a) <= int(b) for a, _, b in sums)
    written = {sorted_numbers(story.calculations[0]) for story in stories["train"] if "+" in story.calculations[0]}
    assert not written & {
        sorted_numbers(story.calculations[0]) for story in stories["test"] if "+" in story.calculations[0]
    }


def sorted_numbers(calculation: str) -> tuple[int, ...]:
    return tuple(sorted(map(int, operands(calculation))))


def test_shots_are_right_earlier_turns_of_the_base_split():
    env = MathRelay(shots=4)
    asked = env.reset(0).observations["first"]
    assert isinstance(asked, Chat) and asked.num_shared == len(asked.messages) - 1 == 9
    seen = env.step({"first": "12"}).observations["second"]
    for number in range(4):
        story = relay_story(number, env.limit, "base")
        assert asked.messages[1 + 2 * number]["content"] == story.parts[0]
        assert asked.messages[2 + 2 * number]["content"] == story.calculations[0]
        assert (
            seen.messages[1 + 2 * number]["content"]
            == f"Your colleague says: {story.calculations[0]}\n{story.parts[1]}"
        )
        assert seen.messages[2 + 2 * number]["content"] == story.calculations[1]


def test_ablations_replace_only_the_message():
    seen = {}
    for message in ("sent", "blank", "foreign"):
        env = MathRelay(shots=0, message=message)
        env.reset(3)
        step = env.step({"first": env.expert("first", random.Random(0))})
        assert step.rewards == {"first": 1.0}
        seen[message], _, rest = step.observations["second"].partition("\n")
        assert rest == env.story.parts[1]
    assert seen["sent"] == f"Your colleague says: {env.story.calculations[0]}"
    assert seen["blank"] == "Your colleague says: "
    assert (
        seen["foreign"] == f"Your colleague says: {relay_story(4, env.limit, 'train').calculations[0]}" != seen["sent"]
    )


def test_a_message_is_cut_to_its_limit():
    env = MathRelay(shots=0)
    env.reset(0)
    asked = env.step({"first": "ab " * 1000}).observations["second"]
    assert len(asked.partition("\n")[0]) == len("Your colleague says: ") + 80


def test_only_the_part_of_a_message_that_arrives_is_rewarded():
    env = MathRelay(shots=0)
    for text, reward in (("so that", 1.0), ("so that " * 10, 0.0)):
        env.reset(4)
        assert env.step({"first": text + env.expert("first", random.Random(0))}).rewards["first"] == reward


@pytest.mark.parametrize("limit", [9, 30, 1000])
def test_experts_succeed(limit: int):
    env = MathRelay(limit=limit, split="dev")
    for seed in range(5):
        env.reset(seed)
        assert env.step({"first": env.expert("first", random.Random(0))}).rewards == {"first": 1.0}
        last = env.step({"second": env.expert("second", random.Random(0))})
        assert last.info["success"] and last.info["gold"] == last_number(env.story.calculations[1])


@pytest.mark.parametrize("options", [{}, {"shots": 0, "reward": "outcome"}, {"limit": 9, "split": "dev"}])
def test_env_passes_the_env_check(options: dict):
    check_env(lambda: MathRelay(**options))


def test_options_out_of_range_are_refused():
    with pytest.raises(ValueError, match="limit"):
        MathRelay(limit=3)
    with pytest.raises(ValueError, match="shots"):
        MathRelay(shots=17)
    with pytest.raises(ValueError, match="signs"):
        MathRelay(signs=[])
    with pytest.raises(ValueError, match=r'"\+\+" is none: write them as "\+\+\+", with \+ or - for each of 3'):
        MathRelay(parts=3, signs=["++"])
    with pytest.raises(ValueError, match="parts"):
        MathRelay(parts=8)
    with pytest.raises(ValueError, match="message: blank replaces what is handed on, and team: single"):
        MathRelay(team="single", message="blank")
    with pytest.raises(ValueError, match="call reset"):
        MathRelay().step({"first": "1"})


def test_single_seat_observes_the_whole_story_and_answers_once():
    env = MathRelay(team="single", shots=1, limit=30, split="test")
    asked = env.reset(0).observations["solver"].messages
    assert asked[-1]["content"] == env.story.text
    assert asked[2]["content"] == ", ".join(relay_story(0, 30, "base").calculations)
    last = env.step({"solver": env.expert("solver", random.Random(0))})
    assert last.done and not last.rewards and last.team_reward == 1.0 and last.info["success"]
    env.reset(0)
    assert env.step({"solver": "22 - 10 = 12, 12 + 14 = 27"}).team_reward == 0.0
    check_env(lambda: MathRelay(team="single", split="train"))


def test_a_story_in_four_parts_by_hand():
    env = MathRelay(parts=4, limit=9, signs=["+++-"], shots=0)
    assert env.seats == ("first", "second", "third", "fourth")
    step = env.reset(0)
    assert step.observations == {"first": "Hugo has 3 tiles and finds 6 more."}
    step = env.step({"first": "3 + 6 = 9"})
    assert step.observations == {"second": "Your colleague says: 3 + 6 = 9\nThen Ivan gives Hugo 6 more."}
    step = env.step({"second": "9 + 6 = 14"})  # wrong
    assert (step.rewards, step.info["turn"]) == ({"second": 0.0}, 2)
    step = env.step({"third": "15 + 8 = 23"})  # right in spite of the message
    assert (step.rewards, step.team_reward) == ({"third": 1.0}, 0.0)
    asked = "Your colleague says: 15 + 8 = 23\nThen Hugo gives 6 to Ivan. How many tiles does Hugo have now?"
    assert step.observations == {"fourth": asked}
    last = env.step({"fourth": "17"})
    assert last.done and not last.rewards and last.team_reward == 1.0
    assert last.info["answers"] == {"first": "9", "second": "14", "third": "23", "fourth": "17"}


def test_one_agent_works_a_story_out_in_turns():
    env = MathRelay(parts=3, team="single_turns", limit=9, shots=1)
    step = env.reset(1)
    seen = []
    for turn in range(3):
        seen.append(step.observations["solver"].messages[-1]["content"])
        step = env.step({"solver": env.expert("solver", random.Random(0))})
        assert step.rewards == ({"solver": 1.0} if turn < 2 else {})
    assert step.done and step.team_reward == 1.0 and step.info["turn"] == 3
    first, second, _ = env.story.calculations
    assert seen == [
        env.story.text,
        f"{env.story.text}\nSo far: {first}",
        f"{env.story.text}\nSo far: {first}, {second}",
    ]
    check_env(lambda: MathRelay(parts=3, team="single_turns"))


@pytest.mark.parametrize("parts", [3, 5, 7])
def test_each_calculation_of_a_longer_story_is_of_its_split(parts: int):
    signs = ("+" * parts,)
    train, test = ({k for seed in range(20) for k in relay_story(seed, 20, s, signs).keys} for s in ("train", "test"))
    assert not train & test
    env = MathRelay(parts=parts, signs=list(signs), limit=20, split="test", shots=1)
    step = env.reset(5)
    while not step.done:
        (seat,) = step.observations
        step = env.step({seat: env.expert(seat, random.Random(0))})
    assert step.info["success"]
    check_env(lambda: MathRelay(parts=parts, limit=20, split="test", shots=1))
