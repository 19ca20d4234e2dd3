"""A coder and a tester: observations, rewards, ends of episodes, and programs that hang."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers.toy_code import ADD, BAD, ECHO, GOOD, play, scripted_pair, write

from palestra.environments.code.answers import read_program, read_test, write_program, write_test
from palestra.environments.code.env import CoderTester, is_test_shown
from palestra.environments.code.files import BUILT_IN_PROGRAMS, load_programs
from palestra.environments.code.test_runner import ProgramTest
from palestra.envs.base import check_env

OPTIONS: list[dict[str, Any]] = [
    {},
    {"rendering": "compact", "reward": "outcome", "max_turns": 2},
    {"team": "single", "max_turns": 3},
    {"source": "drills", "rendering": "compact"},
    {"source": "drills", "difficulty": [2], "team": "single", "reward": "outcome"},
]


pytestmark = pytest.mark.usefixtures("sandboxed")


# ---- the env check


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.few(2)
def test_env_passes_the_env_check(options: dict[str, Any]) -> None:
    check_env(lambda: CoderTester(**options), seeds=range(1))


@pytest.mark.slow
@pytest.mark.parametrize("reward", ["dense", "outcome"])
@pytest.mark.parametrize("rendering", ["full", "compact"])
@pytest.mark.parametrize("team", ["coder_tester", "single"])
@pytest.mark.parametrize("source", ["own", "drills"])
def test_env_passes_the_env_check_in_all_configurations(source: str, team: Any, rendering: Any, reward: Any) -> None:
    make = partial(CoderTester, source=source, team=team, rendering=rendering, reward=reward)
    check_env(make, seeds=range(3), act=partial(sometimes_right, make()))


def sometimes_right(env: CoderTester, seat: str, observation: Any, rng: random.Random) -> str:
    """Answers that reach all branches: the expert's, answers to another problem, and nonsense."""
    env.reset(rng.randrange(3))
    return rng.choice([env.expert(seat, rng), "```python\nprint(1)\n```", "[1,2] -> [3]", "#### [x for x in xs]", ""])


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.few(2)
def test_experts_solve_in_one_turn(options: dict[str, Any]) -> None:
    for seed in range(4):
        env, rng = CoderTester(**options), random.Random(seed)
        env.reset(seed)
        *_, end = play(env, {seat: env.expert(seat, rng) for seat in env.seats}, seed=seed)
        assert end.done and end.info["success"] and not end.truncated
        paid = 1.0 if env.reward == "dense" else 0.0
        assert end.team_reward == 1.0 and end.rewards == pytest.approx(dict.fromkeys(env.seats, paid))


@pytest.mark.slow
@pytest.mark.parametrize("rendering", ["full", "compact"])
def test_experts_solve_all_shipped_problems(rendering: Any) -> None:
    for number in range(len(load_programs(BUILT_IN_PROGRAMS))):
        env = CoderTester(split="all", rendering=rendering, time_limit_s=20)
        env._problems = load_programs(BUILT_IN_PROGRAMS)[number : number + 1]
        env.reset(0)
        *_, end = play(env, {seat: env.expert(seat, random.Random(0)) for seat in env.seats})
        assert end.info["success"] and end.info["agreed"], env.problem.id


def test_options_are_checked() -> None:
    for options, message in [
        ({"difficulty": [0, 1]}, "from 1 to 5"),
        ({"difficulty": []}, "from 1 to 5"),
        ({"max_turns": 0}, "max_turns=0"),
        ({"time_limit_s": 0.0}, "time_limit_s=0"),
        ({"source": "nowhere.jsonl"}, '"own" nor "drills" nor a file'),
        ({"split": "test", "difficulty": [4]}, 'split "test" and of difficulty 4'),
    ]:
        with pytest.raises(ValueError, match=message):
            CoderTester(**options)  # type: ignore[arg-type]


# ---- rewards


def test_rewards_of_one_turn_by_hand(add: Any) -> None:
    """Worked by hand: a - b is right at (0, 0) alone, so at 1 of 4 tests."""
    _, step = play(add(), scripted_pair(BAD, "#### add(2, 3) -> 5"))
    assert step.rewards == pytest.approx({"coder": 1 / 4, "tester": 1.0})
    assert step.team_reward == 0.25
    assert step.info == {
        **{"success": False, "turn": 1, "passed": 0.25, "agreed": False},
        "invalid": {"coder": False, "tester": False},
        "reward_terms": {"coder": {"form": 0.0, "passed": 0.25}, "tester": {"form": 0.0, "correct": 1.0}},
    }


