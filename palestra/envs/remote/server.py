"""gRPC server of `EnvSessions`: one process that runs envs for clients until it is drained.

Each stream is one client; its sessions are closed when the stream ends. HTTP/2 pings detect a vanished client within
the lease. Clients that use unary calls are identified by the metadata key "client"; their sessions are closed when no
request arrives for the duration of the lease.
"""

from __future__ import annotations

import asyncio
import hmac
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from palestra.core.http.listen import url_host
from palestra.envs.remote import MAX_REQUEST_BYTES, MAX_REQUESTS_PER_MESSAGE, PROTOCOL_VERSION, SERVICE
from palestra.envs.remote import envs_pb2 as pb
from palestra.envs.remote.session import ClientSessions, SessionLimits
from palestra.envs.remote.sessions import EnvSessions

HEALTH_SERVICE = "grpc.health.v1.Health"
MAX_REPLY_BYTES = 2**30  # bytes of one message, which may hold many replies
MAX_CONCURRENT_CALLS = 1024  # concurrent calls; a stream counts as one while it is open
MAX_NAMED_CLIENTS = 4096  # named clients of unary calls, at most
MAX_PENDING_REQUESTS = 4096  # unanswered requests of a stream; reading pauses above this number
TURN_S = 0.01  # seconds of work for one client before the event loop switches to others
HANDSHAKE_TIMEOUT_S = 10.0  # seconds in which a new connection must complete the HTTP/2 handshake
IDLE_TIMEOUT_S = 300.0  # seconds after which a connection without a call is closed
STOP_TIMEOUT_S = 1.0  # seconds that open calls have to end when the server stops
SERVING = 1  # status code of the gRPC health protocol


@dataclass(frozen=True)
class EnvServerOptions:
    """Options of `palestra serve-envs`.

    `num_workers`: number of processes that share the address. `token`: required from clients; None admits every client.
    `lease_s`: seconds after which a silent client's sessions are closed. `grace_s`: seconds that open sessions have to
    end after SIGTERM.
    """

    envs: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 50051
    num_workers: int = 1
    cert: Path | None = None
    key: Path | None = None
    token: str | None = None
    lease_s: float = 60.0
    grace_s: float = 30.0
    limits: SessionLimits = field(default_factory=SessionLimits)

    @property
    def address(self) -> str:
        return f"{url_host(self.host)}:{self.port}"

    def read_tls(self) -> tuple[bytes, bytes] | None:
        """Returns private key and certificate chain in PEM; None without TLS. Raises ValueError if
        the files are incomplete or unreadable."""
        if (self.cert is None) != (self.key is None):
            raise ValueError("TLS needs both a certificate and its key: give --cert cert.pem and --key key.pem")
        if self.cert is None or self.key is None:
            return None
        try:
            return self.key.read_bytes(), self.cert.read_bytes()
        except OSError as error:
            raise ValueError(f"cannot read {error.filename}, which --cert or --key names: {error.strerror}") from error


