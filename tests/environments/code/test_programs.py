"""Programming problems: shipped ones, drills, files in published formats, and the comparison of outputs."""

import random
from collections import Counter
from itertools import pairwise, product

import pytest
from helpers.toy_programs import failures, try_program

from palestra.environments.code.files import BUILT_IN_PROGRAMS, load_programs
from palestra.environments.code.harness import encode_value
from palestra.environments.code.programs import select_problems
from palestra.environments.code.results import (
    NO_VALUE,
    matches_literal,
    outputs_equal,
    parse_encoding,
    parse_literal,
    to_python_text,
)
from palestra.environments.code.synthetic_programs import (
    STEP_CHOICES,
    SyntheticProgram,
    draw_synthetic_program,
    synthetic_problem,
)
from palestra.environments.code.test_runner import ProgramSpec, ProgramTestResult, ProgramTestRunner
from palestra.envs.support.splits import split_of_text
from palestra.sandbox import ResourceLimits


def all_synthetic_programs(difficulties: list[int]) -> list[SyntheticProgram]:
    """Every chain of these difficulties."""
    chains = (SyntheticProgram(*pieces) for pieces in product(*([None, *slot] for slot in STEP_CHOICES)))
    return [drill for drill in chains if len(drill.active_steps) in difficulties]


# ---- shipped problems


def test_shipped_problems_are_many_and_of_every_difficulty() -> None:
    problems = load_programs(BUILT_IN_PROGRAMS)
    assert len(problems) >= 60 and len({problem.id for problem in problems}) == len(problems)
    assert len({problem.split_key for problem in problems}) == len(problems)
    assert min(Counter(problem.difficulty for problem in problems).values()) >= 10
    assert {problem.difficulty for problem in problems} == {1, 2, 3, 4, 5}
    assert Counter(problem.kind for problem in problems).keys() == {"function", "stdin"}
    for problem in problems:
        assert len(problem.tests) >= 5 and problem.examples and problem.reference and problem.short_question
        assert not {case.input_text for case in problem.tests} & {case.input_text for case in problem.examples}
        assert len({case.expected_output for case in problem.tests}) > 1  # a constant does not pass


def test_every_split_has_shipped_problems() -> None:
    problems = load_programs(BUILT_IN_PROGRAMS)
    parts = [select_problems(problems, part, (1, 2, 3, 4, 5), "own") for part in ("base", "train", "dev", "test")]
    assert sum(map(len, parts)) == len(problems) and all(parts)


@pytest.mark.parametrize("number", range(3, 64, 12))
@pytest.mark.few(3)
def test_some_references_pass(lab: ProgramTestRunner, number: int) -> None:
    assert failures(lab, load_programs(BUILT_IN_PROGRAMS)[number]) == []


@pytest.mark.slow
def test_all_references_pass(lab: ProgramTestRunner) -> None:
    assert {
        problem.id: failures(lab, problem) for problem in load_programs(BUILT_IN_PROGRAMS) if failures(lab, problem)
    } == {}


@pytest.mark.slow
def test_no_reference_passes_another_problem(lab: ProgramTestRunner) -> None:
    """Tests distinguish programs: each reference is run on the next problem of its kind."""
    problems = load_programs(BUILT_IN_PROGRAMS)
    for kind in ("stdin", "function"):
        ours = [problem for problem in problems if problem.kind == kind]
        for one, other in pairwise(ours):
            code = ProgramSpec(str(one.reference), one.kind, one.entry)
            trials = try_program(lab, code, *other.tests, limits=ResourceLimits(wall=2)).results
            assert not all(trial.passed for trial in trials)


# ---- drills


def test_drill_by_hand() -> None:
    drill = next(
        d for d in all_synthetic_programs([5]) if d.short_question == "keep even each times 3 then plus 2 last 2 sum"
    )
    assert drill.code == "sum([x*3+2 for x in xs if x%2==0][-2:])"
    assert drill.run([1, 2, 3, 4, 5, 6]) == (4 * 3 + 2) + (6 * 3 + 2) == eval(drill.code, {"xs": [1, 2, 3, 4, 5, 6]})
    assert drill.run_checked(["a"]) is None and drill.run_checked([True]) is None and drill.run_checked([10**9]) is None
    assert drill.run_checked([2]) == 8


def test_there_are_thousands_of_drills_and_each_has_one_split() -> None:
    drills = all_synthetic_programs([1, 2, 3])
    shorts = [drill.short_question for drill in drills]
    assert len(shorts) == len(set(shorts)) > 5000
    shares = Counter(map(split_of_text, shorts))
    assert shares["test"] / len(shorts) == pytest.approx(0.1, abs=0.02)


def test_drills_are_drawn_from_their_split_and_difficulty() -> None:
    for part in ("base", "train", "dev", "test"):
        drills = [draw_synthetic_program(seed, part, [1, 2, 4]) for seed in range(40)]
        assert {split_of_text(drill.short_question) for drill in drills} == {part}
        assert {len(drill.active_steps) for drill in drills} == {1, 2, 4}
    assert draw_synthetic_program(7, "train", [3]) == draw_synthetic_program(7, "train", [3])


