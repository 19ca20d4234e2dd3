"""Sessions of an env server: each is one running env of one client; executes requests on them.

Requests to one session run in order of arrival. An env with plain, non-blocking methods is called directly; coroutines
and blocking envs run in tasks, so they do not delay other sessions.
"""

from __future__ import annotations

import asyncio
import inspect
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any

from palestra.envs import Env, VectorEnv, load_env_class, validate_env_options
from palestra.envs.base import ENV_THREADS
from palestra.envs.remote import PROTOCOL_VERSION
from palestra.envs.remote import envs_pb2 as pb
from palestra.envs.remote.serialization import (
    encode_rng_state,
    read_mapping,
    read_value,
    restore_rng_state,
    write_mapping,
    write_step,
    write_value,
)
from palestra.envs.remote.session import (
    ClientSessions,
    EnvSession,
    InvalidRequest,
    ServerDraining,
    SessionLimits,
    UnknownSession,
)

MAX_OPTIONS_BYTES = 256 * 1024  # bytes of an env's serialized options, at most
MAX_OVERLONG_CALLS = 128  # overlong calls on threads above which the worker counts as overloaded
Unfinished = Awaitable[None] | None  # the unfinished part of a request; None if it is done


FAULT_REASONS = {InvalidRequest: pb.Fault.REFUSED, UnknownSession: pb.Fault.UNKNOWN, ServerDraining: pb.Fault.DRAINING}


