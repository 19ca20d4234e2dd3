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
    source = str(blocks[-1]).strip("\n") if blocks else text.rpartition("####")[2].strip()
    return source if source.strip() else None


def read_test(answer: object, problem: ProgramProblem) -> ProgramTest | None:
    """Returns the test in an answer, None if the answer holds no valid test of the problem.

    For stdin programs: the last two fenced blocks, else the text before and after "->". For functions and expressions:
    the last line, `f(1, 2) -> 3`, `assert f(1, 2) == 3` or `[1,2] -> [5,8]`.
    """
    text = str(answer)[-MAX_ANSWER_CHARS:]
    if problem.kind == "stdin":
        blocks = _FENCED.findall(text)
        input_text, mark, expected = text.rpartition("####")[2].strip().rpartition("->")
        if len(blocks) < 2 and not mark:
            return None
        input_text, expected = blocks[-2:] if len(blocks) >= 2 else (input_text.strip(), expected.strip())
        return ProgramTest(f"{input_text.rstrip()}\n", f"{expected.rstrip()}\n")
    line = (text.rpartition("####")[2].strip().splitlines() or [""])[-1].strip(" `")
    line = line.removeprefix("assert ")
    if len(line) > LONGEST_TEST:
        return None
    for sign in re.finditer(r"->|==", line):
        arguments = _arguments(line[: sign.start()].strip(), problem)
        value = NO_VALUE if arguments is None else parse_literal(line[sign.end() :].strip())
        if value is not NO_VALUE:
            return ProgramTest(repr(arguments), repr(value))
    return None


def _arguments(text: str, problem: ProgramProblem) -> tuple[object, ...] | None:
    """Returns the arguments of a call `f(1, 2)`, or of a list for `xs`; None if they cannot be parsed."""
    if problem.kind == "expression":
        xs = parse_literal(re.sub(r"^xs\s*=", "", text).strip())
        return (xs,) if isinstance(xs, list) else None
    name, opened, inner = text.partition("(")
    if name.strip() not in (problem.entry, "candidate") or not opened or not inner.endswith(")"):
        return None
    arguments = parse_literal(f"({inner[:-1]},)" if inner[:-1].strip() else "()")
    return arguments if isinstance(arguments, tuple) else None


def write_program(source: str, *, fenced: bool) -> str:
    """Returns a program in the form that `read_program` parses."""
    return f"```python\n{source.strip()}\n```" if fenced else source.strip()


def write_test(case: ProgramTest, problem: ProgramProblem, *, fenced: bool) -> str:
    """Returns a test in the form that `read_test` parses."""
    if problem.kind == "stdin":
        input_text = case.input_text.rstrip()
        expected = case.expected_output.rstrip()
        return (
            f"Input:\n```\n{input_text}\n```\nOutput:\n```\n{expected}\n```"
            if fenced
            else f"{input_text.strip()} -> {expected.strip()}"
        )
    return f"#### {format_test(case, problem)}" if fenced else format_test(case, problem)


def format_test(case: ProgramTest, problem: ProgramProblem) -> str:
    """Returns a test of a function or an expression on one line: `f(1, 2) -> 3`."""
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
