"""Runs programs on test inputs in the sandbox and compares the results with the expected ones.

All inputs of a program go into one sandboxed process. Equal programs on equal inputs run once: siblings of a group
often write the same program.
"""

from __future__ import annotations

import asyncio
import hashlib
import marshal
import sys
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple
from weakref import WeakKeyDictionary

from palestra.envs.problems.program_results import MISSING, same_text, same_value, tree_of, written
from palestra.sandbox import Limits, Outcome, Sandbox

Kind = Literal["stdin", "function", "expression", "assertion"]
REMEMBERED = 2**24  # bytes of cached results
SAID = 4000  # characters of a result that are kept: more than is ever displayed
STATUS = 2**12  # bytes of a status or exception that are read back
SLACK, LONGER = (
    2**14,
    12,
)  # bytes of a result that are read back: SLACK + LONGER * length of the expected result
ANSWER, ANSWERS = 2**18, 2**23  # bytes that are read back of one call's result, and of all calls of an assertion
CALLS = 2**21  # bytes of the arguments of all calls by assertions
ROUNDS = 8  # dependent calls of an assertion, each needing the previous value; with more it fails
WAITING = "waiting"
NO_RESULT = "it ended without a result"
OVER = {"wall": "out of time", "cpu": "out of time", "memory": "out of memory", "output": "too much output"}


class Case(NamedTuple):
    """One test. `given` is stdin, the arguments of a function as a Python tuple, or an assertion; `expected` is
    stdout, or the value as a Python literal.
    """

    given: str
    expected: str = ""


@dataclass(frozen=True)
class Code:
    """A program and how it is run: it reads stdin and prints; or its function `entry` is called, directly or by
    assertions; or it is one expression of `xs`. `preamble` runs before it. Unless `exact`, a tuple may be a list.
    """

    source: str
    kind: Kind = "stdin"
    entry: str = ""
    preamble: str = ""
    exact: bool = True


@dataclass(frozen=True)
class Trial:
    """The result of one test. `ok`: the program returned a result; `right`: it is the expected one. `said` is the
    start of the output, of the value in Python notation, or of the error.
    """

    ok: bool
    said: str
    right: bool = False


