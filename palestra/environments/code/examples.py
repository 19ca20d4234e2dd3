"""Detects tests that repeat an input shown in the question: they require no understanding and earn no reward."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from palestra.environments.code.harness import encode_value
from palestra.environments.code.programs import ProgramProblem
from palestra.environments.code.results import NO_VALUE, encodings_equal, outputs_equal, parse_literal, words_equal
from palestra.environments.code.test_runner import ProgramTest

MAX_CLOSING_BRACKETS = 20  # closing brackets tried as the end of a call


def is_test_shown(problem: ProgramProblem, test: ProgramTest) -> bool:
    """True if the input of `test` occurs in an example or in the question.

    Numbers may be written differently (2.0, 02), floats may differ in the seventh digit, lists may be tuples. In the
    question's text, calls of the function and verbatim lines of an input are found; inputs given in words ("for n = 3")
    are not. An example's input with words appended counts as shown if the expected output is the example's.
    """
    if problem.kind == "stdin":
        return any(_repeats(test, example) for example in problem.examples) or _stands_in(
            test.input_text, problem.question
        )
    tree = _tree(test.input_text)
    examples = (_tree(case.input_text) for case in problem.examples)
    return any(encodings_equal(tree, shown) for shown in (*examples, *_calls(problem.question, problem.entry)))


def _repeats(test: ProgramTest, example: ProgramTest) -> bool:
    words, shown = _words(test.input_text), _words(example.input_text)
    same = all(map(words_equal, words, shown)) and len(words) >= len(shown)
    return same and (len(words) == len(shown) or outputs_equal(example.expected_output, test.expected_output))


def _words(text: str) -> list[str]:
    return [re.sub(r"^\+?0*(?=[0-9])", "", word) for word in text.split()]


def _stands_in(given: str, question: str) -> bool:
    inner = _lines(given)
    return inner != "\n\n" and inner in _lines(question)


def _lines(text: str) -> str:
    """Returns the non-empty lines with single blanks, each between two line ends."""
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    return "\n".join(["", *lines, ""])


def _tree(arguments: str) -> Any:
    value = parse_literal(arguments)
    return NO_VALUE if value is NO_VALUE else json.loads(encode_value(value))


@lru_cache(maxsize=256)
def _calls(question: str, entry: str) -> tuple[Any, ...]:
    """Returns the arguments of all calls of `entry` with literal values in the question."""
    return tuple(_found(question, entry)) if entry else ()


def _found(question: str, entry: str) -> Iterator[Any]:
    for call in re.finditer(rf"\b{re.escape(entry)}\s*\(", question):
        rest = question[call.end() : call.end() + 1000]
        for end in [match.start() for match in re.finditer(r"\)", rest)][:MAX_CLOSING_BRACKETS]:
            value = parse_literal(f"({rest[:end]},)" if rest[:end].strip() else "()")
            if value is not NO_VALUE:
                yield json.loads(encode_value(value))
                break
