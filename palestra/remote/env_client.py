"""An env whose games are played by a server elsewhere.

An env is a deterministic function of its seed and the actions, and so a game whose server is lost is not: it is opened
anew on another, and played again to where it was. Each step must then be what it was before. Where one is not, the
episode fails and says so.
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

ATTEMPTS = 5  # to bring a session back, before its env is taken to be what brings servers down
PAUSE = 0.2  # seconds between attempts to be told of an env
# Faults that are raised here as what they were there.
KINDS = ("ValueError", "TypeError", "RuntimeError", "TimeoutError", "AssertionError", "OSError")


class RemoteKind:
    """What a server says of an env of some type and options. Calling it makes such an env."""

    def __init__(self, place: Place, kind: pb.Kind, told: pb.Description) -> None:
        self.place, self.kind = place, kind
        self.seats: tuple[Seat, ...] = tuple(told.seats)
        self.roles: Mapping[Seat, str] = mapping_of(told.roles)
        self.expert = told.expert
        self.options = {option.name: option.shown for option in told.options}

    def __call__(self) -> RemoteEnv:
        return (KnowingEnv if self.expert else RemoteEnv)(self)


class RemoteEnv(Env):
    """One game of a `RemoteKind`."""

    def __init__(self, kind: RemoteKind) -> None:
        self.kind, self.seats, self.roles = kind, kind.seats, kind.roles
        self._lane: Lane | None = None
        self._session = 0
        self._seed: pb.Value | None = None
        self._said: list[pb.Pairs] = []  # the actions, and the digests of the steps from the reset on
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
        """The copy is made before whatever this or that one is asked next; nobody waits for it."""
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
        self._leave()  # who drops an env need not have closed it

    def _leave(self) -> None:
        if self._lane:
            self._lane.leave(self._session)
            self._lane = None

    # ---- asking, and asking again

    async def _asked(self, request: pb.Request) -> pb.Reply:
        """The reply. Raises Lost where there is no such session any more, and what the env raised."""
        if self._seed is None:
            raise ValueError("no game is open: call reset(seed) first")
        if self._lane is None:
            raise Lost("it was lost before it was forked")
        reply = await self._lane.ask(request, self.kind.place.deadline)
        if reply.HasField("fault"):
            raise _raised(reply.fault, self._lane.address)
        return reply

    async def _brought_back(self, said: list[pb.Pairs], why: str) -> pb.Step:
        """The last step of this game on another server, or on the same one anew."""
        tally["env_lost"] += 1
        self._note(why, lost=1)
        step = await self._played(said, why)
        tally["env_replays"] += 1
        self._note(replays=1)
        tally["env_replayed_steps"] += len(self._seen)
        return step

    async def _played(self, said: list[pb.Pairs], why: str) -> pb.Step:
        """The last step of a session that is opened, and in which `said` is played at once."""
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
        """Raises RuntimeError where the game, played again, is not what it was."""
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
    """One whose env has an expert."""

    async def expert(self, seat: Seat, rng: random.Random) -> Any:
        """What the env's own expert says at `seat`, drawing from `rng` as it would here."""
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
    """What the servers of a place say of an env; asked once in a process. Raises ValueError where they refuse the type
    or an option, or where none answers within the place's patience."""
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
    """A fault as the exception that it was; those of other modules as a RuntimeError that names them."""
    if fault.why == pb.Fault.UNKNOWN:
        return Lost(f"{address}: {fault.message}")
    if fault.why == pb.Fault.REFUSED:
        return ValueError(f"{address}: {fault.message}")
    if fault.error in KINDS:
        error: Exception = getattr(builtins, fault.error)(fault.message)
        return error
    return RuntimeError(f"{fault.error}: {fault.message}")
