"""The envs that a server has in play, each a session of a client's, and what requests do to them.

Requests to one session are done in the order in which they came. An env whose methods are plain functions answers at
once; one that waits or blocks is waited for in a task, and holds up no other.
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

OPTIONS = 256 * 1024  # bytes
CLOGGED = 128  # calls on threads
Rest = Awaitable[None] | None  # what of a request is still to be waited for


class Refused(ValueError):
    """A request that cannot be done here, whatever the env."""


class Full(Refused):
    """There are as many sessions as there may be."""


class Unknown(Exception):
    """There is no such session."""


class Draining(Exception):
    """No new session is opened here."""


WHY = {Refused: pb.Fault.REFUSED, Unknown: pb.Fault.UNKNOWN, Draining: pb.Fault.DRAINING}


@dataclass(frozen=True)
class Bounds:
    """Limits of one process: open `sessions`, in all and `each` client's; `idle` seconds after which one that is asked
    nothing is closed; `call` seconds that a call of an env may take."""

    sessions: int = 16_384
    each: int = 8_192
    idle: float = 3600.0
    call: float = 120.0


@dataclass(eq=False)
class Session:
    """An env in play; none yet where it is to become a fork, and never where it could not. `tasks` are the requests
    that are still being waited for, in their order; those of them that fork it, or fork another into it, are `forks`,
    too."""

    env: Env | None = None
    failed: str = ""
    used: float = field(default_factory=time.monotonic)
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)
    forks: set[asyncio.Task[Any]] = field(default_factory=set)

    @property
    def playing(self) -> Env:
        if self.env is None:
            raise RuntimeError(f"the env could not be forked: {self.failed}")
        return self.env

    def become(self, env: Env) -> None:
        self.env = env

    def waits_for(self, rest: Awaitable[None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(rest)
        self.tasks.append(task)
        task.add_done_callback(self._over)
        return task

    def _over(self, task: asyncio.Task[Any]) -> None:
        self.tasks.remove(task)
        self.forks.discard(task)


@dataclass(eq=False)
class Client:
    """Somebody's sessions, by the numbers of their choice; `heard` is when a request last came."""

    sessions: dict[int, Session] = field(default_factory=dict)
    heard: float = 0.0


