"""A client's gRPC stream to one worker of an env server; it carries the requests of all its sessions there.

Requests queued during a write are batched into the next message, so that concurrent episodes share its cost.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from palestra.remote import LARGEST, MOST, PROTOCOL, SERVICE
from palestra.remote import envs_pb2 as pb
from palestra.remote.place import Place

CONNECT = 10.0  # seconds until a server must send its first message
LOOK = 0.25  # seconds between checks for overdue requests
OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),  # a TCP connection per lane, so that lanes reach different workers
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", 2**30),
    ("grpc.max_send_message_length", 2**30),
    ("grpc.keepalive_time_ms", 10_000),  # pings detect a vanished machine
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
]


class Lost(Exception):
    """Raised when a session, or the connection with all its sessions, is lost; the message is the reason."""


class Barred(ValueError):
    """Raised when a server refuses this client permanently: wrong token, wrong protocol version, or no env server."""


class Lane:
    """One open stream to a worker, run on the client's event loop (backstage.py).

    `enter`, `leave`, `tell` and `ask` may be called from any thread and event loop. `taken` holds the numbers of this
    client's open sessions; `load` is the worker's last reported number of sessions of all clients.
    """

    def __init__(self, address: str, channel: Any, stream: Any, hello: pb.Replies) -> None:
        self.address, self.worker, self.workers = address, hello.hello.worker, hello.hello.workers
        self.load, self.draining = hello.load, hello.draining
        self.taken: set[int] = set()
        self.lost = ""
        self._known = 0  # own open sessions when `load` was received
        self._channel, self._stream = channel, stream
        self._waiting: dict[int, Waiting] = {}
        self._numbers, self._ids = count(1), count(1)
        self._asked: deque[pb.Request] = deque()
        self._told, self._wake, self._loop = False, asyncio.Event(), asyncio.get_running_loop()
        self.reading = asyncio.create_task(self._read())
        self._others = [asyncio.create_task(self._write()), asyncio.create_task(self._look())]

    @classmethod
    async def connect(cls, address: str, place: Place) -> Lane:
        """Connects to a worker of the server at `address`.

        Raises Lost if it does not answer, Barred if it refuses the token or has another protocol version.
        """
        channel = open_channel(address, place)
        try:
            stream = channel.stream_stream(f"/{SERVICE}/Play", pb.Requests.SerializeToString, pb.Replies.FromString)(
                metadata=metadata(place)
            )
            hello = await _hello(address, stream)
        except BaseException:
            await channel.close()
            raise
        return cls(address, channel, stream, hello)

    @property
    def crowd(self) -> int:
        """Estimated number of sessions on the worker: own ones plus the last known number of other clients'."""
        return len(self.taken) + max(0, self.load - self._known)

    def enter(self) -> int:
        """Allocates and returns the number of a new session."""
        number = next(self._numbers)
        self.taken.add(number)
        return number

    def leave(self, number: int) -> None:
        """Closes a session without waiting; its last request may still be running."""
        if number in self.taken:
            self.taken.discard(number)
            self.tell(pb.Request(session=number, close=pb.Close()))

    def tell(self, request: pb.Request) -> None:
        """Queues a request and returns at once. Requests with id 0 get no reply."""
        self._asked.append(request)
        if not self._told:  # cleared by the writer before it drains the queue, so no request is missed
            self._told = True
            self._loop.call_soon_threadsafe(self._wake.set)

    async def ask(self, request: pb.Request, deadline: float) -> pb.Reply:
        """Sends a request and returns its reply.

        Raises Lost if the connection breaks or no reply arrives within `deadline` seconds, ValueError if the request is
        larger than LARGEST bytes.
        """
        if request.ByteSize() > LARGEST:
            raise ValueError(
                f"a request of {request.ByteSize():,} bytes is more than the {LARGEST:,} that an env is sent"
            )
        loop, number = asyncio.get_running_loop(), next(self._ids)
        future, request.id = loop.create_future(), number
        self._waiting[number] = Waiting(future, loop, time.monotonic() + deadline)
        self.tell(request)
        if self.lost:  # lost after the pending requests were failed: fail this one too
            self._lose(self.lost)
        reply: pb.Reply = await future
        return reply

    async def close(self) -> None:
        """Closes the stream; the server then closes all its sessions."""
        self.reading.cancel()
        await asyncio.wait([self.reading])

    async def _read(self) -> None:
        why = "closed"
        try:
            while (told := await self._stream.read()) is not grpc.aio.EOF:
                self.load, self.draining, self._known = told.load, told.draining, len(self.taken)
                self._hand_over(told.replies)
            why = "hung up"
        except grpc.aio.AioRpcError as error:
            why = str(complaint(self.address, error))
        finally:
            self._lose(f"{self.address}: {why}")
            for task in self._others:
                task.cancel()
            await self._channel.close()

    def _hand_over(self, replies: Iterable[pb.Reply]) -> None:
        """Delivers each reply to the event loop that waits for it, with one call per loop."""
        found = [(waiting, reply) for reply in replies if (waiting := self._waiting.pop(reply.id, None))]
        for loop in {waiting.loop for waiting, _ in found}:
            _call(loop, _answered, [(waiting, reply) for waiting, reply in found if waiting.loop is loop])

    async def _write(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            self._told = False
            try:
                while self._asked:
                    await self._stream.write(self._message())
            except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
                return  # the stream is closed; the reader handles that

    def _message(self) -> pb.Requests:
        """Takes the oldest queued requests, up to the server's limits for one message."""
        message, size = pb.Requests(), 0
        while self._asked and len(message.requests) < MOST:
            size += self._asked[0].ByteSize()
            if message.requests and size > LARGEST:
                break
            message.requests.append(self._asked.popleft())
        return message

    async def _look(self) -> None:
        """Periodically fails overdue requests; cheaper than a timer for each request."""
        while True:
            await asyncio.sleep(LOOK)
            now = time.monotonic()
            for number in [number for number, waiting in list(self._waiting.items()) if waiting.until < now]:
                if waiting := self._waiting.pop(number, None):
                    _call(waiting.loop, _broken, waiting, f"{self.address}: no answer within the deadline")

    def _lose(self, why: str) -> None:
        self.lost = self.lost or why
        self.taken.clear()
        while self._waiting:
            _, waiting = self._waiting.popitem()
            _call(waiting.loop, _broken, waiting, self.lost)


class Waiting(NamedTuple):
    """A pending reply: its future, the event loop of that future, and the deadline in `time.monotonic` seconds."""

    future: asyncio.Future[pb.Reply]
    loop: asyncio.AbstractEventLoop
    until: float


def _answered(found: list[tuple[Waiting, pb.Reply]]) -> None:
    for waiting, reply in found:
        if not waiting.future.done():
            waiting.future.set_result(reply)


def _broken(waiting: Waiting, why: str) -> None:
    if not waiting.future.done():
        waiting.future.set_exception(Lost(why))


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: Any) -> None:
    with suppress(RuntimeError):  # the loop has been closed
        loop.call_soon_threadsafe(function, *arguments)


