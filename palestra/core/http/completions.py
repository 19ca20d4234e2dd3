"""HTTP server of OpenAI's chat completions and responses on a thread (`chat_server.py`)."""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from palestra.core.chat import Json
from palestra.core.http.bodies import read_json
from palestra.core.http.calls import (
    ANY_KEY,
    CallRefused,
    ChatCall,
    ChatReply,
    SessionProtocol,
    assistant_message,
    error_body,
    parse_call,
)
from palestra.core.http.limits import MIB, AdmissionMiddleware, HttpLimits, bearer_token, cancel_on_disconnect
from palestra.core.http.listen import open_listener, url_host
from palestra.core.http.origin_middleware import OriginPolicy
from palestra.core.http.responses import build_response, response_stream, to_chat_body
from palestra.core.http.server import HttpServer, run_in_thread

HTTP_LIMITS = HttpLimits(max_body_bytes=16 * MIB)
DRAIN_TIMEOUT_S = 2  # seconds for running calls to end on shutdown
Convert = Callable[[Any], Any]
_numbers = itertools.count()


class ChatServer:
    """Serves the calls of its sessions at `host` and `port` (0: any free port), under loopback names and `hosts`.
    Raises ValueError if it cannot listen."""

    def __init__(
        self, host: str = "127.0.0.1", port: int = 0, *, hosts: Collection[str] = (), limits: HttpLimits = HTTP_LIMITS
    ) -> None:
        self.sessions: dict[str, SessionProtocol] = {}
        listener = open_listener(host, port)
        self.url = f"http://{url_host(host)}:{listener.getsockname()[1]}/v1"
        origins = OriginPolicy.for_host(host, hosts=hosts, pages=False)
        app = AdmissionMiddleware(self._app(), origins, limits, auth_check=self._admit, error_body=error_body)
        self._http = HttpServer(app, DRAIN_TIMEOUT_S, 75)
        self._thread = threading.Thread(target=run_in_thread, args=(self._http, listener), name="endpoint", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops the server after the running calls, at most `DRAIN_TIMEOUT_S` seconds later."""
        self._http.stop()
        self._thread.join()

    def _app(self) -> Starlette:
        routes = [
            Route("/v1/models", self._models),
            Route("/v1/chat/completions", self._complete, methods=["POST"]),
            Route("/v1/responses", self._respond, methods=["POST"]),
        ]
        return Starlette(routes=routes, exception_handlers={HTTPException: _error_response})

    def _admit(self, path: str, headers: Mapping[str, str]) -> str | None:
        if self._find(bearer_token(headers)):
            return None
        return "this key does not belong to an episode in progress"

    def _find(self, key: str) -> SessionProtocol | None:
        for known, session in list(self.sessions.items()):
            if known == ANY_KEY or secrets.compare_digest(known.encode(), key.encode(errors="replace")):
                return session
        return None

    def _session(self, request: Request) -> SessionProtocol:
        session = self._find(bearer_token(request.headers))
        if session is None:  # closed since the request was admitted
            raise HTTPException(410, "the episode is over")
        return session

    async def _models(self, request: Request) -> Response:
        session = self._session(request)
        data = [{"id": name, "object": "model", "created": 0, "owned_by": "palestra"} for name in session.models]
        return JSONResponse({"object": "list", "data": data})

    async def _answer(self, request: Request, convert: Convert) -> tuple[ChatCall, ChatReply]:
        """Returns the call of a request and its answer. `convert` turns the request's JSON into
        that of chat completions."""
        body = await request.body()
        session = self._session(request)

        def parse() -> ChatCall:
            return parse_call(convert(read_json(body)), session.models)

        try:
            asked = await asyncio.to_thread(parse)
            session.deliver(asked)
            answer = await cancel_on_disconnect(request.receive, asyncio.wrap_future(asked.answer))
        except CallRefused as error:
            raise HTTPException(410, str(error)) from None
        except ValueError as error:
            raise HTTPException(400, str(error)) from None
        if isinstance(answer, str):
            answer = ChatReply(answer)
        return asked, answer

    async def _complete(self, request: Request) -> Response:
        asked, reply = await self._answer(request, lambda body: body)
        message = assistant_message(reply.text, reply.thought, asked.chat)
        finish = "length" if reply.hit_length_limit else "stop"
        if "tool_calls" in message:
            finish = "tool_calls"
        head = {"id": f"chatcmpl-{next(_numbers)}", "created": int(time.time()), "model": asked.model}
        if warning := await asyncio.to_thread(asked.form.check, message):  # a schema's may take seconds
            head["warning"] = warning
        if asked.stream:
            return _stream(head, message, finish, _usage(reply) if asked.stream_usage else {})
        choice = {"index": 0, "message": message, "finish_reason": finish, "logprobs": None}
        return JSONResponse({**head, "object": "chat.completion", "choices": [choice], **_usage(reply)})

    async def _respond(self, request: Request) -> Response:
        asked, reply = await self._answer(request, to_chat_body)
        message = assistant_message(reply.text, reply.thought, asked.chat)
        response = await asyncio.to_thread(build_response, next(_numbers), asked, message, reply)
        if asked.stream:
            return Response(response_stream(response), media_type="text/event-stream")
        return JSONResponse(response)


def _stream(head: Json, message: Json, finish: str, usage: Json) -> Response:
    """Returns the answer as server-sent events, with all text in one event."""
    events = _events({**head, "object": "chat.completion.chunk"}, message, finish, usage)
    return Response("".join(f"data: {event}\n\n" for event in events), media_type="text/event-stream")


def _events(head: Json, message: Json, finish: str, usage: Json) -> Iterator[str]:
    calls = [{"index": i, **call} for i, call in enumerate(message.get("tool_calls", []))]
    delta = message | ({"tool_calls": calls} if calls else {})
    yield json.dumps({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    yield json.dumps({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    if usage:
        yield json.dumps({**head, "choices": [], **usage})
    yield "[DONE]"


def _usage(reply: ChatReply) -> dict[str, Any]:
    read, written = reply.token_counts or (0, 0)  # clients read the field unasked
    return {"usage": {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}}


async def _error_response(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        known = "POST to /v1/chat/completions or /v1/responses"
        error.detail = f"there is no {request.url.path} here: {known}"
    return JSONResponse(error_body(error.status_code, error.detail), error.status_code)
