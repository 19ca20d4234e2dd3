"""Programming problems: our own, drills, files in published shapes, and what counts as the right output."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import pytest
from toy_programs import failures, tried

from palestra.envs.problems.harness import encoded
from palestra.envs.problems.program_drills import Drill, all_drills, draw_drill, drill_problem
from palestra.envs.problems.program_files import OWN, load_programs
from palestra.envs.problems.program_results import MISSING, same_text, same_value, tree_of, value_of, written
from palestra.envs.problems.programs import choose
from palestra.envs.problems.trials import Code, Lab, Trial
from palestra.envs.text.splits import split_of_text
from palestra.sandbox import Limits

# ---- our own


def test_our_own_problems_are_many_and_graded() -> None:
    problems = load_programs(OWN)
    assert len(problems) >= 60 and len({problem.id for problem in problems}) == len(problems)
    assert len({problem.key for problem in problems}) == len(problems)
    assert min(Counter(problem.difficulty for problem in problems).values()) >= 10
    assert {problem.difficulty for problem in problems} == {1, 2, 3, 4, 5}
    assert Counter(problem.kind for problem in problems).keys() == {"function", "stdin"}
    for problem in problems:
        assert len(problem.tests) >= 5 and problem.examples and problem.reference and problem.short
        assert not {case.given for case in problem.tests} & {case.given for case in problem.examples}
        assert len({case.expected for case in problem.tests}) > 1  # no constant passes


def test_every_split_has_some_of_our_own() -> None:
    problems = load_programs(OWN)
    parts = [choose(problems, part, (1, 2, 3, 4, 5), "own") for part in ("base", "train", "dev", "test")]
    assert sum(map(len, parts)) == len(problems) and all(parts)


@pytest.mark.parametrize("number", range(3, 64, 12))
def test_some_references_pass(lab: Lab, number: int) -> None:
    assert failures(lab, load_programs(OWN)[number]) == []


@pytest.mark.slow
def test_all_references_pass(lab: Lab) -> None:
    assert {problem.id: failures(lab, problem) for problem in load_programs(OWN) if failures(lab, problem)} == {}


@pytest.mark.slow
def test_no_reference_passes_another_problem(lab: Lab) -> None:
    """So that tests tell programs apart: each reference is tried on the next problem of its kind."""
    problems = load_programs(OWN)
    for kind in ("stdin", "function"):
        ours = [problem for problem in problems if problem.kind == kind]
        for one, other in pairwise(ours):
            code = Code(str(one.reference), one.kind, one.entry)
            trials = tried(lab, code, *other.tests, limits=Limits(wall=2)).trials
            assert not all(trial.right for trial in trials)


# ---- drills


def test_a_drill_by_hand() -> None:
    drill = next(d for d in all_drills([5]) if d.short == "keep even each times 3 then plus 2 last 2 sum")
    assert drill.code == "sum([x*3+2 for x in xs if x%2==0][-2:])"
    assert drill.of([1, 2, 3, 4, 5, 6]) == (4 * 3 + 2) + (6 * 3 + 2) == eval(drill.code, {"xs": [1, 2, 3, 4, 5, 6]})
    assert drill.gives(["a"]) is None and drill.gives([True]) is None and drill.gives([10**9]) is None
    assert drill.gives([2]) == 8


def test_there_are_thousands_of_drills_and_each_has_one_split() -> None:
    drills = all_drills([1, 2, 3])
    shorts = [drill.short for drill in drills]
    assert len(shorts) == len(set(shorts)) > 5000
    shares = Counter(map(split_of_text, shorts))
    assert shares["test"] / len(shorts) == pytest.approx(0.1, abs=0.02)


def test_drills_are_drawn_from_their_split_and_difficulty() -> None:
    for part in ("base", "train", "dev", "test"):
        drills = [draw_drill(seed, part, [1, 2, 4]) for seed in range(40)]
        assert {split_of_text(drill.short) for drill in drills} == {part}
        assert {len(drill.parts) for drill in drills} == {1, 2, 4}
    assert draw_drill(7, "train", [3]) == draw_drill(7, "train", [3])


def test_what_is_written_is_what_is_meant() -> None:
    rng = random.Random(1)
    for drill in rng.sample(all_drills([1, 2, 3, 4, 5]), 3000):
        for xs in ([], [rng.randrange(-5, 13) for _ in range(rng.randint(1, 6))]):
            assert eval(drill.code, {"xs": xs}) == drill.of(xs), drill.code


def test_a_drill_as_a_problem(lab: Lab) -> None:
    problem = drill_problem(draw_drill(1, "train", [3]))
    assert failures(lab, problem) == []
    assert not all(trial.right for trial in tried(lab, problem.code("xs", "expression"), *problem.tests).trials)
    for flawed in ("x for x in xs", "return xs", "xs)\nimport os\n(xs", ""):
        assert tried(lab, problem.code(flawed, "expression"), "([1],)").flaw


@pytest.mark.slow
def test_drills_are_told_apart_by_their_tests() -> None:
    """Few that are written otherwise come to the same on all tests, as "first 1 count" and "last 1 count" do."""
    drills = random.Random(2).sample(all_drills([1, 2, 3]), 400)
    same = sum(_same_on_tests(one, other) for one in drills for other in drills if one != other)
    assert same < 0.02 * len(drills) ** 2


def _same_on_tests(one: Drill, other: Drill) -> bool:
    return all(other.of(value_of(case.given)[0]) == value_of(case.expected) for case in drill_problem(one).tests)


# ---- what came of a program


def test_what_came_of_each_input(lab: Lab) -> None:
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
    made = tried(lab, Code(source, "function", "f"), *(f"({x},)" for x in range(1, 10)))
    assert made.flaw is None
    assert made.trials[:3] == (
        Trial(True, "2"),
        Trial(False, "ZeroDivisionError: division by zero"),
        Trial(False, "it ended without a result"),
    )
    assert [trial.said for trial in made.trials[3:6]] == [
        "it stopped with status 5",
        "it ended without a result",
        "TypeError: the result is object, which is no plain value",
    ]
    assert value_of(made.trials[6].said) == (1, [2.5, {"a": {3}}], None)
    assert made.trials[7].said == "inf"
    assert made.trials[8].said.startswith("KeyError: 'aaa") and len(made.trials[8].said) == 300


def test_programs_read_and_print_in_any_way(lab: Lab) -> None:
    for read in (
        "input()",
        "sys.stdin.readline().strip()",
        "sys.stdin.buffer.read().decode().strip()",
        "open(0).read().strip()",
    ):
        for write in ("print(s)", "sys.stdout.write(s)", "os.write(1, s.encode())", "print(s, flush=True); exit()"):
            made = tried(lab, Code(f"import os, sys\ns = {read}\n{write}"), "ü 1\n", "2\n")
            assert [trial.said.strip() for trial in made.trials] == ["ü 1", "2"], (read, write)


def test_inputs_do_not_meet(lab: Lab) -> None:
    source = "seen = []\ndef f(x):\n    seen.append(x)\n    return len(seen)"
    assert [trial.said for trial in tried(lab, Code(source, "function", "f"), "(1,)", "(2,)").trials] == ["1", "1"]


def test_limits_are_for_all_inputs_together(lab: Lab) -> None:
    source = "import time\ndef f(x):\n    time.sleep(x)\n    return x"
    made = tried(lab, Code(source, "function", "f"), "(0,)", "(60,)", "(0,)", limits=Limits(wall=0.8))
    assert made.trials == (Trial(True, "0"), Trial(False, "out of time"), Trial(False, "out of time"))


@pytest.mark.parametrize("source", ["def f(", "x = '\0'", "(" * 5000, "\udc80", "f = " + "-" * 100_000 + "1"])
def test_what_does_not_compile(lab: Lab, source: str) -> None:
    assert tried(lab, Code(source, "function", "f"), "(1,)").flaw


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
        ("  *\n ***\n", "*\n***\n", False),  # a triangle on the wrong side
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
        ("", "", True),
        ("", "\n \n", True),
        ("a\n", "", False),
    ],
)
def test_printed_text_is_compared_exactly_but_for_blanks_at_line_ends(expected: str, said: str, right: bool) -> None:
    assert same_text(expected, said) is right


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
    assert same_value(expected, tree_of(encoded(value_of(said))), exact=True) is right


@pytest.mark.parametrize(
    "forged", ["", "oops", "[]", "[[]]", '["set",[]]', '["dict",1]', '["dict",[1]]', '{"a":1}', "["]
)
def test_what_is_no_value_equals_none(forged: str) -> None:
    for expected in ("[]", "()", "{}", "set()", "{1: 2}", "{()}", "None", "''", "oops", "[[]]", "{1}"):
        assert not same_value(expected, tree_of(forged), exact=False)
    assert tree_of(forged) is MISSING or written(tree_of(forged))


def test_a_tuple_may_be_a_list_where_tests_come_from_json() -> None:
    assert same_value("[1, [2, [3]]]", tree_of(encoded((1, [2, (3,)]))), exact=False)
    assert not same_value("[1, 2]", tree_of(encoded((1, 3))), exact=False)
