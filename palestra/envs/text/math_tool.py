"""Runs the tool user's Python: a program that prints an answer, or an expression for it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from palestra.envs.problems.expressions import evaluate
from palestra.sandbox import Limits, Outcome, Sandbox

LONGEST = 20_000  # characters of a program
_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
_PLAIN = re.compile(r"[0-9+\-*/%(). ]{1,200}")

# Like Python's own prompt: what is a single expression is worked out and shown.
RUN = """
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
class Printed:
    """What a program printed, and what went wrong in a line, None where nothing did."""

    text: str
    error: str | None = None


def program_in(text: str) -> str:
    """The last fenced block of Python in a text; all of it where there is none."""
    blocks = _FENCED.findall(text)
    return str(blocks[-1] if blocks else text).strip()


async def run_program(source: str, sandbox: Sandbox, seconds: float) -> Printed:
    """What `source` prints within so many seconds. Plain arithmetic is worked out here, as Python would."""
    if len(source) > LONGEST:
        return Printed("", f"the program is longer than {LONGEST} characters")
    if plain := plain_output(source):
        return plain
    limits = Limits(wall=seconds, cpu=seconds)
    outcome = await sandbox.run_python(RUN, files={"program.py": source.encode("utf-8", "replace")}, limits=limits)
    return Printed(outcome.stdout.strip(), _error(outcome))


def plain_output(source: str) -> Printed | None:
    """What an expression of numbers, or a print of one, prints or fails with; None for any other program."""
    text = source.strip()
    inner = text[len("print(") : -1] if text.startswith("print(") and text.endswith(")") else text
    if not _PLAIN.fullmatch(inner):
        return None
    try:
        return Printed(str(evaluate(inner)))
    except ZeroDivisionError as error:
        return Printed("", f"ZeroDivisionError: {error}")
    except SyntaxError as error:
        return Printed("", f"SyntaxError: {error.msg}") if inner is text else None  # "print(1)(2)" has another mistake
    except ValueError:
        return None


def _error(outcome: Outcome) -> str | None:
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