async def _hello(address: str, stream: Any) -> pb.Replies:
    try:
        async with asyncio.timeout(CONNECT):
            hello: pb.Replies = await stream.read()
    except grpc.aio.AioRpcError as error:
        raise complaint(address, error) from error
    except TimeoutError as error:
        raise Lost(f"{address}: no answer within {CONNECT:g} s") from error
    if hello is grpc.aio.EOF:
        raise Lost(f"{address}: hung up")
    if hello.hello.protocol != PROTOCOL:
        raise Barred(f"{address} speaks protocol {hello.hello.protocol}, this client {PROTOCOL}: use equal versions")
    return hello


def open_channel(address: str, place: Place) -> Any:
    """Opens a gRPC channel on the running event loop. Raises ValueError if the file `place.ca` cannot be read."""
    if not place.tls and not place.ca:
        return grpc.aio.insecure_channel(address, options=OPTIONS)
    try:
        roots = Path(place.ca).read_bytes() if place.ca else None
    except OSError as error:
        raise ValueError(f"cannot read {place.ca}, which ca names: {error.strerror}") from error
    return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(roots), options=OPTIONS)


def metadata(place: Place) -> tuple[tuple[str, str], ...]:
    """Returns the metadata of every call: the authorization header if there is a token."""
    token = place.token()
    return (("authorization", f"Bearer {token}"),) if token else ()


def complaint(address: str, error: Any) -> Lost | Barred:
    """Converts the error of a failed call to Barred (permanent) or Lost (worth a retry)."""
    if error.code() is grpc.StatusCode.UNAUTHENTICATED:
        return Barred(
            f"the env server at {address} refuses the token: put its own into the environment variable that token_env "
            "names, or into token_file"
        )
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return Barred(f"what listens at {address} is no env server: start one with `palestra serve-envs`")
    return Lost(f"{address}: {error.code().name.lower().replace('_', ' ')}: {error.details()}")
