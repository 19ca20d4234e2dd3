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
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

from palestra.envs import Env, VectorEnv, env_class, env_options
from palestra.remote import PROTOCOL
from palestra.remote import envs_pb2 as pb
from palestra.remote.values import (
    fill,
    fill_pairs,
    fill_step,
    mapping_of,
    random_bytes,
    set_random,
    value_of,
)
from palestra.rollouts.play import THREADS

OPTIONS = 256 * 1024  # bytes of an env's serialized options, at most
CLOGGED = 128  # overlong calls on threads above which the worker counts as overloaded
Rest = Awaitable[None] | None  # the unfinished part of a request; None if it is done


class Refused(ValueError):
    """Raised for a request that this server cannot execute, independent of the env."""


class Full(Refused):
    """Raised when the maximum number of sessions is open."""


class Unknown(Exception):
    """Raised for a request to a session that does not exist."""


class Draining(Exception):
    """Raised for a new session on a server that is draining."""


WHY = {Refused: pb.Fault.REFUSED, Unknown: pb.Fault.UNKNOWN, Draining: pb.Fault.DRAINING}


@dataclass(frozen=True)
class Bounds:
    """Limits of one worker process.

    `sessions`: open sessions of all clients. `each`: open sessions of one client. `idle`: seconds without a request
    after which a session is closed. `call`: seconds that one env call may take.
    """

    sessions: int = 16_384
    each: int = 8_192
    idle: float = 3600.0
    call: float = 120.0


@dataclass(eq=False)
class Session:
    """A running env.

    `env` is None until a pending fork is made, and remains None if the fork fails (`failed` is the reason). `tasks`:
    unfinished requests in order. `forks`: those of them that copy this env or create it as a copy. `used`:
    `time.monotonic` time of the last request.
    """

    env: Env | None = None
    failed: str = ""
    used: float = field(default_factory=time.monotonic)
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)
    forks: set[asyncio.Task[Any]] = field(default_factory=set)

    @property
    def playing(self) -> Env:
        """The env. Raises RuntimeError if the fork that should have created it failed."""
        if self.env is None:
            raise RuntimeError(f"the env could not be forked: {self.failed}")
        return self.env

    def become(self, env: Env) -> None:
        """Sets the env of a session that was created by a fork."""
        self.env = env

    def waits_for(self, rest: Awaitable[None]) -> asyncio.Task[None]:
        """Adds `rest` to the unfinished requests of this session and returns its task."""
        task = asyncio.ensure_future(rest)
        self.tasks.append(task)
        task.add_done_callback(self._over)
        return task

    def _over(self, task: asyncio.Task[Any]) -> None:
        self.tasks.remove(task)
        self.forks.discard(task)


@dataclass(eq=False)
class Client:
    """A client's sessions by the numbers it chose. `heard`: `time.monotonic` time of its last unary request."""

    sessions: dict[int, Session] = field(default_factory=dict)
    heard: float = 0.0


