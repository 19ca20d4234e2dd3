"""Parsing and formatting of programs and tests in answers."""

from __future__ import annotations

import re

from palestra.environments.code.programs import ProgramProblem
from palestra.environments.code.results import NO_VALUE, parse_literal
from palestra.environments.code.test_runner import ProgramKind, ProgramTest

MAX_ANSWER_CHARS = 20_000  # characters read from the end of an answer
LONGEST_TEST = 4000  # maximum characters of a call with its value
_FENCED = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)


def read_program(answer: object, kind: ProgramKind = "stdin") -> str | None:
    """Returns the program in an answer: the last fenced block, else the text after the last ####, else all of it.

    An expression is asked for after ####: a fenced block before that is not read. None if the program is empty.
    """
    text = str(answer)[-MAX_ANSWER_CHARS:]
    if kind == "expression":
        text = text.rpartition("####")[2]
    blocks = _FENCED.findall(text)
    source = text.rpartition("####")[2].strip()
    if blocks:
        source = str(blocks[-1]).strip("\n")
    if not source.strip():
        return None
    return source


def read_test(answer: object, problem: ProgramProblem) -> ProgramTest | None:
    """Returns the test in an answer, None if the answer holds no valid test of the problem.

    For stdin programs: the last two fenced blocks, else the text before and after "->". For functions and expressions:
    the last line, `f(1, 2) -> 3`, `assert f(1, 2) == 3` or `[1,2] -> [5,8]`.
    """
    text = str(answer)[-MAX_ANSWER_CHARS:]
    if problem.kind == "stdin":
        blocks = _FENCED.findall(text)
        before, mark, after = text.rpartition("####")[2].rpartition("->")
        parts = [before.strip(), after.strip()]
        if len(blocks) >= 2:
            parts = blocks[-2:]
        elif not mark:
            return None
        return ProgramTest(*(f"{part.rstrip()}\n" for part in parts))
    line = (text.rpartition("####")[2].strip().splitlines() or [""])[-1].strip(" `")
    line = line.removeprefix("assert ")
    if len(line) > LONGEST_TEST:
        return None
    for sign in re.finditer(r"->|==", line):
        arguments = _arguments(line[: sign.start()].strip(), problem)
        if arguments is None:
            continue
        value = parse_literal(line[sign.end() :].strip())
        if value is not NO_VALUE:
            return ProgramTest(repr(arguments), repr(value))
    return None


def _arguments(text: str, problem: ProgramProblem) -> tuple[object, ...] | None:
    """Returns the arguments of a call `f(1, 2)`, or of a list for `xs`; None if they cannot be parsed."""
    if problem.kind == "expression":
        xs = parse_literal(re.sub(r"^xs\s*=", "", text).strip())
        if not isinstance(xs, list):
            return None
        return (xs,)
    name, opened, inner = text.partition("(")
    if name.strip() not in (problem.entry, "candidate") or not opened or not inner.endswith(")"):
        return None
    arguments = parse_literal(write_arguments(inner[:-1]))
    if not isinstance(arguments, tuple):
        return None
    return arguments


def write_arguments(inner: str) -> str:
    """Returns what stands between the brackets of a call as a Python tuple: "(1, 2,)"."""
    if not inner.strip():
        return "()"
    return f"({inner},)"


def write_program(source: str, *, fenced: bool) -> str:
    """Returns a program in the form that `read_program` parses."""
    if not fenced:
        return source.strip()
    return f"```python\n{source.strip()}\n```"


def write_test(case: ProgramTest, problem: ProgramProblem, *, fenced: bool) -> str:
    """Returns a test in the form that `read_test` parses."""
    if not fenced:
        return format_test(case, problem)
    if problem.kind == "stdin":
        return format_example(case, problem)
    return f"#### {format_test(case, problem)}"


def format_example(case: ProgramTest, problem: ProgramProblem) -> str:
    """Returns a test as a question shows it: input and output in blocks, or a call on one line."""
    if problem.kind != "stdin":
        return format_test(case, problem)
    return f"Input:\n```\n{case.input_text.rstrip()}\n```\nOutput:\n```\n{case.expected_output.rstrip()}\n```"


def format_test(case: ProgramTest, problem: ProgramProblem) -> str:
    """Returns a test on one line: `f(1, 2) -> 3`."""
    if problem.kind == "stdin":
        return f"{case.input_text.strip()} -> {case.expected_output.strip()}"
    if problem.kind == "expression":
        return f"{strip_comma_spaces(case.input_text[1:-1].rstrip(','))} -> {strip_comma_spaces(case.expected_output)}"
    if problem.kind == "assertion":
        return case.input_text
    return f"{format_call(case.input_text, problem)} -> {case.expected_output}"


def format_call(given: str, problem: ProgramProblem) -> str:
    """Returns `f(1, 2)` for the arguments "(1, 2)"."""
    inner = given[1:-1]
    return f"{problem.entry}({inner.removesuffix(',')})"


def strip_comma_spaces(value: str) -> str:
    """Returns a value without the spaces that Python puts after commas: "[1,2]"."""
    return value.replace(", ", ",")
