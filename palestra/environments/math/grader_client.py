"""Client of the grader process (`grader_process.py`), which starts at the first request and ends with this process."""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import subprocess
from collections.abc import Mapping
from importlib.util import find_spec
from threading import Lock
from typing import Any, Literal, NamedTuple

from palestra.environments.math import confinement
from palestra.environments.math.grader_process import GraderOutcome
from palestra.sandbox.base import SandboxError
from palestra.sandbox.client import ForkServerClient

GraderKind = Literal["math", "reasoning"]
GRADER_PACKAGES: dict[GraderKind, str] = {
    "math": "math_verify",
    "reasoning": "reasoning_gym",
}  # installed by the extra of the same name
MAX_ATTEMPTS = 2  # attempts for a request whose process died
SINGLE_THREAD_ENV = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # threads do not survive a fork


class GraderResult(NamedTuple):
    """Outcome of grading (see `grader_process`), and the score, which is valid only if `outcome` is "scored"."""

    outcome: GraderOutcome
    score: float = 0.0


CRASHED = GraderResult("crashed")


class GraderClient:
    """One grader process of `kind`. Safe to use from any thread and event loop."""

    def __init__(self, kind: GraderKind) -> None:
        self.kind = kind
        self._server: ForkServerClient | None = None
        self._lock = Lock()

    @property
    def process(self) -> subprocess.Popen[bytes] | None:
        """The grader process; None before the first request, and if it has died."""
        return self._server.process if self._server and self._server.is_usable() else None

    async def grade(self, request: Mapping[str, Any], cpu_limit_s: float) -> GraderResult:
        """Returns the result of grading `request`. Raises ValueError if the grader's package is missing."""
        line = json.dumps({**request, "seconds": cpu_limit_s}).encode() + b"\n"
        for _ in range(MAX_ATTEMPTS):
            reply = await self._ask(line)
            if "missing" in reply:
                raise ValueError(self._lacks(reply["missing"]))
            if reply:
                return GraderResult(**reply)
        return CRASHED

    def require_package(self) -> None:
        """Raises ValueError if the grader's package is not installed."""
        if find_spec(GRADER_PACKAGES[self.kind]) is None:
            raise ValueError(self._lacks("it is not installed"))

    def close(self) -> None:
        """Ends the process; the next request starts another."""
        with self._lock:
            server = self._server
            self._server = None
        if server:
            server.close()

    async def _ask(self, line: bytes) -> dict[str, Any]:
        """Returns the reply to a request; {} if the process died."""
        try:
            reader, writer = await asyncio.open_connection(sock=self._running().connect())
        except SandboxError:
            return {}
        try:
            writer.write(line)
            reply = await reader.read()
        except ConnectionError:
            return {}
        finally:
            writer.close()
        return json.loads(reply) if reply else {}

    def _running(self) -> ForkServerClient:
        """Returns the server, which is started if there is none."""
        with self._lock:
            if self._server and not self._server.is_usable():
                self._server.close()
                self._server = None
            if self._server is None:
                env = SINGLE_THREAD_ENV | {"PYTHONHASHSEED": _hash_seed()}
                rules = confinement.seccomp_filter().hex()
                self._server = ForkServerClient(confinement.GRADER_MODULE, self.kind, rules, env=env)
            return self._server

    def _lacks(self, why: str) -> str:
        package = GRADER_PACKAGES[self.kind].replace("_", "-")
        return f"answers are judged by {package}, which cannot be loaded ({why}): pip install 'palestra[{self.kind}]'"


def _hash_seed() -> str:
    """Returns this process's PYTHONHASHSEED if it is fixed, as some problems depend on it; else "0"."""
    seed = os.environ.get("PYTHONHASHSEED", "random")
    return "0" if seed == "random" else seed


MATH_GRADER, REASONING_GRADER = GraderClient("math"), GraderClient("reasoning")
atexit.register(MATH_GRADER.close)
atexit.register(REASONING_GRADER.close)
