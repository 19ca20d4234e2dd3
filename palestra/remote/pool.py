"""Connection pool of a client: stays connected to every worker of its servers and picks the least loaded one."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterable
from contextlib import suppress

from palestra.remote import backstage
from palestra.remote.lanes import Barred, Lane, Lost
from palestra.remote.place import Place

FIRST = 1.0  # seconds that the first sessions wait for servers that have not answered yet
IDLE = 60.0  # seconds without a new session (plus patience) after which reconnecting pauses
LOOK = 1.0  # seconds between reads of the server list
PAUSES = (0.05, 2.0)  # seconds between attempts to reach a server: first, largest
TRIES = 8  # consecutive connections per worker without a new worker before giving up


class Pool:
    """Connections to the current servers of `place`. All methods but `lane` run on the client's loop (backstage.py)."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.lanes: list[Lane] = []
        self.keepers: dict[str, asyncio.Task[None]] = {}
        self.said: dict[str, Lost | Barred] = {}  # last connection error, by address
        self.tried: set[str] = set()
        self.early = True  # true until every server has been tried once
        self.loop, self.changed = asyncio.get_running_loop(), asyncio.Event()
        self.born, self.used = self.loop.time(), time.monotonic()
        self.follow(place.addresses())
        self.looking = asyncio.create_task(self._look())

    async def lane(self) -> Lane:
        """Returns the least loaded connection that accepts new sessions, waiting for one if needed.

        Raises TimeoutError if there is none within `place.patience` seconds, ValueError if every server refuses this
        client permanently.
        """
        self.used = time.monotonic()
        if not self.early and (lane := self._free()):
            return lane
        return await asyncio.wrap_future(backstage.begin(self._wait()))

    def _free(self) -> Lane | None:
        free = [lane for lane in self.lanes if not lane.lost and not lane.draining and lane.address in self.keepers]
        return min(free, key=lambda lane: lane.crowd, default=None)

    async def _wait(self) -> Lane:
        """Implements `lane`. The first sessions wait for all servers; otherwise all would go to the fastest one."""
        start = self.loop.time()
        while self.early and self.loop.time() < self.born + FIRST:
            await self._change(self.born + FIRST)
        self.early = False
        while (lane := self._free()) is None:
            if self.said and all(isinstance(self.said.get(address), Barred) for address in self.keepers):
                raise ValueError("; ".join(dict.fromkeys(map(str, self.said.values()))))
            if self.loop.time() >= start + self.place.patience:
                raise TimeoutError(self._nobody())
            await self._change(start + self.place.patience)
        return lane

    def follow(self, addresses: Iterable[str]) -> None:
        """Sets the current servers. Removed ones get no new sessions and are disconnected after their last session."""
        wanted = set(addresses)
        for address in self.keepers.keys() - wanted:
            self.keepers.pop(address).cancel()
            self.said.pop(address, None)
        for address in wanted - self.keepers.keys():
            self.keepers[address] = asyncio.create_task(self._keep(address))

    async def _keep(self, address: str) -> None:
        """Keeps a connection to every worker of a server until cancelled."""
        pause = PAUSES[0]
        while True:
            while time.monotonic() > self.used + IDLE + self.place.patience:
                await asyncio.sleep(LOOK)  # no session has been requested for a while
            own = [lane for lane in self.lanes if lane.address == address]
            whole = bool(own) and len(own) >= own[0].workers
            if whole:
                await asyncio.wait([lane.reading for lane in own], return_when=asyncio.FIRST_COMPLETED)
                pause = PAUSES[0]
            try:
                await self._connect(address)
                self.said.pop(address, None)
            except (Lost, Barred) as error:
                self.said[address] = error
            self.tried.add(address)
            self.early &= not self.keepers.keys() <= self.tried
            self.changed.set()
            if not whole:
                await asyncio.sleep(pause)
                pause = min(2 * pause, PAUSES[1])

    async def _connect(self, address: str) -> None:
        """Connects to workers without a connection. The kernel picks the worker of each connection, so duplicates are
        closed and retried."""
        tries = 1
        while tries > 0:
            self.lanes = [lane for lane in self.lanes if not lane.lost]
            own = {lane.worker: lane for lane in self.lanes if lane.address == address}
            if own and len(own) >= next(iter(own.values())).workers:
                return
            lane = await Lane.connect(address, self.place)
            if lane.worker in own:
                await lane.close()
            else:
                self.lanes.append(lane)
                self.changed.set()
            tries = tries - 1 if own else TRIES * lane.workers

    async def _look(self) -> None:
        """Periodically re-reads the server list and disconnects removed servers without open sessions."""
        while True:
            await asyncio.sleep(LOOK)
            try:
                self.follow(self.place.addresses())
            except ValueError:
                continue  # the file is being written: keep the current servers
            for lane in self.lanes:
                if lane.address not in self.keepers and not lane.taken:
                    await lane.close()

    async def _change(self, until: float) -> None:
        """Waits for a change of any server's state, at most until the loop time `until`."""
        self.changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                await self.changed.wait()

    def _nobody(self) -> str:
        said = "; ".join(map(str, self.said.values())) or "none of them takes new sessions"
        who = ", ".join(self.keepers) or f"none, says {self.place.servers}"
        return (
            f"no env server has answered for {self.place.patience:g} s ({said}). Servers: {who}. Start one with "
            "`palestra serve-envs`, correct at:, or be more patient: at: {servers: [...], patience: 600}"
        )


_pools: dict[Place, Pool] = {}
_making = threading.Lock()


def pool_of(place: Place) -> Pool:
    """Returns the pool for `place`; there is one per process and place.

    Raises ValueError if the address file is bad.
    """
    with _making:
        if place not in _pools:
            _pools[place] = backstage.begin(_new(place)).result()
        return _pools[place]


async def _new(place: Place) -> Pool:
    return Pool(place)
