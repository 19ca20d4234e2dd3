"""Client of remote envs: an `Env` whose episodes run on a gRPC server, with replay after a lost server.

An env is a deterministic function of its seed and actions. If a server is lost, the episode is therefore opened on
another one and replayed from its seed and recorded actions. Every replayed step must equal the original (compared by
digest); otherwise the episode fails with an error.
"""

from __future__ import annotations

import builtins
import random
import warnings
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any, Self

import grpc

from palestra.core.http.retry import RetryPolicy
from palestra.core.types import Seat, Step
from palestra.envs.base import Env
from palestra.envs.remote import SERVICE
from palestra.envs.remote import envs_pb2 as pb
from palestra.envs.remote.address import EnvServersConfig, counters
from palestra.envs.remote.connection import (
    EnvConnection,
    SessionLost,
    auth_metadata,
    client_loop,
    connection_error,
    open_channel,
)
from palestra.envs.remote.connection_pool import get_pool
from palestra.envs.remote.serialization import (
    encode_mapping,
    encode_rng_state,
    encode_value,
    read_mapping,
    read_step,
    read_value,
    restore_rng_state,
    step_digest,
)
from palestra.parallel.worker_stats import worker_stats

MAX_LOST_SERVERS = 5  # lost servers in a row after which the env itself is assumed to crash servers
DESCRIBE_INTERVAL_S = 0.2  # seconds between attempts to get an env's description
# Builtin exceptions that the client raises with their original type.
BUILTIN_EXCEPTIONS = ("ValueError", "TypeError", "RuntimeError", "TimeoutError", "AssertionError", "OSError")


class RemoteEnvSpec:
    """A remote env type with options: seats, roles and options as described by a server.

    Calling it returns a new env.
    """

    def __init__(self, server_config: EnvServersConfig, kind: pb.Kind, description: pb.Description) -> None:
        self.server_config = server_config
        self.kind = kind
        self.seats: tuple[Seat, ...] = tuple(description.seats)
        self.roles: Mapping[Seat, str] = read_mapping(description.roles)
        self.has_expert = description.expert
        self.options = {option.name: option.shown for option in description.options}

    def __call__(self) -> RemoteEnv:
        return (RemoteEnvWithExpert if self.has_expert else RemoteEnv)(self)


