"""A client's line to one worker of a server: one stream that carries the requests of all its sessions there.

What is asked while a message is being written goes into the next one together, so that many episodes at once share
the price of a message.
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

CONNECT = 10.0  # seconds that a server may take to say hello
LOOK = 0.25  # seconds between two looks at what is overdue
OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),  # every lane has a connection of its own, and so perhaps another worker
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", 2**30),
    ("grpc.max_send_message_length", 2**30),
    ("grpc.keepalive_time_ms", 10_000),  # a machine that is gone without a word is noticed
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
]


class Lost(Exception):
    """A session, or a whole line, that is no more, and why."""


class Barred(ValueError):
    """A server that lets this client in neither now nor later."""


class Lane:
    """One open stream. It lives backstage; `enter`, `leave`, `tell` and `ask` are for every thread and event loop.

    `taken` sessions are ours, `load` are those of all clients."""

    def __init__(self, address: str, channel: Any, stream: Any, hello: pb.Replies) -> None:
        self.address, self.worker, self.workers = address, hello.hello.worker, hello.hello.workers
        self.load, self.draining = hello.load, hello.draining
        self.taken: set[int] = set()
        self.lost = ""
        self._known = 0  # of our sessions, when `load` was told
        self._channel, self._stream = channel, stream
        self._waiting: dict[int, Waiting] = {}
        self._numbers, self._ids = count(1), count(1)
        self._asked: deque[pb.Request] = deque()
        self._told, self._wake, self._loop = False, asyncio.Event(), asyncio.get_running_loop()
        self.reading = asyncio.create_task(self._read())
        self._others = [asyncio.create_task(self._write()), asyncio.create_task(self._look())]

    @classmethod
    async def connect(cls, address: str, place: Place) -> Lane:
        """Raises Lost where nobody answers, Barred where the server wants another token or speaks otherwise."""
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
        """Sessions there: ours, and as far as is known those of others."""
        return len(self.taken) + max(0, self.load - self._known)

    def enter(self) -> int:
        """The number of a new session."""
        number = next(self._numbers)
        self.taken.add(number)
        return number

    def leave(self, number: int) -> None:
        """Closes a session. Nobody waits for it: what it was asked last may still be under way."""
        if number in self.taken:
            self.taken.discard(number)
            self.tell(pb.Request(session=number, close=pb.Close()))

    def tell(self, request: pb.Request) -> None:
        """Sends what needs no answer."""
        self._asked.append(request)
        if not self._told:  # set before it is cleared and all is taken: none is left behind
            self._told = True
            self._loop.call_soon_threadsafe(self._wake.set)

    async def ask(self, request: pb.Request, deadline: float) -> pb.Reply:
        """The reply. Raises Lost where the line breaks, or nothing comes within `deadline` seconds."""
        if request.ByteSize() > LARGEST:
            raise ValueError(
                f"a request of {request.ByteSize():,} bytes is more than the {LARGEST:,} that an env is sent"
            )
        loop, number = asyncio.get_running_loop(), next(self._ids)
        future, request.id = loop.create_future(), number
        self._waiting[number] = Waiting(future, loop, time.monotonic() + deadline)
        self.tell(request)
        if self.lost:  # perhaps since those who wait were told
            self._lose(self.lost)
        reply: pb.Reply = await future
        return reply

    async def close(self) -> None:
        """Ends the stream, and with it all sessions."""
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
        """Each to the event loop that waits for it, all at once."""
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
                return  # the stream is over, as its reader hears

    def _message(self) -> pb.Requests:
        """The oldest waiting requests, as many as a server takes in one message."""
        message, size = pb.Requests(), 0
        while self._asked and len(message.requests) < MOST:
            size += self._asked[0].ByteSize()
            if message.requests and size > LARGEST:
                break
            message.requests.append(self._asked.popleft())
        return message

    async def _look(self) -> None:
        """Gives up what is overdue. One look at all is cheaper than a timer for each."""
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
    """Who waits for a reply: a future of an event loop, and until when."""

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
    with suppress(RuntimeError):  # a loop that has been closed: nobody waits there any more
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
    """A channel of the running event loop. Raises ValueError where the file of authorities cannot be read."""
    if not place.tls and not place.ca:
        return grpc.aio.insecure_channel(address, options=OPTIONS)
    try:
        roots = Path(place.ca).read_bytes() if place.ca else None
    except OSError as error:
        raise ValueError(f"cannot read {place.ca}, which ca names: {error.strerror}") from error
    return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(roots), options=OPTIONS)


def metadata(place: Place) -> tuple[tuple[str, str], ...]:
    """What goes along with every call."""
    token = place.token()
    return (("authorization", f"Bearer {token}"),) if token else ()


def complaint(address: str, error: Any) -> Lost | Barred:
    """What a failed call says."""
    if error.code() is grpc.StatusCode.UNAUTHENTICATED:
        return Barred(
            f"the env server at {address} refuses the token: put its own into the environment variable that token_env "
            "names, or into token_file"
        )
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return Barred(f"what listens at {address} is no env server: start one with `palestra serve-envs`")
    return Lost(f"{address}: {error.code().name.lower().replace('_', ' ')}: {error.details()}")