class Sessions:
    """Plays the envs of `types` for any number of clients, within `bounds`. Raises ValueError for a name that is no env
    in words."""

    def __init__(self, types: Sequence[str], bounds: Bounds | None = None) -> None:
        self.types, self.bounds = {name: _playable(name) for name in types}, bounds or Bounds()
        self.clients: set[Client] = set()
        self.running: dict[Future[Any], float] = {}  # calls on threads, and when they began
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
        """The reply, or the task that will have it. Whatever an env raises is a fault in the reply."""
        reply = pb.Reply(id=request.id)
        try:
            rest = self._begin(client, request, reply)
        except Exception as error:  # the server's boundary: a failure is told to whom it concerns
            return _failed(reply, error)
        if rest is None:
            return reply
        return asyncio.ensure_future(_finished(rest, reply))

    async def leave(self, client: Client) -> None:
        """Closes what a client has open."""
        for number in list(client.sessions):
            await self._leave(client, number)
        self.clients.discard(client)

    async def expire(self) -> None:
        """Closes sessions that nothing was asked of for as long as they may be idle."""
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
        """Which envs are served; of the one that is asked for, its seats, roles and options."""
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
            twin.waits_for(task)  # whatever is asked of it meanwhile
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
        """What is to become a fork. Its number is the client's, which need not wait before it goes on."""
        if request.fork in client.sessions:
            raise Refused(f"session {request.fork} is open already")
        self._has_room(client)
        twin = client.sessions[request.fork] = Session()
        self.load += 1
        return twin

    def _fork(self, client: Client, request: pb.Request, reply: pb.Reply) -> Rest:
        reply.done.SetInParent()
        twin = client.sessions.get(request.fork)
        if twin is None:  # closed before it was made
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
            if task not in session.forks:  # which concern another
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
        """Raises Full where no session may be opened."""
        if self.load >= self.bounds.sessions:
            raise Full(f"this server has {self.load:,} sessions open, as many as it may (serve-envs --sessions)")
        if len(client.sessions) >= self.bounds.each:
            raise Full(f"this client has {len(client.sessions):,} sessions open here, as many as one may: close some")

    # ---- what takes its time

    def _called(self, env: Env, method: Callable[..., Any], *arguments: Any) -> Any:
        """`method(*arguments)`, on a thread for envs that block; perhaps to be awaited."""
        if not env.blocking:
            return method(*arguments)
        future = THREADS.submit(method, *arguments)
        self.running[future] = time.monotonic()
        future.add_done_callback(lambda done: self.running.pop(done, None))
        return asyncio.wrap_future(future)

    @property
    def clogged(self) -> bool:
        """True if half of the threads are held by calls that took too long: a thread cannot be ended."""
        since = time.monotonic() - self.bounds.call
        return sum(began < since for began in list(self.running.values())) > CLOGGED

    def _then(self, result: Any, write: Callable[[Any], None]) -> Rest:
        """Writes what a method returned: now, or once it is there."""
        if inspect.isawaitable(result):
            return self._written(result, write)
        write(result)
        return None

    async def _written(self, result: Awaitable[Any], write: Callable[[Any], None]) -> None:
        write(await self._waited(result))

    async def _waited(self, result: Any) -> Any:
        """The value that a method returned. On a thread, a coroutine function returns a coroutine, awaited here. Raises
        TimeoutError where it takes longer than a call may."""
        limit = asyncio.timeout(self.bounds.call)
        try:
            async with limit:
                while inspect.isawaitable(result):
                    result = await result
        except TimeoutError:
            if not limit.expired():  # the env's own
                raise
            raise TimeoutError(f"a call of the env took over {self.bounds.call:g} s (serve-envs --limit)") from None
        return result

    async def _played(self, env: Env, seed: int, actions: Iterable[pb.Pairs], steps: Any) -> None:
        """Writes the steps of a reset, then of the actions that an episode is brought back by."""
        fill_step(steps.add(), await self._waited(self._called(env, env.reset, seed)))
        for action in actions:
            fill_step(steps.add(), await self._waited(self._called(env, env.step, mapping_of(action))))
            await asyncio.sleep(0)  # envs that never wait let others play

    # ---- envs by name

    def _maker(self, kind: bytes) -> Callable[[], Env]:
        """What makes envs of a kind, given as a message's bytes."""
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
    """A session's seed. Raises Refused for anything but an integer of 64 bits: making a generator of a long one takes
    the square of its length."""
    kind = message.WhichOneof("kind")
    seed = value_of(message) if kind == "integer" or (kind == "long" and len(message.long) <= 9) else None
    if seed is None or not -(2**63) <= seed < 2**64:
        raise Refused("a seed must be an integer of 64 bits")
    return int(seed)


def _kind(message: pb.Kind) -> bytes:
    """A type and options as a key. Raises Refused for options that are too long."""
    if message.ByteSize() > OPTIONS:
        raise Refused(f"an env's options of {message.ByteSize():,} bytes: {OPTIONS:,} are the most")
    return message.SerializeToString(deterministic=True)


def _of(client: Client, request: pb.Request) -> Session:
    if request.session not in client.sessions:
        raise Unknown(f"there is no session {request.session} here: its server was restarted, or its lease is over")
    return client.sessions[request.session]


async def _after(earlier: Sequence[asyncio.Task[Any]], doing: Callable[[], Rest]) -> None:
    """Does something when earlier requests are over, however they ended."""
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
    text = str(error).encode("utf-8", "replace").decode()  # a message may quote what is no Unicode
    reply.fault.CopyFrom(pb.Fault(why=why, error=type(error).__name__, message=text))
    return reply
