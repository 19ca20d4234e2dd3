"""The math env against turns worked by hand."""

import asyncio
import json
import random
import time

import pytest

from palestra.environments.math.answer_extraction import MAX_ANSWER_CHARS, final_answer
from palestra.environments.math.env import Math, arithmetic_output, extract_program, run_program
from palestra.environments.math.generate import PROBLEM_GENERATORS
from palestra.environments.math.grading import CORRECT, UNREADABLE, grade_directly
from palestra.environments.math.problem import Problem
from palestra.environments.math.problem_source import load_problems
from palestra.envs import check_env
from palestra.sandbox import open_sandbox

SUM = Problem("Work out 12 + 7 * 2.", "26", "12 + 7 * 2", "12+7*2", "arithmetic", needs_computation=True)


def game(monkeypatch, problem=SUM, **options) -> Math:
    """An env whose problem is always the given one."""
    env = Math(**options)
    monkeypatch.setattr(type(env.source), "problem", lambda *_: problem)
    return env


def play(env, *turns):
    """The steps of an env, given the answers of its seats turn by turn."""

    async def steps():
        return [env.reset(0), *[await env.step(turn) for turn in turns]]

    return asyncio.run(steps())


def answers(reasoner, tool):
    return {"reasoner": reasoner, "tool": tool}


def test_episode_by_hand(monkeypatch):
    env = game(monkeypatch, rendering="compact")
    begun, first, second, last = play(
        env, answers("38", "(12+7)*2/0"), answers("24", "print(12 + 7*2)"), answers("26", "12+7*2")
    )
    assert begun.observations == dict.fromkeys(("reasoner", "tool"), "12 + 7 * 2")
    # A wrong number earns nothing; a program that fails, and so prints nothing readable, has a penalty.
    assert first.rewards == {"reasoner": 0.0, "tool": pytest.approx(-0.1)}
    assert first.info["reward_terms"]["tool"] == {"form": -0.1, "correct": 0.0}
    assert first.info["invalid"] == {"reasoner": False, "tool": True}
    assert first.info["answers"] == {"reasoner": "38", "tool": None}
    assert first.observations == {
        "reasoner": "12 + 7 * 2 tool error you 38",
        "tool": "12 + 7 * 2 reasoner 38 you error",
    }
    # Rewards are changes of the score: the reasoner is as wrong as before; the program runs and prints the right
    # number.
    assert second.rewards == {"reasoner": pytest.approx(0.0), "tool": pytest.approx(0.1 + 1.0)}
    assert second.observations["reasoner"] == "12 + 7 * 2 tool error you 38 tool 26 you 24"
    assert (second.team_reward, second.info["success"]) == (0.0, False)
    assert last.rewards == {"reasoner": pytest.approx(1.0), "tool": pytest.approx(0.0)}
    assert (last.team_reward, last.done, last.truncated) == (1.0, True, False)
    assert last.info["success"] and last.info["agreed"] and last.info["gold"] == "26"
    assert last.info["answer"] == "26" and "answer" not in second.info


def test_withdrawn_answer_returns_its_reward(monkeypatch):
    env = game(monkeypatch, rendering="compact")
    _, _, second = play(env, answers("26", "1"), answers("no idea", "print('hello')"))
    assert second.rewards == {"reasoner": pytest.approx(-1.1), "tool": pytest.approx(-0.05)}
    assert second.info["invalid"] == {"reasoner": True, "tool": True}
    assert second.observations["tool"].endswith("reasoner 26 you 1 reasoner none you none")


def test_episode_ends_on_agreement(monkeypatch):
    env = game(monkeypatch, rendering="compact")
    *_, last = play(env, answers("24", "24.0"))
    assert last.done and not last.truncated
    assert (last.info["agreed"], last.info["success"], last.team_reward) == (True, False, 0.0)


def test_episode_continues_without_agreement(monkeypatch):
    env = game(monkeypatch, rendering="compact", max_turns=2)
    *_, first, last = play(env, answers("26", "27"), answers("26", "27"))
    assert not first.done
    assert last.done and last.truncated
    # the reasoner's answer counts
    assert (last.info["agreed"], last.info["success"], last.team_reward) == (False, True, 1.0)


def test_two_empty_answers_are_not_agreement(monkeypatch):
    env = game(monkeypatch, rendering="compact")
    *_, step = play(env, answers("", "print('')"))
    assert not step.done


def test_unevaluated_answers_earn_nothing(monkeypatch):
    for answer in ("12 + 7 * 2", "26 * 1", "52/2"):
        env = game(monkeypatch, team="single", rendering="full")
        *_, last = play(env, {"reasoner": f"#### {answer}"})
        assert not last.info["success"]
    quotient = Problem("Work out 12 / 4.", "3", "12 / 4", "12//4", "q", needs_computation=True)
    *_, last = play(game(monkeypatch, quotient, team="single", rendering="compact"), {"reasoner": "12/4"})
    assert last.rewards == {"reasoner": 0.0}  # a fraction can be read, but is not the answer


