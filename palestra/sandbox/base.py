"""Limits, request and result of a sandboxed run, and their JSON messages between processes."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import PurePosixPath
from typing import Any, Literal

EndReason = Literal["exit", "signal", "wall", "cpu", "memory", "output"]
WORKDIR = "/work"  # path of the program's folder as shown to programs and in their output
LENGTH_BYTES = 8  # bytes of the big-endian length before each message
# kinds of requests to the fork server: a program, a function to call there
RUN = b"+"
CALL = b"c"


class SandboxError(RuntimeError):
    """Raised when the sandbox itself fails; nothing that a program does raises it."""


@dataclass(frozen=True)
class ResourceLimits:
    """Resource limits of a program.

    `wall` and `cpu` in seconds; `memory`, `output` (each of stdout and stderr) and `disk` (its folder) in bytes. `cpu`,
    `memory` and `processes` are totals over the program and all its descendants. Raises ValueError unless all are > 0.
    """

    wall: float = 10.0
    cpu: float = 5.0
    memory: int = 512 * 2**20
    processes: int = 16
    output: int = 64 * 2**10
    disk: int = 16 * 2**20

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not value > 0:
                raise ValueError(f"limits: {name} is {value}, but a program needs some: give a positive number")


@dataclass(frozen=True)
class RunResult:
    """The result of a run.

    `ended`: the reason, "exit", "signal" or the limit that was exceeded; "memory" also means too many processes,
    "output" too much data in its pipes or its folder. `code`: exit status, negative signal number after a signal, None
    after a limit. `seconds`: wall time. `files`: final files of the folder, as selected by `keep`.
    """

    stdout: str
    stderr: str
    code: int | None
    ended: EndReason
    seconds: float
    files: dict[str, bytes] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """True if the program exited by itself with status 0."""
        return self.ended == "exit" and self.code == 0

    def to_bytes(self) -> bytes:
        return encode_message(asdict(self) | {"files": _text(self.files)})

    @staticmethod
    def from_bytes(body: bytes) -> RunResult:
        """Parses a message of `to_bytes`. Raises SandboxError if it reports a failure of the sandbox."""
        message = json.loads(body)
        if "error" in message:
            raise SandboxError(message["error"])
        return RunResult(**message | {"files": _bytes(message["files"])})


@dataclass(frozen=True)
class RunRequest:
    """A request for one run.

    `keep`: True returns all files that the program leaves; a mapping returns the named files, at most the given number
    of bytes of each. Raises ValueError if a name in `files` or `keep` is outside the program's folder.
    """

    backend: str
    source: str
    stdin: str
    files: Mapping[str, bytes]
    limits: ResourceLimits
    keep: bool | Mapping[str, int]

    def __post_init__(self) -> None:
        for name in self.files:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
                raise ValueError(f"file {name!r} would lie outside the program's folder: give a relative path")
        for name in self.keep if isinstance(self.keep, Mapping) else ():
            if "/" in name or name in ("", ".", ".."):
                raise ValueError(f"keep: {name!r} is not a file of the program's folder itself: give a plain name")

    def to_bytes(self) -> bytes:
        return encode_message(asdict(self) | {"files": _text(self.files)})

    @staticmethod
    def from_bytes(body: bytes) -> RunRequest:
        message = json.loads(body)
        return RunRequest(
            **message | {"files": _bytes(message["files"]), "limits": ResourceLimits(**message["limits"])}
        )


def encode_message(message: Mapping[str, Any]) -> bytes:
    """Serializes a message: its length in `LENGTH_BYTES` bytes, then JSON."""
    body = json.dumps(message).encode()
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def _text(files: Mapping[str, bytes]) -> dict[str, str]:
    return {name: base64.b64encode(data).decode("ascii") for name, data in files.items()}


def _bytes(files: Mapping[str, str]) -> dict[str, bytes]:
    return {name: base64.b64decode(text) for name, text in files.items()}
