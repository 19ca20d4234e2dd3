"""A client's gRPC stream to one worker of an env server; it carries the requests of all its sessions there.

Requests queued during a write are batched into the next message, so that concurrent episodes share its cost.

gRPC's asyncio calls are bound to the event loop that created them, but envs are called from several loops in turn (of a
run, of an evaluation, of a check). All gRPC traffic therefore runs on one loop (`client_loop`), which lives as long as
the process.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from palestra.core.http.loop_thread import LoopThread
from palestra.envs.remote import MAX_REQUEST_BYTES, MAX_REQUESTS_PER_MESSAGE, PROTOCOL_VERSION, SERVICE
from palestra.envs.remote import envs_pb2 as pb
from palestra.envs.remote.address import EnvServersConfig

CONNECT_TIMEOUT_S = 10.0  # seconds until a server must send its first message
OVERDUE_CHECK_INTERVAL_S = 0.25  # seconds between checks for overdue requests
EXIT_TIMEOUT_S = 5.0  # seconds that interpreter exit waits for open streams
CHANNEL_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),  # a TCP connection per EnvConnection, so that they reach different workers
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", 2**30),
    ("grpc.max_send_message_length", 2**30),
    ("grpc.keepalive_time_ms", 10_000),  # pings detect a vanished machine
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
]


class SessionLost(Exception):
    """Raised when a session, or the connection with all its sessions, is lost; the message is the reason."""


class AccessRefused(ValueError):
    """Raised when a server refuses this client permanently: wrong token, wrong protocol version, or no env server."""


@cache
def client_loop() -> LoopThread:
    """Returns the event loop of all env clients of this process; the first call starts its thread."""
    return LoopThread("remote envs", EXIT_TIMEOUT_S)


class EnvConnection:
    """One open stream to a worker, run on the client's event loop (`client_loop`).

    `allocate_session`, `close_session`, `send` and `call` may be called from any thread and event loop. `own_sessions`
    holds the numbers of this client's open sessions; `load` is the worker's last reported number of sessions of all
    clients.
    """

    def __init__(self, address: str, channel: Any, stream: Any, hello: pb.Replies) -> None:
        self.address = address
        self.worker_id = hello.hello.worker
        self.num_workers = hello.hello.workers
        self.load = hello.load
        self.draining = hello.draining
        self.own_sessions: set[int] = set()
        self.lost_reason = ""
        self._own_at_report = 0  # own open sessions when `load` was received
        self._channel = channel
        self._stream = stream
        self._pending_replies: dict[int, PendingReply] = {}
        self._numbers = count(1)
        self._ids = count(1)
        self._queue: deque[pb.Request] = deque()
        self._is_woken = False
        self._wake = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.read_task = asyncio.create_task(self._read())
        self._others = [asyncio.create_task(self._write()), asyncio.create_task(self._look())]

    @classmethod
    async def connect(cls, address: str, server_config: EnvServersConfig) -> EnvConnection:
        """Connects to a worker of the server at `address`.

        Raises SessionLost if it does not answer, AccessRefused if it refuses the token or has another protocol version.
        """
        channel = open_channel(address, server_config)
        try:
            play = channel.stream_stream(f"/{SERVICE}/Play", pb.Requests.SerializeToString, pb.Replies.FromString)
            stream = play(metadata=auth_metadata(server_config))
            hello = await _hello(address, stream)
        except BaseException:
            await channel.close()
            raise
        return cls(address, channel, stream, hello)

    @property
    def num_sessions(self) -> int:
        """Estimated number of sessions on the worker: own ones plus the last known number of other clients'."""
        return len(self.own_sessions) + max(0, self.load - self._own_at_report)

    def allocate_session(self) -> int:
        """Allocates and returns the number of a new session."""
        number = next(self._numbers)
        self.own_sessions.add(number)
        return number

    def close_session(self, number: int) -> None:
        """Closes a session without waiting; its last request may still be running."""
        if number in self.own_sessions:
            self.own_sessions.discard(number)
            self.send(pb.Request(session=number, close=pb.Close()))

    def send(self, request: pb.Request) -> None:
        """Queues a request and returns at once. Requests with id 0 get no reply."""
        self._queue.append(request)
        if not self._is_woken:  # cleared by the writer before it drains the queue, so no request is missed
            self._is_woken = True
            self._loop.call_soon_threadsafe(self._wake.set)

    async def call(self, request: pb.Request, timeout_s: float) -> pb.Reply:
        """Sends a request and returns its reply.

        Raises SessionLost if the connection breaks or no reply arrives within `timeout_s` seconds, ValueError if the
        request is larger than `MAX_REQUEST_BYTES`.
        """
        if request.ByteSize() > MAX_REQUEST_BYTES:
            raise ValueError(f"a request of {request.ByteSize():,} bytes exceeds the limit of {MAX_REQUEST_BYTES:,}")
        loop = asyncio.get_running_loop()
        number = next(self._ids)
        future = loop.create_future()
        request.id = number
        self._pending_replies[number] = PendingReply(future, loop, time.monotonic() + timeout_s)
        self.send(request)
        if self.lost_reason:  # lost after the pending requests were failed: fail this one too
            self._lose(self.lost_reason)
        reply: pb.Reply = await future
        return reply

    async def close(self) -> None:
        """Closes the stream; the server then closes all its sessions."""
        self.read_task.cancel()
        await asyncio.wait([self.read_task])

    async def _read(self) -> None:
        why = "closed"
        try:
            while (update := await self._stream.read()) is not grpc.aio.EOF:
                self.load, self.draining, self._own_at_report = update.load, update.draining, len(self.own_sessions)
                self._hand_over(update.replies)
            why = "closed the connection"
        except grpc.aio.AioRpcError as error:
            why = str(connection_error(self.address, error))
        finally:
            self._lose(f"{self.address}: {why}")
            for task in self._others:
                task.cancel()
            await self._channel.close()

    def _hand_over(self, replies: Iterable[pb.Reply]) -> None:
        """Delivers each reply to the event loop that waits for it, with one call per loop."""
        found = [(waiting, reply) for reply in replies if (waiting := self._pending_replies.pop(reply.id, None))]
        for loop in {waiting.loop for waiting, _ in found}:
            _call(loop, _answered, [(waiting, reply) for waiting, reply in found if waiting.loop is loop])

    async def _write(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            self._is_woken = False
            try:
                while self._queue:
                    await self._stream.write(self._message())
            except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
                return  # the stream is closed; the reader handles that

    def _message(self) -> pb.Requests:
        """Takes the oldest queued requests, up to the server's limits for one message."""
        message = pb.Requests()
        size = 0
        while self._queue and len(message.requests) < MAX_REQUESTS_PER_MESSAGE:
            size += self._queue[0].ByteSize()
            if message.requests and size > MAX_REQUEST_BYTES:
                break
            message.requests.append(self._queue.popleft())
        return message

    async def _look(self) -> None:
        """Periodically fails overdue requests; cheaper than a timer for each request."""
        while True:
            await asyncio.sleep(OVERDUE_CHECK_INTERVAL_S)
            now = time.monotonic()
            for number in [number for number, waiting in list(self._pending_replies.items()) if waiting.deadline < now]:
                if waiting := self._pending_replies.pop(number, None):
                    _call(waiting.loop, _broken, waiting, f"{self.address}: no answer within the deadline")

    def _lose(self, why: str) -> None:
        self.lost_reason = self.lost_reason or why
        self.own_sessions.clear()
        while self._pending_replies:
            _, waiting = self._pending_replies.popitem()
            _call(waiting.loop, _broken, waiting, self.lost_reason)


class PendingReply(NamedTuple):
    """A pending reply: its future, the event loop of that future, and the deadline in `time.monotonic` seconds."""

    future: asyncio.Future[pb.Reply]
    loop: asyncio.AbstractEventLoop
    deadline: float


def _answered(found: list[tuple[PendingReply, pb.Reply]]) -> None:
    for waiting, reply in found:
        if not waiting.future.done():
            waiting.future.set_result(reply)


def _broken(waiting: PendingReply, why: str) -> None:
    if not waiting.future.done():
        waiting.future.set_exception(SessionLost(why))


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: Any) -> None:
    with suppress(RuntimeError):  # the loop has been closed
        loop.call_soon_threadsafe(function, *arguments)


