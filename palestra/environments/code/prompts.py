"""Prompts and observations of the code env: the problem and the results of earlier turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from palestra.core.types import Seat
from palestra.environments.code.answers import format_call, format_test, strip_comma_spaces
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
        texts.append("\n".join(["Examples:", *(_example(case, problem) for case in problem.examples)]))
    texts += [_format_turn(number, turn, problem, seat, alone) for number, turn in enumerate(turns, start=1)]
    form = ANSWER_FORMATS[seat]["function" if problem.kind == "assertion" else problem.kind]
    return "\n\n".join([*texts, f"Turn {len(turns) + 1} of {max_turns}. {form}"])


def compact_observation(problem: ProgramProblem, turns: Sequence[CodeTurn]) -> str:
    """Returns the compact observation: the short problem, and the last turn's program, test and result."""
    if not turns:
        return problem.short_question
    last = turns[-1]
    code = last.source if last.source is not None else "none"
    summary = f"{problem.short_question} code {_clip(code)}"
    if last.test is None:
        return f"{summary} test none"
    got = _result_text(last, problem)
    shown = strip_comma_spaces(got) if problem.kind == "expression" else got
    return f"{summary} test {_line(last.test, problem)} got {shown}"


def _line(case: ProgramTest, problem: ProgramProblem) -> str:
    if problem.kind == "stdin":
        return f"{case.input_text.strip()} -> {case.expected_output.strip()}"
    return format_test(case, problem)


def _result_text(turn: CodeTurn, problem: ProgramProblem) -> str:
    if turn.compile_error is not None or turn.trial is None:
        return "error"
    return _clip(turn.trial.output.strip()) if turn.trial.completed else "error"


def _example(case: ProgramTest, problem: ProgramProblem) -> str:
    if problem.kind == "stdin":
        return f"Input:\n```\n{case.input_text.rstrip()}\n```\nOutput:\n```\n{case.expected_output.rstrip()}\n```"
    return format_test(case, problem)


def _format_turn(number: int, turn: CodeTurn, problem: ProgramProblem, seat: Seat, alone: bool) -> str:
    whose = "Your program" if seat == "coder" else "The coder's program"
    if turn.source is None:
        lines = [f"Turn {number}. There was no program in {'your' if seat == 'coder' else 'the coder’s'} answer."]
    else:
        lines = [f"Turn {number}. {whose}:\n```python\n{_clip(turn.source)}\n```"]
    if turn.test is None:
        lines.append(
            f"There was no test that could be read in {'your' if seat == 'tester' else 'the tester’s'} answer."
        )
    else:
        test = "An example that it fails" if alone else "Your test" if seat == "tester" else "The tester's test"
        lines.append(f"{test}: {_describe_case(turn.test, problem)}")
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
    return (
        f"{format_call(case.input_text, problem)} should give {case.expected_output}"
        if case.expected_output
        else case.input_text
    )


def _outcome(turn: CodeTurn, problem: ProgramProblem) -> str:
    if turn.compile_error is not None:
        return f"The program does not compile: {turn.compile_error}"
    if turn.source is None or turn.test is None or turn.trial is None:
        return ""
    if not turn.trial.completed:
        return f"The program failed: {_clip(turn.trial.output)}"
    output = _clip(turn.trial.output.rstrip())
    return f"The program printed\n```\n{output}\n```" if problem.kind == "stdin" else f"The program gave {output}"


def _clip(text: str) -> str:
    return text if len(text) <= MAX_QUOTE_CHARS else f"{text[:MAX_QUOTE_CHARS]} ..."
