"""A connection to a server of the training wire: requests sent, waited for, and sent again where nobody answered."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
import uuid
from collections.abc import Coroutine
from typing import Any, NamedTuple, TypeVar

import aiohttp

PATIENCE = 300.0  # seconds for which a server that is away, or busy, is asked again
FIRST = 10.0  # the same for one that has not answered yet: more likely its address is wrong
AGAIN = (408, 409, 425, 429, 500, 502, 503, 504)

T = TypeVar("T")


class Refused(ValueError):
    """The server's answer was no."""


class Reply(NamedTuple):
    """An HTTP answer, read whole."""

    status: int
    kind: str  # its Content-Type
    content: bytes

    def json(self) -> dict[str, Any]:
        return dict(json.loads(self.content))


class Connection:
    """A session at a server. Its event loop runs in a thread of its own, so that callers may be coroutines of any loop,
    or none."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self.key = key or os.environ.get("TINKER_API_KEY") or os.environ.get("MINT_API_KEY") or "tml-anyone"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="palestra connection", daemon=True)
        self._thread.start()
        self._http, self._patience = self.now(self._opened()), FIRST
        try:
            said = self.now(self.post("create_session", tags=[], user_metadata={}, sdk_version="palestra"))
        except (Refused, ConnectionError):
            self.close()
            raise
        self.id = str(said["session_id"])
        asyncio.run_coroutine_threadsafe(self._beat(), self._loop)
        self._palestra: bool | None = None
        self._numbers = {"model": 0, "sampler": 0}

    async def _opened(self) -> aiohttp.ClientSession:
        # aiohttp takes a tenth of the time that httpx takes for a request, and a rollout makes thousands
        connector, timeout = aiohttp.TCPConnector(limit=64), aiohttp.ClientTimeout(total=60)
        return aiohttp.ClientSession(headers={"X-API-Key": self.key}, connector=connector, timeout=timeout)

    def close(self) -> None:
        """Ends the connection; the server lets go of the session by and by."""
        self.now(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._http.close()

    def number(self, what: str) -> int:
        """The next number of the session's models, or of its samplers."""
        self._numbers[what] += 1
        return self._numbers[what]

    def now(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine of this connection, waited for."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def soon(self, work: Coroutine[Any, Any, T]) -> T:
        """The same for callers that are coroutines."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def post(self, verb: str, **body: Any) -> dict[str, Any]:
        """The reply to a POST of `body` as JSON."""
        return (await self._send("POST", f"/api/v1/{verb}", json=body)).json()

    async def is_palestra(self) -> bool:
        """Whether the server is of our make, and may be asked for what others do not know."""
        if self._palestra is None:
            reply = await self.get("/api/v1/get_server_capabilities")
            self._palestra = reply.json().get("server") == "palestra"
        return self._palestra

    async def must_be_palestra(self, what: str) -> None:
        """Raises ValueError where another make of server would not honour `what`."""
        if not await self.is_palestra():
            raise ValueError(f"{self.url} is no palestra server, and only those know {what}: leave it out")

    async def get(self, path: str) -> Reply:
        return await self._send("GET", path)

    async def call(self, verb: str, body: bytes | None = None, **fields: Any) -> Reply:
        """The result of a long call: posted (as protobuf where `body` is given), then polled for."""
        if body is None:
            promise = await self.post(verb, **fields)
        else:
            headers = {"Content-Type": "application/x-protobuf"}
            promise = (await self._send("POST", f"/api/v1/{verb}", data=body, headers=headers)).json()
        return await self._poll(promise["request_id"])

    async def _poll(self, id: str) -> Reply:
        headers = {"Accept": "application/x-protobuf, application/json"}
        while True:
            reply = await self._send(
                "POST", "/api/v1/retrieve_future", json={"request_id": id}, headers=headers, fine=(408,)
            )
            if reply.kind == "application/x-protobuf":
                return reply
            said = reply.json()
            if reply.status == 408 or said.get("type") == "try_again":
                continue
            if "error" in said:
                raise Refused(said["error"])
            return reply

    async def upload(self, archive: bytes) -> str:
        """The path at which the server keeps the adapter in a .tar.gz."""
        edge = uuid.uuid4().hex
        head = f'--{edge}\r\nContent-Disposition: form-data; name="file"; filename="adapter.tar.gz"\r\n\r\n'
        body = head.encode() + archive + f"\r\n--{edge}--\r\n".encode()
        headers = {"Content-Type": f"multipart/form-data; boundary={edge}"}
        reply = await self._send("POST", "/api/v1/checkpoints/upload", data=body, headers=headers)
        return str(reply.json()["path"])

    async def _send(self, method: str, path: str, *, fine: tuple[int, ...] = (), **options: Any) -> Reply:
        until, pause = time.monotonic() + self._patience, 0.1
        while True:
            try:
                async with self._http.request(method, self.url + path, **options) as answer:
                    reply = Reply(answer.status, answer.content_type, await answer.read())
            except (aiohttp.ClientError, TimeoutError) as error:
                if time.monotonic() > until:
                    what = f"no answer from {self.url}: {error}. Is `palestra serve` running?"
                    raise ConnectionError(what) from error
            else:
                self._patience = PATIENCE
                if reply.status < 300 or reply.status in fine:
                    return reply
                if reply.status not in AGAIN or time.monotonic() > until:
                    raise Refused(f"{self.url}{path} answered {reply.status}: {_detail(reply)}")
            await asyncio.sleep(pause)
            pause = min(2 * pause, 5.0)

    async def _beat(self) -> None:
        """Tells the server every ten seconds that this client lives."""
        while True:
            await asyncio.sleep(10)
            try:
                await self.post("session_heartbeat", session_id=self.id)
            except (Refused, ConnectionError):
                return  # the next real request says what is wrong


def _detail(reply: Reply) -> str:
    try:
        return str(reply.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return reply.content[:500].decode(errors="replace")
