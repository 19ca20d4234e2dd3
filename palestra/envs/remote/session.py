"""One session of an env server: its env, its client's share and limits, and the errors that a request may end with."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any

from palestra.envs import Env


class InvalidRequest(ValueError):
    """Raised for a request that this server cannot execute, independent of the env."""


class UnknownSession(Exception):
    """Raised for a request to a session that does not exist."""


class ServerDraining(Exception):
    """Raised for a new session on a server that is draining."""


@dataclass(frozen=True)
class SessionLimits:
    """Limits of one worker process.

    `max_sessions`: open sessions of all clients. `max_sessions_per_client`: open sessions of one client.
    `idle_timeout_s`: seconds without a request after which a session is closed. `call_timeout_s`: seconds that one env
    call may take.
    """

    max_sessions: int = 16_384
    max_sessions_per_client: int = 8_192
    idle_timeout_s: float = 3600.0
    call_timeout_s: float = 120.0


@dataclass(eq=False)
class EnvSession:
    """A running env.

    `env` is None until a pending fork is made, and remains None if the fork fails (`fork_error` is the reason).
    `tasks`: unfinished requests in order. `fork_tasks`: those of them that copy this env or create it as a copy.
    `last_used`: `time.monotonic` time of the last request.
    """

    env: Env | None = None
    fork_error: str = ""
    last_used: float = field(default_factory=time.monotonic)
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)
    fork_tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    @property
    def ready_env(self) -> Env:
        """The env. Raises RuntimeError if the fork that should have created it failed."""
        if self.env is None:
            raise RuntimeError(f"the env could not be forked: {self.fork_error}")
        return self.env

    def add_task(self, rest: Awaitable[None]) -> asyncio.Task[None]:
        """Adds `rest` to the unfinished requests of this session and returns its task."""
        task = asyncio.ensure_future(rest)
        self.tasks.append(task)
        task.add_done_callback(self._over)
        return task

    def _over(self, task: asyncio.Task[Any]) -> None:
        self.tasks.remove(task)
        self.fork_tasks.discard(task)


@dataclass(eq=False)
class ClientSessions:
    """A client's sessions by the numbers it chose. `last_request`: `time.monotonic` time of its last unary request."""

    sessions: dict[int, EnvSession] = field(default_factory=dict)
    last_request: float = 0.0