async def _hello(address: str, stream: Any) -> pb.Replies:
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            hello: pb.Replies = await stream.read()
    except grpc.aio.AioRpcError as error:
        raise connection_error(address, error) from error
    except TimeoutError as error:
        raise SessionLost(f"{address}: no answer within {CONNECT_TIMEOUT_S:g} s") from error
    if hello is grpc.aio.EOF:
        raise SessionLost(f"{address}: closed the connection")
    if hello.hello.protocol != PROTOCOL_VERSION:
        raise AccessRefused(
            f"{address} speaks protocol {hello.hello.protocol}, this client {PROTOCOL_VERSION}: use equal versions"
        )
    return hello


def open_channel(address: str, server_config: EnvServersConfig) -> Any:
    """Opens a gRPC channel on the running event loop. Raises ValueError if the file
    `server_config.ca` cannot be read."""
    if not server_config.tls and not server_config.ca:
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    try:
        roots = Path(server_config.ca).read_bytes() if server_config.ca else None
    except OSError as error:
        raise ValueError(f"cannot read {server_config.ca}, which ca names: {error.strerror}") from error
    return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(roots), options=CHANNEL_OPTIONS)


def auth_metadata(server_config: EnvServersConfig) -> tuple[tuple[str, str], ...]:
    """Returns the metadata of every call: the authorization header if there is a token."""
    token = server_config.token()
    return (("authorization", f"Bearer {token}"),) if token else ()


def connection_error(address: str, error: Any) -> SessionLost | AccessRefused:
    """Returns the exception for a failed gRPC call: AccessRefused (permanent) or SessionLost (worth a retry)."""
    if error.code() is grpc.StatusCode.UNAUTHENTICATED:
        return AccessRefused(
            f"the env server at {address} refuses the token: put its own into the environment variable that token_env "
            "names, or into token_file"
        )
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return AccessRefused(f"what listens at {address} is not an env server: start one with `palestra serve-envs`")
    return SessionLost(f"{address}: {error.code().name.lower().replace('_', ' ')}: {error.details()}")