class Sessions:
    """Runs the envs named in `types` for any number of clients, within `bounds`.

    Raises ValueError for an unknown env and for vector envs, which cannot be served.
    """

    def __init__(self, types: Sequence[str], bounds: Bounds | None = None) -> None:
        self.types, self.bounds = {name: _playable(name) for name in types}, bounds or Bounds()
        self.clients: set[Client] = set()
        self.running: dict[Future[Any], float] = {}  # calls on threads, with their start in `time.monotonic` seconds
        self.draining = False
        self.load = 0
        self.maker = lru_cache(1024)(self._maker)
        self._doing: dict[str, Callable[[Client, pb.Request, pb.Reply], Rest]] = {
            "step": self._step,
            "open": self._open,
            "fork": self._fork,
            "close": self._close,
            "expert": self._expert,
        }

    def answer(self, client: Client, request: pb.Request) -> pb.Reply | asyncio.Task[pb.Reply]:
        """Executes a request; returns its reply or a task that returns it. Exceptions become a fault in the reply."""
        reply = pb.Reply(id=request.id)
        try:
            rest = self._begin(client, request, reply)
        except Exception as error:  # the server's boundary: every failure is sent to the client
            return _failed(reply, error)
        if rest is None:
            return reply
        return asyncio.ensure_future(_finished(rest, reply))

    async def leave(self, client: Client) -> None:
        """Closes all sessions of a client."""
        for number in list(client.sessions):
            await self._leave(client, number)
        self.clients.discard(client)

    async def expire(self) -> None:
        """Closes sessions without requests for `bounds.idle` seconds."""
        since = time.monotonic() - self.bounds.idle
        for client in list(self.clients):
            for number, session in list(client.sessions.items()):
                if session.used < since and not session.tasks:
                    await self._leave(client, number)

    async def _leave(self, client: Client, number: int) -> None:
        reply = self.answer(client, pb.Request(session=number, close=pb.Close()))
        if isinstance(reply, asyncio.Task):
            await asyncio.wait([reply])

    def describe(self, kind: pb.Kind) -> pb.Description:
        """Returns the served envs and, if `kind` names one, its seats, roles, options and whether it has an expert."""
        told = pb.Description(protocol=PROTOCOL, types=self.types, load=self.load)
        if not kind.type:
            return told
        try:
            env = self.maker(_kind(kind))()
            told.seats.extend(env.seats)
            fill_pairs(told.roles, dict(env.roles))
            told.expert = hasattr(env, "expert")
            for parameter in inspect.signature(self.types[kind.type]).parameters.values():
                told.options.add(name=parameter.name, shown=str(parameter))
        except Exception as error:  # the server's boundary, as above
            told.fault.CopyFrom(_failed(pb.Reply(), error).fault)
        return told

    # ---- one request

    def _begin(self, client: Client, request: pb.Request, reply: pb.Reply) -> Rest:
        what = request.WhichOneof("what")
        if what is None:
            raise Refused("the request asks for nothing that is known here: is the client newer?")
        doing = self._doing[what]
        if what in ("open", "close"):
            return doing(client, request, reply)
        session = _of(client, request)
        session.used = time.monotonic()
        twin = self._twin(client, request) if what == "fork" else None
        if session.tasks:
            rest: Rest = _after([*session.tasks], lambda: doing(client, request, reply))
        else:
            rest = doing(client, request, reply)
        if rest is None:
            return None
        task = session.waits_for(rest)
        if twin:
            twin.waits_for(task)  # later requests to the copy run after the fork
            session.forks.add(task)
            twin.forks.add(task)
        return task

    def _open(self, client: Client, request: pb.Request, reply: pb.Reply) -> Rest:
        if self.draining:
            raise Draining("this server is about to stop, and opens no sessions")
        if request.session in client.sessions:
            raise Refused(f"session {request.session} is open already")
        seed = _seed(request.open.seed)
        self._has_room(client)
        session = Session(self.maker(_kind(request.open.kind))())
        client.sessions[request.session] = session
        self.clients.add(client)
        self.load += 1
        env = session.playing
        if request.open.actions or env.blocking or inspect.iscoroutinefunction(env.reset):
            return session.waits_for(self._played(env, seed, request.open.actions, reply.opened.steps))
        return self._then(env.reset(seed), lambda step: fill_step(reply.opened.steps.add(), step))

    def _step(self, client: Client, request: pb.Request, reply: pb.Reply) -> Rest:
        env = _of(client, request).playing
        return self._then(self._called(env, env.step, mapping_of(request.step)), partial(fill_step, reply.step))

    def _twin(self, client: Client, request: pb.Request) -> Session:
        """Returns an empty session for a fork, under the number chosen by the client; the client can use it at once.

        Raises Refused if the number is in use, Full if no session may be opened.
        """
        if request.fork in client.sessions:
            raise Refused(f"session {request.fork} is open already")
        self._has_room(client)
        twin = client.sessions[request.fork] = Session()
        self.load += 1
        return twin

    def _fork(self, client: Client, request: pb.Request, reply: pb.Reply) -> Rest:
        reply.done.SetInParent()
        twin = client.sessions.get(request.fork)
        if twin is None:  # the copy was closed before it was made
            return None
        try:
            env = _of(client, request).playing
            rest = self._then(self._called(env, env.fork), twin.become)
        except Exception as error:
            twin.failed = f"{type(error).__name__}: {error}"
            raise
        return _forked(twin, rest) if rest else None

    def _close(self, client: Client, request: pb.Request, reply: pb.Reply) -> Rest:
        reply.done.SetInParent()
        session = _of(client, request)
        del client.sessions[request.session]
        self.load -= 1
        for task in session.tasks:
            if task not in session.forks:  # a fork also belongs to another session
                task.cancel()
        return _after([*session.tasks], lambda: self._closed(session)) if session.tasks else self._closed(session)

    def _expert(self, client: Client, request: pb.Request, reply: pb.Reply) -> Rest:
        env: Any = _of(client, request).playing
        rng = random.Random()
        set_random(rng, request.expert.random)

        def write(said: Any) -> None:
            fill(reply.said.answer, said)
            reply.said.random = random_bytes(rng)

        return self._then(self._called(env, env.expert, request.expert.seat, rng), write)

    def _closed(self, session: Session) -> Rest:
        return self._then(self._called(session.env, session.env.close), lambda _: None) if session.env else None

    def _has_room(self, client: Client) -> None:
        """Raises Full if the limit of all sessions or of this client's sessions is reached."""
        if self.load >= self.bounds.sessions:
            raise Full(f"this server has {self.load:,} sessions open, as many as it may (serve-envs --sessions)")
        if len(client.sessions) >= self.bounds.each:
            raise Full(f"this client has {len(client.sessions):,} sessions open here, as many as one may: close some")

    # ---- calls that wait

    def _called(self, env: Env, method: Callable[..., Any], *arguments: Any) -> Any:
        """Calls `method(*arguments)`, on a thread if the env blocks. The result may be awaitable."""
        if not env.blocking:
            return method(*arguments)
        future = THREADS.submit(method, *arguments)
        self.running[future] = time.monotonic()
        future.add_done_callback(lambda done: self.running.pop(done, None))
        return asyncio.wrap_future(future)

    @property
    def clogged(self) -> bool:
        """True if more than CLOGGED threads are held by calls over the time limit; threads cannot be killed."""
        since = time.monotonic() - self.bounds.call
        return sum(began < since for began in list(self.running.values())) > CLOGGED

    def _then(self, result: Any, write: Callable[[Any], None]) -> Rest:
        """Writes the result of a method: now, or, if it is awaitable, when it is ready."""
        if inspect.isawaitable(result):
            return self._written(result, write)
        write(result)
        return None

    async def _written(self, result: Awaitable[Any], write: Callable[[Any], None]) -> None:
        write(await self._waited(result))

    async def _waited(self, result: Any) -> Any:
        """Awaits the result of a method. On a thread, a coroutine function returns a coroutine, which is awaited too.

        Raises TimeoutError after `bounds.call` seconds.
        """
        limit = asyncio.timeout(self.bounds.call)
        try:
            async with limit:
                while inspect.isawaitable(result):
                    result = await result
        except TimeoutError:
            if not limit.expired():  # raised by the env
                raise
            raise TimeoutError(f"a call of the env took over {self.bounds.call:g} s (serve-envs --limit)") from None
        return result

    async def _played(self, env: Env, seed: int, actions: Iterable[pb.Pairs], steps: Any) -> None:
        """Resets the env, replays `actions`, and writes all their steps."""
        fill_step(steps.add(), await self._waited(self._called(env, env.reset, seed)))
        for action in actions:
            fill_step(steps.add(), await self._waited(self._called(env, env.step, mapping_of(action))))
            await asyncio.sleep(0)  # let other sessions run: the env itself may never await

    # ---- envs by name

    def _maker(self, kind: bytes) -> Callable[[], Env]:
        """Returns a factory for the serialized pb.Kind `kind`.

        Raises Refused if its type is not served, ValueError for bad options.
        """
        asked = pb.Kind.FromString(kind)
        if asked.type not in self.types:
            raise Refused(f'env "{asked.type}" is not served here: {", ".join(self.types)} are')
        cls: Any = self.types[asked.type]
        options = env_options(cls, mapping_of(asked.options))
        return lambda: cls(**options)


