"""The gRPC face of `Sessions`: one process that plays envs for clients, until it is told to drain.

A stream is a client: its sessions end with it. Whether it still lives is asked by HTTP/2's own pings, so that one who
is gone without a word is noticed within the lease. Who asks one by one is known by a name, and forgotten when nothing
has been heard of it for as long.
"""

from __future__ import annotations

import asyncio
import hmac
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from palestra.remote import LARGEST, MOST, PROTOCOL, SERVICE
from palestra.remote import envs_pb2 as pb
from palestra.remote.sessions import Client, Sessions

HEALTH = "grpc.health.v1.Health"
LARGEST_REPLY = 2**30  # bytes of a message, which may hold many replies
CALLS = 1024  # under way at once; a stream is one for as long as it lasts
CLIENTS = 4096  # that ask one by one
PENDING = 4096  # requests of a stream that wait for an answer, beyond which no more are read
TURN = 0.01  # seconds of a client's requests after which others have their turn
HANDSHAKE = 10.0  # seconds in which a connection must speak HTTP/2
IDLE = 300.0  # seconds after which a connection without a call is closed
FAREWELL = 1.0  # seconds that calls under way have when the server stops
SERVING, NOT_SERVING = 1, 2  # of health checks


@dataclass(frozen=True)
class Door:
    """Where a server is reached, and by whom. `tls` is a private key and its certificate chain, in PEM; `workers` how
    many processes share the address; `lease` how many seconds a client may be silent."""

    address: str
    workers: int = 1
    tls: tuple[bytes, bytes] | None = None
    token: str | None = None
    lease: float = 60.0


class EnvServer:
    """Serves `sessions` at `door` from `start` to `stop`."""

    def __init__(self, sessions: Sessions, door: Door) -> None:
        self.sessions, self.door = sessions, door
        self.name = uuid.uuid4().hex
        self.talks: dict[Talk, asyncio.Task[None]] = {}
        self.named: dict[str, Client] = {}
        self.leaving: set[asyncio.Task[None]] = set()
        self.health = health.aio.HealthServicer()
        guards = [Guard(door.token)] if door.token else []
        self.server = grpc.aio.server(interceptors=guards, options=_options(door), maximum_concurrent_rpcs=CALLS)
        self.server.add_generic_rpc_handlers((self._handlers(),))
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.server)
        reflection.enable_server_reflection((SERVICE, HEALTH, reflection.SERVICE_NAME), self.server)

    async def start(self) -> int:
        """The port. Raises ValueError where it cannot be listened at."""
        await self.health.set(SERVICE, SERVING)
        try:
            if self.door.tls:
                port = self.server.add_secure_port(self.door.address, grpc.ssl_server_credentials([self.door.tls]))
            else:
                port = self.server.add_insecure_port(self.door.address)
        except RuntimeError as error:
            raise ValueError(f"cannot listen at {self.door.address}: {error}. Choose another --port.") from error
        await self.server.start()
        self._watch = asyncio.create_task(self._expire())
        return int(port)

    async def drain(self) -> None:
        """Opens nothing from now on, and says so; returns once no session is open."""
        self.sessions.draining = True
        await self.health.enter_graceful_shutdown()
        for talk in list(self.talks):
            talk.flush(always=True)
        while self.sessions.load:
            await asyncio.sleep(0.02)

    async def stop(self) -> None:
        """Ends all calls, and closes what their clients had open."""
        self._watch.cancel()
        for conversation in self.talks.values():
            conversation.cancel()
        await self.server.stop(FAREWELL)
        await asyncio.sleep(0.05)  # gRPC's own tasks end a little later
        for client in self.named.values():
            await self.sessions.leave(client)
        if self.leaving:
            await asyncio.wait(self.leaving)

    # ---- the calls

    async def describe(self, kind: pb.Kind, _: Any) -> pb.Description:
        told = self.sessions.describe(kind)
        told.workers = self.door.workers
        return told

    async def ask(self, request: pb.Request, context: Any) -> pb.Reply:
        return await self._answer(await self._named(context), request)

    async def batch(self, asked: pb.Requests, context: Any) -> pb.Replies:
        client = await self._named(context)
        await _check(asked, context)
        replies = await asyncio.gather(*(self._answer(client, request) for request in asked.requests))
        return pb.Replies(replies=replies, load=self.sessions.load, draining=self.sessions.draining)

    async def play(self, _: AsyncIterator[pb.Requests], context: Any) -> None:
        client, talk = Client(), Talk(context, self.sessions)
        hello = pb.Hello(protocol=PROTOCOL, worker=self.name, workers=self.door.workers)
        await context.write(pb.Replies(hello=hello, load=self.sessions.load, draining=self.sessions.draining))
        self.talks[talk] = asyncio.create_task(self._converse(client, talk))
        try:
            await asyncio.wait([self.talks[talk]])  # so that it can be ended in good order: see `stop`
        finally:
            self.talks.pop(talk).cancel()
            task = asyncio.create_task(self.sessions.leave(client))  # this one may be cancelled
            self.leaving.add(task)
            task.add_done_callback(self.leaving.discard)

    async def _converse(self, client: Client, talk: Talk) -> None:
        while (asked := await talk.context.read()) is not grpc.aio.EOF:
            await _check(asked, talk.context)
            turn = time.monotonic() + TURN
            for request in asked.requests:
                talk.take(self.sessions.answer(client, request))
                if time.monotonic() > turn:
                    await asyncio.sleep(0)
                    turn = time.monotonic() + TURN
            await talk.send()
            await talk.room()

    async def _answer(self, client: Client, request: pb.Request) -> pb.Reply:
        reply = self.sessions.answer(client, request)
        return await reply if isinstance(reply, asyncio.Task) else reply

    async def _named(self, context: Any) -> Client:
        name = str(dict(context.invocation_metadata()).get("client", ""))
        if name not in self.named and len(self.named) >= CLIENTS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{CLIENTS} clients ask here, as many as may")
        client = self.named.setdefault(name, Client())
        client.heard = time.monotonic()
        return client

    async def _expire(self) -> None:
        """Closes the sessions of named clients that are silent, and those that are idle."""
        while True:
            await asyncio.sleep(self.door.lease / 10)
            for name, client in list(self.named.items()):
                if time.monotonic() - client.heard > self.door.lease:
                    del self.named[name]
                    await self.sessions.leave(client)
            await self.sessions.expire()

    def _handlers(self) -> Any:
        def unary(method: Callable[[Any, Any], Awaitable[Any]], asked: Any, told: Any) -> Any:
            return grpc.unary_unary_rpc_method_handler(method, asked.FromString, told.SerializeToString)

        calls = {
            "Describe": unary(self.describe, pb.Kind, pb.Description),
            "Ask": unary(self.ask, pb.Request, pb.Reply),
            "Batch": unary(self.batch, pb.Requests, pb.Replies),
            "Play": grpc.stream_stream_rpc_method_handler(
                self.play, pb.Requests.FromString, pb.Replies.SerializeToString
            ),
        }
        return grpc.method_handlers_generic_handler(SERVICE, calls)


