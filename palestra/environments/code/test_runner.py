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
from functools import cache, partial
from pathlib import Path
from typing import Literal, NamedTuple
from weakref import WeakKeyDictionary

from palestra.environments.code.results import NO_VALUE, matches_literal, outputs_equal, parse_encoding, to_python_text
from palestra.sandbox import ResourceLimits, RunResult, Sandbox

ProgramKind = Literal["stdin", "function", "expression", "assertion"]
CACHE_BYTES = 2**24  # bytes of cached results
MAX_OUTPUT_CHARS = 4000  # characters of a result that are kept: more than is ever displayed
MAX_STATUS_BYTES = 2**12  # bytes of a status or exception that are read back
# bytes of a result that are read back: slack + factor * length of the expected result
RESULT_SLACK_BYTES = 2**14
RESULT_LENGTH_FACTOR = 12
# bytes that are read back of one call's result, and of all calls of an assertion
MAX_CALL_RESULT_BYTES = 2**18
MAX_ALL_RESULTS_BYTES = 2**23
MAX_ARGUMENT_BYTES = 2**21  # bytes of the arguments of all calls by assertions
MAX_CALL_ROUNDS = 8  # dependent calls of an assertion, each needing the previous value; with more it fails
WAITING = "waiting"
NO_RESULT = "it ended without a result"
LIMIT_MESSAGES = {"wall": "out of time", "cpu": "out of time", "memory": "out of memory", "output": "too much output"}


class ProgramTest(NamedTuple):
    """One test. `input_text` is stdin, the arguments of a function as a Python tuple, or an assertion;
    `expected_output` is stdout, or the value as a Python literal.
    """

    input_text: str
    expected_output: str = ""


@dataclass(frozen=True)
class ProgramSpec:
    """A program and how it is run: it reads stdin and prints; or its function `entry` is called, directly or by
    assertions; or it is one expression of `xs`. `preamble` runs before it. Unless `exact`, a tuple may be a list.
    """

    source: str
    kind: ProgramKind = "stdin"
    entry: str = ""
    preamble: str = ""
    exact: bool = True


@dataclass(frozen=True)
class ProgramTestResult:
    """The result of one test. `completed`: the program returned a result; `passed`: it is the expected one. `output` is
    the start of the output, of the value in Python notation, or of the error.
    """

    completed: bool
    output: str
    passed: bool = False


