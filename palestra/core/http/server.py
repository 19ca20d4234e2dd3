"""HTTP server used by all serving commands, with limits on connections and headers and a guaranteed shutdown."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from palestra.core.http.limits import AsgiApp

MAX_CONNECTIONS = 4096  # at most; fewer if the limit of open files is lower
RESERVED_FILES = 128  # open files reserved for other uses than connections
MAX_HEADER_BYTES = 64 * 1024  # bytes of the request line and headers, at most
HEADER_TIMEOUT_S = 20.0  # seconds in which the headers must arrive
FORCED_EXIT_DELAY_S = 5.0  # seconds after the grace period until the process is ended


def build_server(
    app: AsgiApp,
    *,
    drain: int,
    keep_alive: int = 75,
    on_shutdown: Callable[[], None] = lambda: None,
    extra_s: float = 0.0,
    on_second_signal: Callable[[], None] = lambda: None,
) -> HttpServer:
    """Returns a server of `app` that stops on signals; call it on the main thread, then `server.run(sockets=[...])`.

    The first SIGTERM or SIGINT calls `on_shutdown` and gives running requests `drain` seconds to end; the process exits
    at most `extra_s` + `FORCED_EXIT_DELAY_S` seconds after that. A second signal calls `on_second_signal` and ends the
    process immediately.
    """
    server = HttpServer(app, drain, keep_alive, on_shutdown)
    on_stop(server.stop, drain + extra_s + FORCED_EXIT_DELAY_S, on_second_signal)
    return server


class HttpServer(uvicorn.Server):
    """uvicorn server that is stopped by `stop` and leaves signals to `on_stop`."""

    def __init__(
        self, app: AsgiApp, drain: int, keep_alive: int, on_shutdown: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=BoundedProtocol,
                log_level="warning",
                access_log=False,
                lifespan="off",
                ws="none",
                server_header=False,
                timeout_keep_alive=keep_alive,
                timeout_graceful_shutdown=drain,
            )
        )
        self.on_shutdown = on_shutdown

    def stop(self) -> None:
        """Stops the server after the running requests. May be called from any thread and from signal handlers."""
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.on_shutdown()
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def on_stop(begin: Callable[[], object], seconds: float, on_second_signal: Callable[[], None] = lambda: None) -> None:
    """Installs signal handlers: the first SIGTERM or SIGINT calls `begin` and ends the process `seconds` later if it
    still runs, with the stack of every thread on standard error. A second signal calls `on_second_signal` and ends it
    immediately."""
    notified = False

    def hear(number: int, frame: Any) -> None:
        nonlocal notified
        if notified:
            on_second_signal()
            os._exit(128 + number)
        notified = True
        stop_within(seconds, begin)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, hear)


def stop_within(seconds: float, begin: Callable[[], object]) -> None:
    """Calls `begin`, and ends the process `seconds` later if it still runs, with the stack of every thread on standard
    error."""
    # runs on a C thread, even while the GIL is held
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__ or sys.stderr)
    begin()


class BoundedProtocol(HttpToolsProtocol):
    """HTTP connection that is closed if there are too many, or if a request's headers are too long or too slow."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._head = 0  # bytes since the headers began
        self._timer: asyncio.TimerHandle | None = self.loop.call_later(HEADER_TIMEOUT_S, transport.close)
        if len(self.connections) > connection_limit():
            self._answer("429 Too Many Requests", "too many connections: try again in a second", "Retry-After: 1\r\n")

    def data_received(self, data: bytes) -> None:
        if self._timer and self._head > MAX_HEADER_BYTES:
            return self._answer("431 Request Header Fields Too Large", f"headers may have {MAX_HEADER_BYTES:,} bytes")
        self._head += len(data)
        super().data_received(data)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head = 0
        self._timer = self._timer or self.loop.call_later(HEADER_TIMEOUT_S, self.transport.close)

    def on_headers_complete(self) -> None:
        self._in_time()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._in_time()
        super().connection_lost(exc)

    def _in_time(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None

    def _answer(self, status: str, reason: str, header: str = "") -> None:
        head = f"HTTP/1.1 {status}\r\nContent-Length: {len(reason)}\r\nConnection: close\r\n{header}\r\n"
        self.transport.write(f"{head}{reason}".encode())
        self.transport.close()


def connection_limit() -> int:
    """Returns the number of connections that this process can hold at once."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, min(MAX_CONNECTIONS, files - RESERVED_FILES)) if files != resource.RLIM_INFINITY else MAX_CONNECTIONS


def run_in_thread(server: HttpServer, listener: socket.socket) -> None:
    """Serves until `server.stop()`; the target of a thread."""
    asyncio.run(server.serve(sockets=[listener]))
