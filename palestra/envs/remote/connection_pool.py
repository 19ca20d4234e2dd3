"""Connection pool of a client: stays connected to every worker of its servers and picks the least loaded one."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterable
from contextlib import suppress

from palestra.core.http.retry import RetryPolicy
from palestra.envs.remote.address import EnvServersConfig
from palestra.envs.remote.connection import AccessRefused, EnvConnection, SessionLost, client_loop

START_WAIT_S = 1.0  # seconds that the first sessions wait for servers that have not answered yet
IDLE_TIMEOUT_S = 60.0  # seconds without a new session (plus `server_timeout`) after which reconnecting pauses
REFRESH_INTERVAL_S = 1.0  # seconds between reads of the server list
RECONNECT = RetryPolicy(0.05, 2.0)  # waits between attempts to reach all workers of a server
CONNECTS_PER_WORKER = 8  # consecutive connections per worker without a new worker before giving up


class ConnectionPool:
    """Connections to the current servers of `server_config`. All methods but `acquire` run on the
    client's loop (`client_loop`)."""

    def __init__(self, server_config: EnvServersConfig) -> None:
        self.server_config = server_config
        self.connections: list[EnvConnection] = []
        self.connect_tasks: dict[str, asyncio.Task[None]] = {}
        self.last_errors: dict[str, SessionLost | AccessRefused] = {}  # last connection error, by address
        self.tried_addresses: set[str] = set()
        self.is_starting = True  # true until every server has been tried once
        self.loop = asyncio.get_running_loop()
        self.changed = asyncio.Event()
        self.created_at = self.loop.time()
        self.last_used = time.monotonic()
        self.set_addresses(server_config.addresses())
        self.refresh_task = asyncio.create_task(self._look())

    async def acquire(self) -> EnvConnection:
        """Returns the least loaded connection that accepts new sessions, waiting for one if needed.

        Raises TimeoutError if there is none within `server_config.server_timeout` seconds, ValueError if every server
        refuses this client permanently.
        """
        self.last_used = time.monotonic()
        if not self.is_starting and (connection := self._free()):
            return connection
        return await client_loop().run_async(self._wait())

    def _free(self) -> EnvConnection | None:
        free = [
            connection
            for connection in self.connections
            if not connection.lost_reason and not connection.draining and connection.address in self.connect_tasks
        ]
        return min(free, key=lambda connection: connection.num_sessions, default=None)

    async def _wait(self) -> EnvConnection:
        """Implements `acquire`. The first sessions wait for all servers; otherwise all would go to the fastest one."""
        start = self.loop.time()
        while self.is_starting and self.loop.time() < self.created_at + START_WAIT_S:
            await self._change(self.created_at + START_WAIT_S)
        self.is_starting = False
        while (connection := self._free()) is None:
            if self.last_errors and all(
                isinstance(self.last_errors.get(address), AccessRefused) for address in self.connect_tasks
            ):
                raise ValueError("; ".join(dict.fromkeys(map(str, self.last_errors.values()))))
            if self.loop.time() >= start + self.server_config.server_timeout:
                raise TimeoutError(self._nobody())
            await self._change(start + self.server_config.server_timeout)
        return connection

    def set_addresses(self, addresses: Iterable[str]) -> None:
        """Sets the current servers. Removed ones get no new sessions and are disconnected after their last session."""
        wanted = set(addresses)
        for address in self.connect_tasks.keys() - wanted:
            self.connect_tasks.pop(address).cancel()
            self.last_errors.pop(address, None)
        for address in wanted - self.connect_tasks.keys():
            self.connect_tasks[address] = asyncio.create_task(self._keep(address))

    async def _keep(self, address: str) -> None:
        """Keeps a connection to every worker of a server until cancelled."""
        failures = 0
        while True:
            while time.monotonic() > self.last_used + IDLE_TIMEOUT_S + self.server_config.server_timeout:
                await asyncio.sleep(REFRESH_INTERVAL_S)  # no session has been requested for a while
            own = [connection for connection in self.connections if connection.address == address]
            whole = bool(own) and len(own) >= own[0].num_workers
            if whole:
                await asyncio.wait([connection.read_task for connection in own], return_when=asyncio.FIRST_COMPLETED)
                failures = 0
            try:
                await self._connect(address)
                self.last_errors.pop(address, None)
            except (SessionLost, AccessRefused) as error:
                self.last_errors[address] = error
            self.tried_addresses.add(address)
            self.is_starting &= not self.connect_tasks.keys() <= self.tried_addresses
            self.changed.set()
            if not whole:
                failures += 1
                await asyncio.sleep(RECONNECT.wait_s(failures))

    async def _connect(self, address: str) -> None:
        """Connects to workers without a connection. The kernel picks the worker of each connection,
        so duplicates are closed and retried."""
        tries = 1
        while tries > 0:
            self.connections = [connection for connection in self.connections if not connection.lost_reason]
            own = {connection.worker_id: connection for connection in self.connections if connection.address == address}
            if own and len(own) >= next(iter(own.values())).num_workers:
                return
            connection = await EnvConnection.connect(address, self.server_config)
            if connection.worker_id in own:
                await connection.close()
            else:
                self.connections.append(connection)
                self.changed.set()
            tries = tries - 1 if own else CONNECTS_PER_WORKER * connection.num_workers

    async def _look(self) -> None:
        """Periodically re-reads the server list and disconnects removed servers without open sessions."""
        while True:
            await asyncio.sleep(REFRESH_INTERVAL_S)
            try:
                self.set_addresses(self.server_config.addresses())
            except ValueError:
                continue  # the file is being written: keep the current servers
            for connection in self.connections:
                if connection.address not in self.connect_tasks and not connection.own_sessions:
                    await connection.close()

    async def _change(self, until: float) -> None:
        """Waits for a change of any server's state, at most until the loop time `until`."""
        self.changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                await self.changed.wait()

    def _nobody(self) -> str:
        reasons = "; ".join(map(str, self.last_errors.values())) or "none of them takes new sessions"
        who = ", ".join(self.connect_tasks) or f"none, says {self.server_config.servers}"
        return (
            f"no env server has answered for {self.server_config.server_timeout:g} s ({reasons}). Servers: {who}. "
            "Start one with `palestra serve-envs`, correct at:, or wait longer: at: {servers: [...], server_timeout: "
            "600}"
        )


_pools: dict[EnvServersConfig, ConnectionPool] = {}
_making = threading.Lock()


def get_pool(server_config: EnvServersConfig) -> ConnectionPool:
    """Returns the pool for `server_config`; there is one per process and config.

    Raises ValueError if the address file is bad.
    """
    with _making:
        if server_config not in _pools:
            _pools[server_config] = client_loop().run(_new(server_config))
        return _pools[server_config]


async def _new(place: EnvServersConfig) -> ConnectionPool:
    return ConnectionPool(place)
