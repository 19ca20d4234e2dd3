"""The envs that a server has in play, each a session of a client's, and what requests do to them.

Requests to one session are done in the order in which they came. An env whose methods are plain functions answers at
once; one that waits or blocks is waited for in a task, and holds up no other.
"""

from __future__ import annotations

import asyncio
import inspect
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
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

Rest = Awaitable[None] | None  # what of a request is still to be waited for


class Refused(ValueError):
    """A request that cannot be done here, whatever the env."""


class Unknown(Exception):
    """There is no such session."""


class Draining(Exception):
    """No new session is opened here."""


WHY = {Refused: pb.Fault.REFUSED, Unknown: pb.Fault.UNKNOWN, Draining: pb.Fault.DRAINING}


@dataclass
class Session:
    """An env in play; none yet where it is to become a fork, and never where it could not. `tasks` are the requests
    that are still being waited for, in their order; those of them that fork it, or fork another into it, are `forks`,
    too."""

    env: Env | None = None
    failed: str = ""
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


@dataclass
class Client:
    """Somebody's sessions, by the numbers of their choice; `heard` is when a request last came."""

    sessions: dict[int, Session] = field(default_factory=dict)
    heard: float = 0.0


class Sessions:
    """Plays the envs of `types` for any number of clients. Raises ValueError for a name that is no env in words."""

    def __init__(self, types: Sequence[str]) -> None:
        self.types = {name: _playable(name) for name in types}
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
            reply = self.answer(client, pb.Request(session=number, close=pb.Close()))
            if isinstance(reply, asyncio.Task):
                await asyncio.wait([reply])

    def describe(self, kind: pb.Kind) -> pb.Description:
        """Which envs are served; of the one that is asked for, its seats, roles and options."""
        told = pb.Description(protocol=PROTOCOL, types=self.types, load=self.load)
        if not kind.type:
            return told
        try:
            env = self.maker(kind.SerializeToString(deterministic=True))()
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
        session = Session(self.maker(request.open.kind.SerializeToString(deterministic=True))())
        client.sessions[request.session] = session
        self.load += 1
        env, seed = session.playing, value_of(request.open.seed)
        if request.open.actions or env.blocking or inspect.iscoroutinefunction(env.reset):
            return session.waits_for(_played(env, seed, request.open.actions, reply.opened.steps))
        return _then(env.reset(seed), lambda step: fill_step(reply.opened.steps.add(), step))

    def _step(self, client: Client, request: pb.Request, reply: pb.Reply) -> Rest:
        env = _of(client, request).playing
        return _then(_called(env, env.step, mapping_of(request.step)), partial(fill_step, reply.step))

    def _twin(self, client: Client, request: pb.Request) -> Session:
        """What is to become a fork. Its number is the client's, which need not wait before it goes on."""
        if request.fork in client.sessions:
            raise Refused(f"session {request.fork} is open already")
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
            rest = _then(_called(env, env.fork), twin.become)
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
        return _after([*session.tasks], lambda: _closed(session)) if session.tasks else _closed(session)

    def _expert(self, client: Client, request: pb.Request, reply: pb.Reply) -> Rest:
        env: Any = _of(client, request).playing
        rng = random.Random()
        set_random(rng, request.expert.random)

        def write(said: Any) -> None:
            fill(reply.said.answer, said)
            reply.said.random = random_bytes(rng)

        return _then(_called(env, env.expert, request.expert.seat, rng), write)

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


def _of(client: Client, request: pb.Request) -> Session:
    if request.session not in client.sessions:
        raise Unknown(f"there is no session {request.session} here: its server was restarted, or its lease is over")
    return client.sessions[request.session]


def _called(env: Env, method: Callable[..., Any], *arguments: Any) -> Any:
    """`method(*arguments)`, on a thread for envs that block; perhaps to be awaited."""
    if env.blocking:
        return asyncio.get_running_loop().run_in_executor(THREADS, method, *arguments)
    return method(*arguments)


def _then(result: Any, write: Callable[[Any], None]) -> Rest:
    """Writes what a method returned: now, or once it is there."""
    if inspect.isawaitable(result):
        return _written(result, write)
    write(result)
    return None


async def _written(result: Awaitable[Any], write: Callable[[Any], None]) -> None:
    write(await _waited(result))


async def _waited(result: Any) -> Any:
    """What a method returned. On a thread, a coroutine function returns a coroutine, awaited here."""
    while inspect.isawaitable(result):
        result = await result
    return result


async def _played(env: Env, seed: Any, actions: Iterable[pb.Pairs], steps: Any) -> None:
    """Writes the steps of a reset, then of the actions that an episode is brought back by."""
    fill_step(steps.add(), await _waited(_called(env, env.reset, seed)))
    for action in actions:
        fill_step(steps.add(), await _waited(_called(env, env.step, mapping_of(action))))


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


def _closed(session: Session) -> Rest:
    return _then(_called(session.env, session.env.close), lambda _: None) if session.env else None


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
