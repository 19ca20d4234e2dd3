"""Local OpenAI-compatible chat endpoint whose answers are supplied by the program that opens a session.

All sessions of a process share one server on a background thread, unless another is given. A session holds the
conversations of one client program: it has an API key, which identifies its calls, and models, which are the seats of a
game. A call waits until the session's owner answers it.

    session = ChatSession(["planner"], deliver)  # deliver(call) is called for every request, on the server's thread
    with_client(base_url=session.url, api_key=session.key)
    ...
    call.answer.set_result("up up")              # or set_exception(CallRefused("...")), from any thread
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING

from palestra.core.http.calls import ChatCall

if TYPE_CHECKING:
    from palestra.core.http.completions import ChatServer


class ChatSession:
    """Access of one client program to `models` at `url`. `key` None generates a key; `calls.ANY_KEY` accepts any.

    Close it when the program has ended. Raises ValueError if the packages of the default server are not installed.
    """

    def __init__(
        self,
        models: Sequence[str],
        deliver: Callable[[ChatCall], None],
        *,
        server: ChatServer | None = None,
        key: str | None = None,
    ) -> None:
        self.models = tuple(models)
        self.deliver = deliver
        self.key = f"palestra-{secrets.token_urlsafe(18)}" if key is None else key
        self._server = server or _server()
        self.url = self._server.url
        self._server.sessions[self.key] = self

    def close(self) -> None:
        """Ends the session; further calls are refused."""
        self._server.sessions.pop(self.key, None)


@cache
def _server() -> ChatServer:
    """Returns the shared server. Raises ValueError if its packages are not installed."""
    try:
        from palestra.core.http.completions import ChatServer
    except ImportError as error:
        raise ValueError(f"a local endpoint needs {error.name}: pip install 'palestra[workflow]'") from error
    return ChatServer()
