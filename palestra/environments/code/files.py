"""Programming problems from files: HumanEval, MBPP, APPS, CodeContests, LiveCodeBench, or palestra's own columns.

The schema of a file is recognised by its columns.
"""

from __future__ import annotations

import ast
import base64
import binascii
import builtins
import contextlib
import json
import pickletools
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Sequence, Set
from functools import lru_cache
from itertools import starmap
from pathlib import Path
from typing import Any, NamedTuple

from palestra.environments.code.programs import ProgramProblem
from palestra.environments.code.test_runner import ProgramKind, ProgramTest
from palestra.envs.support.row_reader import Row, read_rows

BUILT_IN_PROGRAMS = Path(__file__).with_name("data") / "programs.jsonl"
MAX_UNPACKED_BYTES = 2**28  # bytes of hidden tests after unpacking
TEXT_OPCODES = frozenset({"UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"})
FRAME_OPCODES = frozenset({"PROTO", "FRAME", "PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE", "STOP"})
MAX_SHORT_CHARS = 200  # characters of the short question, if a file has none
CODE_CONTESTS_PYTHON3 = 3  # CodeContests' code for the language
DIFFICULTY_LEVELS = {"introductory": 2, "interview": 3, "competition": 5, "easy": 2, "medium": 3, "hard": 5}
PROGRAM_KINDS: dict[bool, ProgramKind] = {True: "function", False: "stdin"}  # is a function called
PREAMBLES: dict[ProgramKind, str] = {  # of programs whose problems have none of their own
    "stdin": "",
    "function": "from typing import *\nfrom collections import *\n"
    "import bisect, functools, heapq, itertools, math, re, string\n",
}


def load_programs(path: Path) -> tuple[ProgramProblem, ...]:
    """Returns the problems of a .jsonl, .json or .parquet file, or of a folder of them, in order.

    Problems whose tests cannot run apart from the program are left out, with a warning that gives their number. Raises
    ValueError, naming file and row, if the columns match no known schema or a row is invalid.
    """
    return _load(path, path.stat().st_mtime_ns if path.exists() else 0)


@lru_cache(maxsize=8)
def _load(path: Path, changed: int) -> tuple[ProgramProblem, ...]:
    problems: list[ProgramProblem] = []
    lost: list[str] = []
    for number, row in enumerate(read_rows(path), start=1):
        try:
            problems.append(_read(row, f"{path}, row {number}"))
        except InseparableTestsError as error:
            lost.append(f"row {number}: {error}")
    if lost:
        warnings.warn(f"{path}: {len(lost)} of {len(lost) + len(problems)} problems left out ({lost[0]})", stacklevel=3)
    return tuple(problems)


def _read(row: Row, where: str) -> ProgramProblem:
    shape = next((shape for shape in DATASET_SCHEMAS if shape.columns <= row.keys()), None)
    if shape is None:
        known = "; ".join(f"{shape.name}: {', '.join(sorted(shape.columns))}" for shape in DATASET_SCHEMAS)
        raise ValueError(f"{where} has columns {', '.join(row)}, which are of no known shape. Known are {known}")
    try:
        problem = shape.parse_row(row)
    except InseparableTestsError:
        raise
    except (KeyError, TypeError, ValueError, SyntaxError, IndexError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{where} is not a problem in the shape of {shape.name}: {error!r}; correct it or leave it out"
        ) from error
    if not problem.tests:
        raise ValueError(f"{where} has no tests: add one, or leave it out")
    return problem


class DatasetSchema(NamedTuple):
    """A known set of columns, and the function that reads such a row."""

    name: str
    columns: frozenset[str]
    parse_row: Callable[[Row], ProgramProblem]


def _own(row: Row) -> ProgramProblem:
    function = bool(row["entry"])

    def cases(name: str) -> tuple[ProgramTest, ...]:
        if function:
            return tuple(ProgramTest(repr(tuple(arguments)), repr(value)) for arguments, value in row[name])
        return tuple(ProgramTest(input_text, expected) for input_text, expected in row[name])

    return ProgramProblem(
        id=row["id"],
        question=row["question"],
        short_question=row["short"],
        split_key=_key(row["question"]),
        kind=PROGRAM_KINDS[function],
        tests=cases("tests"),
        examples=cases("examples"),
        reference=row["reference"],
        entry=row["entry"] or "",
        starter=row.get("starter") or "",
        difficulty=row["difficulty"],
        exact=False,
    )


