"""What a sandboxed run is given and what comes of it, as plain data that crosses process borders."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import PurePosixPath
from typing import Any, Literal

Ended = Literal["exit", "signal", "wall", "cpu", "memory", "output"]
PLACE = "/work"  # what programs, and those who read what they say, call the program's folder
PREFIX = 8  # bytes that say how long the message after them is


class SandboxError(RuntimeError):
    """The sandbox itself failed. What a program does never raises this."""


@dataclass(frozen=True)
class Limits:
    """How much a program may use: `wall` and `cpu` in seconds, `memory`, `output` (of stdout and of stderr) and `disk`
    (in its folder) in bytes. `cpu`, `memory` and `processes` count the program and all that it starts."""

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
class Outcome:
    """What a run came to.

    `ended` says how: by itself ("exit", "signal") or over a limit; "memory" is also for too many processes, "output"
    for what it wrote to its pipes or to its folder. `code` is the exit status, minus the signal's number after a
    signal, None after a limit. `seconds` is by the clock. `files` holds what the folder held at the end, as far as
    `keep` asked for it.
    """

    stdout: str
    stderr: str
    code: int | None
    ended: Ended
    seconds: float
    files: dict[str, bytes] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.ended == "exit" and self.code == 0

    def packed(self) -> bytes:
        return pack(asdict(self) | {"files": _text(self.files)})

    @staticmethod
    def unpacked(body: bytes) -> Outcome:
        """The outcome that `packed` wrote. Raises SandboxError where the message is one of a failure."""
        message = json.loads(body)
        if "error" in message:
            raise SandboxError(message["error"])
        return Outcome(**message | {"files": _bytes(message["files"])})


@dataclass(frozen=True)
class Request:
    """One run, as it is asked for. `keep` is `True` for all files that the program leaves, or maps the names of those
    to return to the number of bytes to read of each."""

    backend: str
    source: str
    stdin: str
    files: Mapping[str, bytes]
    limits: Limits
    keep: bool | Mapping[str, int]

    def __post_init__(self) -> None:
        for name in self.files:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
                raise ValueError(f"file {name!r} would lie outside the program's folder: give a relative path")
        for name in self.keep if isinstance(self.keep, Mapping) else ():
            if "/" in name or name in ("", ".", ".."):
                raise ValueError(f"keep: {name!r} is no file of the program's folder itself: give a plain name")

    def packed(self) -> bytes:
        return pack(asdict(self) | {"files": _text(self.files)})

    @staticmethod
    def unpacked(body: bytes) -> Request:
        message = json.loads(body)
        return Request(**message | {"files": _bytes(message["files"]), "limits": Limits(**message["limits"])})


def pack(message: Mapping[str, Any]) -> bytes:
    """A message as JSON, after its length."""
    body = json.dumps(message).encode()
    return len(body).to_bytes(PREFIX, "big") + body


def _text(files: Mapping[str, bytes]) -> dict[str, str]:
    return {name: base64.b64encode(data).decode("ascii") for name, data in files.items()}


def _bytes(files: Mapping[str, str]) -> dict[str, bytes]:
    return {name: base64.b64decode(text) for name, text in files.items()}
