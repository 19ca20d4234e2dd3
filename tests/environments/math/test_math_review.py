"""The math review env against episodes worked by hand."""

import random

import pytest

from palestra.core.chat import Chat
from palestra.environments.math.grading import CORRECT, grade_directly
from palestra.environments.math.problem_source import ProblemSource
from palestra.environments.math.review import MathReview, last_number
from palestra.envs import check_env
from palestra.envs.support.splits import split_of_text


def test_episode_by_hand():
    env = MathReview(shots=0, split="test")
    first = env.reset(0)
    right = int(env.problem.answer)
    assert first.observations == {"reasoner": env.problem.question}
    second = env.step({"reasoner": f"It is\n{right + 1}."})
    assert second.observations == {"checker": f"{env.problem.question}\nYour colleague says: It is {right + 1}."}
    assert (second.rewards, second.team_reward, second.info["success"]) == ({"reasoner": 0.0}, 0.0, False)
    last = env.step({"checker": f"{right - 3} + 3 = {right}"})
    assert last.done and not last.rewards and last.team_reward == 1.0
    assert last.info == {
        "turn": 2,
        "success": True,
        "answers": {"reasoner": str(right + 1), "checker": str(right)},
        "invalid": {"reasoner": False, "checker": False},
        "answer": str(right),
        "gold": str(right),
    }


def test_checker_can_overrule_a_correct_answer():
    env = MathReview()
    env.reset(1)
    proposed = env.step({"reasoner": env.expert("reasoner", random.Random(0))})
    assert proposed.rewards == {"reasoner": 1.0} and proposed.team_reward == 0.0 and not proposed.info["success"]
    last = env.step({"checker": "hm"})
    assert last.team_reward == 0.0 and not last.info["success"] and last.info["invalid"]["checker"]


def test_single_reasoner_decides_alone():
    env = MathReview(team="single", reward="outcome")
    env.reset(1)
    last = env.step({"reasoner": env.problem.answer})
    assert last.done and last.team_reward == 1.0 and not last.rewards and last.info["success"]


def test_shots_have_right_answers_and_every_second_proposal_wrong():
    env = MathReview(shots=4)
    asked = env.reset(0).observations["reasoner"]
    assert isinstance(asked, Chat) and asked.num_shared == len(asked.messages) - 1 == 9
    assert [m["role"] for m in asked.messages] == ["system", *["user", "assistant"] * 4, "user"]
    seen = env.step({"reasoner": "12"}).observations["checker"]
    for number in range(4):
        question, answer = seen.messages[1 + 2 * number]["content"], seen.messages[2 + 2 * number]["content"]
        proposed = last_number(question)
        assert (proposed == last_number(answer)) == (number % 2 == 0)
        problem = ProblemSource(["sum"], 1, "base").problem(number)
        assert question.startswith(problem.question) and grade_directly(last_number(answer), problem.answer) == CORRECT
        assert split_of_text(problem.split_key) == "base"


@pytest.mark.parametrize(
    ("reply", "number"),
    [
        ("64 + 53 = 127", "127"),
        ("The answer is 127.", "127"),
        ("#### 127\nor 128", "127"),
        ("\\boxed{1,234} of 9", "1,234"),
        ("it falls to -4 degrees", "-4"),
        ("12-5", "5"),
        ("12 -5 = -5", "-5"),
        ("20-15=5", "5"),
        ("12/4 = 3", "3"),
        ("7/2", "7/2"),
        ("I cannot say", None),
        ("", None),
    ],
)
def test_the_last_number_of_a_reply_is_its_answer(reply: str, number: str | None):
    assert last_number(reply) == number


@pytest.mark.parametrize("kind", ["sum", "arithmetic", "word"])
@pytest.mark.parametrize("difficulty", [1, 3, 5])
def test_experts_succeed_and_match_the_examples(kind: str, difficulty: int):
    env = MathReview(kinds=[kind], difficulty=difficulty)
    for seed in range(5):
        env.reset(seed)
        env.step({"reasoner": env.expert("reasoner", random.Random(0))})
        assert env.step({"checker": env.expert("checker", random.Random(0))}).info["success"]


@pytest.mark.parametrize("options", [{}, {"team": "single", "shots": 0}, {"kinds": ["word"], "split": "dev"}])
def test_env_passes_the_env_check(options: dict):
    check_env(lambda: MathReview(**options))


def test_options_out_of_range_are_refused():
    with pytest.raises(ValueError, match="shots"):
        MathReview(shots=17)
    with pytest.raises(ValueError, match="difficulty"):
        MathReview(difficulty=6)
    env = MathReview()
    with pytest.raises(ValueError, match="call reset"):
        env.step({"reasoner": "1"})
