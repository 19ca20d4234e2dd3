"""Programming problems from files: published formats, refused files, and assertions read as cases."""

import base64
import json
import pickle
import zlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from helpers.toy_programs import failures, try_program

from palestra.environments.code.files import load_programs
from palestra.environments.code.programs import ProgramProblem
from palestra.environments.code.test_runner import ProgramTest, ProgramTestRunner

HUMAN_EVAL = {
    "task_id": "HumanEval/x",
    "prompt": """from typing import List


def plus(a: int):
    return a + 1

def total(xs: List[int]) -> int:
    ''' Sum. '''
""",
    "canonical_solution": "    return sum(xs)\n",
    "test": """METADATA = {}


def check(candidate):
    assert candidate([1, 2]) == 3
    assert candidate([]) == 0, 'empty'
""",
    "entry_point": "total",
}
MBPP = {
    "task_id": 11,
    "text": "Write a function to swap a pair.",
    "code": "def swap(pair):\r\n  return (pair[1], pair[0])",
    "test_list": ["assert swap((1, 2)) == (2, 1)", "assert swap(('a', 0)) == (0, 'a')"],
    "test_setup_code": "",
    "challenge_test_list": [],
}
APPS_STDIN = {
    "problem_id": 5,
    "question": "Add two numbers.",
    "solutions": json.dumps(["print 'old'", "print(sum(map(int, input().split())))"]),
    "input_output": json.dumps({"inputs": ["1 2\n", "5 6\n"], "outputs": ["3\n", "11\n"]}),
    "difficulty": "introductory",
    "url": "",
    "starter_code": "",
}
APPS_CALL = APPS_STDIN | {
    "question": "Sum a list.",
    "solutions": json.dumps(["class Solution:\n    def total(self, xs: List[int]) -> int:\n        return sum(xs)"]),
    "input_output": json.dumps({"fn_name": "total", "inputs": [[[1, 2]], [[]]], "outputs": [[3], [0]]}),
    "difficulty": "competition",
    "starter_code": "class Solution:\n    def total(self, xs: List[int]) -> int:\n",
}
CODE_CONTESTS = {
    "name": "1_A. Sum",
    "description": "Print the sum of two numbers.",
    "public_tests": {"input": ["1 2\n"], "output": ["3\n"]},
    "private_tests": {"input": ["3 4\n"], "output": ["7\n"]},
    "generated_tests": {"input": ["5 5\n"], "output": ["10\n"]},
    "solutions": {"language": [2, 3], "solution": ["int main(){}", "print(sum(map(int, input().split())))"]},
    "difficulty": 7,
}


def packed(tests: Any) -> str:
    """The format in which LiveCodeBench packs its hidden tests."""
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests)))).decode()


LIVE_STDIN = {
    "question_title": "Double",
    "question_content": "Print twice the number.",
    "platform": "atcoder",
    "question_id": "abc1",
    "contest_date": "2024-01-01",
    "starter_code": "",
    "difficulty": "easy",
    "public_test_cases": json.dumps([{"input": "2\n", "output": "4\n", "testtype": "stdin"}]),
    "private_test_cases": packed([{"input": "5\n", "output": "10\n", "testtype": "stdin"}]),
    "metadata": "{}",
}
LIVE_CALL = LIVE_STDIN | {
    "starter_code": "class Solution:\n    def pick(self, xs: List[int], k: int) -> int:\n",
    "difficulty": "hard",
    "public_test_cases": json.dumps([{"input": "[1, 2]\n1", "output": "2", "testtype": "functional"}]),
    "private_test_cases": packed([{"input": "[7, 8, 9]\n0", "output": "7", "testtype": "functional"}]),
    "metadata": json.dumps({"func_name": "pick"}),
}
ALL = {
    "human_eval": (HUMAN_EVAL, "function", ("([1, 2],)", "([],)"), 2),
    "mbpp": (MBPP, "function", ("((1, 2),)", "(('a', 0),)"), 2),
    "apps": (APPS_STDIN, "stdin", ("1 2\n", "5 6\n"), 2),
    "apps call": (APPS_CALL, "function", ("([1, 2],)", "([],)"), 5),
    "code_contests": (CODE_CONTESTS, "stdin", ("3 4\n", "5 5\n"), 4),
    "live_code_bench": (LIVE_STDIN, "stdin", ("5\n",), 2),
    "live_code_bench call": (LIVE_CALL, "function", ("([7, 8, 9], 0)",), 5),
}


def load(folder: Path, *rows: dict[str, Any], ending: str = "jsonl") -> tuple[ProgramProblem, ...]:
    path = folder / f"rows.{ending}"
    if ending == "parquet":
        pyarrow.parquet.write_table(pa.Table.from_pylist(list(rows)), path)
    else:
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        path.write_text(lines if ending == "jsonl" else json.dumps(rows))
    return load_programs(path)


@pytest.mark.parametrize("ending", ["jsonl", "json", "parquet"])
@pytest.mark.parametrize("name", ALL)
def test_published_shapes_load(tmp_path: Path, name: str, ending: str) -> None:
    row, kind, givens, difficulty = ALL[name]
    (problem,) = load(tmp_path, row, ending=ending)
    assert (problem.kind, problem.difficulty) == (kind, difficulty)
    assert tuple(case.input_text for case in problem.tests) == givens