class RemoteEnv(Env):
    """An env of a `RemoteEnvSpec`, run on a server. Restores lost sessions by replay on the same or another server."""

    def __init__(self, spec: RemoteEnvSpec) -> None:
        self.spec = spec
        self.name = spec.kind.type  # type: ignore[misc]  # of the server's env, not of this class
        self.seats = spec.seats
        self.roles = spec.roles
        self._connection: EnvConnection | None = None
        self._session = 0
        self._seed: pb.Value | None = None
        self._instance: Any = None
        self._actions: list[pb.Pairs] = []  # all actions since the reset; `_step_digests` are the digests of all steps
        self._step_digests: list[bytes] = []

    async def reset(self, seed: int) -> Step:
        self._leave()
        self._seed = encode_value(seed)
        self._instance = None
        self._actions = []
        self._step_digests = []
        step = await self._open_session([], "")
        counters["env_sessions"] += 1
        self._note(done=1)
        return self._noted(step)

    def instance_of(self, seed: int) -> Any:
        """Returns what the server's env identified the seed's instance by when `reset` opened it. Before that, and with
        a server that does not say it, the seed."""
        is_open = self._seed is not None and read_value(self._seed) == seed
        return self._instance if is_open and self._instance is not None else seed

    async def step(self, actions: dict[Seat, Any]) -> Step:
        encoded = encode_mapping(actions)
        try:
            reply = await self._asked(pb.Request(session=self._session, step=encoded), "step")
            step = reply.step
        except SessionLost as lost:
            step = await self._replay([*self._actions, encoded], str(lost))
        self._actions.append(encoded)
        return self._noted(step)

    async def fork(self) -> Self:
        """Returns a copy of the episode without waiting for the server.

        The server makes the copy before later requests of either env. If it cannot, the copy's next call raises.
        """
        twin = type(self)(self.spec)
        twin._seed = self._seed
        twin._instance = self._instance
        twin._actions = [*self._actions]
        twin._step_digests = [*self._step_digests]
        if self._connection and not self._connection.lost_reason:
            twin._connection, twin._session = self._connection, self._connection.allocate_session()
            self._connection.send(pb.Request(session=self._session, fork=twin._session))
        return twin

    async def close(self) -> None:
        self._leave()
        self._seed = None

    def __del__(self) -> None:
        self._leave()  # envs may be dropped without `close`

    def _leave(self) -> None:
        if self._connection:
            self._connection.close_session(self._session)
            self._connection = None

    # ---- requests and replay

    async def _asked(self, request: pb.Request, kind: str) -> pb.Reply:
        """Sends a request of the open session and returns the reply, which is of that kind.

        Raises ValueError before `reset`, SessionLost if the session no longer exists, RuntimeError for a reply of
        another kind, and what the env raised.
        """
        if self._seed is None:
            raise ValueError("no game is open: call reset(seed) first")
        if self._connection is None:
            raise SessionLost("it was lost before it was forked")
        reply = await self._connection.call(request, self.spec.server_config.request_timeout)
        _check_reply(reply, kind, self._connection.address)
        return reply

    async def _replay(self, actions: list[pb.Pairs], why: str) -> pb.Step:
        """Replays the episode in a new session, on any server, and returns its last step."""
        counters["env_lost"] += 1
        self._note(why, lost=1)
        step = await self._open_session(actions, why)
        counters["env_replays"] += 1
        self._note(replays=1)
        counters["env_replayed_steps"] += len(self._step_digests)
        return step

    async def _open_session(self, actions: list[pb.Pairs], why: str) -> pb.Step:
        """Opens a session, plays `actions` in one request and returns the last step.

        Raises RuntimeError after `MAX_LOST_SERVERS` lost servers in a row, and if a replayed step differs from the
        original.
        """
        request = pb.Request(open=pb.Open(kind=self.spec.kind, seed=self._seed, actions=actions))
        attempts = 0
        while attempts < MAX_LOST_SERVERS:
            connection = await get_pool(self.spec.server_config).acquire()
            self._leave()
            self._connection = connection
            request.session = connection.allocate_session()
            self._session = request.session
            try:
                reply = await connection.call(request, self.spec.server_config.request_timeout * (1 + len(actions)))
            except SessionLost as lost:
                attempts = attempts + 1
                why = str(lost)
                self._note(why, lost=1)
                continue
            if reply.fault.why == pb.Fault.DRAINING:
                connection.draining = True
                continue
            self._take_instance(reply, connection.address)
            _check_reply(reply, "opened", connection.address)
            if len(reply.opened.steps) != 1 + len(actions):
                raise _wrong_reply(connection.address, f"{len(reply.opened.steps)} steps for {1 + len(actions)}")
            self._compare(reply.opened.steps, why)
            return reply.opened.steps[-1]
        raise RuntimeError(
            f'env "{self.name}" lost its server {MAX_LOST_SERVERS} times in a row, {len(actions)} joint steps into an '
            f"instance. That step may bring servers down, or take longer than the deadline: {why}"
        )

    def _take_instance(self, reply: pb.Reply, address: str) -> None:
        if reply.HasField("instance"):
            self._instance = read_value(reply.instance)
        elif reply.HasField("opened"):
            warnings.warn(
                f"the env server at {address} is older and does not say which instance a seed gives: intervals count "
                "seeds. Start it with this version of palestra",
                stacklevel=2,
            )

    def _note(self, why: str = "", **figures: float) -> None:
        if self._connection:
            worker_stats.count("env server", self._connection.address, why, **figures)

    def _compare(self, steps: Any, why: str) -> None:
        """Raises RuntimeError if a replayed step differs from the recorded digest."""
        for number, (step, before) in enumerate(zip(steps, self._step_digests, strict=False)):  # one may be new
            if step_digest(step) != before:
                raise RuntimeError(
                    f'env "{self.name}" is not a function of its seed and the actions: replayed after its server '
                    f"was lost ({why}), joint step {number} differs. `palestra.envs.check_env` finds such faults; "
                    "all servers of an env must also have equal versions and data"
                )

    def _noted(self, step: pb.Step) -> Step:
        self._step_digests.append(step_digest(step))
        return read_step(step)


