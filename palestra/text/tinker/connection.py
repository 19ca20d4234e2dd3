"""HTTP connection to a training server: requests, polling for results, and retries."""

from __future__ import annotations

import asyncio
import json
import os
import uuid
from collections.abc import Coroutine
from functools import partial
from typing import Any, NamedTuple, TypeVar

import aiohttp

from palestra.core.http.loop_thread import LoopThread
from palestra.core.http.retry import RETRY_STATUSES, RetryPolicy

RETRY = RetryPolicy(0.1, 5.0, timeout_s=300.0)  # while the server is unavailable or busy
FIRST_RETRY = RetryPolicy(0.1, 5.0, timeout_s=10.0)  # before its first answer: the address is probably wrong

T = TypeVar("T")


class RequestRefused(ValueError):
    """The server rejected a request."""


class ServerBusy(RequestRefused):
    """The server could not process a request now."""


class HttpReply(NamedTuple):
    """A complete HTTP response; `content_type` is its Content-Type."""

    status: int
    content_type: str
    content: bytes

    def json(self) -> dict[str, Any]:
        """Returns the body as a JSON object. Raises ValueError if it is none."""
        return dict(json.loads(self.content))


class ServiceConnection:
    """A session on a server. Its event loop runs in its own thread, so that callers may run on any event loop or on
    none.

    Raises ConnectionError if the server does not answer, and RequestRefused (a ValueError) if it rejects the session.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self.key = key or os.environ.get("TINKER_API_KEY") or os.environ.get("MINT_API_KEY") or "tml-anyone"
        self.loop_thread = LoopThread("palestra connection")
        self._http = self.run(self._open_session())
        self._retry_policy = FIRST_RETRY
        self.loop_thread.on_close = self._http.close
        try:
            session = self.run(self.post("create_session", tags=[], user_metadata={}, sdk_version="palestra"))
        except (RequestRefused, ConnectionError):
            self.close()
            raise
        self.id = str(session["session_id"])
        self.loop_thread.run_detached(self._beat)
        self._palestra: bool | None = None
        self._numbers = {"model": 0, "sampler": 0}

    async def _open_session(self) -> aiohttp.ClientSession:
        # a request takes a tenth of the time of httpx, and a rollout makes thousands
        connector = aiohttp.TCPConnector(limit=64)
        timeout = aiohttp.ClientTimeout(total=60)
        return aiohttp.ClientSession(headers={"X-API-Key": self.key}, connector=connector, timeout=timeout)

    def close(self) -> None:
        """Closes the connection; the server expires the session later."""
        self.loop_thread.close()

    def next_number(self, what: str) -> int:
        """Returns the next sequence number of the session's models (`what="model"`) or samplers ("sampler")."""
        self._numbers[what] += 1
        return self._numbers[what]

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on the connection's loop and blocks until it returns its result."""
        return self.loop_thread.run(work)

    async def post(self, verb: str, **body: Any) -> dict[str, Any]:
        """Sends `body` as a JSON POST and returns the JSON reply. Raises RequestRefused if the server rejects it."""
        return (await self._send("POST", f"/api/v1/{verb}", json=body)).json()

    async def is_palestra(self) -> bool:
        """Returns True if the server is palestra, which supports extensions of the wire."""
        if self._palestra is None:
            reply = await self.get("/api/v1/get_server_capabilities")
            self._palestra = reply.json().get("server") == "palestra"
        return self._palestra

    async def require_palestra(self, what: str) -> None:
        """Raises ValueError if the server is not palestra and so does not support `what`."""
        if not await self.is_palestra():
            raise ValueError(f"{self.url} is not a palestra server, and only those know {what}: leave it out")

    async def get(self, path: str) -> HttpReply:
        """Sends a GET request to `path` and returns the reply."""
        return await self._send("GET", path)

    async def call(self, verb: str, body: bytes | None = None, **fields: Any) -> HttpReply:
        """Runs a long call: posts it (as protobuf if `body` is given) and polls for the result. Raises RequestRefused
        if the call fails."""
        if body is None:
            promise = await self.post(verb, **fields)
        else:
            headers = {"Content-Type": "application/x-protobuf"}
            promise = (await self._send("POST", f"/api/v1/{verb}", data=body, headers=headers)).json()
        return await self._poll(promise["request_id"])

    async def _poll(self, id: str) -> HttpReply:
        headers = {"Accept": "application/x-protobuf, application/json"}
        while True:
            reply = await self._send(
                "POST", "/api/v1/retrieve_future", json={"request_id": id}, headers=headers, fine=(408,)
            )
            if reply.content_type == "application/x-protobuf":
                return reply
            content = reply.json()
            if reply.status == 408 or content.get("type") == "try_again":
                continue
            if "error" in content:
                raise RequestRefused(content["error"])
            return reply

    async def upload(self, archive: bytes) -> str:
        """Uploads an adapter in a .tar.gz archive and returns its path on the server."""
        edge = uuid.uuid4().hex
        head = f'--{edge}\r\nContent-Disposition: form-data; name="file"; filename="adapter.tar.gz"\r\n\r\n'
        body = head.encode() + archive + f"\r\n--{edge}--\r\n".encode()
        headers = {"Content-Type": f"multipart/form-data; boundary={edge}"}
        reply = await self._send("POST", "/api/v1/checkpoints/upload", data=body, headers=headers)
        return str(reply.json()["path"])

    async def _send(self, method: str, path: str, *, fine: tuple[int, ...] = (), **options: Any) -> HttpReply:
        attempt = partial(self._attempt, method, path, fine, options)
        return await self._retry_policy.run(attempt, ConnectionError, ServerBusy)

    async def _attempt(self, method: str, path: str, fine: tuple[int, ...], options: dict[str, Any]) -> HttpReply:
        try:
            async with self._http.request(method, self.url + path, **options) as answer:
                reply = HttpReply(answer.status, answer.content_type, await answer.read())
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ConnectionError(f"no answer from {self.url}: {error}. Is `palestra serve` running?") from error
        self._retry_policy = RETRY
        if reply.status < 300 or reply.status in fine:
            return reply
        refusal = ServerBusy if reply.status in RETRY_STATUSES else RequestRefused
        raise refusal(f"{self.url}{path} answered {reply.status}: {_detail(reply)}")

    async def _beat(self) -> None:
        """Sends a heartbeat every ten seconds until a request fails."""
        while True:
            await asyncio.sleep(10)
            try:
                await self.post("session_heartbeat", session_id=self.id)
            except (RequestRefused, ConnectionError):
                return  # the next request of the user reports the error


def _detail(reply: HttpReply) -> str:
    try:
        return str(reply.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return reply.content[:500].decode(errors="replace")
