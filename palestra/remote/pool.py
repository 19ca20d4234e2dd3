"""The servers of a place: each kept connected, the least crowded one found."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterable
from contextlib import suppress

from palestra.remote import backstage
from palestra.remote.lanes import Barred, Lane, Lost
from palestra.remote.place import Place

FIRST = 1.0  # seconds that the first session waits for servers that have not answered yet
IDLE = 60.0  # seconds after which a server that is gone is no longer looked for, if no session is wanted
LOOK = 1.0  # seconds between two looks at who the servers are
PAUSES = (0.05, 2.0)  # seconds between attempts to reach a server: at first, at most
TRIES = 8  # connections for each worker of a server, until every one is found


class Pool:
    """Lanes to the servers that `place` names from time to time. All but `lane` happens backstage."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.lanes: list[Lane] = []
        self.keepers: dict[str, asyncio.Task[None]] = {}
        self.said: dict[str, Lost | Barred] = {}  # what kept a server from being reached last
        self.tried: set[str] = set()
        self.early = True  # as long as some server has not been tried
        self.loop, self.changed = asyncio.get_running_loop(), asyncio.Event()
        self.born, self.used = self.loop.time(), time.monotonic()
        self.follow(place.addresses())
        self.looking = asyncio.create_task(self._look())

    async def lane(self) -> Lane:
        """The least crowded one that takes new sessions. Raises TimeoutError where none comes within the place's
        patience, and ValueError where every server bars this client."""
        self.used = time.monotonic()
        if not self.early and (lane := self._free()):
            return lane
        return await asyncio.wrap_future(backstage.begin(self._wait()))

    def _free(self) -> Lane | None:
        free = [lane for lane in self.lanes if not lane.lost and not lane.draining and lane.address in self.keepers]
        return min(free, key=lambda lane: lane.crowd, default=None)

    async def _wait(self) -> Lane:
        """As `lane`. The first sessions wait for every server's answer, or they would all go to the fastest."""
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
        """These are the servers now: others are given no new sessions, and left when their last one ends."""
        wanted = set(addresses)
        for address in self.keepers.keys() - wanted:
            self.keepers.pop(address).cancel()
            self.said.pop(address, None)
        for address in wanted - self.keepers.keys():
            self.keepers[address] = asyncio.create_task(self._keep(address))

    async def _keep(self, address: str) -> None:
        """Keeps a lane to every worker of a server, as long as it is one of ours."""
        pause = PAUSES[0]
        while True:
            while time.monotonic() > self.used + IDLE + self.place.patience:
                await asyncio.sleep(LOOK)  # nobody wants servers any more
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
        """Lanes to the workers that have none. The system says which worker a connection reaches, so some are made in
        vain."""
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
        """Looks again and again who the servers are, and leaves those that are no longer."""
        while True:
            await asyncio.sleep(LOOK)
            try:
                self.follow(self.place.addresses())
            except ValueError:
                continue  # a file that is being written: the servers stay as they are
            for lane in self.lanes:
                if lane.address not in self.keepers and not lane.taken:
                    await lane.close()

    async def _change(self, until: float) -> None:
        """Waits for news of a server, or until that time."""
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
    """The pool of a place, of which a process has one."""
    with _making:
        if place not in _pools:
            _pools[place] = backstage.begin(_new(place)).result()
        return _pools[place]


async def _new(place: Place) -> Pool:
    return Pool(place)