def _human_eval(row: Row) -> ProgramProblem:
    prompt = row["prompt"]
    entry = row["entry_point"]
    kind, tests = _checks(row["test"], entry, prompt)
    question = f"Complete this function:\n\n{prompt.rstrip()}"
    reference = prompt + row["canonical_solution"]
    named = dict(id=row["task_id"], question=question, reference=reference, entry=entry)
    return _problem(named, kind, tests, preamble=prompt, difficulty=2)


def _checks(test: str, entry: str, prompt: str) -> tuple[ProgramKind, tuple[ProgramTest, ...]]:
    """Returns the tests in HumanEval's `check`: its assertions, or all of it if it does more."""
    check = next((node for node in ast.parse(test).body if getattr(node, "name", "") == "check"), None)
    body = check.body if isinstance(check, ast.FunctionDef) else []
    if all(isinstance(node, ast.Assert | ast.Expr) for node in body):
        with contextlib.suppress(InseparableTestsError):  # names that the test defines outside of `check`
            kind, cases = parse_asserts("\n".join(map(ast.unparse, body)), entry, alias="candidate", given=prompt)
            if cases:
                return kind, cases
    source = f"{test}\ncheck({entry})"
    check_names(f"{prompt}\n{source}", {entry})
    return "assertion", (ProgramTest(source),)


def _mbpp(row: Row) -> ProgramProblem:
    text = row.get("text") or row["prompt"]
    asserts = "\n".join(row["test_list"])
    entry = find_entry_point(asserts, row["code"])
    setup = "\n".join([row.get("test_setup_code") or "", *(row.get("test_imports") or [])]).strip()
    try:
        kind, tests = parse_asserts(asserts, entry, given=setup)
    except InseparableTestsError:  # the tests may use modules that the reference imports
        setup = f"{setup}\n{_imports(row['code'])}".strip()
        kind, tests = parse_asserts(asserts, entry, given=setup)
    question = f"{text.strip()}\n\nThe function is called {entry}, as in: {row['test_list'][0]}"
    named = dict(id=f"mbpp/{row['task_id']}", question=question, reference=row["code"], entry=entry)
    return _problem(named, kind, tests, preamble=setup, difficulty=2)


def _imports(code: str) -> str:
    return "\n".join(
        ast.unparse(node) for node in ast.parse(code).body if isinstance(node, ast.Import | ast.ImportFrom)
    )


def _apps(row: Row) -> ProgramProblem:
    tests = json.loads(row["input_output"])
    entry = tests.get("fn_name") or ""
    starter = row.get("starter_code") or ""
    if entry:
        calls = zip(tests["inputs"], _unwrap_values(tests["outputs"]), strict=True)
        cases = tuple(starmap(_call, calls))
    else:
        texts = zip(map(_lines, tests["inputs"]), map(_lines, tests["outputs"]), strict=True)
        cases = tuple(starmap(ProgramTest, texts))
    solutions = json.loads(row.get("solutions") or "[]")
    named = dict(id=f"apps/{row.get('problem_id', row.get('id'))}", question=row["question"], entry=entry)
    named |= dict(reference=_first_python(solutions), starter=starter)
    kind = PROGRAM_KINDS[bool(entry)]
    level = DIFFICULTY_LEVELS.get(row["difficulty"], 3)
    return _problem(named, kind, cases, preamble=PREAMBLES[kind], difficulty=level, exact=False)


def _code_contests_tests(table: Row | None) -> list[ProgramTest]:
    """Returns the tests of a table of inputs and outputs. Raises ValueError if there are more of the one."""
    if not table:
        return []
    return list(starmap(ProgramTest, zip(table["input"], table["output"], strict=True)))


def _code_contests(row: Row) -> ProgramProblem:
    public = _code_contests_tests(row.get("public_tests"))
    tests = _code_contests_tests(row.get("private_tests")) + _code_contests_tests(row.get("generated_tests"))
    solutions = row["solutions"]
    pairs = zip(solutions["language"], solutions["solution"], strict=True)
    written = [text for language, text in pairs if language in (CODE_CONTESTS_PYTHON3, "PYTHON3")]
    named = dict(id=row["name"], question=row["description"], reference=_first_python(written), examples=tuple(public))
    return _problem(named, "stdin", tuple(tests or public), difficulty=4)