def test_word_problem_needs_an_evaluated_number(monkeypatch):
    problem = Problem("What is two to the tenth?", "1024", "2^10?", "print(1024)", "q")
    for said, success in ((r"It is \boxed{2^{10}}.", False), (r"It is \boxed{1{,}024}.", True)):
        *_, last = play(game(monkeypatch, problem, team="single"), {"reasoner": said})
        assert last.info["success"] == success


def test_outcome_reward_pays_at_the_end_only(monkeypatch):
    env = game(monkeypatch, rendering="compact", reward="outcome")
    _, first, last = play(env, answers("26", "24"), answers("26", "26"))
    assert (first.rewards, first.team_reward) == ({"reasoner": 0.0, "tool": 0.0}, 0.0)
    assert (last.rewards, last.team_reward) == ({"reasoner": 0.0, "tool": 0.0}, 1.0)


def test_single_seat_answers_until_it_repeats_itself(monkeypatch):
    *_, last = play(game(monkeypatch, team="single"), {"reasoner": "#### 26"})
    assert last.done and not last.truncated and last.info["success"]
    env = game(monkeypatch, team="single", max_turns=5, rendering="compact")
    *_, second, last = play(env, *[{"reasoner": answer} for answer in ("24", "26", "26")])
    assert second.observations == {"reasoner": "12 + 7 * 2 you 24 you 26"}
    assert last.done and last.info["agreed"] and not last.truncated


def test_full_rendering_by_hand(monkeypatch):
    env = game(monkeypatch)
    begun, step = play(env, answers("Twelve and 14.\n#### 24", "So:\n```python\nprint(12 + 7 * 2)\n```"))
    assert begun.observations["tool"] == "Problem: Work out 12 + 7 * 2.\n\nThis is turn 1 of 4."
    assert step.observations["tool"] == (
        "Problem: Work out 12 + 7 * 2.\n\n"
        "Turn 1\nThe reasoner said:\nTwelve and 14.\n#### 24\nAnswer: 24\n"
        "Your program:\n```python\nprint(12 + 7 * 2)\n```\nIt printed: 26\n\n"
        "This is turn 2 of 4. Check, and correct what is wrong."
    )
    assert "You said:" in step.observations["reasoner"]
    assert "The tool user's program:" in step.observations["reasoner"]
    assert "####" in env.roles["reasoner"] and "print" in env.roles["tool"]


def test_full_rendering_needs_the_answer_mark(monkeypatch):
    *_, step = play(game(monkeypatch), answers("26", "```python\nprint(1 / 0)\n```"))
    assert step.rewards == {"reasoner": pytest.approx(-0.1), "tool": pytest.approx(-0.1)}
    assert "Answer: none was found" in step.observations["reasoner"]
    assert "It failed: ZeroDivisionError: division by zero" in step.observations["reasoner"]


@pytest.mark.parametrize("rendering", ["full", "compact"])
@pytest.mark.parametrize("kind", list(PROBLEM_GENERATORS))
def test_experts_succeed(kind, rendering):
    """Programs of the tool's expert run in the sandbox if they are more than one sum."""
    for difficulty in range(1, 6):
        env = Math(kinds=[kind], difficulty=difficulty, rendering=rendering)
        env.reset(0)
        said = {seat: env.expert(seat, random.Random(0)) for seat in env.seats}
        *_, last = play(env, said)
        assert last.info["success"] and last.info["agreed"], (said, last.info)
        assert last.rewards == {"reasoner": pytest.approx(1.0), "tool": pytest.approx(1.0)}


@pytest.mark.parametrize(
    "options",
    [
        {"kinds": ["arithmetic"], "difficulty": [1, 2], "rendering": "compact"},
        {"max_turns": 2, "reward": "outcome"},
        {"team": "single"},
        {"team": "single", "max_turns": 3, "rendering": "compact", "split": "dev"},
        {"team": "single", "reasoning": ["chain_sum", "spiral_matrix"]},
    ],
)
@pytest.mark.few(2)
def test_env_passes_the_env_check(options):
    check_env(lambda: Math(**options), seeds=range(1))


def test_problems_from_a_file_are_played(tmp_path):
    rows = [{"question": "What is half of five?", "answer": "It is two and a half.\n#### 2.5"}]
    (tmp_path / "gsm8k.jsonl").write_text(json.dumps(rows[0]))
    env = Math(path=tmp_path / "gsm8k.jsonl", split="all")
    env.reset(0)
    *_, last = play(env, {seat: env.expert(seat, random.Random(0)) for seat in env.seats})
    assert last.info["success"]
    *_, last = play(env, answers(r"\boxed{\frac{5}{2}}", "```\nprint(5 / 2)\n```"))
    assert last.info["success"] and last.info["agreed"]