class EnvServer:
    """gRPC server for `sessions`, listening as described by `options` from `start` to `stop`."""

    def __init__(self, sessions: EnvSessions, options: EnvServerOptions) -> None:
        self.sessions = sessions
        self.options = options
        self.worker_id = uuid.uuid4().hex
        self.streams: dict[ReplyStream, asyncio.Task[None]] = {}
        self.named_clients: dict[str, ClientSessions] = {}
        self.close_tasks: set[asyncio.Task[None]] = set()
        self.health = health.aio.HealthServicer()
        guards = [TokenInterceptor(options.token)] if options.token else []
        self.server = grpc.aio.server(
            interceptors=guards, options=_channel_options(options.lease_s), maximum_concurrent_rpcs=MAX_CONCURRENT_CALLS
        )
        self.server.add_generic_rpc_handlers((self._handlers(),))
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.server)
        reflection.enable_server_reflection((SERVICE, HEALTH_SERVICE, reflection.SERVICE_NAME), self.server)

    async def start(self) -> int:
        """Starts listening and returns the port. Raises ValueError if the address cannot be bound."""
        await self.health.set(SERVICE, SERVING)
        try:
            if tls := self.options.read_tls():
                credentials = grpc.ssl_server_credentials([tls])
                port = self.server.add_secure_port(self.options.address, credentials)
            else:
                port = self.server.add_insecure_port(self.options.address)
        except RuntimeError as error:
            raise ValueError(f"cannot listen at {self.options.address}: {error}. Choose another --port.") from error
        await self.server.start()
        self._watch = asyncio.create_task(self._expire())
        return int(port)

    async def drain(self) -> None:
        """Stops opening sessions, announces this to clients, and returns once no session is open."""
        self.sessions.is_draining = True
        await self.health.enter_graceful_shutdown()
        for stream in list(self.streams):
            stream.schedule_write(even_if_empty=True)
        while self.sessions.num_open:
            await asyncio.sleep(0.02)

    async def stop(self) -> None:
        """Ends all calls and closes all sessions."""
        self._watch.cancel()
        for conversation in self.streams.values():
            conversation.cancel()
        await self.server.stop(STOP_TIMEOUT_S)
        await asyncio.sleep(0.05)  # gRPC's own tasks end a little later
        for client in self.named_clients.values():
            await self.sessions.close_client(client)
        if self.close_tasks:
            await asyncio.wait(self.close_tasks)

    # ---- the calls

    async def describe(self, kind: pb.Kind, _: Any) -> pb.Description:
        """RPC Describe: returns the served envs and, if `kind` names a type, its seats, roles and options."""
        description = self.sessions.describe(kind)
        description.workers = self.options.num_workers
        return description

    async def ask(self, request: pb.Request, context: Any) -> pb.Reply:
        """RPC Ask: answers one request of a named client."""
        return await self._answer(await self._named(context), request)

    async def batch(self, asked: pb.Requests, context: Any) -> pb.Replies:
        """RPC Batch: answers several requests of a named client in one message, when all are done."""
        client = await self._named(context)
        await _check(asked, context)
        replies = await asyncio.gather(*(self._answer(client, request) for request in asked.requests))
        return pb.Replies(replies=replies, load=self.sessions.num_open, draining=self.sessions.is_draining)

    async def play(self, _: AsyncIterator[pb.Requests], context: Any) -> None:
        """RPC Play: serves a bidirectional stream; replies are sent in the order in which they become ready."""
        client = ClientSessions()
        stream = ReplyStream(context, self.sessions)
        hello = pb.Hello(protocol=PROTOCOL_VERSION, worker=self.worker_id, workers=self.options.num_workers)
        await context.write(pb.Replies(hello=hello, load=self.sessions.num_open, draining=self.sessions.is_draining))
        self.streams[stream] = asyncio.create_task(self._converse(client, stream))
        try:
            await asyncio.wait([self.streams[stream]])  # a separate task, so that `stop` can cancel it
        finally:
            self.streams.pop(stream).cancel()
            # a separate task, since the current one may be cancelled
            task = asyncio.create_task(self.sessions.close_client(client))
            self.close_tasks.add(task)
            task.add_done_callback(self.close_tasks.discard)

    async def _converse(self, client: ClientSessions, stream: ReplyStream) -> None:
        while (asked := await stream.context.read()) is not grpc.aio.EOF:
            await _check(asked, stream.context)
            turn = time.monotonic() + TURN_S
            for request in asked.requests:
                stream.add_reply(self.sessions.execute(client, request))
                if time.monotonic() > turn:
                    await asyncio.sleep(0)
                    turn = time.monotonic() + TURN_S
            await stream.write()
            await stream.wait_for_room()

    async def _answer(self, client: ClientSessions, request: pb.Request) -> pb.Reply:
        reply = self.sessions.execute(client, request)
        return await reply if isinstance(reply, asyncio.Task) else reply

    async def _named(self, context: Any) -> ClientSessions:
        name = str(dict(context.invocation_metadata()).get("client", ""))
        if name not in self.named_clients and len(self.named_clients) >= MAX_NAMED_CLIENTS:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_NAMED_CLIENTS} clients are connected, the maximum"
            )
        client = self.named_clients.setdefault(name, ClientSessions())
        client.last_request = time.monotonic()
        return client

    async def _expire(self) -> None:
        """Periodically closes the sessions of named clients whose lease has expired, and all idle sessions."""
        while True:
            await asyncio.sleep(self.options.lease_s / 10)
            for name, client in list(self.named_clients.items()):
                if time.monotonic() - client.last_request > self.options.lease_s:
                    del self.named_clients[name]
                    await self.sessions.close_client(client)
            await self.sessions.close_idle()

    def _handlers(self) -> Any:
        def unary(method: Callable[[Any, Any], Awaitable[Any]], request: Any, reply: Any) -> Any:
            return grpc.unary_unary_rpc_method_handler(method, request.FromString, reply.SerializeToString)

        calls = {
            "Describe": unary(self.describe, pb.Kind, pb.Description),
            "Ask": unary(self.ask, pb.Request, pb.Reply),
            "Batch": unary(self.batch, pb.Requests, pb.Replies),
            "Play": grpc.stream_stream_rpc_method_handler(
                self.play, pb.Requests.FromString, pb.Replies.SerializeToString
            ),
        }
        return grpc.method_handlers_generic_handler(SERVICE, calls)