@dataclass(frozen=True)
class ProgramTestResults:
    """The results of tests, in order. `requested_calls` are calls by assertions with unknown results."""

    results: tuple[ProgramTestResult, ...]
    compile_error: str | None = None
    requested_calls: tuple[str, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Approximate size in memory, in bytes."""
        texts = [self.compile_error or "", *self.requested_calls, *(trial.output for trial in self.results)]
        return sum(map(sys.getsizeof, texts)) + 100 * len(self.results) + 300


class ProgramTestRunner:
    """Tests programs in a sandbox. Caches the most recently used results, up to `CACHE_BYTES` bytes."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self._known: OrderedDict[bytes, ProgramTestResults] = OrderedDict()
        self._size = 0
        self._locks: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[bytes, asyncio.Lock]] = WeakKeyDictionary()

    async def run_tests(
        self, code: ProgramSpec, cases: tuple[ProgramTest, ...], limits: ResourceLimits
    ) -> ProgramTestResults:
        """Returns the results of `code` on `cases`, within `limits` for all of them together.

        Raises ValueError if an assertion is broken or tests nothing, independent of the program.
        """
        run = self._run
        if code.kind == "assertion":
            run = self._run_assertions
        return await self._once((code, cases, limits), partial(run, code, cases, limits))

    async def _once(
        self, what: tuple[object, ...], make: Callable[[], Awaitable[ProgramTestResults]]
    ) -> ProgramTestResults:
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

    def _remember(self, key: bytes, result: ProgramTestResults) -> None:
        self._known[key] = result
        self._size += result.size_bytes
        while self._size > CACHE_BYTES and len(self._known) > 1:
            self._size -= self._known.popitem(last=False)[1].size_bytes

    async def _run(
        self, code: ProgramSpec, cases: tuple[ProgramTest, ...], limits: ResourceLimits
    ) -> ProgramTestResults:
        most = {
            str(i): RESULT_LENGTH_FACTOR * len(case.expected_output) + RESULT_SLACK_BYTES
            for i, case in enumerate(cases)
        }
        outcome = await self._run_harness(code, tuple(case.input_text for case in cases), limits, most)
        # comparing hundreds of long texts would block the event loop
        return await asyncio.to_thread(_build_results, outcome, code, cases, most)

    async def _run_harness(
        self, code: ProgramSpec, givens: tuple[str, ...], limits: ResourceLimits, most: Mapping[str, int]
    ) -> RunResult:
        """Runs the program on inputs; reads at most `most["3"]` bytes, and one more, of the result of input 3."""
        results = {f"{name}.out" if code.kind == "stdin" else name: size + 1 for name, size in most.items()}
        keep = dict.fromkeys(most, MAX_STATUS_BYTES) | results | {"built": MAX_STATUS_BYTES}
        orders = repr((code.kind, code.entry, code.preamble, code.source, givens))
        return await self.sandbox.run_python(_program("harness"), stdin=orders, limits=limits, keep=keep)

    # ---- assertions

    async def _run_assertions(
        self, code: ProgramSpec, cases: tuple[ProgramTest, ...], limits: ResourceLimits
    ) -> ProgramTestResults:
        """Runs assertions apart from the calls that they make, which affect them by return values only."""
        asking = await self._once(("asking", code.preamble, code.entry, cases), partial(self._find_calls, code, cases))
        answers: dict[str, tuple[bool, str]] = {}
        for _ in range(MAX_CALL_ROUNDS):
            most = {
                str(i): min(MAX_CALL_RESULT_BYTES, MAX_ALL_RESULTS_BYTES // len(asking.requested_calls))
                for i in range(len(asking.requested_calls))
            }
            outcome = await self._run_harness(code, asking.requested_calls, limits, most)
            if not (built := _status(outcome, "built")).completed:
                return ProgramTestResults((built,) * len(cases), built.output)
            answers |= zip(asking.requested_calls, (_answer(outcome, *one) for one in most.items()), strict=True)
            asking = await self._check(code, cases, answers, limits)
            if not asking.requested_calls:
                return asking
        return replace(asking, requested_calls=())  # assertions that still wait have failed

    async def _find_calls(self, code: ProgramSpec, cases: tuple[ProgramTest, ...]) -> ProgramTestResults:
        """Runs the assertions without any call results, to find which calls they make."""
        asking = await self._check(code, cases, {}, ResourceLimits(wall=60, cpu=30))
        for case, trial in zip(cases, asking.results, strict=True):
            if trial.output != WAITING:
                why = f"does not run: {trial.output}"
                if trial.completed:
                    why = "never calls the function"
                raise ValueError(f"the test {case.input_text[-300:]!r} {why}; correct it or leave the problem out")
        if not asking.requested_calls:
            raise ValueError(
                f"the assertions make calls with more than {MAX_ARGUMENT_BYTES} bytes of arguments: leave some out"
            )
        return asking

    async def _check(
        self,
        code: ProgramSpec,
        cases: tuple[ProgramTest, ...],
        answers: Mapping[str, tuple[bool, str]],
        limits: ResourceLimits,
    ) -> ProgramTestResults:
        """Runs the assertions once with the call results known so far."""
        orders = repr((code.preamble, code.entry, [case.input_text for case in cases], dict(answers)))
        keep = {str(i): MAX_STATUS_BYTES for i in range(len(cases))} | {"asked": MAX_ARGUMENT_BYTES + 1}
        outcome = await self.sandbox.run_python(_program("harness", "checker"), stdin=orders, limits=limits, keep=keep)
        asked = outcome.files.get("asked", b"")
        trials = (_status(outcome, str(i)) for i in range(len(cases)))
        calls = _text(asked).partition("\n")[2] if len(asked) <= MAX_ARGUMENT_BYTES else ""
        return ProgramTestResults(
            tuple(ProgramTestResult(trial.completed, trial.output, trial.completed) for trial in trials),
            requested_calls=tuple(calls.split("\n")) if calls else (),
        )


@cache
def _program(*modules: str) -> str:
    """Returns a program that runs `main` of the last of these modules, compiled once for all runs (the sandbox runs
    the same Python). The modules can import each other, and nothing else of palestra.
    """
    codes = [(f"{__package__}.{name}", _compile_module(name)) for name in modules]
    return f"""import marshal, sys
for name, code in marshal.loads({marshal.dumps(codes)!r}):
    module = sys.modules[name] = type(sys)(name)
    exec(code, module.__dict__)
module.main()"""


def _compile_module(name: str) -> object:
    path = Path(__file__).with_name(f"{name}.py")
    return compile(path.read_text(encoding="utf-8"), path.name, "exec", dont_inherit=True)


# ---- reading results, which are untrusted: the program may have written them itself


def _build_results(
    outcome: RunResult, code: ProgramSpec, cases: tuple[ProgramTest, ...], most: Mapping[str, int]
) -> ProgramTestResults:
    built = _status(outcome, "built")
    trials = (_trial(outcome, code, case, name, most[name]) for name, case in zip(most, cases, strict=True))
    return ProgramTestResults(tuple(trials), None if built.completed else built.output)


def _trial(outcome: RunResult, code: ProgramSpec, case: ProgramTest, name: str, most: int) -> ProgramTestResult:
    status = _status(outcome, name)
    if not status.completed:
        return status
    if code.kind == "stdin":
        printed = outcome.files.get(f"{name}.out", b"")
        text = _text(printed)
        return ProgramTestResult(
            True, text[:MAX_OUTPUT_CHARS], len(printed) <= most and outputs_equal(case.expected_output, text)
        )
    tree = parse_encoding(_text(outcome.files[name]).partition("\n")[2])
    if tree is NO_VALUE:
        return ProgramTestResult(False, "the result is too long, or nested too deep")
    return ProgramTestResult(
        True, to_python_text(tree)[:MAX_OUTPUT_CHARS], matches_literal(case.expected_output, tree, exact=code.exact)
    )


def _answer(outcome: RunResult, name: str, most: int) -> tuple[bool, str]:
    """Returns (True, value as JSON) if a call returned, else (False, exception)."""
    status = _status(outcome, name)
    data = outcome.files.get(name, b"")
    if len(data) > most:
        return False, "the result is too long"
    if not status.completed:
        return False, status.output
    return True, _text(data).partition("\n")[2]


def _status(outcome: RunResult, name: str) -> ProgramTestResult:
    """Returns the status of a result file, and the start of the text below it."""
    status, _, message = _text(outcome.files.get(name, b"")[:MAX_STATUS_BYTES]).partition("\n")
    if status == "ok":
        return ProgramTestResult(True, message)
    if status == WAITING:
        return ProgramTestResult(False, WAITING)
    if not message or (outcome.ended != "exit" and message == NO_RESULT):
        message = LIMIT_MESSAGES.get(outcome.ended, NO_RESULT)
    return ProgramTestResult(False, message)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")