@pytest.mark.parametrize(("size", "grade"), [(MAX_ANSWER_CHARS, CORRECT), (MAX_ANSWER_CHARS + 1, UNREADABLE)])
def test_the_longest_answer_that_a_file_may_have_is_right_and_a_longer_one_unreadable(size, grade, tmp_path):
    gold, path = "abcdefghij" * (MAX_ANSWER_CHARS // 10), tmp_path / "long.jsonl"
    path.write_text(json.dumps({"question": "Which letters?", "answer": f"#### {gold}"}))
    (problem,) = load_problems(path, None, "all")
    answer = final_answer(f"#### {(gold + 'k')[:size]}")
    assert grade_directly(answer, problem.answer) == grade


def test_reasoning_gym_tasks_accept_multiline_answers():
    env = Math(reasoning=["binary_matrix"])
    env.reset(0)
    assert "\n" in env.problem.answer
    *_, last = play(env, {seat: env.expert(seat, random.Random(0)) for seat in env.seats})
    assert last.info["success"] and last.info["agreed"]


def test_actions_of_wrong_seats_or_after_the_end_are_refused(monkeypatch):
    env = game(monkeypatch, rendering="compact")
    with pytest.raises(ValueError, match="all of"):
        play(env, {"reasoner": "26"})
    with pytest.raises(ValueError, match="the game is over"):
        play(env, answers("26", "26"), answers("26", "26"))


@pytest.mark.parametrize("options", [{"max_turns": 0}, {"tool_time_limit_s": 0.0}, {"grader_time_limit_s": 10_000.0}])
def test_out_of_range_options_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        Math(**options)


# ---- the tool


@pytest.mark.parametrize("source", ["12+7*2", "print(12+7*2)", "7/2", "-(3 - 5) % 4", " 2 ** 3"])
def test_arithmetic_output_equals_python(source):
    printed = arithmetic_output(source)
    if "**" in source:
        assert printed is None
    else:
        expected = eval(source.strip().removeprefix("print"))
        assert (printed.text, printed.error) == (str(expected), None)


@pytest.mark.parametrize(
    ("source", "error"), [("12 +", "SyntaxError: invalid syntax"), ("1/0", "ZeroDivisionError: division by zero")]
)
def test_arithmetic_errors_equal_python(source, error):
    assert arithmetic_output(source).error == error
    assert run(f"{source}#").error == error  # the same error from the sandbox


@pytest.mark.parametrize("source", ["", "x", "print(1)(2)", "1+1;2", "print(12+7)*2", "9" * 300, "import os"])
def test_other_programs_are_for_the_sandbox(source):
    assert arithmetic_output(source) is None


def run(source, seconds=5.0):
    return asyncio.run(run_program(source, open_sandbox(), seconds))


def test_programs_run_in_the_sandbox():
    assert run("x = 12\nfor _ in range(2):\n    x += 7\nprint(x)").text == "26"
    assert run("sum(range(5))").text == "10"
    assert run("print('working'); print(26)").text == "working\n26"
    assert run("x = 1").error == "nothing was printed"
    assert run("1 / x").error == "NameError: name 'x' is not defined"
    assert run("import sys; sys.exit(3)").error == "exit status 3"
    assert run("\ud800").error.startswith("SyntaxError")
    assert run("while True: pass", seconds=0.5).error == "it ran out of time"
    assert run("1" * 30_000).error.startswith("the program is longer")


def test_program_is_extracted_from_an_answer():
    assert extract_program("First\n```python\n1\n```\nno:\n```py\nprint(2)\n```\n") == "print(2)"
    assert extract_program("```\nprint(2)") == "print(2)"
    assert extract_program(" 12+7 ") == "12+7"


def test_hung_programs_do_not_block_others():
    """Every tenth of 200 programs hangs for a second: all others end before the first of those does."""
    ended: dict[int, float] = {}

    async def run_one(seed):
        env = Math(kinds=["arithmetic"], difficulty=1, rendering="compact", max_turns=1, tool_time_limit_s=1.0)
        env.reset(seed)
        hangs = seed % 10 == 0
        said = {"reasoner": env.problem.answer, "tool": "while 1: pass" if hangs else env.problem.solution_program}
        step = await env.step(said)
        ended[seed] = time.monotonic()
        assert step.info["success"] and step.info["invalid"]["tool"] == hangs

    async def run_all():
        await asyncio.gather(*map(run_one, range(200)))

    asyncio.run(run_all())
    assert max(ended[seed] for seed in range(200) if seed % 10) < min(ended[seed] for seed in range(0, 200, 10))