def _live_code_bench(row: Row) -> ProgramProblem:
    public = json.loads(row["public_test_cases"])
    hidden = _unpack_hidden_tests(row["private_test_cases"])
    entry = json.loads(row.get("metadata") or "{}").get("func_name") or ""
    functional = bool(public or hidden) and (public or hidden)[0]["testtype"] == "functional"

    def cases(tests: Sequence[Any]) -> tuple[ProgramTest, ...]:
        if not functional:
            return tuple(ProgramTest(test["input"], test["output"]) for test in tests)
        arguments = ([json.loads(line) for line in test["input"].split("\n") if line.strip()] for test in tests)
        return tuple(_call(one, json.loads(test["output"])) for one, test in zip(arguments, tests, strict=True))

    title = f"{row['question_title']}\n\n" if row.get("question_title") else ""
    named = dict(id=f"lcb/{row['question_id']}", question=title + row["question_content"], entry=entry)
    named |= dict(examples=cases(public), starter=row.get("starter_code") or "")
    kind = PROGRAM_KINDS[functional]
    level = DIFFICULTY_LEVELS.get(row.get("difficulty") or "", 3)
    return _problem(named, kind, cases(hidden or public), preamble=PREAMBLES[kind], difficulty=level, exact=False)


DATASET_SCHEMAS = (
    DatasetSchema(
        "palestra",
        frozenset({"id", "difficulty", "question", "short", "entry", "reference", "examples", "tests"}),
        _own,
    ),
    DatasetSchema(
        "HumanEval", frozenset({"task_id", "prompt", "canonical_solution", "test", "entry_point"}), _human_eval
    ),
    DatasetSchema("MBPP", frozenset({"task_id", "code", "test_list"}), _mbpp),
    DatasetSchema("APPS", frozenset({"question", "input_output", "difficulty"}), _apps),
    DatasetSchema("CodeContests", frozenset({"name", "description", "public_tests", "solutions"}), _code_contests),
    DatasetSchema(
        "LiveCodeBench",
        frozenset({"question_id", "question_content", "public_test_cases", "private_test_cases"}),
        _live_code_bench,
    ),
)


def _problem(
    named: dict[str, Any], kind: ProgramKind, tests: tuple[ProgramTest, ...], **options: Any
) -> ProgramProblem:
    question = named["question"] = named["question"].strip()
    return ProgramProblem(
        **named,
        **options,
        kind=kind,
        tests=tests,
        split_key=_key(question),
        short_question=_key(question)[:MAX_SHORT_CHARS],
    )


def _key(question: str) -> str:
    return " ".join(question.split())


def _call(arguments: Sequence[Any], value: Any) -> ProgramTest:
    return ProgramTest(repr(tuple(arguments)), repr(value))


def _unwrap_values(values: Sequence[Any]) -> list[Any]:
    """Returns the values of a function: APPS wraps those of most problems in lists of one, all of a problem or none."""
    wrapped = all(isinstance(value, list) and len(value) == 1 for value in values)
    if not wrapped:
        return list(values)
    return [value[0] for value in values]


def _lines(text: str | Sequence[str]) -> str:
    if isinstance(text, str):
        return text
    return "\n".join(map(str, text))


def _first_python(solutions: Sequence[str]) -> str | None:
    """Returns the first solution that parses as Python 3 (some are Python 2); None if none does."""
    for source in solutions:
        with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            ast.parse(source)
            return source
    return None


def _unpack_hidden_tests(text: str) -> list[Any]:
    """Returns LiveCodeBench's hidden tests: JSON, or base64-encoded, compressed, pickled JSON.

    Raises ValueError if they cannot be unpacked or exceed `MAX_UNPACKED_BYTES` bytes.
    """
    if not text or text.lstrip().startswith("["):
        return _parse_list(text or "[]")
    try:
        unpack = zlib.decompressobj()
        data = unpack.decompress(base64.b64decode(text), MAX_UNPACKED_BYTES)
        if unpack.unconsumed_tail:
            raise ValueError(f"private_test_cases unpack to more than {MAX_UNPACKED_BYTES} bytes")
        plain = _pickled_text(data)
    except (binascii.Error, zlib.error, ValueError) as error:
        raise ValueError(f"private_test_cases cannot be unpacked: {error}") from error
    return _parse_list(plain)


