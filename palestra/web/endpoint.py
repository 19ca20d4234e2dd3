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

import asyncio
import itertools
import json
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from palestra.chat import Chat, assistant
from palestra.web.door import bracketed

if TYPE_CHECKING:
    from aiohttp import web

LARGEST = 64 * 2**20  # bytes of a request
ANYBODY = ""  # the key of a session that answers whatever key comes
SETTINGS = ("temperature", "top_p", "max_tokens", "max_completion_tokens", "seed", "stop")
_numbers = itertools.count()


class Refused(Exception):
    """Why a call gets no answer; the program is told so with an HTTP error."""


@dataclass(frozen=True)
class Said:
    """An answer with how it ended and how many tokens were read and written, where its owner knows that."""

    text: str
    cut_off: bool = False
    tokens: tuple[int, int] | None = None


@dataclass(frozen=True)
class Asked:
    """A call: who is asked, what about, how the answer is to be sampled (SETTINGS as they came), and where it goes."""

    model: str
    chat: Chat
    settings: dict[str, Any] = field(default_factory=dict)
    answer: Future[str | Said] = field(default_factory=Future)


class Session:
    """What one program may ask: `models` by name, at `url` with `key` (None: a new one; ANYBODY: with any). Close it
    when the program is done."""

    def __init__(
        self,
        models: Sequence[str],
        deliver: Callable[[Asked], None],
        *,
        server: Server | None = None,
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
def _server() -> Server:
    return Server()


class Server:
    """Listens at `host` and `port` (0: any that is free) for the calls of its sessions. Raises ValueError where it
    cannot."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        try:
            import aiohttp.web  # noqa: F401
        except ImportError as error:
            raise ValueError(f"a local endpoint needs {error.name}: pip install 'palestra[workflow]'") from error
        self.sessions: dict[str, Session] = {}
        ready: Future[str] = Future()
        serving = lambda: asyncio.run(self._serve(host, port, ready))  # noqa: E731 (a thread's target)
        self._thread = threading.Thread(target=serving, name="endpoint", daemon=True)
        self._thread.start()
        try:
            self.url = ready.result()
        except OSError as error:
            raise ValueError(
                f"cannot listen at {host}:{port}: {error.strerror or error}; take another --port"
            ) from error

    def close(self) -> None:
        """Hangs up, once the calls under way are answered or two seconds are over."""
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()

    async def _serve(self, host: str, port: int, ready: Future[str]) -> None:
        from aiohttp import web

        self._loop, self._closing = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application(client_max_size=LARGEST, middlewares=[_told])
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._complete)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=2.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            await runner.cleanup()
            return ready.set_exception(error)
        ready.set_result(f"http://{bracketed(host)}:{runner.addresses[0][1]}/v1")
        await self._closing.wait()
        await runner.cleanup()

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
            answer = await asyncio.wrap_future(asked.answer)
        except Refused as error:
            raise _error(410, str(error)) from None
        except ValueError as error:
            raise _error(400, str(error)) from None
        said = Said(answer) if isinstance(answer, str) else answer
        message = assistant(said.text)
        finish = "tool_calls" if "tool_calls" in message else "length" if said.cut_off else "stop"
        head = {"id": f"chatcmpl-{next(_numbers)}", "created": int(time.time()), "model": asked.model}
        if stream:
            return await _streamed(request, head, message, finish)
        choice = {"index": 0, "message": message, "finish_reason": finish, "logprobs": None}
        return _json({**head, "object": "chat.completion", "choices": [choice], **_usage(said)})

    def _session(self, request: web.Request) -> Session:
        key = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        for known, session in self.sessions.items():
            if known == ANYBODY or secrets.compare_digest(known.encode(), key.encode(errors="replace")):
                return session
        raise _error(401, "this key is not, or no longer, one of an episode that is being played")


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
    settings = {key: body[key] for key in SETTINGS if body.get(key) is not None}
    return Asked(name, Chat(tuple(messages), tuple(tools)), settings), bool(body.get("stream"))


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


def _usage(said: Said) -> dict[str, Any]:
    if said.tokens is None:
        return {}
    read, written = said.tokens
    return {"usage": {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}}


async def _told(request: web.Request, handler: Callable[[web.Request], Awaitable[Any]]) -> Any:
    """Errors that are not ours, such as a wrong address or a body too large, in OpenAI's shape too."""
    from aiohttp import web

    try:
        return await handler(request)
    except web.HTTPException as error:
        if error.content_type == "application/json":
            raise
        return web.json_response(_fault(error.status, error.reason), status=error.status)


_told.__middleware_version__ = 1  # type: ignore[attr-defined]  # what aiohttp's decorator says, which is not loaded yet


def _json(body: dict[str, Any]) -> web.Response:
    from aiohttp import web

    return web.json_response(body)


def _error(status: int, message: str) -> Exception:
    """An HTTP error in OpenAI's shape."""
    from aiohttp import web

    kinds = {400: web.HTTPBadRequest, 401: web.HTTPUnauthorized, 410: web.HTTPGone}
    return kinds[status](text=json.dumps(_fault(status, message)), content_type="application/json")


def _fault(status: int, message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": status}}