@pytest.mark.parametrize(
    ("program", "worth"),
    [
        ("", -0.1),
        ("```python\ndef add(a, b:\n```", -0.1),  # does not compile
        ("```python\ndef add(a, b):\n    return a + c\n```", -0.05),  # compiles, fails at the first test
        ("```python\ndef plus(a, b):\n    return a + b\n```", -0.05),
        ("```python\ndef add(a, b):\n    return 7\n```", 0.0),
        ("```python\ndef add(a, b):\n    return 4\n```", 1 / 2),
        (GOOD, 1.0),
    ],
)
def test_program_rewards_by_hand(add: Any, program: str, worth: float) -> None:
    _, step = play(add(), scripted_pair(program, "nothing"))
    assert step.rewards == pytest.approx({"coder": worth, "tester": -0.1})
    assert step.info["invalid"] == {"coder": worth == -0.1, "tester": True}


@pytest.mark.parametrize(
    ("test", "worth"),
    [
        ("", -0.1),
        ("add(1) 2", -0.1),
        ("#### sub(1, 2) -> 3", -0.1),
        ("#### add(1, 2) -> 4", 0.0),  # can be read, but is wrong
        ("#### add(1) -> 1", 0.0),
        ("#### add(1, 2) -> 3", 1.0),
        ("I think so.\n#### assert add('a', 'b') == 'ab'", 1.0),
    ],
)
def test_tester_rewards_by_hand(add: Any, test: str, worth: float) -> None:
    _, step = play(add(), scripted_pair("", test))
    assert step.rewards == pytest.approx({"coder": -0.1, "tester": worth})


COPIES = [
    "#### add(5, 1) -> 6",
    "#### assert add(5, 1) == 6",
    "#### add( 5,1 )->6.0",
    "#### add(5.0, 1) -> 6",
    "#### add(5, True) -> 6",
    "#### add(4.9999999, 1) -> 6.0",
    "#### candidate(5, 1) -> 6",
    "#### add(0, 9) -> 9",
]


@pytest.mark.parametrize("test", COPIES)
def test_a_test_with_an_input_that_the_question_shows_earns_nothing(tmp_path: Path, test: str) -> None:
    question = ADD["question"] + "\n>>> add(0, 9)\n9"
    env = CoderTester(source=write(tmp_path / "a.jsonl", ADD | {"question": question}), split="all")
    _, right = play(env, scripted_pair(GOOD, test))
    assert right.rewards["tester"] == 0.0 and right.done and not right.info["invalid"]["tester"]
    _, wrong = play(env, scripted_pair(BAD, test))
    assert "The question shows this input" in wrong.observations["tester"]
    assert "The question shows this input" not in wrong.observations["coder"]
    assert right.rewards["coder"] == 1.0


@pytest.mark.parametrize(
    ("given", "expected", "worth"),
    [
        ("1 2", "3", 0.0),
        ("1  2\n", "3", 0.0),
        ("01 +2", "3", 0.0),
        ("1\n2", "3", 0.0),
        ("1.0 2", "3", 0.0),
        ("1 2\nmore", "3", 0.0),  # what follows is not read
        ("7\n7", "14", 0.0),  # lines of the question
        ("1 20", "21", 1.0),
        ("2 1", "3", 1.0),
        ("7 70", "77", 1.0),
        ("5 5", "11", 0.0),
    ],
)
def test_copied_example_inputs_of_stdin_problems_earn_nothing(
    tmp_path: Path, given: str, expected: str, worth: float
) -> None:
    problem = ECHO | {
        "question": "Print the sum of the first two numbers.\nInput\n7\n7\nOutput\n14\n",
        "reference": "import sys\nprint(sum(int(float(w)) for w in sys.stdin.read().split()[:2]))",
        "examples": [["1 2\n", "3\n"]],
        "tests": [["3 4\n", "7\n"]],
    }
    env = CoderTester(source=write(tmp_path / "a.jsonl", problem), split="all")
    _, step = play(env, scripted_pair("", f"```\n{given}\n```\n```\n{expected}\n```"))
    assert step.rewards["tester"] == pytest.approx(worth)


def test_shown_examples_of_shipped_problems_earn_nothing() -> None:
    for problem in load_programs(BUILT_IN_PROGRAMS):
        assert all(is_test_shown(problem, case) for case in problem.examples), problem.id
        assert sum(not is_test_shown(problem, case) for case in problem.tests) >= 3, problem.id