def _playable(name: str) -> type[Env]:
    cls = env_class(name)
    if issubclass(cls, VectorEnv):
        raise ValueError(
            f'env "{name}" plays many games at once on arrays, millions of steps a second: it runs where networks are '
            "trained, and is not served"
        )
    return cls


def _seed(message: pb.Value) -> int:
    """Reads a session's seed. Raises Refused unless it is a 64-bit integer: seeding a generator from a longer one takes
    time quadratic in its length."""
    kind = message.WhichOneof("kind")
    seed = value_of(message) if kind == "integer" or (kind == "long" and len(message.long) <= 9) else None
    if seed is None or not -(2**63) <= seed < 2**64:
        raise Refused("a seed must be an integer of 64 bits")
    return int(seed)


def _kind(message: pb.Kind) -> bytes:
    """Serializes type and options as a cache key. Raises Refused if they are larger than OPTIONS bytes."""
    if message.ByteSize() > OPTIONS:
        raise Refused(f"an env's options of {message.ByteSize():,} bytes: {OPTIONS:,} are the most")
    return message.SerializeToString(deterministic=True)


def _of(client: Client, request: pb.Request) -> Session:
    if request.session not in client.sessions:
        raise Unknown(f"there is no session {request.session} here: its server was restarted, or its lease is over")
    return client.sessions[request.session]


async def _after(earlier: Sequence[asyncio.Task[Any]], doing: Callable[[], Rest]) -> None:
    """Calls `doing` when all `earlier` requests have ended, successfully or not."""
    await asyncio.wait(earlier)
    rest = doing()
    if rest:
        await rest


async def _forked(twin: Session, rest: Awaitable[None]) -> None:
    try:
        await rest
    except Exception as error:
        twin.failed = f"{type(error).__name__}: {error}"
        raise


async def _finished(rest: Awaitable[None], reply: pb.Reply) -> pb.Reply:
    try:
        await rest
    except asyncio.CancelledError:
        return _failed(reply, Unknown("the session was closed meanwhile"))
    except Exception as error:  # the server's boundary, as in `answer`
        return _failed(reply, error)
    return reply


def _failed(reply: pb.Reply, error: Exception) -> pb.Reply:
    why = next((why for kind, why in WHY.items() if isinstance(error, kind)), pb.Fault.ENV)
    text = str(error).encode("utf-8", "replace").decode()  # the message may contain lone surrogates
    reply.fault.CopyFrom(pb.Fault(why=why, error=type(error).__name__, message=text))
    return reply
