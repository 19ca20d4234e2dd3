"""Client of the graders (`grader_process.py`), which the fork server of the sandbox loads at the first request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, NamedTuple

from palestra.environments.math.grader_process import GraderKind, GraderOutcome, prepare_grading
from palestra.sandbox.base import CALL, SandboxError
from palestra.sandbox.client import fork_server

GRADER_PACKAGES: dict[GraderKind, str] = {
    "math": "math_verify",
    "reasoning": "reasoning_gym",
}  # installed by the extra of the same name
MAX_ATTEMPTS = 2  # attempts for a request whose process died


class GraderResult(NamedTuple):
    """Outcome of grading (see `grader_process`), and the score, which is valid only if `outcome` is "scored"."""

    outcome: GraderOutcome
    score: float = 0.0


async def grade(kind: GraderKind, request: Mapping[str, Any], cpu_limit_s: float) -> GraderResult:
    """Returns the result of grading `request`. Raises ValueError if the package of `kind` is missing."""
    call = {"call": f"{prepare_grading.__module__}:{prepare_grading.__name__}", "kind": kind, "seconds": cpu_limit_s}
    line = json.dumps({**request, **call}).encode() + b"\n"
    for _ in range(MAX_ATTEMPTS):
        reply = await _ask(line)
        if "missing" in reply:
            raise ValueError(_lacks(kind, reply["missing"]))
        if reply:
            return GraderResult(**reply)
    return GraderResult("crashed")


def require_package(kind: GraderKind) -> None:
    """Raises ValueError if the package of `kind` is not installed."""
    if find_spec(GRADER_PACKAGES[kind]) is None:
        raise ValueError(_lacks(kind, "it is not installed"))


async def _ask(line: bytes) -> dict[str, Any]:
    """Returns the reply to a request; {} if the process died."""
    try:
        reader, writer = await asyncio.open_connection(sock=fork_server().connect(CALL))
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


def _lacks(kind: GraderKind, why: str) -> str:
    package = GRADER_PACKAGES[kind].replace("_", "-")
    return f"answers are judged by {package}, which cannot be loaded ({why}): pip install 'palestra[{kind}]'"