class RemoteEnvWithExpert(RemoteEnv):
    """A remote env that has an `expert` method."""

    async def expert(self, seat: Seat, rng: random.Random) -> Any:
        """Returns the expert's action for `seat`. The state of `rng` advances as in a local call.

        Raises RuntimeError after `MAX_LOST_SERVERS` lost servers.
        """
        request = pb.Request(expert=pb.Expert(seat=seat, random=encode_rng_state(rng)))
        for _ in range(MAX_LOST_SERVERS):
            try:
                request.session = self._session
                answered = (await self._asked(request, "said")).said
                restore_rng_state(rng, answered.random)
                return read_value(answered.answer)
            except SessionLost as lost:
                await self._replay(self._actions, str(lost))
        raise RuntimeError(
            f'the expert of env "{self.name}" was asked {MAX_LOST_SERVERS} times, and its server lost each time'
        )


def describe_env(server_config: EnvServersConfig, type: str, options: Mapping[str, Any]) -> RemoteEnvSpec:
    """Returns a server's description of the env `type` with `options`; cached per process.

    Raises ValueError if the server refuses the type or an option, or if none answers within
    `server_config.server_timeout` seconds.
    """
    kind = pb.Kind(type=type, options=encode_mapping(options))
    return _described(server_config, kind.SerializeToString(deterministic=True))


@lru_cache(256)
def _described(place: EnvServersConfig, kind: bytes) -> RemoteEnvSpec:
    asked = pb.Kind.FromString(kind)
    policy = RetryPolicy(DESCRIBE_INTERVAL_S, DESCRIBE_INTERVAL_S, timeout_s=place.server_timeout)
    try:
        description = client_loop().run(policy.run(partial(_first_description, place, asked), SessionLost))
    except SessionLost as lost:
        raise ValueError(
            f'no env server described the env "{asked.type}" within {place.server_timeout:g} s: {lost}. '
            "Start one with `palestra serve-envs`, or correct at:"
        ) from None
    return RemoteEnvSpec(place, asked, description)


async def _first_description(place: EnvServersConfig, kind: pb.Kind) -> pb.Description:
    """Asks the servers in turn. Raises SessionLost with the last server's error if none of them answers."""
    reason = "there is none"
    for address in place.addresses():
        try:
            return await _description(place, address, kind)
        except SessionLost as lost:
            reason = str(lost)
    raise SessionLost(reason)


async def _description(place: EnvServersConfig, address: str, kind: pb.Kind) -> pb.Description:
    channel = open_channel(address, place)
    try:
        call = channel.unary_unary(f"/{SERVICE}/Describe", pb.Kind.SerializeToString, pb.Description.FromString)
        description: pb.Description = await call(kind, timeout=place.request_timeout, metadata=auth_metadata(place))
    except grpc.aio.AioRpcError as error:
        raise connection_error(address, error) from error
    finally:
        await channel.close()
    if description.HasField("fault"):
        raise ValueError(description.fault.message)
    return description


def _check_reply(reply: pb.Reply, kind: str, address: str) -> None:
    """Raises what the env raised, and RuntimeError for a reply of another kind: read as a step, it would be one that
    ends the episode."""
    if reply.HasField("fault"):
        raise _raised(reply.fault, address)
    if (found := reply.WhichOneof("what")) != kind:
        raise _wrong_reply(address, f'"{found or "nothing"}" where "{kind}" was asked for')


def _wrong_reply(address: str, what: str) -> RuntimeError:
    return RuntimeError(f"the env server at {address} replied {what}: start it with this version of palestra")


def _raised(fault: pb.Fault, address: str) -> Exception:
    """Converts a fault to its original exception; non-builtin exceptions become a RuntimeError with their name."""
    if fault.why == pb.Fault.UNKNOWN:
        return SessionLost(f"{address}: {fault.message}")
    if fault.why == pb.Fault.REFUSED:
        return ValueError(f"{address}: {fault.message}")
    if fault.error in BUILTIN_EXCEPTIONS:
        error: Exception = getattr(builtins, fault.error)(fault.message)
        return error
    return RuntimeError(f"{fault.error}: {fault.message}")
