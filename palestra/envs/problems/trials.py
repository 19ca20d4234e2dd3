"""What a program makes of inputs, found out in the sandbox, and whether that is what was expected.

All inputs of a program go into one sandboxed process. Equal programs on equal inputs are run once: siblings of a group
often write the same.
"""

from __future__ import annotations

import ast
import asyncio
import marshal
import math
import warnings
from collections import OrderedDict
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal
from weakref import WeakKeyDictionary

from palestra.sandbox import Limits, Outcome, Sandbox

Kind = Literal["stdin", "function", "expression", "assertion"]
REMEMBERED = 4096  # batches of trials
LONGEST = 10**6  # characters of a value that is read back
MISSING = object()
OVER = {"wall": "out of time", "cpu": "out of time", "memory": "out of memory", "output": "too much output"}


@dataclass(frozen=True)
class Code:
    """A program and how it is used: it reads stdin and prints, or its function `entry` is called, or it is one
    expression of `xs`, or assertions run in its names. `preamble` runs before it."""

    source: str
    kind: Kind = "stdin"
    entry: str = ""
    preamble: str = ""


@dataclass(frozen=True)
class Trial:
    """What came of one input: `said` is what the program printed, or the value as Python writes it, or the error."""

    ok: bool
    said: str


@dataclass(frozen=True)
class Trials:
    """What came of all inputs, in their order; `flaw` says why the program could not even be compiled."""

    trials: tuple[Trial, ...]
    flaw: str | None = None


class Lab:
    """Tries programs in a sandbox. Keeps the newest results."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self._known: OrderedDict[tuple[Any, ...], Trials] = OrderedDict()
        self._locks: WeakKeyDictionary[Any, dict[tuple[Any, ...], asyncio.Lock]] = WeakKeyDictionary()

    async def tries(self, code: Code, givens: tuple[str, ...], limits: Limits) -> Trials:
        """What `code` makes of each of `givens`, within `limits` for all of them together."""
        key = (code, givens, limits)
        locks = self._locks.setdefault(asyncio.get_running_loop(), {})
        async with locks.setdefault(key, asyncio.Lock()):  # whoever asks the same meanwhile waits for this answer
            if key not in self._known:
                self._known[key] = await self._run(code, givens, limits)
                while len(self._known) > REMEMBERED:
                    self._known.popitem(last=False)
            locks.pop(key, None)
            self._known.move_to_end(key)
            return self._known[key]

    async def _run(self, code: Code, givens: tuple[str, ...], limits: Limits) -> Trials:
        orders = repr((code.kind, code.entry, code.preamble, code.source, givens))
        outcome = await self.sandbox.run_python(_harness(), stdin=orders, limits=limits, keep=True)
        return _read(outcome, len(givens))


@cache
def _harness() -> str:
    """The harness, compiled once for all runs: the sandbox's Python is this one."""
    text = Path(__file__).with_name("harness.py").read_text(encoding="utf-8")
    code = marshal.dumps(compile(text, "harness.py", "exec", dont_inherit=True))
    return f"import marshal\nexec(marshal.loads({code!r}))"


def _read(outcome: Outcome, number: int) -> Trials:
    missing = OVER.get(outcome.ended, "it ended without a result")
    built = _left(outcome, "built", missing)
    trials = tuple(_left(outcome, str(i), missing) for i in range(number))
    return Trials(trials, None if built.ok else built.said)


def _left(outcome: Outcome, name: str, missing: str) -> Trial:
    status, _, said = outcome.files.get(name, b"").decode("utf-8", "replace").partition("\n")
    if status == "ok":
        return Trial(True, said)
    cut = outcome.ended != "exit" and said in ("", "it ended without a result")
    return Trial(False, missing if cut or not said else said)


def agrees(kind: Kind, trial: Trial, expected: str, *, exact: bool = True) -> bool:
    """Whether a trial came to what was expected: printed text but for blanks at the ends of lines, an equal value, or
    no failed assertion. Numbers with a fraction may differ in the seventh digit. Not `exact`: a tuple may be a list."""
    if not trial.ok:
        return False
    if kind == "stdin":
        return _same_text(expected, trial.said)
    if kind == "assertion":
        return True
    wanted = value_of(expected)
    try:
        return wanted is not MISSING and _same_value(wanted, value_of(trial.said), exact)
    except (RecursionError, OverflowError):  # nested too deep; an integer beyond all fractions
        return False


def value_of(text: str) -> Any:
    """The value that `text` writes; MISSING, which is equal to no value, where it writes none."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of odd spellings that Python may forbid one day
            return ast.literal_eval(text) if len(text) <= LONGEST else MISSING
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return MISSING


def _same_text(expected: str, said: str) -> bool:
    wanted, got = ([line.rstrip() for line in text.rstrip().splitlines()] for text in (expected, said))
    if wanted == got:
        return True
    pairs = list(zip(" ".join(wanted).split(), " ".join(got).split(), strict=False))
    same_size = [len(line.split()) for line in wanted] == [len(line.split()) for line in got]
    return same_size and all(one == other or _close_text(one, other) for one, other in pairs)


def _close_text(wanted: str, got: str) -> bool:
    if "." not in wanted:
        return False
    try:
        return _close(float(wanted), float(got))
    except ValueError:
        return False


def _same_value(wanted: Any, got: Any, exact: bool) -> bool:
    if isinstance(wanted, float) and type(got) in (int, float):
        return _close(wanted, float(got))
    if isinstance(wanted, list | tuple) and isinstance(got, list | tuple):
        alike = type(wanted) is type(got) or not exact
        return (
            alike
            and len(wanted) == len(got)
            and all(_same_value(w, g, exact) for w, g in zip(wanted, got, strict=True))
        )
    if isinstance(wanted, dict) and isinstance(got, dict):
        return wanted.keys() == got.keys() and all(_same_value(wanted[key], got[key], exact) for key in wanted)
    return bool(wanted == got)


def _close(wanted: float, got: float) -> bool:
    return wanted == got or math.isclose(wanted, got, rel_tol=1e-6, abs_tol=1e-9)