def test_drill_source_equals_its_semantics() -> None:
    rng = random.Random(1)
    for drill in rng.sample(all_synthetic_programs([1, 2, 3, 4, 5]), 3000):
        for xs in ([], [rng.randrange(-5, 13) for _ in range(rng.randint(1, 6))]):
            assert eval(drill.code, {"xs": xs}) == drill.run(xs), drill.code


def test_drill_becomes_a_problem(lab: ProgramTestRunner) -> None:
    problem = synthetic_problem(draw_synthetic_program(1, "train", [3]))
    assert failures(lab, problem) == []
    assert not all(
        trial.passed for trial in try_program(lab, problem.program_from("xs", "expression"), *problem.tests).results
    )
    for flawed in ("x for x in xs", "return xs", "xs)\nimport os\n(xs", ""):
        assert try_program(lab, problem.program_from(flawed, "expression"), "([1],)").compile_error


@pytest.mark.parametrize(
    ("question", "lacking"),
    [
        ("keep odd first 3", "[x for x in xs if x%2==1]"),
        ("keep above 2 first 1", "xs[:1]"),
        ("keep below 4 each plus 7 sorted", "[x+7 for x in xs if x<4]"),
    ],
)
def test_drill_without_one_of_its_parts_fails_a_test(question: str, lacking: str) -> None:
    drill = next(one for one in all_synthetic_programs([2, 3]) if one.short_question == question)
    lists = [parse_literal(case.input_text)[0] for case in synthetic_problem(drill).tests]
    assert any(eval(lacking, {"xs": xs}) != drill.run(xs) for xs in lists)
    assert len(lists) <= 8 + len(drill.active_steps)


@pytest.mark.slow
def test_tests_distinguish_drills() -> None:
    """Few different drills agree on all tests, as "first 1 count" and "last 1 count" do."""
    drills = random.Random(2).sample(all_synthetic_programs([1, 2, 3]), 400)
    same = sum(_same_on_tests(one, other) for one in drills for other in drills if one != other)
    assert same < 0.02 * len(drills) ** 2


def _same_on_tests(one: SyntheticProgram, other: SyntheticProgram) -> bool:
    return all(
        other.run(parse_literal(case.input_text)[0]) == parse_literal(case.expected_output)
        for case in synthetic_problem(one).tests
    )


# ---- results of programs


def test_results_are_reported_per_input(lab: ProgramTestRunner) -> None:
    source = """
import os, sys
def f(x):
    if x == 1: return x + 1
    if x == 2: return 1 / 0
    if x == 3: os._exit(0)
    if x == 4: sys.exit(5)
    if x == 5: os.kill(os.getpid(), 9)
    if x == 6: return object()
    if x == 7: print("noise"); return (1, [2.5, {"a": {3}}], None)
    if x == 8: return float("inf")
    raise KeyError("a" * 1000)
"""
    made = try_program(lab, ProgramSpec(source, "function", "f"), *(f"({x},)" for x in range(1, 10)))
    assert made.compile_error is None
    assert made.results[:3] == (
        ProgramTestResult(True, "2"),
        ProgramTestResult(False, "ZeroDivisionError: division by zero"),
        ProgramTestResult(False, "it ended without a result"),
    )
    assert [trial.output for trial in made.results[3:6]] == [
        "it stopped with status 5",
        "it ended without a result",
        "TypeError: the result is object, which is no plain value",
    ]
    assert parse_literal(made.results[6].output) == (1, [2.5, {"a": {3}}], None)
    assert made.results[7].output == "inf"
    assert made.results[8].output.startswith("KeyError: 'aaa") and len(made.results[8].output) == 300


def test_programs_read_and_print_in_any_way(lab: ProgramTestRunner) -> None:
    for read in (
        "input()",
        "sys.stdin.readline().strip()",
        "sys.stdin.buffer.read().decode().strip()",
        "open(0).read().strip()",
    ):
        for write in ("print(s)", "sys.stdout.write(s)", "os.write(1, s.encode())", "print(s, flush=True); exit()"):
            made = try_program(lab, ProgramSpec(f"import os, sys\ns = {read}\n{write}"), "ü 1\n", "2\n")
            assert [trial.output.strip() for trial in made.results] == ["ü 1", "2"], (read, write)


def test_inputs_are_isolated(lab: ProgramTestRunner) -> None:
    source = "seen = []\ndef f(x):\n    seen.append(x)\n    return len(seen)"
    assert [
        trial.output for trial in try_program(lab, ProgramSpec(source, "function", "f"), "(1,)", "(2,)").results
    ] == [
        "1",
        "1",
    ]


def test_limits_apply_to_all_inputs_together(lab: ProgramTestRunner) -> None:
    source = "import time\ndef f(x):\n    time.sleep(x)\n    return x"
    made = try_program(
        lab, ProgramSpec(source, "function", "f"), "(0,)", "(60,)", "(0,)", limits=ResourceLimits(wall=0.8)
    )
    assert made.results == (
        ProgramTestResult(True, "0"),
        ProgramTestResult(False, "out of time"),
        ProgramTestResult(False, "out of time"),
    )


