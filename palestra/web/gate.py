"""The middleware of every HTTP server here: what is refused before a route sees a request.

A request passes when its page and name are accepted (403), its key is right (401), the server has room for it (429),
and its body is within the limit and in time (413, 408). The body is read here, whole, so that no route can forget to
bound it. Plain ASGI, without a framework.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from palestra.web.origins import Origins

MIB = 2**20
LINGER = 1.0  # seconds for which the rest of a refused body is dropped

T = TypeVar("T")
Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Shape = Callable[[int, str], Any]  # the JSON of an answer that refuses: status, reason
Admit = Callable[[str, Mapping[str, str]], str | None]  # path and headers -> the reason of a 401


@dataclass(frozen=True)
class Limits:
    """Bounds of a server. `body` [bytes] of one request (None: the app reads bodies itself), `bodies` [bytes] held at
    once, `seconds` in which a body must arrive, `requests` under way at once."""

    body: int | None = MIB
    bodies: int = 256 * MIB
    seconds: float = 60.0
    requests: int = 2048


class Refusal(Exception):
    """A request that goes no further: its HTTP status, and why."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Gate:
    """`app` behind the checks. `admit` gives the reason to ask for another key; `shape` the JSON of a refusal."""

    def __init__(
        self,
        app: App,
        origins: Origins,
        limits: Limits,
        *,
        admit: Admit = lambda path, headers: None,
        shape: Shape = lambda status, reason: {"detail": reason},
    ) -> None:
        self.app, self.origins, self.limits, self.admit, self.shape = app, origins, limits, admit, shape
        self.requests = self.held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        body = bytearray()
        self.requests += 1
        try:
            headers = Lower(scope["headers"])
            self._check(scope["path"], headers)
            receive = await self._read(headers, receive, body)
            await self.app(scope, receive, send)
        except Refusal as refusal:
            await _refuse(receive, send, refusal.status, self.shape(refusal.status, str(refusal)))
        finally:
            self.requests -= 1
            self.held -= len(body)

    def _check(self, path: str, headers: Mapping[str, str]) -> None:
        """Raises Refusal for what the headers alone tell."""
        if reason := self.origins.refusal(headers):
            raise Refusal(403, reason)
        if reason := self.admit(path, headers):
            raise Refusal(401, reason)
        if self.requests > self.limits.requests:
            raise Refusal(429, f"{self.limits.requests} requests are under way: ask again in a second")

    async def _read(self, headers: Mapping[str, str], receive: Receive, body: bytearray) -> Receive:
        """Fills `body`; returns a `receive` that has it. Raises Refusal for too much, or too slowly."""
        limit = self.limits.body
        if limit is None:
            return receive
        if int(headers.get("content-length", "0")) > limit:  # the HTTP parser let digits alone through
            raise _too_long(limit)
        try:
            async with asyncio.timeout(self.limits.seconds):
                last = await self._pieces(receive, body, limit)
        except TimeoutError:
            raise Refusal(408, f"the body did not arrive within {self.limits.seconds:g} s") from None
        if last["type"] == "http.disconnect":
            raise Refusal(499, "the client hung up")
        waiting = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def replayed() -> Message:
            return waiting.pop() if waiting else await receive()

        return replayed

    async def _pieces(self, receive: Receive, body: bytearray, limit: int) -> Message:
        """Adds pieces to `body`; returns the last message."""
        while True:
            message = await receive()
            piece = message.get("body", b"")
            body += piece
            self.held += len(piece)
            if len(body) > limit:
                raise _too_long(limit)
            if self.held > self.limits.bodies:
                raise Refusal(429, f"bodies of {self.limits.bodies:,} bytes are being read: ask again in a second")
            if not message.get("more_body", False):
                return message


class Lower(dict[str, str]):
    """Headers by their names in lower case, the first of each name."""

    def __init__(self, raw: list[tuple[bytes, bytes]]) -> None:
        super().__init__({name.decode("latin-1").lower(): value.decode("latin-1") for name, value in reversed(raw)})


def bearer(headers: Mapping[str, str]) -> str:
    """The key that a request sends in its Authorization header; empty where it sends none."""
    return headers.get("authorization", "").removeprefix("Bearer ").strip()


def _too_long(limit: int) -> Refusal:
    return Refusal(413, f"the body is longer than this server's {limit:,} bytes: send less")


async def _refuse(receive: Receive, send: Send, status: int, content: Any) -> None:
    """Answers, then hangs up. A socket that is closed with bytes unread would take the answer with it, so that for a
    moment the rest of the body is read and dropped."""
    text = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(text)).encode())]
    headers += [(b"connection", b"close")] + ([(b"retry-after", b"1")] if status == 429 else [])
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text, "more_body": True})
    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER):
            while (await receive()).get("more_body", False):
                pass
    await send({"type": "http.response.body", "body": b""})


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client hangs up: Refusal then. The body must have been read."""
    wanted, gone = asyncio.ensure_future(work), asyncio.ensure_future(receive())
    try:
        await asyncio.wait({wanted, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not wanted.done():
            raise Refusal(499, "the client hung up")
        return wanted.result()
    finally:
        wanted.cancel()
        gone.cancel()