class ReplyStream:
    """The outgoing replies of one stream.

    Replies that become ready during a write are batched into the next message.
    """

    def __init__(self, context: Any, sessions: EnvSessions) -> None:
        self.context = context
        self.sessions = sessions
        self.ready: list[pb.Reply] = []
        self.is_writing = False
        self.write_if_empty = False
        self.write_task: asyncio.Task[None] | None = None
        self.pending: set[asyncio.Task[pb.Reply]] = set()

    def add_reply(self, reply: pb.Reply | asyncio.Task[pb.Reply]) -> None:
        """Queues a finished reply, or registers the task that will produce one."""
        if isinstance(reply, asyncio.Task):
            self.pending.add(reply)
            reply.add_done_callback(self._late)
        elif reply.id:
            self.ready.append(reply)

    async def wait_for_room(self) -> None:
        """Waits until fewer than `MAX_PENDING_REQUESTS` requests are unanswered."""
        while len(self.pending) >= MAX_PENDING_REQUESTS:
            await asyncio.wait(self.pending, return_when=asyncio.FIRST_COMPLETED)

    def schedule_write(self, *, even_if_empty: bool = False) -> None:
        """Schedules a write of the ready replies; with `even_if_empty`, also if there are none (an empty message)."""
        self.write_if_empty |= even_if_empty
        if self.write_task is None or self.write_task.done():
            self.write_task = asyncio.create_task(self._flushed())

    async def write(self) -> None:
        """Writes ready replies until none are left.

        Returns at once if another task is writing; that task writes them.
        """
        if self.is_writing:
            return
        self.is_writing = True
        try:
            while self.ready or self.write_if_empty:
                ready = self.ready
                self.ready = []
                self.write_if_empty = False
                load = self.sessions.num_open
                draining = self.sessions.is_draining
                await self.context.write(pb.Replies(replies=ready, load=load, draining=draining))
        finally:
            self.is_writing = False

    async def _flushed(self) -> None:
        try:
            await self.write()
        except (grpc.RpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
            self.ready.clear()  # the stream has ended

    def _late(self, task: asyncio.Task[pb.Reply]) -> None:
        self.pending.discard(task)
        if not task.cancelled():
            self.add_reply(task.result())
            self.schedule_write()


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Rejects calls without the token, except health checks, with UNAUTHENTICATED."""

    def __init__(self, token: str) -> None:
        self.expected = f"Bearer {token}".encode()

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        given = dict(details.invocation_metadata).get("authorization", "")
        given = given if isinstance(given, bytes) else given.encode()
        if details.method.startswith(f"/{HEALTH_SERVICE}/") or hmac.compare_digest(given, self.expected):
            return await continuation(details)
        return grpc.stream_stream_rpc_method_handler(_refuse)  # a stream handler refuses without waiting for a message


async def _check(asked: pb.Requests, context: Any) -> None:
    """Aborts the call if a message holds more than `MAX_REQUESTS_PER_MESSAGE` requests."""
    if len(asked.requests) > MAX_REQUESTS_PER_MESSAGE:
        why = f"a message of {len(asked.requests):,} requests: {MAX_REQUESTS_PER_MESSAGE:,} are the most"
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, why)


async def _refuse(_: Any, context: Any) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is missing, or not this server's")


def _channel_options(lease_s: float) -> list[tuple[str, int]]:
    half = int(1000 * lease_s / 2)
    return [
        ("grpc.so_reuseport", 1),  # shared with the other workers and the parent's reserving socket
        ("grpc.max_receive_message_length", MAX_REQUEST_BYTES + 2**20),  # plus envelope
        ("grpc.max_send_message_length", MAX_REPLY_BYTES),
        ("grpc.max_concurrent_streams", MAX_CONCURRENT_CALLS),
        ("grpc.server_handshake_timeout_ms", int(1000 * HANDSHAKE_TIMEOUT_S)),
        ("grpc.max_connection_idle_ms", int(1000 * IDLE_TIMEOUT_S)),
        ("grpc.keepalive_time_ms", half),
        ("grpc.keepalive_timeout_ms", half),
        ("grpc.http2.ping_timeout_ms", half),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_ping_strikes", 0),  # no limit on client pings
    ]