class EnvSessions:
    """Runs the envs named in `env_classes` for any number of clients, within `limits`.

    Raises ValueError for an unknown env and for vector envs, which cannot be served.
    """

    def __init__(self, types: Sequence[str], limits: SessionLimits | None = None) -> None:
        self.env_classes = {name: _playable(name) for name in types}
        self.limits = limits or SessionLimits()
        self.clients: set[ClientSessions] = set()
        self.thread_calls: dict[Future[Any], float] = {}  # with the start of each in `time.monotonic` seconds
        self.is_draining = False
        self.num_open = 0
        self.env_factory = lru_cache(1024)(self._maker)
        self._doing: dict[str, Callable[[ClientSessions, pb.Request, pb.Reply], Unfinished]] = {
            "step": self._step,
            "open": self._open,
            "fork": self._fork,
            "close": self._close,
            "expert": self._expert,
        }

    def execute(self, client: ClientSessions, request: pb.Request) -> pb.Reply | asyncio.Task[pb.Reply]:
        """Executes a request; returns its reply or a task that returns it. Exceptions become a fault in the reply."""
        reply = pb.Reply(id=request.id)
        try:
            rest = self._begin(client, request, reply)
        except Exception as error:  # the server's boundary: every failure is sent to the client
            return _failed(reply, error)
        if rest is None:
            return reply
        return asyncio.ensure_future(_finished(rest, reply))

    async def close_client(self, client: ClientSessions) -> None:
        for number in list(client.sessions):
            await self._leave(client, number)
        self.clients.discard(client)

    async def close_idle(self) -> None:
        """Closes sessions without requests for `limits.idle_timeout_s` seconds."""
        since = time.monotonic() - self.limits.idle_timeout_s
        for client in list(self.clients):
            for number, session in list(client.sessions.items()):
                if session.last_used < since and not session.tasks:
                    await self._leave(client, number)

    async def _leave(self, client: ClientSessions, number: int) -> None:
        reply = self.execute(client, pb.Request(session=number, close=pb.Close()))
        if isinstance(reply, asyncio.Task):
            await asyncio.wait([reply])

    def describe(self, kind: pb.Kind) -> pb.Description:
        """Returns the served envs and, if `kind` names one, its seats, roles, options and whether it has an expert."""
        description = pb.Description(protocol=PROTOCOL_VERSION, types=self.env_classes, load=self.num_open)
        if not kind.type:
            return description
        try:
            env = self.env_factory(_kind(kind))()
            description.seats.extend(env.seats)
            write_mapping(description.roles, dict(env.roles))
            description.expert = hasattr(env, "expert")
            for parameter in inspect.signature(self.env_classes[kind.type]).parameters.values():
                description.options.add(name=parameter.name, shown=str(parameter))
        except Exception as error:  # the server's boundary, as above
            description.fault.CopyFrom(_failed(pb.Reply(), error).fault)
        return description

    # ---- one request

    def _begin(self, client: ClientSessions, request: pb.Request, reply: pb.Reply) -> Unfinished:
        what = request.WhichOneof("what")
        if what is None:
            raise InvalidRequest("the request is of an unknown kind: is the client newer?")
        doing = self._doing[what]
        if what in ("open", "close"):
            return doing(client, request, reply)
        session = _of(client, request)
        session.last_used = time.monotonic()
        twin = self._twin(client, request) if what == "fork" else None
        if session.tasks:
            rest: Unfinished = _after([*session.tasks], lambda: doing(client, request, reply))
        else:
            rest = doing(client, request, reply)
        if rest is None:
            return None
        task = session.add_task(rest)
        if twin:
            twin.add_task(task)  # later requests to the copy run after the fork
            session.fork_tasks.add(task)
            twin.fork_tasks.add(task)
        return task

    def _open(self, client: ClientSessions, request: pb.Request, reply: pb.Reply) -> Unfinished:
        if self.is_draining:
            raise ServerDraining("this server is about to stop, and opens no sessions")
        if request.session in client.sessions:
            raise InvalidRequest(f"session {request.session} is open already")
        seed = _seed(request.open.seed)
        self._has_room(client)
        session = EnvSession(self.env_factory(_kind(request.open.kind))())
        client.sessions[request.session] = session
        self.clients.add(client)
        self.num_open += 1
        return session.add_task(self._played(session.ready_env, seed, request.open.actions, reply))

    def _step(self, client: ClientSessions, request: pb.Request, reply: pb.Reply) -> Unfinished:
        env = _of(client, request).ready_env
        return self._then(self._called(env, env.step, read_mapping(request.step)), partial(write_step, reply.step))

    def _twin(self, client: ClientSessions, request: pb.Request) -> EnvSession:
        """Returns an empty session for a fork, under the number chosen by the client; the client can use it at once.

        Raises InvalidRequest if the number is in use, or no session may be opened.
        """
        if request.fork in client.sessions:
            raise InvalidRequest(f"session {request.fork} is open already")
        self._has_room(client)
        twin = client.sessions[request.fork] = EnvSession()
        self.num_open += 1
        return twin

    def _fork(self, client: ClientSessions, request: pb.Request, reply: pb.Reply) -> Unfinished:
        reply.done.SetInParent()
        twin = client.sessions.get(request.fork)
        if twin is None:  # the copy was closed before it was made
            return None
        try:
            env = _of(client, request).ready_env
            rest = self._then(self._called(env, env.fork), partial(setattr, twin, "env"))
        except Exception as error:
            twin.fork_error = f"{type(error).__name__}: {error}"
            raise
        return _forked(twin, rest) if rest else None

    def _close(self, client: ClientSessions, request: pb.Request, reply: pb.Reply) -> Unfinished:
        reply.done.SetInParent()
        session = _of(client, request)
        del client.sessions[request.session]
        self.num_open -= 1
        for task in session.tasks:
            if task not in session.fork_tasks:  # a fork also belongs to another session
                task.cancel()
        if session.tasks:
            return _after([*session.tasks], lambda: self._closed(session))
        return self._closed(session)

    def _expert(self, client: ClientSessions, request: pb.Request, reply: pb.Reply) -> Unfinished:
        env: Any = _of(client, request).ready_env
        rng = random.Random()
        restore_rng_state(rng, request.expert.random)

        def write(value: Any) -> None:
            write_value(reply.said.answer, value)
            reply.said.random = encode_rng_state(rng)

        return self._then(self._called(env, env.expert, request.expert.seat, rng), write)

    def _closed(self, session: EnvSession) -> Unfinished:
        if session.env is None:
            return None
        return self._then(self._called(session.env, session.env.close), lambda _: None)

    def _has_room(self, client: ClientSessions) -> None:
        """Raises InvalidRequest if the limit of all sessions or of this client's sessions is reached."""
        if self.num_open >= self.limits.max_sessions:
            raise InvalidRequest(
                f"this server has {self.num_open:,} sessions open, the maximum (serve-envs --sessions)"
            )
        if len(client.sessions) >= self.limits.max_sessions_per_client:
            raise InvalidRequest(
                f"this client has {len(client.sessions):,} sessions open here, the maximum: close some"
            )

    # ---- calls that wait

    def _called(self, env: Env, method: Callable[..., Any], *arguments: Any) -> Any:
        """Calls `method(*arguments)`, on a thread if the env blocks. The result may be awaitable."""
        if not env.blocking:
            return method(*arguments)
        future = ENV_THREADS.submit(method, *arguments)
        self.thread_calls[future] = time.monotonic()
        future.add_done_callback(lambda done: self.thread_calls.pop(done, None))
        return asyncio.wrap_future(future)

    @property
    def is_overloaded(self) -> bool:
        """True if calls over the time limit hold more than `MAX_OVERLONG_CALLS` threads; threads cannot be killed."""
        since = time.monotonic() - self.limits.call_timeout_s
        return sum(began < since for began in list(self.thread_calls.values())) > MAX_OVERLONG_CALLS

    def _then(self, result: Any, write: Callable[[Any], None]) -> Unfinished:
        """Writes the result of a method: now, or, if it is awaitable, when it is ready."""
        if inspect.isawaitable(result):
            return self._written(result, write)
        write(result)
        return None

    async def _written(self, result: Awaitable[Any], write: Callable[[Any], None]) -> None:
        write(await self._waited(result))

    async def _waited(self, result: Any) -> Any:
        """Awaits the result of a method. On a thread, a coroutine function returns a coroutine, which is awaited too.

        Raises TimeoutError after `limits.call_timeout_s` seconds.
        """
        limit = asyncio.timeout(self.limits.call_timeout_s)
        try:
            async with limit:
                while inspect.isawaitable(result):
                    result = await result
        except TimeoutError:
            if not limit.expired():  # raised by the env
                raise
            raise TimeoutError(
                f"a call of the env took over {self.limits.call_timeout_s:g} s (serve-envs --limit)"
            ) from None
        return result

    async def _played(self, env: Env, seed: int, actions: Iterable[pb.Pairs], reply: pb.Reply) -> None:
        """Resets the env, replays `actions`, and writes the seed's instance, also if the reset fails, and all steps."""
        steps = reply.opened.steps
        try:
            write_step(steps.add(), await self._waited(self._called(env, env.reset, seed)))
        except Exception:
            with suppress(Exception):
                write_value(reply.instance, await self._waited(self._called(env, env.instance_of, seed)))
            raise
        write_value(reply.instance, await self._waited(self._called(env, env.instance_of, seed)))
        for action in actions:
            write_step(steps.add(), await self._waited(self._called(env, env.step, read_mapping(action))))
            await asyncio.sleep(0)  # let other sessions run: the env itself may never await

    # ---- envs by name

    def _maker(self, kind: bytes) -> Callable[[], Env]:
        """Returns a factory for the serialized pb.Kind `kind`.

        Raises InvalidRequest if its type is not served, ValueError for bad options.
        """
        asked = pb.Kind.FromString(kind)
        if asked.type not in self.env_classes:
            raise InvalidRequest(f'env "{asked.type}" is not served here: {", ".join(self.env_classes)} are')
        cls: Any = self.env_classes[asked.type]
        options = validate_env_options(cls, read_mapping(asked.options))
        return lambda: cls(**options)


