"""Assertions as tests of programs: the forms that are read, and their evaluation apart from the program."""

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.toy_code import play, scripted_pair
from helpers.toy_programs import failures, try_program

from palestra.environments.code.env import CoderTester
from palestra.environments.code.files import InseparableTestsError, find_entry_point, load_programs, parse_asserts
from palestra.environments.code.programs import ProgramProblem
from palestra.environments.code.test_runner import ProgramSpec, ProgramTest, ProgramTestRunner

PROMPT = "from typing import List\nimport math\n\n\ndef shift(s: str):\n    return s[1:] + s[:1]\n\n"


def human_eval(folder: Path, test: str, signature: str = "def f(*xs):", prompt: str = PROMPT) -> ProgramProblem:
    row = {
        "task_id": "HumanEval/x",
        "prompt": f"{prompt}{signature}\n    ''' Not told. '''\n",
        "canonical_solution": "    return xs\n",
        "test": test,
        "entry_point": "f",
    }
    return load(folder, row)[0]


def mbpp(folder: Path, *asserts: str, code: str, setup: str = "") -> ProgramProblem:
    row = {"task_id": 1, "text": "Do it.", "code": code, "test_list": list(asserts), "test_setup_code": setup}
    return load(folder, row)[0]


def load(folder: Path, *rows: dict[str, Any]) -> tuple[ProgramProblem, ...]:
    path = folder / f"{len(list(folder.iterdir()))}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_programs(path)


def passed_share(lab: ProgramTestRunner, problem: ProgramProblem, answer: str) -> float:
    trials = try_program(lab, problem.program_from(answer, problem.kind), *problem.tests).results
    return sum(trial.passed for trial in trials) / len(trials)