def test_leading_whitespace_is_kept(tmp_path: Path) -> None:
    """A triangle aligned right and one aligned left differ."""
    stars = ECHO | {
        "reference": "n = int(input())\nfor i in range(1, n + 1): print(('*' * i).rjust(n))",
        "examples": [["2\n", " *\n**\n"]],
        "tests": [["3\n", "  *\n **\n***\n"], ["4\n", "   *\n  **\n ***\n****\n"]],
    }
    env = CoderTester(source=write(tmp_path / "a.jsonl", stars), split="all")
    left = "```python\nfor i in range(1, int(input()) + 1): print('*' * i)\n```"
    test = "```\n5\n```\n```\n    *\n   **\n  ***\n ****\n*****\n```"
    start, step = play(env, scripted_pair(left, test))
    assert "Output:\n```\n *\n**\n```" in start.observations["tester"]
    assert step.info["passed"] == 0.0 and step.rewards == pytest.approx({"coder": 0.0, "tester": 1.0})
    _, end = play(env, scripted_pair(f"```python\n{stars['reference']}\n```", test))
    assert end.info["success"] and end.info["agreed"]


def test_total_reward_depends_on_the_last_answers_only(add: Any) -> None:
    """Further turns earn nothing in themselves, and a worse answer returns its reward."""
    env = add(max_turns=3)
    steps = play(
        env, scripted_pair(BAD, "#### add(1, 2) -> 3"), scripted_pair("", ""), scripted_pair(BAD, "#### add(2, 1) -> 4")
    )
    assert steps[-1].done and steps[-1].truncated and not steps[-1].info["success"]
    assert sum(step.team_reward for step in steps) == pytest.approx(0.25)
    assert sum(step.rewards.get("coder", 0) for step in steps) == pytest.approx(0.25)
    assert sum(step.rewards.get("tester", 0) for step in steps) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(("program", "paid"), [(GOOD, 1.0), (BAD, 0.0)])
def test_outcome_reward_pays_at_the_end_only(add: Any, program: str, paid: float) -> None:
    wrong, last = scripted_pair(GOOD, "#### add(1, 2) -> 4"), scripted_pair(program, "#### add(0, 0) -> 0")
    *_, middle, end = play(add(reward="outcome"), wrong, last)
    assert middle.team_reward == 0.0 and middle.info["success"]  # the program is right, but the seats continue
    assert end.done and end.team_reward == paid and end.rewards == {"coder": 0.0, "tester": 0.0}


# ---- ends of episodes


def test_episode_ends_on_agreement(add: Any) -> None:
    _, right = play(add(), scripted_pair(GOOD, "#### add(1, 2) -> 3"))
    assert right.done and right.info["success"] and not right.truncated
    _, wrong = play(add(), scripted_pair(BAD, "#### add(5, 2) -> 3"))
    assert wrong.done and not wrong.info["success"] and not wrong.truncated


def test_hidden_tests_do_not_end_the_episode(add: Any) -> None:
    _, step = play(add(), scripted_pair(GOOD, "#### add(1, 2) -> 4"))
    assert not step.done and step.info["success"] and not step.info["agreed"]


def test_single_seat_stops_on_the_examples(add: Any) -> None:
    _, first, second = play(add(team="single"), {"coder": BAD}, {"coder": GOOD})
    assert not first.done and "An example that it fails: add(5, 1) should give 6" in first.observations["coder"]
    assert "The program gave 4" in first.observations["coder"]
    assert second.done and second.info["agreed"] and second.info["success"]