def _playable(name: str) -> type[Env]:
    cls = load_env_class(name)
    if issubclass(cls, VectorEnv):
        raise ValueError(
            f'env "{name}" plays many games at once on arrays, millions of steps a second: it runs where networks are '
            "trained, and is not served"
        )
    return cls


def _seed(message: pb.Value) -> int:
    """Reads a session's seed. Raises InvalidRequest unless it is a 64-bit integer: seeding a
    generator from a longer one takes time quadratic in its length."""
    kind = message.WhichOneof("kind")
    seed = read_value(message) if kind == "integer" or (kind == "long" and len(message.long) <= 9) else None
    if seed is None or not -(2**63) <= seed < 2**64:
        raise InvalidRequest("a seed must be an integer of 64 bits")
    return int(seed)


def _kind(message: pb.Kind) -> bytes:
    """Serializes type and options as a cache key. Raises InvalidRequest if they are larger than `MAX_OPTIONS_BYTES`."""
    if message.ByteSize() > MAX_OPTIONS_BYTES:
        raise InvalidRequest(f"an env's options of {message.ByteSize():,} bytes: {MAX_OPTIONS_BYTES:,} are the most")
    return message.SerializeToString(deterministic=True)


def _of(client: ClientSessions, request: pb.Request) -> EnvSession:
    if request.session not in client.sessions:
        raise UnknownSession(
            f"there is no session {request.session} here: its server was restarted, or its lease is over"
        )
    return client.sessions[request.session]


async def _after(earlier: Sequence[asyncio.Task[Any]], doing: Callable[[], Unfinished]) -> None:
    """Calls `doing` when all `earlier` requests have ended, successfully or not."""
    await asyncio.wait(earlier)
    if rest := doing():
        await rest


async def _forked(twin: EnvSession, rest: Awaitable[None]) -> None:
    try:
        await rest
    except Exception as error:
        twin.fork_error = f"{type(error).__name__}: {error}"
        raise


async def _finished(rest: Awaitable[None], reply: pb.Reply) -> pb.Reply:
    try:
        await rest
    except asyncio.CancelledError:
        return _failed(reply, UnknownSession("the session was closed meanwhile"))
    except Exception as error:  # the server's boundary, as in `execute`
        return _failed(reply, error)
    return reply


def _failed(reply: pb.Reply, error: Exception) -> pb.Reply:
    why = next((why for kind, why in FAULT_REASONS.items() if isinstance(error, kind)), pb.Fault.ENV)
    text = str(error).encode("utf-8", "replace").decode()  # the message may contain lone surrogates
    reply.fault.CopyFrom(pb.Fault(why=why, error=type(error).__name__, message=text))
    return reply