# The body of HumanEval's `check`, a right program and a wrong one.
BODIES: dict[str, tuple[str, str, str]] = {
    "equal to a sum": ("assert candidate(2) == 1 + 1", "return xs[0]", "return 3"),
    "equal to a repeated list": ("assert candidate(3) == [0] * 3", "return [0] * xs[0]", "return [0]"),
    "equal, on the other side": ("assert 3 == candidate(3)", "return xs[0]", "return 4"),
    "tolerance": ("assert abs(candidate(2.0) - 0.5) < 1e-6", "return 1 / xs[0]", "return 0.4"),
    "fabs": ("assert math.fabs(candidate(2.0) - 0.5) < 1e-6", "return 1 / xs[0]", "return float('nan')"),
    "isclose": ("assert math.isclose(candidate(2), math.sqrt(2))", "return xs[0] ** 0.5", "return 1.41"),
    "true": ("assert candidate(2)", "return xs[0] % 2 == 0", "return False"),
    "not": ("assert not candidate(2)", "return xs[0] % 2 == 1", "return True"),
    "is true": ("assert candidate(2) is True", "return True", "return 1"),
    "is none": ("assert candidate(2) is None", "return None", "return 0"),
    "is not none": ("assert candidate(2) is not None", "return 0", "return None"),
    "less": ("assert candidate(2) < 3", "return 2", "return 3"),
    "chained": ("assert 1 < candidate(2) <= 3", "return 3", "return 1"),
    "in": ("assert candidate(2) in ([1, 2], [2, 1])", "return [2, 1]", "return [2, 2]"),
    "one of two": ("assert candidate(2) == 1 or candidate(2) == 4", "return 4", "return 2"),
    "and": ("assert candidate(1) == 1 and candidate(2) == 2", "return xs[0]", "return 1"),
    "tuples": ("assert candidate((1, 2), (3,)) == ((3,), (1, 2) * 1)", "return xs[::-1]", "return xs"),
    "tuples of calls": ("assert (candidate(1), candidate(2)) == (1, 2)", "return xs[0]", "return 2"),
    "all": ("assert all(candidate(n) == n * n for n in range(4))", "return xs[0] ** 2", "return 2 * xs[0]"),
    "any": ("assert any([candidate(n) for n in range(3)])", "return xs[0] == 2", "return []"),
    "sorted": ("assert sorted(candidate(3)) == [0, 1, 2]", "return [2, 0, 1]", "return [2, 0, 2]"),
    "set": ("assert set(candidate(3)) == {0, 1, 2}", "return [2, 0, 1, 0]", "return [2, 0]"),
    "set of both": ("assert set(candidate(1, 2)) == set((1, 2))", "return xs", "return (1,)"),
    "length": ("assert len(candidate('ab')) == 2", "return xs[0]", "return ''"),
    "isinstance": ("assert isinstance(candidate(1), list)", "return []", "return ()"),
    "round": ("assert round(candidate(2), 2) == 1.41", "return 2 ** 0.5", "return 1.4"),
    "str": ("assert str(candidate(1)) == '[1]'", "return list(xs)", "return '1'"),
    "item": ("assert candidate(5)[0] == 5", "return xs", "return [4]"),
    "dict items": ("assert list(candidate(1).items()) == [(1, 2)]", "return {1: 2}", "return {2: 1}"),
    "method of the value": ("assert candidate('a').upper() == 'AB'", "return 'ab'", "return 'b'"),
    "keywords": ("assert candidate(base=2, *[3]) == 8", "return base ** xs[0]", "return xs[0] ** base"),
    "applied twice": ("assert candidate(candidate('abc')) == 'cab'", "return shift(xs[0])", "return xs[0]"),
    "undone": ("assert candidate(shift('abc')) == 'abc'", "return xs[0][-1:] + xs[0][:-1]", "return xs[0]"),
    "the same twice": ("assert candidate(1, 2) == candidate(2, 1)", "return sum(xs)", "return xs[0]"),
    "large": ("assert candidate(64) == 2 ** 64", "return 2 ** xs[0]", "return 2.5 ** xs[0]"),
    "nan": ("assert math.isnan(candidate(1))", "return float('nan')", "return 1.0"),
    "nan, unequal to itself": (
        "v = candidate(1)\n    assert v != v and not v == v",
        "return float('nan')",
        "return 1.0",
    ),
    "nan, as text": ("assert str(candidate(1)) == 'nan'", "return float('nan')", "return 1.0"),
    "not greater": ("assert not abs(candidate(2) - 0.5) > 1e-6", "return 0.5", "return float('nan')"),
    "infinite": ("assert candidate(float('inf')) == float('inf')", "return xs[0]", "return 1e308"),
    "complex": ("assert candidate(1j) == 1j * 1j", "return xs[0] * xs[0]", "return 1j"),
    "bytes and none": ("assert candidate(b'a', None) == (bytes([97]), None)", "return xs", "return None"),
    "loop": ("for n in range(12):\n        assert candidate(n) == n", "return xs[0]", "return 11"),
    "random": (
        "import random, copy\n    for _ in range(6):\n        a, b = random.randint(0, 99), random.randint(0, 99)\n"
        "        assert candidate(copy.deepcopy(a), b) == a + b",
        "return sum(xs)",
        "return xs[0]",
    ),
    "value before": ("value = candidate([3, 4])\n    assert math.hypot(*value) == 5.0", "return xs[0]", "return [3]"),
    "raises": (
        "try:\n        candidate(0)\n        assert False\n    except ZeroDivisionError:\n        pass",
        "return 1 / xs[0]",
        "return 0",
    ),
}


@pytest.mark.parametrize("which", ["right", "wrong"])
def test_assertion_forms_distinguish_right_from_wrong(lab: ProgramTestRunner, tmp_path: Path, which: str) -> None:
    """All in one run: the function's first argument names the form that calls it."""
    program, cases = "def form(name, *xs, base=0):\n", []
    for name, (body, *answers) in BODIES.items():
        problem = human_eval(tmp_path, f"METADATA = {{}}\n\n\ndef check(candidate):\n    {body}\n")
        assert problem.kind == "assertion" and len(problem.tests) == 1, name
        cases.append(
            ProgramTest(f"def f(*xs, **named):\n    return form({name!r}, *xs, **named)\n{problem.tests[0].input_text}")
        )
        program += f"    if name == {name!r}:\n        {answers[which == 'wrong']}\n"
    trials = try_program(lab, ProgramSpec(program, "assertion", "form", PROMPT), *cases).results
    odd = {name: trial for name, trial in zip(BODIES, trials, strict=True) if trial.passed != (which == "right")}
    assert not odd