def test_single_seat_without_examples_has_one_turn(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", ADD | {"examples": []})
    _, step = play(CoderTester(source=source, split="all", team="single"), {"coder": BAD})
    assert step.done and not step.info["success"]


def test_passing_program_replaces_a_missing_reference(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", ADD | {"reference": None})
    env = CoderTester(source=source, split="all")
    for program, test, worth in [(GOOD, "#### add(1, 2) -> 3", 1.0), (BAD, "#### add(5, 2) -> 3", 0.0)]:
        _, step = play(env, scripted_pair(program, test))
        assert step.rewards["tester"] == pytest.approx(worth)
    with pytest.raises(ValueError, match="no reference solution"):
        env.expert("coder", random.Random(0))


# ---- observations


def test_both_seats_observe_the_test_results(add: Any) -> None:
    start, step = play(add(), scripted_pair(BAD, "#### add(2, 3) -> 5"))
    for seat, program, test in [("coder", "Your program", "The tester's test"), ("tester", "The coder's", "Your test")]:
        assert "Write a function `add(a, b)`" in start.observations[seat]
        assert "Examples:\nadd(5, 1) -> 6" in start.observations[seat]
        observation = step.observations[seat]
        assert (
            program in observation
            and "return a - b" in observation
            and f"{test}: add(2, 3) should give 5" in observation
        )
        assert "The program gave -1" in observation and "Turn 2 of 4." in observation


def test_hidden_tests_are_not_shown(add: Any) -> None:
    steps = play(add(), scripted_pair("", ""), scripted_pair(BAD, "#### add(2, 3) -> 5"))
    shown = "".join(text for step in steps for text in step.observations.values())
    assert not any(word in shown for word in ("30", "20", "0, 0", "-1, 5"))


def test_failures_are_described_in_observations(add: Any) -> None:
    loop = "```python\ndef add(a, b):\n    while True: pass\n```"
    _, crashed = play(add(), scripted_pair("```python\ndef add(a, b):\n    return a / 0\n```", "#### add(1, 2) -> 3"))
    assert "The program failed: ZeroDivisionError: division by zero" in crashed.observations["tester"]
    _, hung = play(add(time_limit_s=0.4), scripted_pair(loop, "#### add(1, 2) -> 3"))
    assert "The program failed: out of time" in hung.observations["coder"]
    _, bad = play(add(), scripted_pair("```python\ndef add(\n```", "none"))
    assert "The program does not compile: SyntaxError" in bad.observations["coder"]
    assert "no test that could be read" in bad.observations["coder"]


def test_compact_observations_are_short() -> None:
    env = CoderTester(source="drills", rendering="compact")
    start, step = play(env, scripted_pair("xs", "[1,2] -> [7]"), seed=3)
    assert env.roles == {"coder": "code coder", "tester": "code tester"}
    short = env.problem.short_question
    assert start.observations == {"coder": short, "tester": short}
    assert step.observations["tester"] == f"{short} code xs test [1,2] -> [7] got [1,2]"


def test_stdin_programs_are_supported(tmp_path: Path) -> None:
    env = CoderTester(source=write(tmp_path / "a.jsonl", ECHO), split="all")
    start, step, end = play(
        env,
        scripted_pair("```python\nprint(input().upper())\n```", "Input:\n```\nx y\n```\nOutput:\n```\nx y\n```"),
        scripted_pair("```\nprint(input())\n```", "x y -> x y"),
    )
    assert "Input:\n```\na\n```\nOutput:\n```\na\n```" in start.observations["coder"]
    assert "The program printed\n```\nX Y\n```" in step.observations["coder"]
    assert step.rewards == pytest.approx({"coder": 0.0, "tester": 1.0})
    assert end.done and end.info["success"]


# ---- parsing answers


def test_reading_programs() -> None:
    assert read_program("```python\na\n```\nor better\n```py\nb\n```") == "b"
    assert read_program("thinking #### [x for x in xs]") == "[x for x in xs]"
    assert read_program("print(1)") == "print(1)"
    shown = "Say xs is\n```\n[1, 2]\n```\nThen it works.\n#### "
    assert read_program(f"{shown}xs[:1]", "expression") == read_program(f"{shown}```py\nxs[:1]\n```", "expression")
    assert read_program(f"{shown}xs[:1]", "expression") == "xs[:1]"
    assert read_program("```py\nxs[:1]\n```", "expression") == "xs[:1]"
    assert read_program("  ") is None and read_program("```python\n```") is None
    assert read_program("x" * 10**6) == "x" * 20_000


@pytest.mark.parametrize("number", range(0, 64, 7))
def test_expert_answers_are_parsable(number: int) -> None:
    problem = load_programs(BUILT_IN_PROGRAMS)[number]
    for case in (case for case in problem.tests if len(case.input_text) < 1000):
        test = read_test(write_test(case, problem, fenced=True), problem)
        if problem.kind == "stdin":
            assert test == ProgramTest(case.input_text.rstrip() + "\n", case.expected_output.rstrip() + "\n")
        else:
            assert test == case
    assert problem.reference
    assert read_program(write_program(problem.reference, fenced=True)) == problem.reference.strip()


def test_reading_tests_with_signs_in_their_values(add: Any) -> None:
    env = add()
    env.reset(0)
    assert read_test("#### add('a->b', '==') -> 'a->b=='", env.problem) == ProgramTest("('a->b', '==')", "'a->b=='")
    assert read_test("#### `add([1], (2,)) == [1]`", env.problem) == ProgramTest("([1], (2,))", "[1]")
    for bad in ("add(x) -> 1", "add(1 -> 2", "add(**{}) -> 1", "add(" + "[" * 900 + " -> 1", "add(1) ->"):
        assert read_test(bad, env.problem) is None
