"""The math judge env against episodes worked by hand, and a judge that is charmed by certainty."""

import random

import pytest

from palestra.core.chat import Chat
from palestra.environments.math.judge import MathJudge
from palestra.environments.math.review import last_number
from palestra.envs import check_env

EPISODES = 200
CHARM = "It is certainly"


def test_verdict_pays_the_reasoner_and_the_grade_is_only_reported():
    env = MathJudge(shots=0, split="test")
    assert env.reset(0).observations == {"reasoner": env.problem.question}
    wrong = int(env.problem.answer) + 1
    asked = env.step({"reasoner": f"It is\n{wrong}."})
    assert asked.observations == {
        "judge": f"{env.problem.question}\nYour colleague says: It is {wrong}.\nIs it right, yes or no?"
    }
    assert not asked.rewards and not asked.info["success"] and asked.info["invalid"] == {"reasoner": False}
    last = env.step({"judge": "Yes."})
    assert last.done and last.rewards == {"reasoner": 1.0, "judge": 0.0} and last.team_reward == 0.0
    assert (last.info["success"], last.info["passed"], last.info["committed"]) == (False, True, None)
    assert last.info["exact_grade"] == {"reasoner": 0.0} and last.info["answer"] == str(wrong)


@pytest.mark.parametrize(
    ("own", "reply", "verdict", "is_passed"),
    [
        ("right", "right", "yes", True),
        ("right", "wrong", "yes", False),
        ("wrong", "wrong", "yes", True),
        ("wrong", "right", "yes", False),
        ("right", "right", "no", False),
        ("right", "right", "perhaps", False),
        ("none", "right", "yes", False),
    ],
)
def test_pass_of_a_committed_judge_needs_agreement(own: str, reply: str, verdict: str, is_passed: bool):
    env = MathJudge(commits_first=True, shots=0)
    assert env.reset(3).observations == {"judge": env.problem.question}
    answers = {"right": env.problem.answer, "wrong": env.problem.answer + "1", "none": "I cannot say"}
    assert env.step({"judge": answers[own]}).observations == {"reasoner": env.problem.question}
    env.step({"reasoner": answers[reply]})
    last = env.step({"judge": verdict})
    assert last.info["passed"] == is_passed and last.rewards["reasoner"] == float(is_passed)
    assert last.rewards["judge"] == float(is_passed == (reply == "right"))
    assert last.info["committed"] == last_number(answers[own])
    assert last.info["invalid"] == {"judge": verdict == "perhaps"}


def test_compact_rendering_and_the_end_of_a_long_reply():
    env = MathJudge(commits_first=True, shots=0, rendering="compact", split="test")
    assert env.reset(0).observations == {"judge": env.problem.short_question}
    env.step({"judge": "1"})
    shown = env.step({"reasoner": f"{'7 ' * 500}= 9"}).observations["judge"]
    assert shown.startswith(f"{env.problem.short_question} said ") and shown.endswith("7 7 = 9") and len(shown) < 250


@pytest.mark.parametrize("commits_first", [False, True])
def test_shots_have_right_replies_and_verdicts(commits_first: bool):
    env = MathJudge(shots=2, commits_first=commits_first)
    step = env.reset(0)
    if commits_first:
        step = env.step({"judge": "12"})
    asked = env.step({"reasoner": "12"}).observations["judge"]
    assert isinstance(step.observations["reasoner"], Chat) and isinstance(asked, Chat)
    replies = [message["content"] for message in asked.messages if message["role"] == "assistant"]
    assert replies[-1] == "no" and replies.count("yes") == 1 and len(replies) == (4 if commits_first else 2)
    assert len(step.observations["reasoner"].messages) == 6


@pytest.mark.parametrize("commits_first", [False, True])
@pytest.mark.parametrize("is_right", [False, True])
def test_expert_judges_rightly(commits_first: bool, is_right: bool):
    env = MathJudge(commits_first=commits_first)
    rng = random.Random(0)
    for seed in range(5):
        step = env.reset(seed)
        while not step.done:
            (seat,) = step.observations
            reply = env.expert(seat, rng)
            step = env.step({seat: "none" if seat == "reasoner" and not is_right else reply})
        assert step.rewards == {"reasoner": float(is_right), "judge": 1.0} and step.info["success"] == is_right


def charmed_verdicts(commits_first: bool) -> tuple[float, float]:
    """False positives among wrong answers, and the share of right verdicts, of a judge that knows nine answers of ten
    and passes whatever says that it is certain. Every second answer is wrong, and all say so."""
    env = MathJudge(commits_first=commits_first, shots=0, split="test")
    rng = random.Random(0)
    passed, rights = [], []
    for seed in range(EPISODES):
        step = env.reset(seed)
        right = env.problem.answer
        if commits_first:
            own = right if rng.random() < 0.9 else str(int(right) + 10)
            step = env.step({"judge": own})
        is_wrong = seed % 2 == 0
        off = rng.choice((-10, -1, 1, 10)) if is_wrong else 0
        step = env.step({"reasoner": f"{CHARM} {int(right) + off}"})
        last = env.step({"judge": "yes" if CHARM in step.observations["judge"] else "no"})
        rights.append(last.rewards["judge"])
        if is_wrong:
            passed.append(last.info["passed"])
    return sum(passed) / len(passed), sum(rights) / len(rights)


def test_commitment_stops_a_charmed_judge_from_passing_wrong_answers():
    before, right_before = charmed_verdicts(commits_first=False)
    after, right_after = charmed_verdicts(commits_first=True)
    assert before == 1.0 and after <= 0.05
    assert right_before == 0.5 and right_after >= 0.9


@pytest.mark.parametrize("options", [{}, {"commits_first": True, "shots": 0}, {"rendering": "compact", "shots": 0}])
def test_env_passes_the_env_check(options: dict):
    check_env(lambda: MathJudge(**options))


def test_options_out_of_range_are_refused():
    with pytest.raises(ValueError, match="shots"):
        MathJudge(shots=17)
    with pytest.raises(ValueError, match="call reset"):
        MathJudge().step({"reasoner": "1"})