def test_each_assertion_of_a_check_function_counts(lab: ProgramTestRunner, tmp_path: Path) -> None:
    test = """
def check(candidate):
    assert True, 'This prints if this assert fails'
    assert abs(candidate(1.5) - 1.5) < 1e-6
    assert candidate(0) == 0
    assert candidate(7) == 7
"""
    problem = human_eval(tmp_path, test)
    assert len(problem.tests) == 3  # the first tests nothing
    assert passed_share(lab, problem, "def f(x):\n    return x") == 1.0
    assert passed_share(lab, problem, "def f(x):\n    return min(x, 1)") == pytest.approx(1 / 3)


def test_check_with_local_names_runs_as_one_test(lab: ProgramTestRunner, tmp_path: Path) -> None:
    test = "TWO = 2\ndef half(x):\n    return x / TWO\ndef check(candidate):\n    assert half(candidate(3)) == 3\n"
    problem = human_eval(tmp_path, test)
    assert len(problem.tests) == 1
    assert passed_share(lab, problem, "def f(x):\n    return 2 * x") == 1.0
    assert passed_share(lab, problem, "def f(x):\n    return x") == 0.0


def test_mbpp_with_imports_and_its_reference(lab: ProgramTestRunner, tmp_path: Path) -> None:
    code = "import collections\ndef f(xs):\n  return collections.Counter(xs)"
    asserts = ["assert f('aab') == {'a': 2, 'b': 1}", "assert math.isclose(sum(f('ab').values()), 2)"]
    problem = mbpp(tmp_path, *asserts, code=code, setup="import math")
    assert problem.kind == "assertion" and failures(lab, problem) == []
    assert passed_share(lab, problem, "def f(xs):\n  return {'a': 2, 'b': 1}") == 0.5


def test_mbpp_whose_tests_use_what_the_reference_imports(lab: ProgramTestRunner, tmp_path: Path) -> None:
    code = "import math\nimport re\ndef f(x):\n  return re.match('a', x) or math.pi"
    problem = mbpp(tmp_path, "assert f('a')", "assert math.isclose(f('b'), math.pi)", code=code)
    assert failures(lab, problem) == []  # a Match is true
    assert passed_share(lab, problem, "def f(x):\n  return 0 if x == 'a' else 3.141592653589793") == 0.5


def test_problems_whose_tests_need_the_programs_own_names_are_left_out(tmp_path: Path) -> None:
    tree = {"task_id": 1, "text": "A tree.", "code": "class Node:\n  pass\ndef f(n):\n  return 1"}
    rows = [
        tree | {"test_list": ["assert f(root) == 1"], "test_setup_code": "root = Node()"},
        tree | {"test_list": ["assert f(Node()) == 1"]},
        tree | {"test_list": ["assert f(1) == 1"]},
    ]
    with pytest.warns(UserWarning, match=r"2 of 3 problems left out \(row 1: its tests use Node, which only the"):
        problems = load(tmp_path, *rows)
    assert [problem.kind for problem in problems] == ["function"]


@pytest.mark.parametrize(
    ("test", "why"),
    [
        ("def check(candidate):\n    for n in range(3):\n        assert n < 3", "never calls the function"),
        ("def check(candidate):\n    assert candidate(object()) == 1", "does not run: TypeError: the result is object"),
        ("def check(candidate):\n    raise KeyError('a')", "does not run: KeyError: 'a'"),
        ("def check(candidate):\n    assert candidate('a' * 3_000_000) == ''", "more than 2097152 bytes of arguments"),
    ],
)
def test_assertions_without_the_function_are_refused(
    lab: ProgramTestRunner, tmp_path: Path, test: str, why: str
) -> None:
    problem = human_eval(tmp_path, test)
    with pytest.raises(ValueError, match=why):
        passed_share(lab, problem, "def f(x):\n    return 1")


