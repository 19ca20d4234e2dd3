"""Execution of the tool seat's Python: a program that prints an answer, or a single expression."""

from __future__ import annotations

import re
from dataclasses import dataclass

from palestra.environments.math.expressions import evaluate
from palestra.sandbox import ResourceLimits, RunResult, Sandbox

MAX_PROGRAM_CHARS = 20_000  # maximum characters of a program
_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
_PLAIN = re.compile(r"[0-9+\-*/%(). ]{1,200}")

# Like Python's interactive prompt: the value of a single expression is printed.
RUNNER_SOURCE = """
source = open("program.py", encoding="utf-8").read().strip()
names = {"__name__": "__main__"}
try:
    code = compile(source, "program.py", "eval")
except SyntaxError:
    exec(compile(source, "program.py", "exec"), names)
else:
    shown = eval(code, names)
    if shown is not None:
        print(shown)
"""


@dataclass(frozen=True)
class ProgramOutput:
    """Output of a program, and a one-line error, None on success."""

    text: str
    error: str | None = None


def extract_program(text: str) -> str:
    """Returns the last fenced Python block of a text, or the whole text without one."""
    blocks = _FENCED.findall(text)
    return str(blocks[-1] if blocks else text).strip()


async def run_program(source: str, sandbox: Sandbox, seconds: float) -> ProgramOutput:
    """Runs `source` in the sandbox for at most `seconds` of wall and CPU time. Arithmetic is evaluated in process."""
    if len(source) > MAX_PROGRAM_CHARS:
        return ProgramOutput("", f"the program is longer than {MAX_PROGRAM_CHARS} characters")
    if plain := arithmetic_output(source):
        return plain
    limits = ResourceLimits(wall=seconds, cpu=seconds)
    outcome = await sandbox.run_python(
        RUNNER_SOURCE, files={"program.py": source.encode("utf-8", "replace")}, limits=limits
    )
    return ProgramOutput(outcome.stdout.strip(), _error(outcome))


def arithmetic_output(source: str) -> ProgramOutput | None:
    """Returns the output or error of an arithmetic expression, or of `print` of one; None for any other program."""
    text = source.strip()
    inner = text[len("print(") : -1] if text.startswith("print(") and text.endswith(")") else text
    if not _PLAIN.fullmatch(inner):
        return None
    try:
        return ProgramOutput(str(evaluate(inner)))
    except ZeroDivisionError as error:
        return ProgramOutput("", f"ZeroDivisionError: {error}")
    except SyntaxError as error:
        return (
            ProgramOutput("", f"SyntaxError: {error.msg}") if inner is text else None
        )  # "print(1)(2)" fails differently
    except ValueError:
        return None


def _error(outcome: RunResult) -> str | None:
    if outcome.ended == "exit":
        if outcome.code:
            return (outcome.stderr.strip().splitlines() or [f"exit status {outcome.code}"])[-1][:200]
        return None if outcome.stdout.strip() else "nothing was printed"
    return {
        "signal": "it was killed",
        "wall": "it ran out of time",
        "cpu": "it ran out of time",
        "memory": "it ran out of memory",
        "output": "it printed too much",
    }[outcome.ended]