class Talk:
    """The replies of one stream. What is ready while a message is written goes into the next one together."""

    def __init__(self, context: Any, sessions: Sessions) -> None:
        self.context, self.sessions = context, sessions
        self.ready: list[pb.Reply] = []
        self.writing = False
        self.always = False
        self.flushing: asyncio.Task[None] | None = None
        self.pending: set[asyncio.Task[pb.Reply]] = set()

    def take(self, reply: pb.Reply | asyncio.Task[pb.Reply]) -> None:
        """A reply that is there, or one that will be."""
        if isinstance(reply, asyncio.Task):
            self.pending.add(reply)
            reply.add_done_callback(self._late)
        elif reply.id:
            self.ready.append(reply)

    async def room(self) -> None:
        """Returns once fewer than PENDING requests wait for their answer."""
        while len(self.pending) >= PENDING:
            await asyncio.wait(self.pending, return_when=asyncio.FIRST_COMPLETED)

    def flush(self, *, always: bool = False) -> None:
        """Writes what is ready soon; `always` a message, even an empty one."""
        self.always |= always
        if self.flushing is None or self.flushing.done():
            self.flushing = asyncio.create_task(self._flushed())

    async def send(self) -> None:
        """Writes what is ready. Only one writes at a time, and what it finds to write when it is done it writes too."""
        if self.writing:
            return
        self.writing = True
        try:
            while self.ready or self.always:
                ready, self.ready, self.always = self.ready, [], False
                load, draining = self.sessions.load, self.sessions.draining
                await self.context.write(pb.Replies(replies=ready, load=load, draining=draining))
        finally:
            self.writing = False

    async def _flushed(self) -> None:
        try:
            await self.send()
        except (grpc.RpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
            self.ready.clear()  # the stream has ended meanwhile: nobody hears this

    def _late(self, task: asyncio.Task[pb.Reply]) -> None:
        self.pending.discard(task)
        if not task.cancelled():
            self.take(task.result())
            self.flush()


class Guard(grpc.aio.ServerInterceptor):
    """Lets nobody in without the token, but for health checks."""

    def __init__(self, token: str) -> None:
        self.expected = f"Bearer {token}".encode()

    async def intercept_service(self, go_on: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        given = dict(details.invocation_metadata).get("authorization", "")
        given = given if isinstance(given, bytes) else given.encode()
        if details.method.startswith(f"/{HEALTH}/") or hmac.compare_digest(given, self.expected):
            return await go_on(details)
        return grpc.stream_stream_rpc_method_handler(_refuse)  # which waits for no message first


async def _check(asked: pb.Requests, context: Any) -> None:
    """Ends the call where a message holds too many requests."""
    if len(asked.requests) > MOST:
        why = f"a message of {len(asked.requests):,} requests: {MOST:,} are the most"
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, why)


async def _refuse(_: Any, context: Any) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is missing, or not this server's")


def _options(door: Door) -> list[tuple[str, int]]:
    half = int(1000 * door.lease / 2)
    return [
        ("grpc.so_reuseport", 1),  # with the other workers, and the parent's socket that keeps others from the port
        ("grpc.max_receive_message_length", LARGEST + 2**20),  # a request, and what stands round it
        ("grpc.max_send_message_length", LARGEST_REPLY),
        ("grpc.max_concurrent_streams", CALLS),
        ("grpc.server_handshake_timeout_ms", int(1000 * HANDSHAKE)),
        ("grpc.max_connection_idle_ms", int(1000 * IDLE)),
        ("grpc.keepalive_time_ms", half),
        ("grpc.keepalive_timeout_ms", half),
        ("grpc.http2.ping_timeout_ms", half),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_ping_strikes", 0),  # clients may ask as often whether this one lives
    ]