@pytest.mark.parametrize(
    ("test", "passes"),
    [
        ("x = 0\nfor n in range(3):\n    x = f(x)\nassert x == 3", True),
        ("x = 0\nfor n in range(4):\n    x = f(x)\nassert x == 4", False),  # the recursion is one call too deep
        ("x = 0\nwhile x >= 0:\n    x = f(x)\nassert x", False),  # never ends for this program
        ("x = 'a' * 200_000\nfor n in range(20):\n    f(x + str(n))\nassert f(1) == 2", None),
    ],
)
def test_stateful_assertions_are_separated_correctly(
    lab: ProgramTestRunner, test: str, passes: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("palestra.environments.code.test_runner.MAX_CALL_ROUNDS", 3)
    code = ProgramSpec("def f(x):\n    return x + 1", "assertion", "f")
    if passes is None:
        with pytest.raises(ValueError, match="bytes of arguments"):
            try_program(lab, code, ProgramTest(test))
    else:
        assert try_program(lab, code, ProgramTest(test)).results[0].passed is passes


def test_failing_program_fails_its_assertions(lab: ProgramTestRunner) -> None:
    case = ProgramTest("assert f(1) > 0")
    for source, said in [
        ("def f(x): return x / 0", "ZeroDivisionError: division by zero"),
        ("def f(x): return object()", "TypeError: '>' not supported between instances of 'OpaqueValue' and 'int'"),
        ("def g(x): return 1", "ProgramError: NameError: the program defines no f"),
        ("def f(x): return 0", "AssertionError"),
    ]:
        made = try_program(lab, ProgramSpec(source, "assertion", "f"), case)
        assert (made.results[0].completed, made.results[0].passed, made.results[0].output) == (False, False, said)
    assert try_program(lab, ProgramSpec("def f(", "assertion", "f"), case).compile_error


def test_assertions_are_parsed_to_cases() -> None:
    assert parse_asserts("assert f(1, [2]) == 3\nassert f(0) == None\nassert True", "f") == (
        "function",
        (ProgramTest("(1, [2])", "3"), ProgramTest("(0,)", "None")),
    )
    for other in ("assert f(1)", "assert not f(1)", "assert f(1) < 2", "assert f(2 * 3) == 1", "assert f(1) is True"):
        assert parse_asserts(other, "f")[0] == "assertion"
    for unknown in ("assert f(x) == 1", "assert f(1) == g(1)", "assert f(Node()) == 1"):
        with pytest.raises(InseparableTestsError, match="which only the program defines"):
            parse_asserts(unknown, "f")
    assert (
        parse_asserts("assert f(g(1)) == [n for n in (1, 2)]", "f", given="def g(x):\n    return x")[0] == "assertion"
    )
    assert find_entry_point("assert set(f(1)) == set(g(2))\nassert f(3)", "def f(x): pass\ndef g(x): pass") == "f"
    assert find_entry_point("assert sum(10, 15) == 6\nassert sum(1, 2) == 1", "def sum(a, b): pass") == "sum"
    assert find_entry_point("assert set(f(1)) == set([1])", "def set(x): pass\ndef f(x): pass") == "f"
    with pytest.raises(ValueError, match="nothing that the code defines"):
        find_entry_point("assert h(1)", "def f(x): pass")


def test_env_supports_assertion_problems(sandboxed: None, tmp_path: Path) -> None:
    test = "def check(candidate):\n    assert abs(candidate(2) - 0.5) < 1e-6\n    assert candidate(4) < 0.3\n"
    prompt = 'def f(x):\n    """\n    >>> f(1)\n    1.0\n    """\n'
    row = {"task_id": "HumanEval/x", "prompt": prompt, "canonical_solution": "    return 1 / x\n"}
    load(tmp_path, row | {"test": test, "entry_point": "f"})
    env = CoderTester(source=str(tmp_path), split="all")
    forge = "import os\nfor n in range(9): open(str(n), 'w').write('ok\\n')\nos._exit(0)"
    for program, answer, worth in [
        ("def f(x):\n    return 1 / x", "#### f(8) -> 0.125", {"coder": 1.0, "tester": 1.0}),
        ("def f(x):\n    return 0.5", "#### f(1) -> 1.0", {"coder": 0.5, "tester": 0.0}),  # the question shows f(1)
        (forge, "#### f(8) -> 8", {"coder": -0.05, "tester": 0.0}),
    ]:
        _, step = play(env, scripted_pair(f"```python\n{program}\n```", answer))
        assert step.rewards == pytest.approx(worth)
