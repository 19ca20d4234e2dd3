"""Prompts and observations of the code env: the problem and the results of earlier turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from palestra.core.types import Seat
from palestra.environments.code.answers import format_call, format_example, format_test, strip_comma_spaces
from palestra.environments.code.programs import ProgramProblem
from palestra.environments.code.test_runner import ProgramKind, ProgramTest, ProgramTestResult

MAX_QUOTE_CHARS = 2000  # maximum characters of a quoted program or output
TOGETHER = (
    "If the program passes the test, you two are done; if not, you both see why and have another turn. Either of you "
    "may be wrong. Think briefly if you need to, then answer in the form that you are asked for."
)
ROLE_PROMPTS: dict[Seat, str] = {
    "coder": f"You are the coder: solve the problem. A tester, who cannot see your answer, writes a test. {TOGETHER}",
    "tester": (
        "You are the tester: write one test for the problem, what is given and what a right program makes of it. An "
        "input that the question shows earns nothing. A "
        f"coder, whose answer you cannot see, solves the problem. {TOGETHER}"
    ),
    "alone": (
        "You are the coder: solve the problem. If your program fails one of the examples, you see how and have another "
        "turn. Think briefly if you need to, then answer in the form that you are asked for."
    ),
}
ANSWER_FORMATS: dict[Seat, dict[ProgramKind, str]] = {
    "coder": {
        "stdin": (
            "End your answer with the whole program, which reads from stdin and prints to stdout, as a block that "
            "begins with a line ```python and ends with a line ```."
        ),
        "function": (
            "End your answer with the whole function, as a block that begins with a line ```python and ends with a "
            "line ```."
        ),
        "expression": "End your answer with #### and one Python expression of `xs`, as in: #### [x+1 for x in xs]",
    },
    "tester": {
        "stdin": "End your answer with two blocks between lines of ```: first the whole input, then the whole output.",
        "function": "End your answer with #### and a call with its value, for example: #### add(1, 2) -> 3",
        "expression": "End your answer with #### and a list with what becomes of it, for example: #### [1,2] -> [2,3]",
    },
}


# What the answers, the program and the test are called, by the seat that reads of them.
CODERS_ANSWER: dict[Seat, str] = {"coder": "your answer", "tester": "the coder’s answer"}
TESTERS_ANSWER: dict[Seat, str] = {"coder": "the tester’s answer", "tester": "your answer"}
PROGRAM_NAMES: dict[Seat, str] = {"coder": "Your program", "tester": "The coder's program"}
TEST_NAMES: dict[Seat, str] = {"coder": "The tester's test", "tester": "Your test"}


@dataclass(frozen=True)
class CodeTurn:
    """A completed turn: the coder's program, the tester's test (or the failed example) and the result of running it.

    None for anything that could not be parsed. `compile_error`: the compile error. `is_copied`: the question shows the
    test's input.
    """

    source: str | None
    test: ProgramTest | None
    trial: ProgramTestResult | None
    compile_error: str | None = None
    is_copied: bool = False


def full_observation(
    problem: ProgramProblem, seat: Seat, turns: Sequence[CodeTurn], max_turns: int, *, alone: bool
) -> str:
    """Returns the full observation: the problem, its examples and all earlier turns."""
    texts = [problem.question]
    if problem.starter:
        texts.append(f"Start from:\n```python\n{problem.starter.strip()}\n```")
    if problem.examples:
        texts.append("\n".join(["Examples:", *(format_example(case, problem) for case in problem.examples)]))
    texts += [_format_turn(number, turn, problem, seat, alone) for number, turn in enumerate(turns, start=1)]
    forms = ANSWER_FORMATS[seat]
    form = forms.get(problem.kind, forms["function"])  # assertions call a function too
    return "\n\n".join([*texts, f"Turn {len(turns) + 1} of {max_turns}. {form}"])


def compact_observation(problem: ProgramProblem, turns: Sequence[CodeTurn]) -> str:
    """Returns the compact observation: the short problem, and the last turn's program, test and result."""
    if not turns:
        return problem.short_question
    last = turns[-1]
    summary = f"{problem.short_question} code {_clip(last.source or 'none')}"
    if last.test is None:
        return f"{summary} test none"
    got = _result_text(last, problem)
    if problem.kind == "expression":
        got = strip_comma_spaces(got)
    return f"{summary} test {format_test(last.test, problem)} got {got}"


def _result_text(turn: CodeTurn, problem: ProgramProblem) -> str:
    if turn.compile_error is not None or turn.trial is None or not turn.trial.completed:
        return "error"
    return _clip(turn.trial.output.strip())


def _format_turn(number: int, turn: CodeTurn, problem: ProgramProblem, seat: Seat, alone: bool) -> str:
    if turn.source is None:
        lines = [f"Turn {number}. There was no program in {CODERS_ANSWER[seat]}."]
    else:
        lines = [f"Turn {number}. {PROGRAM_NAMES[seat]}:\n```python\n{_clip(turn.source)}\n```"]
    if turn.test is None:
        lines.append(f"There was no test that could be read in {TESTERS_ANSWER[seat]}.")
    else:
        test_name = TEST_NAMES[seat]
        if alone:
            test_name = "An example that it fails"
        lines.append(f"{test_name}: {_describe_case(turn.test, problem)}")
        if turn.is_copied and seat == "tester":
            lines.append("The question shows this input, so the test earns nothing.")
    return "\n".join([*lines, _outcome(turn, problem)]).strip()


def _describe_case(case: ProgramTest, problem: ProgramProblem) -> str:
    if problem.kind == "stdin":
        input_text = _clip(case.input_text.rstrip())
        expected = _clip(case.expected_output.rstrip())
        return f"the input\n```\n{input_text}\n```\nshould give\n```\n{expected}\n```"
    if problem.kind == "expression":
        return f"xs = {case.input_text[1:-1].rstrip(',')} should give {case.expected_output}"
    if not case.expected_output:
        return case.input_text
    return f"{format_call(case.input_text, problem)} should give {case.expected_output}"


def _outcome(turn: CodeTurn, problem: ProgramProblem) -> str:
    if turn.compile_error is not None:
        return f"The program does not compile: {turn.compile_error}"
    if turn.source is None or turn.test is None or turn.trial is None:
        return ""
    if not turn.trial.completed:
        return f"The program failed: {_clip(turn.trial.output)}"
    output = _clip(turn.trial.output.rstrip())
    if problem.kind == "stdin":
        return f"The program printed\n```\n{output}\n```"
    return f"The program gave {output}"


def _clip(text: str) -> str:
    if len(text) <= MAX_QUOTE_CHARS:
        return text
    return f"{text[:MAX_QUOTE_CHARS]} ..."
