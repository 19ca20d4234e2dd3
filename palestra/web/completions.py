"""HTTP server of OpenAI's chat completions on a background thread, used by `endpoint.py`."""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from palestra.chat import assistant
from palestra.web.bodies import read_json
from palestra.web.calls import ANYBODY, Asked, Listens, Refused, Said, read_call
from palestra.web.door import bracketed, listening
from palestra.web.gate import MIB, Gate, Limits, bearer, unless_gone
from palestra.web.origins import Origins
from palestra.web.server import Server as HttpServer
from palestra.web.server import run_in_thread

LIMITS = Limits(body=16 * MIB)
DRAIN = 2  # seconds for running calls to end on shutdown
_numbers = itertools.count()


class Server:
    """Serves the calls of its sessions at `host` and `port` (0: any free port), under loopback names and `hosts`.
    Raises ValueError if it cannot listen."""

    def __init__(
        self, host: str = "127.0.0.1", port: int = 0, *, hosts: Collection[str] = (), limits: Limits = LIMITS
    ) -> None:
        self.sessions: dict[str, Listens] = {}
        door = listening(host, port)
        self.url = f"http://{bracketed(host)}:{door.getsockname()[1]}/v1"
        origins = Origins.of(host, hosts=hosts, pages=False)
        app = Gate(self._app(), origins, limits, admit=self._admit, shape=_fault)
        self._http = HttpServer(app, DRAIN, 75)
        self._thread = threading.Thread(target=run_in_thread, args=(self._http, door), name="endpoint", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops the server after the running calls, at most `DRAIN` seconds later."""
        self._http.stop()
        self._thread.join()

    def _app(self) -> Starlette:
        routes = [Route("/v1/models", self._models), Route("/v1/chat/completions", self._complete, methods=["POST"])]
        return Starlette(routes=routes, exception_handlers={HTTPException: _told})

    def _admit(self, path: str, headers: Mapping[str, str]) -> str | None:
        known = self._find(bearer(headers))
        return None if known else "this key is not, or no longer, one of an episode that is being played"

    def _find(self, key: str) -> Listens | None:
        for known, session in list(self.sessions.items()):
            if known == ANYBODY or secrets.compare_digest(known.encode(), key.encode(errors="replace")):
                return session
        return None

    def _session(self, request: Request) -> Listens:
        session = self._find(bearer(request.headers))
        if session is None:  # closed since the request was admitted
            raise HTTPException(410, "the episode is over")
        return session

    async def _models(self, request: Request) -> Response:
        session = self._session(request)
        data = [{"id": name, "object": "model", "created": 0, "owned_by": "palestra"} for name in session.models]
        return JSONResponse({"object": "list", "data": data})

    async def _complete(self, request: Request) -> Response:
        body = await request.body()
        session = self._session(request)
        try:
            asked, stream = await asyncio.to_thread(_read, body, session.models)
            session.deliver(asked)
            answer = await unless_gone(request.receive, asyncio.wrap_future(asked.answer))
        except Refused as error:
            raise HTTPException(410, str(error)) from None
        except ValueError as error:
            raise HTTPException(400, str(error)) from None
        said = Said(answer) if isinstance(answer, str) else answer
        message = assistant(said.text)
        finish = "tool_calls" if "tool_calls" in message else "length" if said.cut_off else "stop"
        head = {"id": f"chatcmpl-{next(_numbers)}", "created": int(time.time()), "model": asked.model}
        if stream:
            return _streamed(head, message, finish)
        choice = {"index": 0, "message": message, "finish_reason": finish, "logprobs": None}
        return JSONResponse({**head, "object": "chat.completion", "choices": [choice], **_usage(said)})


def _read(body: bytes, models: tuple[str, ...]) -> tuple[Asked, bool]:
    return read_call(read_json(body), models)


def _streamed(head: dict[str, Any], message: dict[str, Any], finish: str) -> Response:
    """Returns the answer as server-sent events, with all text in one event."""
    events = _events({**head, "object": "chat.completion.chunk"}, message, finish)
    return Response("".join(f"data: {event}\n\n" for event in events), media_type="text/event-stream")


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


async def _told(request: Request, error: Exception) -> Response:
    """Formats errors as OpenAI does."""
    assert isinstance(error, HTTPException)
    return JSONResponse(_fault(error.status_code, error.detail), error.status_code)


def _fault(status: int, message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": status}}
