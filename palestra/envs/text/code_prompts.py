"""Prompts and observations of the code env: the problem and the results of earlier turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from palestra.envs.problems.programs import ProgramProblem
from palestra.envs.problems.trials import Case, Kind, Trial
from palestra.envs.text.code_answers import call, shown, tight
from palestra.types import Seat

LONGEST_QUOTE = 2000  # maximum characters of a quoted program or output
TOGETHER = (
    "If the program passes the test, you two are done; if not, you both see why and have another turn. Either of you "
    "may be wrong. Think briefly if you need to, then answer in the form that you are asked for."
)
ROLES: dict[Seat, str] = {
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
FORMS: dict[Seat, dict[Kind, str]] = {
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
class Turn:
    """A completed turn: the coder's program, the tester's test (or the failed example) and the result of running it.

    None for anything that could not be parsed. `flaw`: the compile error. `copied`: the question shows the test's
    input.
    """

    source: str | None
    test: Case | None
    trial: Trial | None
    flaw: str | None = None
    copied: bool = False


def full(problem: ProgramProblem, seat: Seat, turns: Sequence[Turn], most: int, *, alone: bool) -> str:
    """Returns the full observation: the problem, its examples and all earlier turns."""
    parts = [problem.question]
    if problem.starter:
        parts.append(f"Start from:\n```python\n{problem.starter.strip()}\n```")
    if problem.examples:
        parts.append("\n".join(["Examples:", *(_example(case, problem) for case in problem.examples)]))
    parts += [_told(number, turn, problem, seat, alone) for number, turn in enumerate(turns, start=1)]
    form = FORMS[seat]["function" if problem.kind == "assertion" else problem.kind]
    return "\n\n".join([*parts, f"Turn {len(turns) + 1} of {most}. {form}"])


def compact(problem: ProgramProblem, turns: Sequence[Turn]) -> str:
    """Returns the compact observation: the short problem, and the last turn's program, test and result."""
    if not turns:
        return problem.short
    last = turns[-1]
    code = last.source if last.source is not None else "none"
    told = f"{problem.short} code {_clip(code)}"
    if last.test is None:
        return f"{told} test none"
    got = _said(last, problem)
    return f"{told} test {_line(last.test, problem)} got {tight(got) if problem.kind == 'expression' else got}"


def _line(case: Case, problem: ProgramProblem) -> str:
    if problem.kind == "stdin":
        return f"{case.given.strip()} -> {case.expected.strip()}"
    return shown(case, problem)


def _said(turn: Turn, problem: ProgramProblem) -> str:
    if turn.flaw is not None or turn.trial is None:
        return "error"
    return _clip(turn.trial.said.strip()) if turn.trial.ok else "error"


def _example(case: Case, problem: ProgramProblem) -> str:
    if problem.kind == "stdin":
        return f"Input:\n```\n{case.given.rstrip()}\n```\nOutput:\n```\n{case.expected.rstrip()}\n```"
    return shown(case, problem)


def _told(number: int, turn: Turn, problem: ProgramProblem, seat: Seat, alone: bool) -> str:
    """Returns the description of one turn for one seat."""
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
        lines.append(f"{test}: {_asked(turn.test, problem)}")
        if turn.copied and seat == "tester":
            lines.append("The question shows this input, so the test earns nothing.")
    return "\n".join([*lines, _outcome(turn, problem)]).strip()


def _asked(case: Case, problem: ProgramProblem) -> str:
    if problem.kind == "stdin":
        return (
            f"the input\n```\n{_clip(case.given.rstrip())}\n```\nshould give\n```\n{_clip(case.expected.rstrip())}\n```"
        )
    if problem.kind == "expression":
        return f"xs = {case.given[1:-1].rstrip(',')} should give {case.expected}"
    return f"{call(case.given, problem)} should give {case.expected}" if case.expected else case.given


def _outcome(turn: Turn, problem: ProgramProblem) -> str:
    if turn.flaw is not None:
        return f"The program does not compile: {turn.flaw}"
    if turn.source is None or turn.test is None or turn.trial is None:
        return ""
    if not turn.trial.ok:
        return f"The program failed: {_clip(turn.trial.said)}"
    said = _clip(turn.trial.said.rstrip())
    return f"The program printed\n```\n{said}\n```" if problem.kind == "stdin" else f"The program gave {said}"


def _clip(text: str) -> str:
    return text if len(text) <= LONGEST_QUOTE else f"{text[:LONGEST_QUOTE]} ..."
