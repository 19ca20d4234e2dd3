"""An endpoint on this machine that speaks OpenAI's chat completions and lets somebody else answer.

One server for the process, on a thread of its own. A session is one program's conversations: it has a key, by which its
calls are known, and models, which are the seats of a game. A call waits until the session's owner answers it.

    session = Session(["planner"], deliver)     # deliver(Asked) hears of every call, on the server's thread
    with_client(base_url=session.url, api_key=session.key)
    ...
    asked.answer.set_result("up up")            # or set_exception(Refused("...")), from any thread
"""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from palestra.chat import Chat, assistant

if TYPE_CHECKING:
    from aiohttp import web

LARGEST = 64 * 2**20  # bytes of a request
_numbers = itertools.count()


class Refused(Exception):
    """Why a call gets no answer; the program is told so with an HTTP error."""


@dataclass(frozen=True)
class Asked:
    """A call: who is asked, what about, and where the answer goes."""

    model: str
    chat: Chat
    answer: Future[str] = field(default_factory=Future)


class Session:
    """What one program may ask: `models` by name, at `url` with `key`. Close it when the program is done."""

    def __init__(self, models: Sequence[str], deliver: Callable[[Asked], None]) -> None:
        self.models, self.deliver = tuple(models), deliver
        self.key = f"palestra-{secrets.token_urlsafe(18)}"
        self._server = _server()
        self.url = self._server.url
        self._server.sessions[self.key] = self

    def close(self) -> None:
        """Refuses all further calls."""
        self._server.sessions.pop(self.key, None)


@cache
def _server() -> _Server:
    return _Server()


class _Server:
    def __init__(self) -> None:
        try:
            import aiohttp.web  # noqa: F401
        except ImportError as error:
            raise ValueError(f"a local endpoint needs {error.name}: pip install 'palestra[workflow]'") from error
        self.sessions: dict[str, Session] = {}
        ready: Future[str] = Future()
        threading.Thread(target=lambda: asyncio.run(self._serve(ready)), name="endpoint", daemon=True).start()
        self.url = ready.result()

    async def _serve(self, ready: Future[str]) -> None:
        from aiohttp import web

        app = web.Application(client_max_size=LARGEST)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._complete)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        ready.set_result(f"http://127.0.0.1:{runner.addresses[0][1]}/v1")
        await asyncio.Event().wait()

    async def _models(self, request: web.Request) -> web.Response:
        session = self._session(request)
        data = [{"id": name, "object": "model", "created": 0, "owned_by": "palestra"} for name in session.models]
        return _json({"object": "list", "data": data})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        try:
            asked, stream = _asked(await request.json(), session.models)
        except ValueError as error:
            raise _error(400, str(error)) from None
        session.deliver(asked)
        try:
            text = await asyncio.wrap_future(asked.answer)
        except Refused as error:
            raise _error(410, str(error)) from None
        message = assistant(text)
        finish = "tool_calls" if "tool_calls" in message else "stop"
        head = {"id": f"chatcmpl-{next(_numbers)}", "created": int(time.time()), "model": asked.model}
        if stream:
            return await _streamed(request, head, message, finish)
        choice = {"index": 0, "message": message, "finish_reason": finish, "logprobs": None}
        return _json({**head, "object": "chat.completion", "choices": [choice]})

    def _session(self, request: web.Request) -> Session:
        key = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        if key not in self.sessions:
            raise _error(401, "this key is not, or no longer, one of an episode that is being played")
        return self.sessions[key]


def _asked(body: Any, models: Sequence[str]) -> tuple[Asked, bool]:
    """The call that a request makes, and whether its answer is to be streamed. Raises ValueError for none."""
    if not isinstance(body, dict):
        raise ValueError("the body must be a JSON object")
    name = str(body.get("model")).rsplit("/", 1)[-1]  # some programs put the provider's name before it
    if name not in models:
        raise ValueError(f"there is no model {body.get('model')!r} here, but {', '.join(models)}: each is a seat")
    if body.get("n") not in (None, 1):
        raise ValueError("n must be 1: siblings are drawn by the algorithm, not by the program")
    messages, tools = body.get("messages"), body.get("tools") or []
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise ValueError("messages must be a list of messages, each with a role")
    if any(_has_pictures(message.get("content")) for message in messages):
        raise ValueError("messages of text only are answered here: send parts of type text")
    return Asked(name, Chat(tuple(messages), tuple(tools))), bool(body.get("stream"))


def _has_pictures(content: Any) -> bool:
    return isinstance(content, list) and any(not isinstance(p, dict) or p.get("type") != "text" for p in content)


async def _streamed(request: web.Request, head: dict[str, Any], message: dict[str, Any], finish: str) -> Any:
    """The answer as server-sent events, in one piece."""
    from aiohttp import web

    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for event in _events({**head, "object": "chat.completion.chunk"}, message, finish):
        await response.write(f"data: {event}\n\n".encode())
    return response


def _events(head: dict[str, Any], message: dict[str, Any], finish: str) -> Iterator[str]:
    calls = [{"index": i, **call} for i, call in enumerate(message.get("tool_calls", []))]
    delta = message | ({"tool_calls": calls} if calls else {})
    yield json.dumps({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    yield json.dumps({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    yield "[DONE]"


def _json(body: dict[str, Any]) -> web.Response:
    from aiohttp import web

    return web.json_response(body)


def _error(status: int, message: str) -> Exception:
    """An HTTP error in OpenAI's shape."""
    from aiohttp import web

    kinds = {400: web.HTTPBadRequest, 401: web.HTTPUnauthorized, 410: web.HTTPGone}
    body = json.dumps({"error": {"message": message, "type": "invalid_request_error", "code": status}})
    return kinds[status](text=body, content_type="application/json")
