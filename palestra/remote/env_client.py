"""Client of remote envs: an `Env` whose episodes run on a gRPC server, with replay after a lost server.

An env is a deterministic function of its seed and actions. If a server is lost, the episode is therefore opened on
another one and replayed from its seed and recorded actions. Every replayed step must equal the original (compared by
digest); otherwise the episode fails with an error.
"""

from __future__ import annotations

import builtins
import random
import time
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Self

import grpc

from palestra.envs.base import Env
from palestra.remote import SERVICE, backstage
from palestra.remote import envs_pb2 as pb
from palestra.remote.lanes import Lane, Lost, complaint, metadata, open_channel
from palestra.remote.place import Place, tally
from palestra.remote.pool import pool_of
from palestra.remote.values import (
    digest,
    encoded,
    mapping_of,
    pairs,
    random_bytes,
    set_random,
    step_of,
    value_of,
)
from palestra.roll import roll
from palestra.types import Seat, Step

ATTEMPTS = 5  # lost servers in a row after which the env itself is assumed to crash servers
PAUSE = 0.2  # seconds between attempts to get an env's description
# Builtin exceptions that the client raises with their original type.
KINDS = ("ValueError", "TypeError", "RuntimeError", "TimeoutError", "AssertionError", "OSError")


class RemoteKind:
    """A remote env type with options: seats, roles and options as described by a server.

    Calling it returns a new env.
    """

    def __init__(self, place: Place, kind: pb.Kind, told: pb.Description) -> None:
        self.place, self.kind = place, kind
        self.seats: tuple[Seat, ...] = tuple(told.seats)
        self.roles: Mapping[Seat, str] = mapping_of(told.roles)
        self.expert = told.expert
        self.options = {option.name: option.shown for option in told.options}

    def __call__(self) -> RemoteEnv:
        return (KnowingEnv if self.expert else RemoteEnv)(self)


class RemoteEnv(Env):
    """An env of a `RemoteKind`, run on a server. Restores lost sessions by replay on the same or another server."""

    def __init__(self, kind: RemoteKind) -> None:
        self.kind, self.seats, self.roles = kind, kind.seats, kind.roles
        self._lane: Lane | None = None
        self._session = 0
        self._seed: pb.Value | None = None
        self._said: list[pb.Pairs] = []  # all actions, and the digests of all steps from the reset on
        self._seen: list[bytes] = []

    async def reset(self, seed: int) -> Step:
        self._leave()
        self._seed, self._said, self._seen = encoded(seed), [], []
        step = await self._played([], "")
        tally["env_sessions"] += 1
        self._note(done=1)
        return self._noted(step)

    async def step(self, actions: dict[Seat, Any]) -> Step:
        said = pairs(actions)
        try:
            reply = await self._asked(pb.Request(session=self._session, step=said))
            step = reply.step
        except Lost as lost:
            step = await self._brought_back([*self._said, said], str(lost))
        self._said.append(said)
        return self._noted(step)

    async def fork(self) -> Self:
        """Returns a copy of the episode without waiting for the server.

        The server makes the copy before later requests of either env. If it cannot, the copy's next call raises.
        """
        twin = type(self)(self.kind)
        twin._seed, twin._said, twin._seen = self._seed, [*self._said], [*self._seen]
        if self._lane and not self._lane.lost:
            twin._lane, twin._session = self._lane, self._lane.enter()
            self._lane.tell(pb.Request(session=self._session, fork=twin._session))
        return twin

    async def close(self) -> None:
        self._leave()
        self._seed = None

    def __del__(self) -> None:
        self._leave()  # envs may be dropped without `close`

    def _leave(self) -> None:
        if self._lane:
            self._lane.leave(self._session)
            self._lane = None

    # ---- requests and replay

    async def _asked(self, request: pb.Request) -> pb.Reply:
        """Sends a request of the open session and returns the reply.

        Raises ValueError before `reset`, Lost if the session no longer exists, and what the env raised.
        """
        if self._seed is None:
            raise ValueError("no game is open: call reset(seed) first")
        if self._lane is None:
            raise Lost("it was lost before it was forked")
        reply = await self._lane.ask(request, self.kind.place.deadline)
        if reply.HasField("fault"):
            raise _raised(reply.fault, self._lane.address)
        return reply

    async def _brought_back(self, said: list[pb.Pairs], why: str) -> pb.Step:
        """Replays the episode in a new session, on any server, and returns its last step."""
        tally["env_lost"] += 1
        self._note(why, lost=1)
        step = await self._played(said, why)
        tally["env_replays"] += 1
        self._note(replays=1)
        tally["env_replayed_steps"] += len(self._seen)
        return step

    async def _played(self, said: list[pb.Pairs], why: str) -> pb.Step:
        """Opens a session, plays the actions `said` in one request and returns the last step.

        Raises RuntimeError after ATTEMPTS lost servers in a row, and if a replayed step differs from the original.
        """
        request = pb.Request(open=pb.Open(kind=self.kind.kind, seed=self._seed, actions=said))
        attempts = 0
        while attempts < ATTEMPTS:
            lane = await pool_of(self.kind.place).lane()
            self._leave()
            self._lane, request.session = lane, lane.enter()
            self._session = request.session
            try:
                reply = await lane.ask(request, self.kind.place.deadline * (1 + len(said)))
            except Lost as lost:
                attempts, why = attempts + 1, str(lost)
                self._note(why, lost=1)
                continue
            if reply.fault.why == pb.Fault.DRAINING:
                lane.draining = True
                continue
            if reply.HasField("fault"):
                raise _raised(reply.fault, lane.address)
            self._compare(reply.opened.steps, why)
            return reply.opened.steps[-1]
        raise RuntimeError(
            f"env {self._name} lost its server {ATTEMPTS} times in a row, {len(said)} joint steps into an instance. "
            f"That step may bring servers down, or take longer than the deadline: {why}"
        )

    def _note(self, why: str = "", **figures: float) -> None:
        if self._lane:
            roll.note("env server", self._lane.address, why, **figures)

    def _compare(self, steps: Any, why: str) -> None:
        """Raises RuntimeError if a replayed step differs from the recorded digest."""
        for number, (step, before) in enumerate(zip(steps, self._seen, strict=False)):
            if digest(step) != before:
                raise RuntimeError(
                    f"env {self._name} is not a function of its seed and the actions: played again after its server "
                    f"was lost ({why}), joint step {number} is another. `palestra.envs.check_env` finds such faults; "
                    "servers of one place must also have equal versions and data"
                )

    def _noted(self, step: pb.Step) -> Step:
        self._seen.append(digest(step))
        return step_of(step)

    @property
    def _name(self) -> str:
        return f'"{self.kind.kind.type}"'