@pytest.mark.parametrize("source", ["def f(", "x = '\0'", "(" * 5000, "\udc80", "f = " + "-" * 100_000 + "1"])
def test_compile_errors_are_reported(lab: ProgramTestRunner, source: str) -> None:
    assert try_program(lab, ProgramSpec(source, "function", "f"), "(1,)").compile_error


@pytest.mark.parametrize(
    ("expected", "said", "right"),
    [
        ("1 2\n3\n", "1 2\n3", True),
        ("1 2\n3\n", "1 2  \n3\n\n", True),
        ("1 2\r\n3\r\n", "1 2\n3\n", True),
        ("1 2\n3\n", "1 2 3\n", False),
        ("1 2\n", "1 3\n", False),
        ("0.3333333\n", "0.33333334\n", True),
        ("0.5 x\n", "0.50000001 x\n", True),
        ("0.5 x\n", "0.50000001  x\n", False),
        ("  *\n ***\n", "  *\n ***\n", True),
        ("  *\n ***\n", "*\n***\n", False),  # a triangle aligned to the wrong side
        ("*\n**\n", " *\n**\n", False),
        (" 0.5\n", "0.5\n", False),
        ("a  b\n", "a b\n", False),
        ("a b\n", "a\tb\n", False),
        ("a\n", "\na\n", False),
        ("a\n\nb\n", "a\nb\n", False),
        ("1.5\n", "1_0.5\n", False),
        ("1e999.\n", "inf\n", False),
        ("1.0\n", "nan\n", False),
        ("0.5\n", "0.6\n", False),
        ("3\n", "3.0\n", False),
        ("0.0000000001\n", "0\n", False),
        ("0.0000000001\n", "1.0000000001e-10\n", True),
        ("1e-30\n", "0\n", False),
        ("0.0\n", "0.0000000001\n", True),
        ("0.0\n", "0.0001\n", False),
        ("", "", True),
        ("", "\n \n", True),
        ("a\n", "", False),
    ],
)
def test_printed_text_is_compared_exactly_but_for_blanks_at_line_ends(expected: str, said: str, right: bool) -> None:
    assert outputs_equal(expected, said) is right


@pytest.mark.parametrize(
    ("expected", "said", "right"),
    [
        ("3", "3", True),
        ("3", "4", False),
        ("3", "3.0", True),
        ("1", "True", True),
        ("0.1", "0.10000000001", True),
        ("0.1", "0.11", False),
        ("2.0", "2", True),
        ("1e-10", "0", False),
        ("[1e-10, 1.0]", "[0.0, 1.0]", False),
        ("0.0", "1e-17", True),
        ("0.5", "1" + "0" * 400, False),
        ("[1, 2]", "[1, 2]", True),
        ("[1, 2]", "[2, 1]", False),
        ("[1, [2.0]]", "[1, [2.0000000001]]", True),
        ("{'a': 1}", "{'a': 1}", True),
        ("{'a': 1}", "{'b': 1}", False),
        ("{'a': [0.5], 'b': {}}", "{'b': {}, 'a': [0.50000000001]}", True),
        ("{1, 2}", "{2, 1}", True),
        ("{1, 2}", "{2.0, True}", True),
        ("{(1, 'a')}", "{(1.0, 'a')}", True),
        ("{1, 2}", "{1}", False),
        ("{1}", "[1]", False),
        ("set()", "{}", False),
        ("(1, 2)", "[1, 2]", False),
        ("'a'", "['a']", False),
        ("'tuple'", "()", False),
        ("b'a'", "b'a'", True),
        ("b'a'", "'a'", False),
        ("1j", "1j", True),
        ("None", "None", True),
        ("None", "0", False),
    ],
)
def test_values_are_compared_by_type_and_content(expected: str, said: str, right: bool) -> None:
    assert matches_literal(expected, parse_encoding(encode_value(parse_literal(said))), exact=True) is right


@pytest.mark.parametrize(
    "forged", ["", "oops", "[]", "[[]]", '["set",[]]', '["dict",1]', '["dict",[1]]', '{"a":1}', "["]
)
def test_invalid_values_equal_nothing(forged: str) -> None:
    for expected in ("[]", "()", "{}", "set()", "{1: 2}", "{()}", "None", "''", "oops", "[[]]", "{1}"):
        assert not matches_literal(expected, parse_encoding(forged), exact=False)
    assert parse_encoding(forged) is NO_VALUE or to_python_text(parse_encoding(forged))


def test_a_tuple_may_be_a_list_where_tests_come_from_json() -> None:
    assert matches_literal("[1, [2, [3]]]", parse_encoding(encode_value((1, [2, (3,)]))), exact=False)
    assert not matches_literal("[1, 2]", parse_encoding(encode_value((1, 3))), exact=False)
