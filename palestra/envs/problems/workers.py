"""Asks the judging process of `verify_worker.py`, which is started by the first question and dies with this process."""

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

from palestra.envs.problems import confinement
from palestra.envs.problems.verify_worker import Ended

Kind = Literal["math", "reasoning"]
MODULES: dict[Kind, str] = {"math": "math_verify", "reasoning": "reasoning_gym"}  # which the extras bring
TRIES = 2  # of a question whose process died under it
ALONE = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # a fork copies no threads


class Judgement(NamedTuple):
    """The end of a judgement (see `verify_worker`) and its score, which counts only if it ended as scored."""

    ended: Ended
    score: float = 0.0


CRASHED = Judgement("crashed")


@dataclass
class _Question:
    line: bytes
    answered: Future[Judgement] = field(default_factory=Future)
    tries: int = 0


class Workers:
    """One server of `kind` and the questions it has not answered yet; to be asked from any thread and event loop."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.process: subprocess.Popen[bytes] | None = None
        self._lock = RLock()
        self._open: dict[int, _Question] = {}
        self._ids = itertools.count()
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()
        self._owner = 0

    async def ask(self, request: Mapping[str, Any], seconds: float) -> Judgement:
        """The judgement of `request`. Raises ValueError where the package that judges is missing."""
        return await asyncio.wrap_future(self._ask(request, seconds))

    def require(self) -> None:
        """Raises ValueError where the package that judges is not installed."""
        if find_spec(MODULES[self.kind]) is None:
            raise ValueError(self._lacks("it is not installed"))

    def close(self) -> None:
        """End the process; the next question starts another."""
        with self._lock:
            process, self.process = self.process, None
            left, self._open = self._open, {}
            self._outbox.put(None)
        for question in left.values():
            question.answered.set_result(CRASHED)
        if process and self._owner == os.getpid():
            _ended(process)

    def _ask(self, request: Mapping[str, Any], seconds: float) -> Future[Judgement]:
        name = next(self._ids)
        line = json.dumps({**request, "id": name, "seconds": seconds}).encode() + b"\n"
        question = _Question(line)
        question.answered.set_running_or_notify_cancel()  # who no longer waits for it does not stop the reader
        with self._lock:
            if self.process is None or self._owner != os.getpid():
                self._start()
            self._send(name, question)
        return question.answered

    def _send(self, name: int, question: _Question) -> None:
        question.tries += 1
        self._open[name] = question
        self._outbox.put(question.line)

    def _start(self) -> None:
        command = [sys.executable, "-P", confinement.WORKER, self.kind, confinement.rules().hex()]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | ALONE | {"PYTHONHASHSEED": _hash_seed()},
            start_new_session=True,  # an interrupt at the terminal is for us
        )
        self._outbox, self._owner = SimpleQueue(), os.getpid()
        Thread(target=_write, args=(self.process, self._outbox), name="judge-in", daemon=True).start()
        Thread(target=self._read, args=(self.process,), name="judge-out", daemon=True).start()

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout
        for line in process.stdout:
            said = json.loads(line)
            with self._lock:
                if "missing" in said:
                    self._refuse(said["missing"])
                elif question := self._open.pop(said["id"], None):
                    question.answered.set_result(Judgement(said["ended"], said["score"]))
        process.stdout.close()
        process.wait()
        with self._lock:
            if self.process is process:
                self._outbox.put(None)
                self._died()

    def _refuse(self, why: str) -> None:
        for question in self._open.values():
            question.answered.set_exception(ValueError(self._lacks(why)))
        self._open.clear()

    def _lacks(self, why: str) -> str:
        package = MODULES[self.kind].replace("_", "-")
        return f"answers are judged by {package}, which cannot be loaded ({why}): pip install 'palestra[{self.kind}]'"

    def _died(self) -> None:
        """Ask a new process what the dead one left open; what has been asked twice is taken to have killed it."""
        self.process, left, self._open = None, self._open, {}
        for name, question in left.items():
            if question.tries >= TRIES:
                question.answered.set_result(CRASHED)
                continue
            if self.process is None:
                self._start()
            self._send(name, question)


def _hash_seed() -> str:
    """Our own seed of Python's hashes if it is fixed: some problems depend on it."""
    seed = os.environ.get("PYTHONHASHSEED", "random")
    return "0" if seed == "random" else seed


def _write(process: subprocess.Popen[bytes], outbox: SimpleQueue[bytes | None]) -> None:
    """Feeds a process from a thread of its own: a pipe that is full must not stop an event loop."""
    assert process.stdin
    with suppress(BrokenPipeError), process.stdin as pipe:  # it died: whoever reads its answers sees to that
        while line := outbox.get():
            pipe.write(line)
            pipe.flush()


def _ended(process: subprocess.Popen[bytes]) -> None:
    """Waits for a process whose stdin was closed, but not for long."""
    try:
        process.wait(timeout=2)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


MATH, REASONING = Workers("math"), Workers("reasoning")
atexit.register(MATH.close)
atexit.register(REASONING.close)
