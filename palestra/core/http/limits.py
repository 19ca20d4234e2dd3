"""ASGI middleware of every HTTP server: checks requests before they reach a route.

A request passes if its origin and host are accepted (403), its key is valid (401), the server has capacity (429), and
its body arrives within the size and time limits (413, 408). The middleware reads the whole body, so that no route can
omit the limit. Plain ASGI, independent of any framework.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, TypeVar

from palestra.core.http.origin_middleware import OriginPolicy

MIB = 2**20
MIN_BODY_BYTES_PER_S = 2**14  # bytes per second that a body read by the app must arrive with on average
LINGER_TIMEOUT_S = 1.0  # seconds for which the rest of a rejected body is read and dropped

T = TypeVar("T")
Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]
ErrorBody = Callable[[int, str], Any]  # status, reason -> JSON body of a rejection
AuthCheck = Callable[[str, Mapping[str, str]], str | None]  # path, headers -> reason of a 401, or None


@dataclass(frozen=True)
class HttpLimits:
    """Limits of a server: `max_body_bytes` of one request (None: the app reads bodies itself), `max_buffered_bytes` of
    all requests held at once, `body_timeout_s` in which a body must arrive, `max_requests` running at once.

    A body that the app reads itself may be large: it has `MIN_BODY_BYTES_PER_S` bytes per second of time in addition.
    """

    max_body_bytes: int | None = MIB
    max_buffered_bytes: int = 256 * MIB
    body_timeout_s: float = 60.0
    max_requests: int = 2048


class RequestRejected(Exception):
    """A rejected request: HTTP status and reason."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(eq=False)
class AdmissionMiddleware:
    """Middleware around `app`. `auth_check` returns the reason for a 401, or None; `error_body` builds the JSON body of
    a rejection."""

    app: AsgiApp
    origins: OriginPolicy
    limits: HttpLimits
    _: KW_ONLY
    auth_check: AuthCheck = lambda path, headers: None
    error_body: ErrorBody = lambda status, reason: {"detail": reason}
    num_requests: int = field(default=0, init=False)
    buffered_bytes: int = field(default=0, init=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        body = bytearray()
        self.num_requests += 1
        try:
            headers = LowerCaseHeaders(scope["headers"])
            self._check(scope["path"], headers)
            receive = await self._read(headers, receive, body)
            await self.app(scope, receive, send)
        except RequestRejected as refusal:
            await _refuse(receive, send, refusal.status, self.error_body(refusal.status, str(refusal)))
        finally:
            self.num_requests -= 1
            self.buffered_bytes -= len(body)

    def _check(self, path: str, headers: Mapping[str, str]) -> None:
        """Raises RequestRejected if the headers alone are reason to reject the request."""
        if reason := self.origins.rejection_reason(headers):
            raise RequestRejected(403, reason)
        if reason := self.auth_check(path, headers):
            raise RequestRejected(401, reason)
        if self.num_requests > self.limits.max_requests:
            raise RequestRejected(429, f"{self.limits.max_requests} requests are under way: ask again in a second")

    async def _read(self, headers: Mapping[str, str], receive: Receive, body: bytearray) -> Receive:
        """Reads the request body into `body` and returns a `receive` that replays it. Raises RequestRejected if it is
        too large, too slow, or the client disconnects."""
        if (limit := self.limits.max_body_bytes) is None:
            return self._in_time(receive)
        if int(headers.get("content-length", "0")) > limit:  # the HTTP parser only accepts digits
            raise _too_long(limit)
        try:
            async with asyncio.timeout(self.limits.body_timeout_s):
                last = await self._pieces(receive, body, limit)
        except TimeoutError:
            raise RequestRejected(408, f"the body did not arrive within {self.limits.body_timeout_s:g} s") from None
        if last["type"] == "http.disconnect":
            raise RequestRejected(499, "the client disconnected")
        waiting = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def replay() -> Message:
            return waiting.pop() if waiting else await receive()

        return replay

    def _in_time(self, receive: Receive) -> Receive:
        """Returns a `receive` that raises RequestRejected (408) in the app if the body arrives too slowly."""
        deadline = asyncio.get_running_loop().time() + self.limits.body_timeout_s
        is_complete = False

        async def receive_in_time() -> Message:
            nonlocal deadline, is_complete
            if is_complete:  # only the client's disconnect follows, which has no time limit
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise RequestRejected(408, "the body arrives too slowly: send it faster, or less at once") from None
            deadline += len(message.get("body", b"")) / MIN_BODY_BYTES_PER_S
            is_complete = not message.get("more_body", False)
            return message

        return receive_in_time

    async def _pieces(self, receive: Receive, body: bytearray, limit: int) -> Message:
        """Appends the request's chunks to `body`; returns the last message."""
        while True:
            message = await receive()
            piece = message.get("body", b"")
            body += piece
            self.buffered_bytes += len(piece)
            if len(body) > limit:
                raise _too_long(limit)
            if self.buffered_bytes > self.limits.max_buffered_bytes:
                raise RequestRejected(
                    429, f"bodies of {self.limits.max_buffered_bytes:,} bytes are being read: ask again in a second"
                )
            if not message.get("more_body", False):
                return message


class LowerCaseHeaders(dict[str, str]):
    """Headers by lower-case name; of repeated headers the first."""

    def __init__(self, raw: list[tuple[bytes, bytes]]) -> None:
        super().__init__({name.decode("latin-1").lower(): value.decode("latin-1") for name, value in reversed(raw)})


def bearer_token(headers: Mapping[str, str]) -> str:
    """Returns the key in the Authorization header, or an empty string."""
    return headers.get("authorization", "").removeprefix("Bearer ").strip()


def _too_long(limit: int) -> RequestRejected:
    return RequestRejected(413, f"the body is longer than this server's {limit:,} bytes: send less")


async def _refuse(receive: Receive, send: Send, status: int, content: Any) -> None:
    """Sends the rejection and closes the connection. Closing a socket with unread bytes would discard the answer, so
    that the rest of the body is read and dropped for up to `LINGER_TIMEOUT_S` seconds."""
    text = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(text)).encode())]
    headers += [(b"connection", b"close")] + ([(b"retry-after", b"1")] if status == 429 else [])
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text, "more_body": True})
    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER_TIMEOUT_S):
            while (await receive()).get("more_body", False):
                pass
    await send({"type": "http.response.body", "body": b""})


async def cancel_on_disconnect(receive: Receive, work: Awaitable[T]) -> T:
    """Returns the result of `work`. Cancels it and raises RequestRejected if the client disconnects. The body must have
    been read before."""
    wanted = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(receive())
    try:
        await asyncio.wait({wanted, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not wanted.done():
            raise RequestRejected(499, "the client disconnected")
        return wanted.result()
    finally:
        wanted.cancel()
        gone.cancel()
