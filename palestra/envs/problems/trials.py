"""What a program makes of inputs, found out in the sandbox, and whether that is what was expected.

All inputs of a program go into one sandboxed process. Equal programs on equal inputs are run once: siblings of a group
often write the same.
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
REMEMBERED = 2**24  # bytes of results
SAID = 4000  # characters of a result that are kept: more than is ever shown
STATUS = 2**12  # bytes of "ok" or of an exception that are read back
SLACK, LONGER = (
    2**14,
    12,
)  # bytes of a result that are read back: so many, and so many times the length of what is expected
ANSWER, ANSWERS = 2**18, 2**23  # bytes that are read back of one call that an assertion makes, and of all its calls
CALLS = 2**21  # bytes of arguments of all calls that assertions make
ROUNDS = 8  # calls of an assertion that each need the value of the one before; an assertion with more fails
WAITING = "waiting"
NO_RESULT = "it ended without a result"
OVER = {"wall": "out of time", "cpu": "out of time", "memory": "out of memory", "output": "too much output"}


class Case(NamedTuple):
    """One test. `given` is stdin, a function's arguments as Python writes a tuple, or an assertion; `expected` is
    stdout, or the value as Python writes it."""

    given: str
    expected: str = ""


@dataclass(frozen=True)
class Code:
    """A program and how it is used: it reads stdin and prints, or its function `entry` is called, by us or by
    assertions, or it is one expression of `xs`. `preamble` runs before it. Not `exact`: a tuple may be a list."""

    source: str
    kind: Kind = "stdin"
    entry: str = ""
    preamble: str = ""
    exact: bool = True


@dataclass(frozen=True)
class Trial:
    """The result of one test. `ok`: the program came to a result; `right`: the expected one. `said` is the start of
    what it printed, of the value as Python writes it, or of the error."""

    ok: bool
    said: str
    right: bool = False


@dataclass(frozen=True)
class Trials:
    """The results of tests, in their order; `flaw` says why the program could not even be compiled. `asked` are calls
    that assertions make and that have no answer yet."""

    trials: tuple[Trial, ...]
    flaw: str | None = None
    asked: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Bytes in memory, nearly."""
        texts = [self.flaw or "", *self.asked, *(trial.said for trial in self.trials)]
        return sum(map(sys.getsizeof, texts)) + 100 * len(self.trials) + 300


class Lab:
    """Tests programs in a sandbox. Keeps the newest results, up to `REMEMBERED` bytes of them."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self._known: OrderedDict[bytes, Trials] = OrderedDict()
        self._size = 0
        self._locks: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[bytes, asyncio.Lock]] = WeakKeyDictionary()

    async def tries(self, code: Code, cases: tuple[Case, ...], limits: Limits) -> Trials:
        """The results of `code` on `cases`, within `limits` for all of them together. Raises ValueError where an
        assertion does not work or tests nothing, whatever the program."""

        async def make() -> Trials:
            return await (self._asserted if code.kind == "assertion" else self._run)(code, cases, limits)

        return await self._once((code, cases, limits), make)

    async def _once(self, what: tuple[object, ...], make: Callable[[], Awaitable[Trials]]) -> Trials:
        """The result that is known, else the one that `make` makes; those who ask meanwhile wait for it."""
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
        return await asyncio.to_thread(_judged, outcome, code, cases, most)  # hundreds of long texts take their time

    async def _harnessed(self, code: Code, givens: tuple[str, ...], limits: Limits, most: Mapping[str, int]) -> Outcome:
        """The outcome of the program on inputs; of the result of input 3 at most `most["3"]` bytes, and one more."""
        results = {f"{name}.out" if code.kind == "stdin" else name: size + 1 for name, size in most.items()}
        keep = dict.fromkeys(most, STATUS) | results | {"built": STATUS}
        orders = repr((code.kind, code.entry, code.preamble, code.source, givens))
        return await self.sandbox.run_python(_program("harness"), stdin=orders, limits=limits, keep=keep)

    # ---- assertions

    async def _asserted(self, code: Code, cases: tuple[Case, ...], limits: Limits) -> Trials:
        """Results of assertions. They run in one sandbox, the calls that they make in others: nothing that the program
        does reaches an assertion but the values that it returns."""
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
        return replace(asking, asked=())  # what still waits has failed

    async def _asking(self, code: Code, cases: tuple[Case, ...]) -> Trials:
        """The assertions with no answer to any call: which calls they make."""
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
    """A program that runs `main` of the last of these modules, compiled once for all runs: the sandbox's Python is this
    one. They can import each other, and nothing else of ours."""
    codes = [(f"{__package__}.{name}", _compiled(name)) for name in modules]
    return f"""import marshal, sys
for name, code in marshal.loads({marshal.dumps(codes)!r}):
    module = sys.modules[name] = type(sys)(name)
    exec(code, module.__dict__)
module.main()"""


def _compiled(name: str) -> object:
    path = Path(__file__).with_name(f"{name}.py")
    return compile(path.read_text(encoding="utf-8"), path.name, "exec", dont_inherit=True)


# ---- reading results, which a program may have written itself


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
    """True if a call returned, with the value as JSON; else False with the exception."""
    status, data = _status(outcome, name), outcome.files.get(name, b"")
    if len(data) > most:
        return False, "the result is too long"
    return status.ok, _text(data).partition("\n")[2] if status.ok else status.said


def _status(outcome: Outcome, name: str) -> Trial:
    """The file's status, and the start of what stands below it."""
    status, _, said = _text(outcome.files.get(name, b"")[:STATUS]).partition("\n")
    if status in ("ok", WAITING):
        return Trial(status == "ok", said if status == "ok" else WAITING)
    missing = OVER.get(outcome.ended, NO_RESULT)
    cut = outcome.ended != "exit" and said in ("", NO_RESULT)
    return Trial(False, missing if cut or not said else said)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")