def _pickled_text(data: bytes) -> str:
    """Returns the text in the pickle of a text, without unpickling. Raises ValueError for any other pickle."""
    text: str | None = None
    for opcode, value, _ in pickletools.genops(data):
        if opcode.name in TEXT_OPCODES and text is None:
            text = value
        elif opcode.name not in FRAME_OPCODES:
            raise ValueError(f"the pickle holds more than a text ({opcode.name})")
    if text is None:
        raise ValueError("the pickle holds no text")
    return text


def _parse_list(text: str) -> list[Any]:
    """Returns the list in a JSON text. Raises ValueError for anything else."""
    try:
        tests = json.loads(text)
    except RecursionError as error:
        raise ValueError("private_test_cases are nested too deep") from error
    if not isinstance(tests, list):
        raise ValueError(f"private_test_cases hold {type(tests).__name__}, not a list")
    return tests


class InseparableTestsError(ValueError):
    """Raised for assertions that need more of a program than the return values of its function."""


def parse_asserts(
    asserts: str, entry: str, *, alias: str | None = None, given: str = ""
) -> tuple[ProgramKind, tuple[ProgramTest, ...]]:
    """Returns the tests in a sequence of assertions.

    If all compare a call of `entry` with a value, these are input-value pairs; otherwise the assertions themselves,
    which run apart from the program. An assertion that does not mention the function tests nothing and is left out.
    `alias` is another name of the function, `given` is code that runs before. Raises InseparableTestsError if the
    assertions or `given` use a name that only the program can define.
    """
    names = {entry, alias}
    check_names(f"{given}\n{asserts}", names)
    nodes = [node for node in ast.parse(asserts).body if isinstance(node, ast.Assert) and names & _used_names(node)]
    calls = [_parsed_call(node.test, names) for node in nodes]
    if all(calls):
        return "function", tuple(call for call in calls if call)
    before = f"{alias} = {entry}\n" if alias else ""
    return "assertion", tuple(ProgramTest(before + ast.unparse(node)) for node in nodes)


def check_names(source: str, known: Set[str | None]) -> None:
    """Raises InseparableTestsError for a name that is not defined in the code, builtin or `known`."""
    tree = ast.parse(source)
    defined = _defined_names(tree) | known
    unknown = {str(name) for name in _used_names(tree) - defined if not hasattr(builtins, str(name))}
    if unknown and "*" not in defined:  # `from math import *` defines unknown names
        raise InseparableTestsError(f"its tests use {', '.join(sorted(unknown))}, which only the program defines")


def _used_names(tree: ast.AST) -> set[str | None]:
    names = (node for node in ast.walk(tree) if isinstance(node, ast.Name))
    return {node.id for node in names if isinstance(node.ctx, ast.Load)}


def _defined_names(tree: ast.AST) -> set[str | None]:
    """Returns the names that code binds, anywhere in it."""
    names: set[str | None] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.alias):
            names.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Name):
            if not isinstance(node.ctx, ast.Load):
                names.add(node.id)
        else:  # functions, classes, caught exceptions
            names.add(getattr(node, "name", None))
    return names


def _parsed_call(test: ast.expr, names: Set[str | None]) -> ProgramTest | None:
    """Returns input and value of `f(arguments) == value` if both are literals; None for anything else."""
    if not isinstance(test, ast.Compare) or len(test.ops) != 1 or not isinstance(test.ops[0], ast.Eq):
        return None
    call = test.left
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in names) or call.keywords:
        return None
    try:
        arguments = [ast.literal_eval(node) for node in call.args]
        value = ast.literal_eval(test.comparators[0])
    except (ValueError, TypeError):
        return None
    return ProgramTest(repr(tuple(arguments)), repr(value))


def find_entry_point(asserts: str, code: str) -> str:
    """Returns the function that the assertions test: the one they call most often among those that `code` defines.

    A function with the name of a Python builtin (MBPP has a `sum`) is chosen only if there is no other. Raises
    ValueError if they call none.
    """
    defined = {node.name for node in ast.walk(ast.parse(code)) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    called = Counter(
        node.func.id
        for node in ast.walk(ast.parse(asserts))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    )
    candidates = [name for name, _ in called.most_common() if name in defined]
    if not candidates:
        raise ValueError(f"the tests call nothing that the code defines ({', '.join(sorted(defined))})")
    return min(candidates, key=lambda name: hasattr(builtins, name))
