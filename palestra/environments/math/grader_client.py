"""Client of the grader process (`grader_process.py`), which starts at the first request and ends with this process."""

from __future__ import annotations

import asyncio
import atexit
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from queue import SimpleQueue
from threading import RLock, Thread
from typing import Any, Literal, NamedTuple

from palestra.core.stop_signals import stop_signals_blocked
from palestra.environments.math import confinement
from palestra.environments.math.grader_process import GraderOutcome
from palestra.parallel.processes import wait_or_kill

GraderKind = Literal["math", "reasoning"]
GRADER_PACKAGES: dict[GraderKind, str] = {
    "math": "math_verify",
    "reasoning": "reasoning_gym",
}  # installed by the extra of the same name
STOP_TIMEOUT_S = 2.0  # seconds from the end of its stdin until the process is killed
MAX_ATTEMPTS = 2  # attempts for a request whose process died
SINGLE_THREAD_ENV = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # threads do not survive a fork


class GraderResult(NamedTuple):
    """Outcome of grading (see `grader_process`), and the score, which is valid only if `outcome` is "scored"."""

    outcome: GraderOutcome
    score: float = 0.0


CRASHED = GraderResult("crashed")


@dataclass
class _Question:
    line: bytes
    result: Future[GraderResult] = field(default_factory=Future)
    attempts: int = 0


class GraderClient:
    """One grader process of `kind` and its pending requests. Safe to use from any thread and event loop."""

    def __init__(self, kind: GraderKind) -> None:
        self.kind = kind
        self.process: subprocess.Popen[bytes] | None = None
        self._lock = RLock()
        self._open: dict[int, _Question] = {}
        self._ids = itertools.count()
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()
        self._owner = 0

    async def grade(self, request: Mapping[str, Any], cpu_limit_s: float) -> GraderResult:
        """Returns the result of grading `request`. Raises ValueError if the grader's package is missing."""
        return await asyncio.wrap_future(self._ask(request, cpu_limit_s))

    def require_package(self) -> None:
        """Raises ValueError if the grader's package is not installed."""
        if find_spec(GRADER_PACKAGES[self.kind]) is None:
            raise ValueError(self._lacks("it is not installed"))

    def close(self) -> None:
        """Ends the process; the next request starts another."""
        with self._lock:
            process, self.process = self.process, None
            left, self._open = self._open, {}
            self._outbox.put(None)
        for question in left.values():
            question.result.set_result(CRASHED)
        if process and self._owner == os.getpid():
            wait_or_kill(process, STOP_TIMEOUT_S)

    def _ask(self, request: Mapping[str, Any], seconds: float) -> Future[GraderResult]:
        name = next(self._ids)
        line = json.dumps({**request, "id": name, "seconds": seconds}).encode() + b"\n"
        question = _Question(line)
        question.result.set_running_or_notify_cancel()  # else set_result would raise after a waiter's cancel
        with self._lock:
            if self.process is None or self._owner != os.getpid():
                self._start()
            self._send(name, question)
        return question.result

    def _send(self, name: int, question: _Question) -> None:
        question.attempts += 1
        self._open[name] = question
        self._outbox.put(question.line)

    def _start(self) -> None:
        command = [sys.executable, "-P", confinement.GRADER_SCRIPT, self.kind, confinement.seccomp_filter().hex()]
        with stop_signals_blocked():  # an answer that is judged then would get no reward
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=os.environ | SINGLE_THREAD_ENV | {"PYTHONHASHSEED": _hash_seed()},
                start_new_session=True,
            )
        self._outbox, self._owner = SimpleQueue(), os.getpid()
        Thread(target=_write, args=(self.process, self._outbox), name="judge-in", daemon=True).start()
        Thread(target=self._read, args=(self.process,), name="judge-out", daemon=True).start()

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout
        for line in process.stdout:
            message = json.loads(line)
            with self._lock:
                if "missing" in message:
                    self._refuse(message["missing"])
                elif question := self._open.pop(message["id"], None):
                    question.result.set_result(GraderResult(message["ended"], message["score"]))
        process.stdout.close()
        process.wait()
        with self._lock:
            if self.process is process:
                self._outbox.put(None)
                self._died()

    def _refuse(self, why: str) -> None:
        for question in self._open.values():
            question.result.set_exception(ValueError(self._lacks(why)))
        self._open.clear()

    def _lacks(self, why: str) -> str:
        package = GRADER_PACKAGES[self.kind].replace("_", "-")
        return f"answers are judged by {package}, which cannot be loaded ({why}): pip install 'palestra[{self.kind}]'"

    def _died(self) -> None:
        """Resends pending requests to a new process; one that has failed `MAX_ATTEMPTS` times is reported as
        crashed."""
        self.process, left, self._open = None, self._open, {}
        for name, question in left.items():
            if question.attempts >= MAX_ATTEMPTS:
                question.result.set_result(CRASHED)
                continue
            if self.process is None:
                self._start()
            self._send(name, question)


def _hash_seed() -> str:
    """Returns this process's PYTHONHASHSEED if it is fixed, as some problems depend on it; else "0"."""
    seed = os.environ.get("PYTHONHASHSEED", "random")
    return "0" if seed == "random" else seed


def _write(process: subprocess.Popen[bytes], outbox: SimpleQueue[bytes | None]) -> None:
    """Writes requests from a separate thread: a full pipe must not block an event loop."""
    assert process.stdin
    with suppress(BrokenPipeError), process.stdin as pipe:  # the process died: the reader thread handles that
        while line := outbox.get():
            pipe.write(line)
            pipe.flush()


MATH_GRADER, REASONING_GRADER = GraderClient("math"), GraderClient("reasoning")
atexit.register(MATH_GRADER.close)
atexit.register(REASONING_GRADER.close)