@pytest.mark.parametrize("table", ["public_tests", "generated_tests"])
def test_inputs_without_outputs_are_refused(tmp_path: Path, table: str) -> None:
    with pytest.raises(ValueError):
        load(tmp_path, CODE_CONTESTS | {table: {"input": ["1 2\n", "2 2\n"], "output": ["3\n"]}})


@pytest.mark.parametrize(("outputs", "values"), [([[[2]], [[4, 5]]], ["[2]", "[4, 5]"]), ([[2], [4, 5]],) * 2])
def test_values_of_functions_are_unwrapped_if_all_are_wrapped(tmp_path: Path, outputs: Any, values: Any) -> None:
    row = APPS_CALL | {"input_output": json.dumps({"fn_name": "f", "inputs": [[1], [2]], "outputs": outputs})}
    assert [case.expected_output for case in load(tmp_path, row)[0].tests] == [str(value) for value in values]


@pytest.mark.parametrize("name", [name for name, (row, *_) in ALL.items() if "question_id" not in row])
def test_their_references_pass(lab: ProgramTestRunner, tmp_path: Path, name: str) -> None:
    assert failures(lab, load(tmp_path, ALL[name][0])[0]) == []


def test_answers_to_live_code_bench(lab: ProgramTestRunner, tmp_path: Path) -> None:
    """It has no solutions; an answer may be a class with a method and need not import the names in its annotations."""
    (problem,) = load(tmp_path, LIVE_CALL)
    assert problem.reference is None and problem.examples == (ProgramTest("([1, 2], 1)", "2"),)
    answer = "class Solution:\n    def pick(self, xs: List[int], k: int) -> int:\n        return xs[k]"
    assert try_program(lab, problem.program_from(answer, "function"), *problem.tests).results[0].passed


def test_human_eval_keeps_what_its_prompt_defines(lab: ProgramTestRunner, tmp_path: Path) -> None:
    (problem,) = load(tmp_path, HUMAN_EVAL)
    answer = "def total(xs: List[int]):\n    return plus(sum(xs)) - 1"
    assert all(
        trial.passed for trial in try_program(lab, problem.program_from(answer, "function"), *problem.tests).results
    )


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"what": 1}, "of no known shape.*HumanEval: .*LiveCodeBench"),
        (APPS_STDIN | {"input_output": "{}"}, "row 1 is not a problem in the shape of APPS: KeyError"),
        (APPS_STDIN | {"input_output": '{"inputs": [], "outputs": []}'}, "row 1 has no tests"),
        (MBPP | {"code": "x = "}, "shape of MBPP: SyntaxError"),
        (LIVE_STDIN | {"private_test_cases": "????"}, "cannot be unpacked"),
    ],
)
def test_rows_that_cannot_be_read_are_named(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(tmp_path, row)


class Evil:
    """An object whose unpickling would run code."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (open, (str(self.path), "w"))


def test_hidden_tests_that_would_run_code_are_refused(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    for bad in (Evil(trace), [Evil(trace)], {"a": 1}, b"text", 7):
        blob = base64.b64encode(zlib.compress(pickle.dumps(bad))).decode()
        with pytest.raises(ValueError, match="private_test_cases"):
            load(tmp_path, LIVE_STDIN | {"private_test_cases": blob, "question_id": repr(type(bad))})
        (tmp_path / "rows.jsonl").unlink()
    assert not trace.exists()
    pickle.loads(pickle.dumps(Evil(trace))).close()
    assert trace.exists()  # unpickling would create the file


DEEP = "[" * 100_000 + "]" * 100_000
BUILD = b"\x80\x04\x8c\x01a}\x8c\x01b\x8c\x01csb."  # sets an attribute of a text
NOT_TESTS = {
    "sets an attribute": BUILD,
    "names a global": b"cbuiltins\nopen\n.",
    "two texts": b"\x8c\x01a\x8c\x01b.",
    "no text": b".",
    "cut off": pickle.dumps("[]")[:-3],
    "no end": b"\x8c\x02[]",
    "bytes": pickle.dumps(b"[]"),
    "not UTF-8": b"\x8c\x01\xff.",
    "from memory": b"h\x07.",
    "deep JSON": pickle.dumps(DEEP),
    "a number": pickle.dumps("7"),
    "an object": pickle.dumps('{"input": "1"}'),
    "a list of numbers": pickle.dumps("[7]"),
    "no JSON": pickle.dumps("tests"),
}


@pytest.mark.parametrize("name", NOT_TESTS)
def test_hidden_tests_of_another_shape_are_refused_with_their_row(tmp_path: Path, name: str) -> None:
    blob = base64.b64encode(zlib.compress(NOT_TESTS[name])).decode()
    with pytest.raises(ValueError, match=r"rows.jsonl, row 1 is not a problem in the shape of LiveCodeBench") as error:
        load(tmp_path, LIVE_STDIN | {"private_test_cases": blob})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("column", ["public_test_cases", "private_test_cases", "metadata"])
def test_deep_json_is_refused_with_its_row(tmp_path: Path, column: str) -> None:
    with pytest.raises(ValueError, match=r"rows.jsonl, row 1 is not a problem in the shape of LiveCodeBench"):
        load(tmp_path, LIVE_STDIN | {column: DEEP})


def test_hidden_tests_that_unpack_without_end_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("palestra.environments.code.files.MAX_UNPACKED_BYTES", 10_000)
    with pytest.raises(ValueError, match="more than 10000 bytes"):
        load(tmp_path, LIVE_STDIN | {"private_test_cases": packed("x" * 10**6)})