class KnowingEnv(RemoteEnv):
    """A remote env that has an `expert` method."""

    async def expert(self, seat: Seat, rng: random.Random) -> Any:
        """Returns the expert's action for `seat`. The state of `rng` advances as in a local call.

        Raises RuntimeError after ATTEMPTS lost servers.
        """
        request = pb.Request(expert=pb.Expert(seat=seat, random=random_bytes(rng)))
        for _ in range(ATTEMPTS):
            try:
                request.session = self._session
                said = (await self._asked(request)).said
                set_random(rng, said.random)
                return value_of(said.answer)
            except Lost as lost:
                await self._brought_back(self._said, str(lost))
        raise RuntimeError(f"the expert of env {self._name} was asked {ATTEMPTS} times, and its server lost each time")


def described(place: Place, type: str, options: Mapping[str, Any]) -> RemoteKind:
    """Returns a server's description of the env `type` with `options`; cached per process.

    Raises ValueError if the server refuses the type or an option, or if none answers within `place.patience` seconds.
    """
    return _described(place, pb.Kind(type=type, options=pairs(options)).SerializeToString(deterministic=True))


@lru_cache(256)
def _described(place: Place, kind: bytes) -> RemoteKind:
    asked, end, said = pb.Kind.FromString(kind), time.monotonic() + place.patience, ""
    while True:
        for address in place.addresses():
            try:
                return RemoteKind(place, asked, backstage.begin(_description(place, address, asked)).result())
            except Lost as lost:
                said = str(lost)
        if time.monotonic() > end:
            raise ValueError(
                f'no env server says what env "{asked.type}" is, for {place.patience:g} s: {said or "there is none"}. '
                "Start one with `palestra serve-envs`, or correct at:"
            )
        time.sleep(PAUSE)


async def _description(place: Place, address: str, kind: pb.Kind) -> pb.Description:
    channel = open_channel(address, place)
    try:
        call = channel.unary_unary(f"/{SERVICE}/Describe", pb.Kind.SerializeToString, pb.Description.FromString)
        told: pb.Description = await call(kind, timeout=place.deadline, metadata=metadata(place))
    except grpc.aio.AioRpcError as error:
        raise complaint(address, error) from error
    finally:
        await channel.close()
    if told.HasField("fault"):
        raise ValueError(told.fault.message)
    return told


def _raised(fault: pb.Fault, address: str) -> Exception:
    """Converts a fault to its original exception; non-builtin exceptions become a RuntimeError with their name."""
    if fault.why == pb.Fault.UNKNOWN:
        return Lost(f"{address}: {fault.message}")
    if fault.why == pb.Fault.REFUSED:
        return ValueError(f"{address}: {fault.message}")
    if fault.error in KINDS:
        error: Exception = getattr(builtins, fault.error)(fault.message)
        return error
    return RuntimeError(f"{fault.error}: {fault.message}")
