"""An endpoint on this machine that speaks OpenAI's chat completions and lets somebody else answer.

One server for the programs of this process, on a thread of its own; others may be started at an address of their own.
A session is one program's conversations: it has a key, by which its calls are known, and models, which are the seats of
a game. A call waits until the session's owner answers it.

    session = Session(["planner"], deliver)     # deliver(Asked) hears of every call, on the server's thread
    with_client(base_url=session.url, api_key=session.key)
    ...
    asked.answer.set_result("up up")            # or set_exception(Refused("...")), from any thread
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from functools import cache
from typing import Protocol

from palestra.web.calls import Asked, Listens


class Serves(Protocol):
    """A server of sessions, by their keys: `completions.Server`."""

    url: str
    sessions: dict[str, Listens]


class Session:
    """The access of one program: `models` by name, at `url` with `key` (None: a new one; `calls.ANYBODY`: with any).
    Close it when the program is done."""

    def __init__(
        self,
        models: Sequence[str],
        deliver: Callable[[Asked], None],
        *,
        server: Serves | None = None,
        key: str | None = None,
    ) -> None:
        self.models, self.deliver = tuple(models), deliver
        self.key = f"palestra-{secrets.token_urlsafe(18)}" if key is None else key
        self._server = server or _server()
        self.url = self._server.url
        self._server.sessions[self.key] = self

    def close(self) -> None:
        """Refuses all further calls."""
        self._server.sessions.pop(self.key, None)


@cache
def _server() -> Serves:
    """Raises ValueError where the packages of a server are not installed."""
    try:
        from palestra.web.completions import Server
    except ImportError as error:
        raise ValueError(f"a local endpoint needs {error.name}: pip install 'palestra[workflow]'") from error
    return Server()
