"""The tool review env against episodes worked by hand."""

import random

import pytest

from palestra.core.chat import Chat, parse_tool_call
from palestra.environments.tools.review import PlaceLibrary, ToolReview, draw_question, is_right, render, run_call
from palestra.environments.tools.synthetic_world import PLACE_NAMES
from palestra.envs import check_env
from palestra.envs.support.splits import split_of_text

SEED = 3
RIGHT = '<tool_call>{"name": "search", "arguments": {"query": "%s"}}</tool_call>'


def lookup(**options) -> ToolReview:
    return ToolReview(shots=0, kinds=["lookup"], split="test", **options)


def test_episode_by_hand():
    env = ToolReview(shots=0, kinds=["sum"], split="test", limit=30)
    first = env.reset(0)
    story = (
        "27 people are on a bus and 21 of them get off. At the next stop 27 more get on. "
        "How many people are on the bus now?"
    )
    assert first.observations == {"caller": story}
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "27 - 21 + 27"}}</tool_call>'
    second = env.step({"caller": f"I call\n{call}"})
    assert second.observations == {"reviewer": f"{story}\nYour colleague called: {call}\nResult: 33"}
    assert (second.rewards, second.team_reward, second.info["success"]) == ({"caller": 1.0}, 0.0, False)
    assert second.info["reward_terms"] == {"caller": {"call": 1.0}}
    last = env.step({"reviewer": "33"})
    assert last.done and not last.rewards and last.team_reward == 1.0
    invalid = {"caller": False, "reviewer": False}
    assert last.info == {"turn": 2, "success": True, "kind": "sum", "calls": 1, "invalid": invalid, "gold": "33"}


def test_wrong_call_earns_nothing_and_may_be_corrected_once():
    env = lookup()
    env.reset(SEED)
    wrong, right = render(env.question.wrong_call), render(env.question.right_call)
    step = env.step({"caller": wrong})
    assert step.rewards == {"caller": 0.0}
    step = env.step({"reviewer": right})
    asked = step.observations["reviewer"].splitlines()
    assert asked[1] == f"Your colleague called: {wrong}" and asked[3] == f"You called: {right}"
    assert env.question.answer in asked[4] and step.rewards == {} and step.info["calls"] == 2
    assert env.step({"reviewer": env.question.answer}).team_reward == 1.0

    env.reset(SEED)
    env.step({"caller": wrong})
    env.step({"reviewer": wrong})
    last = env.step({"reviewer": right})  # no call is left, so this is its answer, which is invalid
    assert last.done and last.team_reward == 0.0 and last.info["invalid"]["reviewer"]


def test_without_own_calls_the_reviewers_first_reply_is_the_answer():
    env = lookup(max_calls=0)
    env.reset(SEED)
    env.step({"caller": render(env.question.wrong_call)})
    last = env.step({"reviewer": render(env.question.right_call)})
    assert last.done and last.team_reward == 0.0


@pytest.mark.parametrize(
    ("reply", "result"),
    [
        ("Let me think.", "Error: that is no call of a tool."),
        ("<tool_call>{name: search}</tool_call>", "Error: that is no call of a tool."),
        ('<tool_call>{"name": "sarch", "arguments": {}}</tool_call>', "Error: there is no tool"),
        ('<tool_call>{"name": "search", "arguments": {"words": "Bafi"}}</tool_call>', "Error: search takes query"),
        (RIGHT % "nowhere", "Nothing was found. Try other words."),
        ('<tool_call>{"name": "calculator", "arguments": {"expression": "9 ** 9 ** 9"}}</tool_call>', "Error: "),
    ],
)
def test_invalid_and_failed_calls_are_reported_and_earn_nothing(reply, result):
    env = lookup()
    env.reset(SEED)
    step = env.step({"caller": reply})
    assert step.observations["reviewer"].splitlines()[2].startswith(f"Result: {result}")
    assert step.rewards == {"caller": 0.0}
    assert step.info["invalid"] == {"caller": "no call of a tool" in result}