@dataclass(frozen=True)
class Trials:
    """The results of tests, in order. `flaw` is the error if the program does not compile. `asked` are calls by
    assertions whose results are not known yet.
    """

    trials: tuple[Trial, ...]
    flaw: str | None = None
    asked: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Approximate size in memory, in bytes."""
        texts = [self.flaw or "", *self.asked, *(trial.said for trial in self.trials)]
        return sum(map(sys.getsizeof, texts)) + 100 * len(self.trials) + 300


class Lab:
    """Tests programs in a sandbox. Caches the most recently used results, up to `REMEMBERED` bytes."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self._known: OrderedDict[bytes, Trials] = OrderedDict()
        self._size = 0
        self._locks: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[bytes, asyncio.Lock]] = WeakKeyDictionary()

    async def tries(self, code: Code, cases: tuple[Case, ...], limits: Limits) -> Trials:
        """Returns the results of `code` on `cases`, within `limits` for all of them together.

        Raises ValueError if an assertion is broken or tests nothing, independent of the program.
        """

        async def make() -> Trials:
            return await (self._asserted if code.kind == "assertion" else self._run)(code, cases, limits)

        return await self._once((code, cases, limits), make)

    async def _once(self, what: tuple[object, ...], make: Callable[[], Awaitable[Trials]]) -> Trials:
        """Returns the cached result, else computes it with `make`; concurrent callers with the same key wait for it."""
        key = hashlib.sha256(repr(what).encode("utf-8", "surrogatepass")).digest()
        locks = self._locks.setdefault(asyncio.get_running_loop(), {})
        async with locks.setdefault(key, asyncio.Lock()):
            try:
                if key not in self._known:
                    self._remember(key, await make())
                self._known.move_to_end(key)
                return self._known[key]
            finally:
                locks.pop(key, None)

    def _remember(self, key: bytes, result: Trials) -> None:
        self._known[key] = result
        self._size += result.size
        while self._size > REMEMBERED and len(self._known) > 1:
            self._size -= self._known.popitem(last=False)[1].size

    async def _run(self, code: Code, cases: tuple[Case, ...], limits: Limits) -> Trials:
        most = {str(i): LONGER * len(case.expected) + SLACK for i, case in enumerate(cases)}
        outcome = await self._harnessed(code, tuple(case.given for case in cases), limits, most)
        return await asyncio.to_thread(
            _judged, outcome, code, cases, most
        )  # comparing hundreds of long texts would block the event loop

    async def _harnessed(self, code: Code, givens: tuple[str, ...], limits: Limits, most: Mapping[str, int]) -> Outcome:
        """Runs the program on inputs; reads at most `most["3"]` bytes, and one more, of the result of input 3."""
        results = {f"{name}.out" if code.kind == "stdin" else name: size + 1 for name, size in most.items()}
        keep = dict.fromkeys(most, STATUS) | results | {"built": STATUS}
        orders = repr((code.kind, code.entry, code.preamble, code.source, givens))
        return await self.sandbox.run_python(_program("harness"), stdin=orders, limits=limits, keep=keep)

    # ---- assertions

    async def _asserted(self, code: Code, cases: tuple[Case, ...], limits: Limits) -> Trials:
        """Runs assertions in one sandbox and the calls that they make in others, so that the program can affect an
        assertion only by its return values.
        """
        asking = await self._once(("asking", code.preamble, code.entry, cases), lambda: self._asking(code, cases))
        answers: dict[str, tuple[bool, str]] = {}
        for _ in range(ROUNDS):
            most = {str(i): min(ANSWER, ANSWERS // len(asking.asked)) for i in range(len(asking.asked))}
            outcome = await self._harnessed(code, asking.asked, limits, most)
            if not (built := _status(outcome, "built")).ok:
                return Trials((built,) * len(cases), built.said)
            answers |= zip(asking.asked, (_answer(outcome, *one) for one in most.items()), strict=True)
            asking = await self._check(code, cases, answers, limits)
            if not asking.asked:
                return asking
        return replace(asking, asked=())  # assertions that still wait have failed

    async def _asking(self, code: Code, cases: tuple[Case, ...]) -> Trials:
        """Runs the assertions without any call results, to find which calls they make."""
        asking = await self._check(code, cases, {}, Limits(wall=60, cpu=30))
        for case, trial in zip(cases, asking.trials, strict=True):
            if trial.said != WAITING:
                why = "never calls the function" if trial.ok else f"does not run: {trial.said}"
                raise ValueError(f"the test {case.given[-300:]!r} {why}; mend it or leave the problem out")
        if not asking.asked:
            raise ValueError(f"the assertions make calls with more than {CALLS} bytes of arguments: leave some out")
        return asking

    async def _check(
        self, code: Code, cases: tuple[Case, ...], answers: Mapping[str, tuple[bool, str]], limits: Limits
    ) -> Trials:
        """Runs the assertions once with the call results known so far."""
        orders = repr((code.preamble, code.entry, [case.given for case in cases], dict(answers)))
        keep = {str(i): STATUS for i in range(len(cases))} | {"asked": CALLS + 1}
        outcome = await self.sandbox.run_python(_program("harness", "checker"), stdin=orders, limits=limits, keep=keep)
        asked = outcome.files.get("asked", b"")
        trials = (_status(outcome, str(i)) for i in range(len(cases)))
        calls = _text(asked).partition("\n")[2] if len(asked) <= CALLS else ""
        return Trials(
            tuple(Trial(trial.ok, trial.said, trial.ok) for trial in trials),
            asked=tuple(calls.split("\n")) if calls else (),
        )


@cache
def _program(*modules: str) -> str:
    """Returns a program that runs `main` of the last of these modules, compiled once for all runs (the sandbox runs
    the same Python). The modules can import each other, and nothing else of palestra.
    """
    codes = [(f"{__package__}.{name}", _compiled(name)) for name in modules]
    return f"""import marshal, sys
for name, code in marshal.loads({marshal.dumps(codes)!r}):
    module = sys.modules[name] = type(sys)(name)
    exec(code, module.__dict__)
module.main()"""


def _compiled(name: str) -> object:
    path = Path(__file__).with_name(f"{name}.py")
    return compile(path.read_text(encoding="utf-8"), path.name, "exec", dont_inherit=True)


# ---- reading results, which are untrusted: the program may have written them itself


def _judged(outcome: Outcome, code: Code, cases: tuple[Case, ...], most: Mapping[str, int]) -> Trials:
    built = _status(outcome, "built")
    trials = (_trial(outcome, code, case, name, most[name]) for name, case in zip(most, cases, strict=True))
    return Trials(tuple(trials), None if built.ok else built.said)


def _trial(outcome: Outcome, code: Code, case: Case, name: str, most: int) -> Trial:
    status = _status(outcome, name)
    if not status.ok:
        return status
    if code.kind == "stdin":
        printed = outcome.files.get(f"{name}.out", b"")
        text = _text(printed)
        return Trial(True, text[:SAID], len(printed) <= most and same_text(case.expected, text))
    tree = tree_of(_text(outcome.files[name]).partition("\n")[2])
    if tree is MISSING:
        return Trial(False, "the result is too long, or nested too deep")
    return Trial(True, written(tree)[:SAID], same_value(case.expected, tree, exact=code.exact))


def _answer(outcome: Outcome, name: str, most: int) -> tuple[bool, str]:
    """Returns (True, value as JSON) if a call returned, else (False, exception)."""
    status, data = _status(outcome, name), outcome.files.get(name, b"")
    if len(data) > most:
        return False, "the result is too long"
    return status.ok, _text(data).partition("\n")[2] if status.ok else status.said


def _status(outcome: Outcome, name: str) -> Trial:
    """Returns the status of a result file, and the start of the text below it."""
    status, _, said = _text(outcome.files.get(name, b"")[:STATUS]).partition("\n")
    if status in ("ok", WAITING):
        return Trial(status == "ok", said if status == "ok" else WAITING)
    missing = OVER.get(outcome.ended, NO_RESULT)
    cut = outcome.ended != "exit" and said in ("", NO_RESULT)
    return Trial(False, missing if cut or not said else said)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")