def test_a_reply_that_quotes_the_result_or_names_several_numbers_is_not_right():
    env = lookup()
    env.reset(SEED)
    env.step({"caller": render(env.question.right_call)})
    document = env.calls[-1].result
    assert env.question.answer in document and not is_right(document, env.question)
    assert is_right(f"{env.question.answer}.", env.question)
    assert not is_right(f"{env.question.answer} or 7", env.question) and not is_right("", env.question)
    sums = draw_question("sum", 0, 30, "test")
    assert is_right("27 - 21 + 27 = 33", sums) and not is_right("27 - 21 + 27", sums)


def test_single_agent_calls_and_answers():
    env = lookup(team="single")
    assert set(env.reset(SEED).observations) == {"agent"}
    step = env.step({"agent": render(env.question.right_call)})
    assert step.rewards == {} and "\nYou called: " in step.observations["agent"]
    assert env.step({"agent": env.question.answer}).team_reward == 1.0
    env.reset(SEED)
    assert env.step({"agent": env.question.answer}).team_reward == 1.0  # without a call it would have to guess


def test_only_the_team_is_rewarded_for_the_outcome():
    env = lookup(reward="outcome")
    env.reset(SEED)
    assert env.step({"caller": render(env.question.right_call)}).rewards == {}
    assert env.step({"reviewer": env.question.answer}).team_reward == 1.0


@pytest.mark.parametrize("kind", ["sum", "lookup"])
def test_right_call_returns_the_answer_and_wrong_call_another(kind):
    for seed in range(100):
        question = draw_question(kind, seed, 99, "train")
        right, wrong = (run_call(call, question.library) for call in (question.right_call, question.wrong_call))
        assert (right == question.answer if kind == "sum" else question.answer in right) and wrong != right


def test_splits_have_different_places_and_numbers_vary():
    names = {
        split: {draw_question("lookup", seed, 99, split).right_call.arguments["query"] for seed in range(300)}
        for split in ("train", "dev", "test", "base")
    }
    for split, own in names.items():
        assert {split_of_text(f"tool review {name.lower()}") for name in own} == {split} and len(own) > 80
    name = min(PLACE_NAMES)
    assert PlaceLibrary(1).numbers(name) != PlaceLibrary(2).numbers(name) == PlaceLibrary(2).numbers(name)
    assert PlaceLibrary(1).read("nowhere") is None and name.capitalize() in str(PlaceLibrary(1).read(name))


@pytest.mark.parametrize("team", ["caller_reviewer", "single"])
def test_the_expert_is_always_right_also_after_a_wrong_call(team):
    env, rng = ToolReview(team=team, split="dev"), random.Random(0)
    for seed in range(20):
        step = env.reset(seed)
        first = env.seats[0]
        step = env.step({first: render(env.question.wrong_call)})
        while step.observations:
            (seat,) = step.observations
            step = env.step({seat: env.expert(seat, rng)})
        assert step.info["success"] and step.info["calls"] == 2


def test_half_of_the_shots_correct_a_wrong_call():
    env = ToolReview(shots=4)
    asked = env.reset(0).observations["caller"]
    assert isinstance(asked, Chat) and asked.num_shared == len(asked.messages) - 1 == 9
    questions = [draw_question(("sum", "lookup")[i % 2], i, env.limit, "base") for i in range(4)]
    assert [m["content"] for m in asked.messages[2:9:2]] == [render(q.right_call) for q in questions]
    seen = env.step({"caller": "hm"}).observations["reviewer"].messages
    replies = [message["content"] for message in seen if message["role"] == "assistant"]
    sums, lookups = (parse_tool_call(replies[i][len("<tool_call>") : -len("</tool_call>")]) for i in (2, 4))
    assert replies[:2] == [questions[0].answer, questions[1].answer]
    assert (sums, lookups) == (questions[2].right_call, questions[3].right_call)
    assert [replies[3], replies[5]] == [questions[2].answer, questions[3].answer]
    assert render(questions[2].wrong_call) in seen[5]["content"]


def test_env_passes_the_env_check():
    check_env(lambda: ToolReview(shots=2))


@pytest.mark.parametrize("options", [{"limit": 8}, {"max_calls": -1}, {"shots": 17}, {"kinds": []}])
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        ToolReview(**options)
